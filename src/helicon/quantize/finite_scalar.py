"""Finite scalar quantization: each number of a row is squashed and rounded to a few levels.

Mentzer et al. 2023, arXiv:2309.15505. The codebook is the grid of all combinations; there is nothing to learn, no
loss, and no code that can die.

Letters: b batch, n positions, d feature size, r rows, m codebooks, k numbers of a code.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from helicon.quantize.rows import QuantizedRows, RowQuantizer, straight_through, usage


class FiniteScalarQuantizer(RowQuantizer):
    """Features `[b, ..., d]` to codes `[b, ...]`, or `[b, ..., num_codebooks]` for several codebooks.

    dim, levels: feature size, and how many levels each number of a code has (the first counts least in the code);
        features are projected to `num_codebooks` times len(levels) numbers, and back, when that is not `dim`.
    preserve_symmetry: levels lie evenly in [-1, 1] (arXiv:2411.19842, section 3.2). Otherwise zero is always a level,
        so that an even number of levels has one more below zero than above (the paper's half offset).
    bound_hard_clamp: rows are clamped to [-1, 1] instead of squashed by a tanh.
    """

    levels: Tensor
    basis: Tensor
    centre: Tensor
    half_width: Tensor
    half_range: Tensor
    offset: Tensor

    def __init__(
        self,
        dim: int,
        levels: Sequence[int],
        *,
        num_codebooks: int = 1,
        preserve_symmetry: bool = False,
        bound_hard_clamp: bool = False,
        projection_has_bias: bool = True,
    ):
        least = 2 if preserve_symmetry else 3
        if not levels or min(levels) < least:
            raise ValueError(
                f"levels={list(levels)} must be at least {least} each"
                + ("" if preserve_symmetry else " (2 needs preserve_symmetry=True)")
            )
        super().__init__(
            dim, len(levels) * num_codebooks, num_codebooks if num_codebooks > 1 else None, projection_has_bias
        )
        self.codebook_size = math.prod(levels)
        self.num_codebooks = num_codebooks
        self.preserve_symmetry = preserve_symmetry
        self.bound_hard_clamp = bound_hard_clamp
        self._create_constants(torch.tensor(list(levels)))

    def _create_constants(self, levels: Int64[Tensor, " k"]) -> None:
        highest = (levels - 1).float()
        if self.preserve_symmetry:
            centre, half_width, half_range = highest / 2, highest / 2, highest / 2
            offset = torch.zeros_like(highest)
        else:
            centre = half_width = (levels // 2).float()
            half_range = (
                highest * (1 + 1e-3) / 2
            )  # a little more than to the outermost level, so that it can be reached
            offset = torch.where(levels % 2 == 0, 0.5, 0.0)
        constants = {"levels": levels, "centre": centre, "half_width": half_width, "half_range": half_range}
        constants["offset"] = offset
        constants["basis"] = torch.cat((levels.new_ones(1), levels[:-1].cumprod(0)))
        for name, value in constants.items():
            self.register_buffer(name, value, persistent=False)

    def quantize_rows(self, rows: Float[Tensor, "r c"], keep: Bool[Tensor, " r"]) -> QuantizedRows:
        position = self._position(rows)
        level = self._level(position)
        codes = self._codes(level)
        values = straight_through((position - self.centre) / self.half_width, self._value(level))
        loss = rows.new_zeros(())
        return QuantizedRows(values.flatten(1), codes, loss, usage(codes, keep, self.codebook_size))

    def encode_rows(self, rows: Float[Tensor, "r c"]) -> Int64[Tensor, "r *q"]:
        return self._codes(self._level(self._position(rows)))

    def decode_rows(self, codes: Int64[Tensor, "r *q"]) -> Float[Tensor, "r c"]:
        level = codes.clamp(min=0)[..., None] // self.basis % self.levels
        return torch.where(codes[..., None] >= 0, self._value(level), 0.0).flatten(1)

    def _position(self, rows: Float[Tensor, "r c"]) -> Float[Tensor, "r m k"]:
        """Where each number lies on the scale 0 ... levels - 1, before rounding."""
        numbers = rows.unflatten(-1, (self.num_codebooks, -1))
        shift = self.offset / self.half_range
        if self.bound_hard_clamp:
            squashed = (numbers + shift).clamp(-1, 1)
        else:
            squashed = (numbers + shift.atanh()).tanh()
        return squashed * self.half_range - self.offset + self.centre

    def _level(self, position: Float[Tensor, "r m k"]) -> Int64[Tensor, "r m k"]:
        level = (position.detach() + 0.5).floor().long()
        return level.clamp(min=0).minimum(self.levels - 1)

    def _value(self, level: Int64[Tensor, "r *m k"]) -> Float[Tensor, "r *m k"]:
        return (level - self.centre) / self.half_width

    def _codes(self, level: Int64[Tensor, "r m k"]) -> Int64[Tensor, "r *q"]:
        codes = (level * self.basis).sum(-1)
        return codes[:, 0] if self.num_codes is None else codes
