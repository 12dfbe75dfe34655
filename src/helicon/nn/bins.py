"""Numbers and the equal bins of a range they are in."""

from jaxtyping import Float, Int
from torch import Tensor

# Of a bin, by which numbers are shifted where many lie on the border of two: right angles, the middle of a symmetric mesh.
# Without it errors of rounding, which are not the same in every batch, would tear them apart.
NUDGE = 1e-3


def discretize(
    values: Float[Tensor, "*shape"], num_discrete: int, continuous_range: tuple[float, float], nudge: float = 0.0
) -> Int[Tensor, "*shape"]:
    """The one of `num_discrete` equal bins each number, `nudge` bins higher, is in; outside of the range, the first or last."""
    low, high = continuous_range
    bins = ((values - low) / (high - low) * num_discrete + nudge).floor()
    return bins.clamp(0, num_discrete - 1).long()


def undiscretize(
    bins: Int[Tensor, "*shape"], num_discrete: int, continuous_range: tuple[float, float]
) -> Float[Tensor, "*shape"]:
    """The centres of the bins: at most half a bin from what was there."""
    low, high = continuous_range
    return ((bins.double() + 0.5) / num_discrete * (high - low) + low).float()
