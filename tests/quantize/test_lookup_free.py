"""Lookup-free quantization: the factorised entropies against their definition, and parity with vector-quantize-pytorch."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from vector_quantize_pytorch import LFQ

from helicon.quantize import LookupFreeQuantizer


def entropies_by_definition(quantizer: LookupFreeQuantizer, features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """A softmax over all 2^k codes for each row, in float64."""
    rows = features[mask].double()
    if quantizer.soft_clamp_input_value is not None:
        rows = (rows / quantizer.soft_clamp_input_value).tanh() * quantizer.soft_clamp_input_value
    rows = rows.reshape(len(rows), quantizer.num_codebooks, quantizer.bits)
    if quantizer.spherical:
        rows = F.normalize(rows, dim=-1) * quantizer.codebook_scale
    bits = torch.arange(quantizer.codebook_size)[:, None] >> torch.arange(quantizer.bits - 1, -1, -1) & 1
    codebook = (2.0 * bits.double() - 1) * quantizer.codebook_scale
    if quantizer.spherical:
        codebook = F.normalize(codebook, dim=-1) * quantizer.codebook_scale
    log_probabilities = (2 * quantizer.inv_temperature * rows @ codebook.T).log_softmax(-1)
    probabilities = log_probabilities.exp()
    per_sample = -(probabilities * log_probabilities).sum(-1).mean()
    mean = probabilities.mean(0)
    return per_sample, torch.special.entr(mean.clamp(min=1e-300)).sum(-1).mean()


@pytest.mark.parametrize("bits", [1, 2, 7, 10])
@pytest.mark.parametrize("inv_temperature", [0.3, 3.0, 100.0])
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"spherical": True}, {"soft_clamp_input_value": 2.0, "codebook_scale": 0.5}, {"num_codebooks": 2}]
)
def test_entropies_are_those_of_the_definition(
    bits: int, inv_temperature: float, is_masked: bool, options: dict[str, float]
) -> None:
    torch.manual_seed(0)
    num_codebooks = int(options.get("num_codebooks", 1))
    quantizer = LookupFreeQuantizer(
        bits * num_codebooks, 2**bits, inv_temperature=inv_temperature, diversity_gamma=1.7, **options
    )
    features = torch.randn(2, 33, bits * num_codebooks, requires_grad=True)
    mask = torch.rand(2, 33) > 0.4 if is_masked else torch.ones(2, 33, dtype=torch.bool)
    result = quantizer(features, mask if is_masked else None)
    per_sample, codebook = entropies_by_definition(quantizer, features, mask)
    torch.testing.assert_close(result.parts["per_sample_entropy"].double(), per_sample.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(result.parts["codebook_entropy"].double(), codebook.detach(), rtol=1e-5, atol=1e-6)
    expected_loss = 0.1 * (per_sample - 1.7 * codebook)
    (gradient,) = torch.autograd.grad(result.loss, features)
    (expected,) = torch.autograd.grad(expected_loss, features)
    torch.testing.assert_close(gradient, expected.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"dim": 8},
        {"dim": 8, "inv": 1.0, "diversity_gamma": 4.0, "commitment_loss_weight": 0.7},
        {"dim": 8, "spherical": True, "inv": 5.0},
        {"dim": 8, "codebook_size": 2**4, "num_codebooks": 2, "inv": 2.0},
        {"dim": 8, "inv": 2.0, "soft_clamp_input_value": 3.0, "experimental_softplus_entropy_loss": True},
        {"dim": 5, "codebook_size": 2**7, "inv": 2.0},
    ],
)
def test_parity_without_mask(options: dict) -> None:
    torch.manual_seed(0)
    inv_temperature = options.pop("inv", 100.0)
    ours = LookupFreeQuantizer(inv_temperature=inv_temperature, **options)
    theirs = LFQ(**options)
    theirs.load_state_dict(ours.state_dict(), strict=False)
    features, weights = torch.randn(3, 29, options["dim"], requires_grad=True), torch.randn(3, 29, options["dim"])
    result = ours(features)
    (values, codes, loss), parts = theirs(features, inv_temperature=inv_temperature, return_loss_breakdown=True)
    assert torch.equal(result.codes, codes.long())
    torch.testing.assert_close(result.values, values)
    # Theirs takes log(max(p, 1e-5)) for log p.
    torch.testing.assert_close(result.loss, loss, rtol=0, atol=1e-4)
    torch.testing.assert_close(result.parts["per_sample_entropy"], parts.per_sample_entropy, rtol=0, atol=1e-3)
    torch.testing.assert_close(result.parts["codebook_entropy"], parts.batch_entropy, rtol=0, atol=1e-3)
    if ours.commitment_loss_weight:
        torch.testing.assert_close(result.parts["commitment"], parts.commitment)
    (gradient,) = torch.autograd.grad((result.values * weights).sum() + result.loss, features)
    (expected,) = torch.autograd.grad((values * weights).sum() + loss, features)
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(ours.decode(result.codes), theirs.indices_to_codes(codes))


def test_a_mask_keeps_the_diversity_term() -> None:
    """vector-quantize-pytorch 1.32.0 with any mask gives the entropy of a row for that of the batch."""
    torch.manual_seed(0)
    features, mask = torch.randn(2, 60, 6), torch.ones(2, 60, dtype=torch.bool)
    (_, parts) = LFQ(dim=6)(features, inv_temperature=1.0, mask=mask, return_loss_breakdown=True)
    assert torch.isclose(parts.batch_entropy, parts.per_sample_entropy)  # the trap is still there
    quantizer = LookupFreeQuantizer(6, inv_temperature=1.0)
    masked, unmasked = quantizer(features, mask).parts, quantizer(features).parts
    torch.testing.assert_close(masked, unmasked)
    assert masked["codebook_entropy"] > masked["per_sample_entropy"] + 1


def test_a_fraction_of_the_rows_estimates_the_entropies() -> None:
    torch.manual_seed(0)
    features = torch.randn(1, 4000, 5)
    whole = LookupFreeQuantizer(5, inv_temperature=0.5)(features).parts
    part = LookupFreeQuantizer(5, inv_temperature=0.5, frac_per_sample_entropy=0.5)(features).parts
    for name in ("per_sample_entropy", "codebook_entropy"):
        assert part[name] != whole[name]
        torch.testing.assert_close(part[name], whole[name], rtol=0, atol=0.03)


def test_large_inputs_have_finite_gradients() -> None:
    features = (1e4 * torch.randn(1, 50, 9)).requires_grad_()
    LookupFreeQuantizer(9)(features).loss.backward()
    assert features.grad is not None and features.grad.isfinite().all()


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"power of two .*1024"):
        LookupFreeQuantizer(5, 1000)
    with pytest.raises(ValueError, match="give codebook_size"):
        LookupFreeQuantizer(64)
    with pytest.raises(ValueError, match="soft_clamp_input_value"):
        LookupFreeQuantizer(5, soft_clamp_input_value=0.5)
    with pytest.raises(ValueError, match="frac_per_sample_entropy"):
        LookupFreeQuantizer(5, frac_per_sample_entropy=0.0)
