import math

import pytest
import torch

from helicon.metrics.codes import code_counts, usage


def used(codes: torch.Tensor, size: int = 8) -> list[float]:
    return [value.item() for value in usage(code_counts(codes, size)).values()]


def test_masked_codes_do_not_count():
    assert used(torch.tensor([[0, 0, 3], [3, -1, -1]])[..., None]) == pytest.approx([2 / 8, 2.0])
    assert used(torch.full((3, 2), -1)) == pytest.approx([0.0, 1.0])


def test_perplexity_is_that_of_the_frequencies():
    assert used(torch.arange(8)[:, None]) == pytest.approx([1.0, 8.0])
    expected = math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    assert used(torch.tensor([[0], [0], [0], [1]])) == pytest.approx([2 / 8, expected])


def test_quantizers_of_a_stack_have_codebooks_of_their_own():
    codes = torch.tensor([[[0, 5], [1, 5]], [[2, 5], [3, 5]]])  # [b, n, q]
    assert torch.equal(code_counts(codes, 8)[1], torch.tensor([0, 0, 0, 0, 0, 4.0, 0, 0]))
    assert used(codes) == pytest.approx([(4 / 8 + 1 / 8) / 2, (4.0 + 1.0) / 2])


def test_counts_of_batches_add_up():
    first, second = torch.tensor([[0], [1]]), torch.tensor([[1], [7]])
    together = code_counts(first, 8) + code_counts(second, 8)
    assert torch.equal(together, code_counts(torch.cat((first, second)), 8))
