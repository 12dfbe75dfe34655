"""Rows of unequal length in one tensor.

Letters: b rows.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def before(lengths: Int[Tensor, " b"], size: int) -> Bool[Tensor, "b size"]:
    """Which of `size` places lie before the end of each row."""
    return torch.arange(size, device=lengths.device) < lengths[:, None]


def check_lengths(lengths: Int[Tensor, " b"] | None, size: int) -> None:
    """Refuses those that rows of `size` cannot have. (Of what is on the host alone: a device would have to be waited for.)"""
    if lengths is None or lengths.device.type != "cpu":
        return
    for row, length in enumerate(lengths.tolist()):
        if not 0 <= length <= size:
            raise ValueError(
                f"row {row} cannot have a length of {length}: the rows have {size}; lengths count what is given, at its own rate"
            )
