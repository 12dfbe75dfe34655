import pytest
import torch

from helicon.nn.bins import discretize, undiscretize


@pytest.mark.parametrize("num_discrete", [2, 100, 128])
@pytest.mark.parametrize("continuous_range", [(-1.0, 1.0), (0.0, 3.5)])
def test_numbers_to_bins_and_back(num_discrete: int, continuous_range: tuple[float, float]):
    low, high = continuous_range
    size = (high - low) / num_discrete
    values = low + (high - low) * torch.rand(1000, generator=torch.Generator().manual_seed(0))
    bins = discretize(values, num_discrete, continuous_range)
    centres = undiscretize(bins, num_discrete, continuous_range)
    assert (centres - values).abs().max() <= size / 2 * (1 + 1e-5)
    assert torch.equal(discretize(centres, num_discrete, continuous_range), bins)
    assert bins.min() == 0 and bins.max() == num_discrete - 1


def test_the_range_must_be_said():
    with pytest.raises(TypeError, match="continuous_range"):
        discretize(torch.zeros(3), 7)
    with pytest.raises(TypeError, match="continuous_range"):
        undiscretize(torch.zeros(3, dtype=torch.long), 7)


def test_what_is_outside_is_in_the_first_or_last_bin():
    assert discretize(torch.tensor([-9.0, -1.0, 1.0, 9.0]), 7, (-1.0, 1.0)).tolist() == [0, 0, 6, 6]
