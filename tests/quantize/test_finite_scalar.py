"""Finite scalar quantization: parity with vector-quantize-pytorch, and the grid itself."""

import pytest
import torch
from vector_quantize_pytorch import FSQ

from helicon.quantize import FiniteScalarQuantizer


@pytest.mark.parametrize(
    ("levels", "symmetric"),
    [((8, 5, 5, 5), False), ((8, 5, 5, 5), True), ((3, 4), False), ((7,), False), ((7,), True), ((2, 6, 3), True)],
)
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("num_codebooks", [1, 2])
def test_parity(levels: tuple[int, ...], symmetric: bool, hard: bool, num_codebooks: int) -> None:
    torch.manual_seed(0)
    dim = len(levels) * num_codebooks
    options = {"num_codebooks": num_codebooks, "preserve_symmetry": symmetric, "bound_hard_clamp": hard}
    ours, theirs = FiniteScalarQuantizer(dim, levels, **options), FSQ(list(levels), **options)
    features = (1.5 * torch.randn(2, 301, dim)).requires_grad_()
    weights = torch.randn(2, 301, dim)
    result = ours(features)
    values, codes = theirs(features)
    assert torch.equal(result.codes, codes.long())
    torch.testing.assert_close(result.values, values)
    (gradient,) = torch.autograd.grad((result.values * weights).sum(), features)
    (expected,) = torch.autograd.grad((values * weights).sum(), features)
    torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(ours.decode(result.codes), theirs.indices_to_codes(codes))


@pytest.mark.parametrize("symmetric", [False, True])
def test_every_code_is_its_own_grid_point_and_can_be_reached(symmetric: bool) -> None:
    quantizer = FiniteScalarQuantizer(3, (5, 4, 3), preserve_symmetry=symmetric)
    assert quantizer.codebook_size == 60
    codes = torch.arange(60)[None]
    grid = quantizer.decode(codes)
    assert len(grid[0].unique(dim=0)) == 60 and grid.abs().max() <= 1
    reached = quantizer.encode(3 * torch.randn(1, 20000, 3))
    assert len(reached.unique()) == 60


def test_many_levels_stay_in_range() -> None:
    """From about a thousand levels on, the margin around the outermost one is more than half a level."""
    quantizer = FiniteScalarQuantizer(1, (2001,))
    codes = quantizer.encode(torch.tensor([[[-50.0], [50.0]]]))
    assert codes.tolist() == [[0, 2000]]


def test_no_loss_and_no_parameters_without_projection() -> None:
    quantizer = FiniteScalarQuantizer(2, (5, 4))
    assert quantizer(torch.randn(1, 3, 2)).loss == 0
    assert not list(quantizer.parameters()) and not quantizer.state_dict()


def test_too_few_levels_are_refused() -> None:
    with pytest.raises(ValueError, match="preserve_symmetry=True"):
        FiniteScalarQuantizer(2, (2, 5))
    with pytest.raises(ValueError, match="at least 2"):
        FiniteScalarQuantizer(2, (1, 5), preserve_symmetry=True)
