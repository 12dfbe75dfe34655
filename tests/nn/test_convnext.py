import pytest
import torch
import torch.nn.functional as F

from helicon.nn.convnext import ConvNeXtBlock


def block_of(dim=6, **options):
    torch.manual_seed(0)
    block = ConvNeXtBlock(dim, **options)
    torch.nn.init.normal_(block.scale)
    torch.nn.init.normal_(block.norm.weight)
    return block


def test_it_is_its_formula_written_as_a_loop():
    block = block_of(dim=4, kernel_size=3, mult=3)
    x = torch.randn(2, 5, 4)
    padded = F.pad(x, (0, 0, 1, 1))
    taps = block.depthwise.weight[:, 0]  # [d, k]
    frames = [sum(padded[:, i + k] * taps[:, k] for k in range(3)) + block.depthwise.bias for i in range(5)]
    mixed = torch.stack(frames, dim=1)
    centred = mixed - mixed.mean(dim=-1, keepdim=True)
    normed = centred / (centred.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * block.norm.weight + block.norm.bias
    hidden = normed @ block.expand.weight.T + block.expand.bias
    assert hidden.shape[-1] == 12
    hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
    expected = x + block.scale * (hidden @ block.contract.weight.T + block.contract.bias)
    torch.testing.assert_close(block(x), expected)


@pytest.mark.parametrize("kernel_size", [1, 7])
def test_padding_never_reaches_a_real_frame(kernel_size):
    block = torch.nn.ModuleList([block_of(kernel_size=kernel_size) for _ in range(3)])
    x = torch.randn(2, 9, 6)
    lengths = [5, 9]
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    out = torch.where(mask[..., None], x, torch.nan)
    for layer in block:
        out = layer(out, mask)
    for row, length in enumerate(lengths):
        alone = x[row : row + 1, :length]
        for layer in block:
            alone = layer(alone)
        torch.testing.assert_close(out[row : row + 1, :length], alone)
        assert not out[row, length:].any()


def test_a_zero_scale_is_the_identity():
    x = torch.randn(1, 4, 6)
    torch.testing.assert_close(ConvNeXtBlock(6, layer_scale=0.0)(x), x, rtol=0, atol=0)


def test_half_precision_stays_half():
    block = block_of().to(torch.bfloat16)
    x = torch.randn(1, 5, 6, dtype=torch.bfloat16)
    assert block(x, torch.ones(1, 5, dtype=torch.bool)).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert block_of()(x.float()).dtype == torch.float32


def test_every_weight_learns():
    block = block_of()
    block(torch.randn(2, 5, 6)).square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in block.parameters())


def test_an_even_kernel_is_refused():
    with pytest.raises(ValueError, match="kernel_size=4 has no middle"):
        ConvNeXtBlock(6, kernel_size=4)
