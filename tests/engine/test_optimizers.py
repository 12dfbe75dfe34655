"""What Muon does to a matrix. (How its steps and those of Lion follow their formulas: test_optim.py.)"""

import pytest
import torch
from torch import Tensor

from helicon.engine.optimizers import orthogonalise


def polar(matrix: Tensor) -> Tensor:
    u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
    return u @ vt


@pytest.mark.parametrize("shape", [(7, 5), (5, 7), (6, 6), (1, 4), (64, 24)])
def test_orthogonalise_gives_the_nearest_orthogonal_matrix(shape: tuple[int, int]) -> None:
    matrix = 100 * (torch.randn(shape, generator=torch.Generator().manual_seed(3)) + 2 * torch.eye(*shape))
    found = orthogonalise(matrix[None], steps=5)[0]
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.6 and values.max() < 1.3
    alignment = torch.nn.functional.cosine_similarity(found.flatten(), polar(matrix).flatten(), dim=0)
    assert alignment > 0.97


def test_orthogonalise_of_nothing_is_nothing() -> None:
    assert torch.equal(orthogonalise(torch.zeros(2, 3, 4), 5), torch.zeros(2, 3, 4))
