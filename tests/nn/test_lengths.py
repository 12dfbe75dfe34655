import torch

from helicon.nn.lengths import before


def test_the_places_before_the_end_of_each_row() -> None:
    mask = before(torch.tensor([0, 2, 3, 5]), 3)
    assert mask.tolist() == [[False, False, False], [True, True, False], [True, True, True], [True, True, True]]
