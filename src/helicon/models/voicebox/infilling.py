"""Frames that are to be filled in, and the simplest ways to do it: what a network that infills is judged against.

Letters: b batch, n frames, d features.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Frames = Float[Tensor, "b n d"]
Mask = Bool[Tensor, "b n"]


def middle_span(lengths: Int[Tensor, " b"], n: int, share: float = 0.3) -> Mask:
    """One run of frames in the middle of each row of `lengths`, a `share` of it and at least one frame."""
    size = (lengths * share).round().long().clamp(min=1)
    first = (lengths - size) // 2
    place = torch.arange(n, device=lengths.device)
    return (place >= first[:, None]) & (place < (first + size)[:, None])


def neighbours(hidden: Mask, mask: Mask) -> tuple[Int[Tensor, "b n"], Int[Tensor, "b n"]]:
    """The places of the nearest given frame before each frame and after it; itself, where it is given. Where there is none on one side,
    that of the other."""
    n = hidden.shape[1]
    is_given = mask & ~hidden
    place = torch.arange(n, device=hidden.device)
    before = torch.where(is_given, place, -1).cummax(dim=1).values
    after = torch.where(is_given, place, n).flip(1).cummin(dim=1).values.flip(1)
    first = torch.where(before < 0, after, before).clamp(max=n - 1)
    last = torch.where(after == n, before, after).clamp(min=0)
    return first, last


def copied(features: Frames, hidden: Mask, mask: Mask) -> Frames:
    """Hidden frames as the nearest given one."""
    first, last = neighbours(hidden, mask)
    place = torch.arange(hidden.shape[1], device=hidden.device)
    nearest = torch.where(place - first <= last - place, first, last)
    return features.gather(1, nearest[..., None].expand_as(features))


def interpolated(features: Frames, hidden: Mask, mask: Mask) -> Frames:
    """Hidden frames on the straight line between the given ones around them."""
    first, last = neighbours(hidden, mask)
    place = torch.arange(hidden.shape[1], device=hidden.device)
    way = ((place - first) / (last - first).clamp(min=1)).clamp(0, 1)[..., None]
    one, other = (features.gather(1, found[..., None].expand_as(features)) for found in (first, last))
    return one + way * (other - one)


def frame_error(found: Frames, true: Frames, counted: Mask, *, squared: bool = False) -> Float[Tensor, ""]:
    """The mean absolute (or squared) difference over all features of the frames that count."""
    error = (found - true).masked_fill(~counted[..., None], 0.0)
    error = error.square() if squared else error.abs()
    return error.mean(dim=-1).sum() / counted.sum().clamp(min=1)
