"""Rows of unequal length in one tensor.

Letters: b rows.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def before(lengths: Int[Tensor, " b"], size: int) -> Bool[Tensor, "b size"]:
    """Which of `size` places lie before the end of each row."""
    return torch.arange(size, device=lengths.device) < lengths[:, None]
