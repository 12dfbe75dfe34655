"""Tensors sent to a device, and drawn on it."""

from typing import Any

import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, without waiting for what the device still has to do: a copy out of memory that is not pinned would."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def drawn_by(generator: torch.Generator | None) -> dict[str, Any]:
    """Keywords for a draw, without `generator` where there is none: with it, the compiler refuses batches of varying size."""
    return {} if generator is None else {"generator": generator}
