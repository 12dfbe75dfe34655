"""Positions of tokens: ids from a padding mask, and rotary embedding (Su et al., 2021) in its half-split form.

Letters: b batch (1 where all rows agree), h heads, n positions, a axes, d features of a head (a multiple of 2 a).
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

ROTARY_BASE = 10_000.0


def positions_from_mask(mask: Bool[Tensor, "b n"]) -> Int[Tensor, "b n"]:
    """Counts the real tokens of each row from 0, wherever padding stands (which takes its left neighbour's number)."""
    return (mask.cumsum(dim=-1) - 1).clamp(min=0)


class Rotation:
    """The cosines and signed sines that turn each pair of features `(i, i + d/2)` by `position * base^(-2i/d)`.

    Of positions on several axes (a row and a column, say) each turns its own share of the pairs, as if a head had d/a features.

    Made once a forward pass and shared by all layers. The angles are always fp32 (bf16 has no odd integers beyond 256),
    and no table is kept in a buffer, which a cast of the module would spoil.
    """

    def __init__(self, positions: Int[Tensor, "b n"] | Int[Tensor, "b n a"], dim_head: int, base: float = ROTARY_BASE):
        positions = positions[..., None] if positions.ndim == 2 else positions
        share, rest = divmod(dim_head, positions.shape[-1])
        if rest or share % 2:
            raise ValueError(
                f"dim_head={dim_head} must be a multiple of {2 * positions.shape[-1]}, for rotary positions on "
                f"{positions.shape[-1]} axes"
            )
        pairs = torch.arange(0, share, 2, device=positions.device, dtype=torch.float32)
        angles = positions[:, None, :, :, None].float() * base ** (-pairs / share)
        angles = angles.flatten(-2)  # [b, 1, n, d/2]
        cosine, sine = angles.cos(), angles.sin()
        self.cosine = _in_memory(torch.cat((cosine, cosine), dim=-1))
        self.sine = _in_memory(torch.cat((-sine, sine), dim=-1))

    def __call__(self, x: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n d"]:
        first, second = x.chunk(2, dim=-1)
        swapped = torch.cat((second, first), dim=-1)
        return (x * self.cosine + swapped * self.sine).to(x.dtype)


def _in_memory(x: Tensor) -> Tensor:
    """The same tensor. Of a strided view the compiler must first write the tensor down, where it would otherwise compute
    powers, cosines and sines again for every head of every layer."""
    return x.as_strided(x.shape, x.stride())
