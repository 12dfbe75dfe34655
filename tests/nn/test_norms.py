import pytest
import torch

from helicon.nn.norms import HeadNorm, Modulation, RMSNorm


def test_rms_norm_is_its_formula():
    x = torch.randn(2, 3, 10)
    norm = RMSNorm(10)
    torch.nn.init.normal_(norm.weight)
    expected = x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected)


@pytest.mark.parametrize("learned", [True, False])
def test_half_precision_uses_fp32_statistics(learned):
    # In bf16 the sum of squares of 4097 ones is 256: each further one is rounded away.
    x = torch.ones(1, 4097, dtype=torch.bfloat16)
    out = RMSNorm(4097, learned)(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, x)


def test_normalised_queries_and_keys_give_logits_of_unit_deviation():
    torch.manual_seed(0)
    dim_head = 32
    norm = HeadNorm(3, dim_head)
    queries, keys = norm(40 * torch.randn(2, 3, 50, dim_head)), norm(0.01 * torch.randn(2, 3, 50, dim_head))
    logits = queries @ keys.transpose(-1, -2) * dim_head**-0.5
    assert 0.9 < logits.std() < 1.1


def test_modulation_starts_at_zero_and_shares_its_projection():
    modulation = Modulation(dim_cond=5, dim=4, depth=3, blocks=2)
    cond = torch.randn(7, 5)
    layers = modulation(cond)
    assert len(layers) == 3
    assert all(layer.shape == (2, 3, 7, 1, 4) and not layer.any() for layer in layers)
    with torch.no_grad():
        modulation.shared.weight.normal_()
        modulation.offsets.normal_()
    first, second, _ = modulation(cond)
    difference = (modulation.offsets[0] - modulation.offsets[1])[:, :, None, None].expand_as(first)
    torch.testing.assert_close(first - second, difference)
    assert (first[:, :, 0] - first[:, :, 1]).abs().min() > 0  # the rows' conditions matter


def test_normed_heads_lie_in_memory_as_a_projection_writes_them():
    """Attention's result is laid out as its queries are: otherwise it would be copied before the next projection."""
    projected = torch.randn(2, 5, 3 * 4).unflatten(-1, (3, 4)).transpose(1, 2)
    normed = HeadNorm(3, 4)(projected)
    assert normed.transpose(1, 2).is_contiguous() and not normed.is_contiguous()
