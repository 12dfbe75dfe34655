"""Numbers and the equal bins of a range they are in."""

from jaxtyping import Float, Int
from torch import Tensor


def discretize(
    values: Float[Tensor, "*shape"], num_discrete: int, continuous_range: tuple[float, float]
) -> Int[Tensor, "*shape"]:
    """The one of `num_discrete` equal bins each number is in; what is outside of the range is in the first or last."""
    low, high = continuous_range
    bins = ((values - low) / (high - low) * num_discrete).floor()
    return bins.clamp(0, num_discrete - 1).long()


def undiscretize(
    bins: Int[Tensor, "*shape"], num_discrete: int, continuous_range: tuple[float, float]
) -> Float[Tensor, "*shape"]:
    """The centres of the bins: at most half a bin from what was there."""
    low, high = continuous_range
    return ((bins.double() + 0.5) / num_discrete * (high - low) + low).float()
