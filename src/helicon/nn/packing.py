"""Rows of unequal length with their padding at the right: a causal transformer over them needs no mask.

Parts of a sequence (a prompt, tokens of one kind, tokens of another) are each padded to a width of their own, which
leaves holes where they are joined. Packed, the real tokens of a row stand one after the other: nothing real attends to
padding, the fast causal kernel does, and positions count real tokens. Shapes depend on shapes alone, and nothing asks
the host, so all of this may be compiled and captured.

Letters: b batch, n tokens, d and e features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Part(NamedTuple):
    """Embeddings that stand next to one another, and which of them are real."""

    embeddings: Tensor  # [b, n, d]
    mask: Tensor | None = None  # [b, n], True = a real token; None: all are


@dataclass(frozen=True)
class Packed:
    """The real tokens of all parts, row by row, then padding."""

    embeddings: Float[Tensor, "b total d"]  # zeros where padded
    mask: Bool[Tensor, "b total"] | None  # None where nothing is padded
    widths: tuple[int, ...]  # of the parts
    slots: Int[Tensor, "b total"] | None  # where each token of the joined parts went; None where all stayed

    def unpack(self, hidden: Float[Tensor, "b total e"]) -> list[Tensor]:
        """What a network made of the tokens: `[b, n, e]` for each part, zeros where a token is not real."""
        if self.mask is not None and self.slots is not None:
            hidden = _gathered(hidden, self.slots, self.mask.gather(1, self.slots))
        return list(hidden.split(self.widths, dim=1))


def pack(parts: Sequence[Part]) -> Packed:
    """Joins the parts, in order; what masked embeddings hold (NaN, too) stays out of the result and of gradients."""
    for embeddings, mask in parts:
        if mask is not None and mask.shape != embeddings.shape[:2]:
            raise ValueError(f"a mask of {tuple(mask.shape)} does not fit embeddings of {tuple(embeddings.shape)}")
    embeddings = torch.cat([part.embeddings for part in parts], dim=1)
    widths = tuple(part.embeddings.shape[1] for part in parts)
    if all(part.mask is None for part in parts):
        return Packed(embeddings, None, widths, None)
    masks = [part.embeddings.new_ones(part.embeddings.shape[:2], dtype=torch.bool) for part in parts]
    masks = [mask if part.mask is None else part.mask for part, mask in zip(parts, masks, strict=True)]
    mask = torch.cat(masks, dim=1)
    order = _kept_first(mask)
    packed_mask = mask.gather(1, order)
    return Packed(_gathered(embeddings, order, packed_mask), packed_mask, widths, order.argsort(dim=1))


def left_packed(values: Int[Tensor, "b n"], keep: Bool[Tensor, "b n"], fill: int) -> Int[Tensor, "b n"]:
    """The kept values of each row at its front, in order, and `fill` behind them."""
    order = _kept_first(keep)
    return values.gather(1, order).masked_fill(~keep.gather(1, order), fill)


def unique_consecutive(ids: Int[Tensor, "b n"], pad_id: int = -1) -> Int[Tensor, "b n"]:
    """Each row without the ids that repeat the one before, nor its padding, and padded anew: `5 5 2 5` to `5 2 5`."""
    keep = ids != pad_id
    keep[:, 1:] &= ids[:, 1:] != ids[:, :-1]
    return left_packed(ids, keep, pad_id)


def _kept_first(keep: Bool[Tensor, "b n"]) -> Int[Tensor, "b n"]:
    """Of each row the indices to keep, in order, then the others."""
    return torch.argsort((~keep).byte(), dim=1, stable=True)


def _gathered(
    features: Float[Tensor, "b n d"], indices: Int[Tensor, "b n"], mask: Bool[Tensor, "b n"]
) -> Float[Tensor, "b n d"]:
    """Features in the order of `indices`, zeros outside `mask`."""
    ordered = features.gather(1, indices[..., None].expand(-1, -1, features.shape[-1]))
    return ordered.masked_fill(~mask[..., None], 0)
