"""Residual quantization: each quantizer of a stack codes what the ones before it left.

SoundStream, Zeghidour et al. 2021, arXiv:2107.03312, algorithm 1. The stack is one quantizer: its gradient passes
straight through (or by one rotation) from its input to the sum of its levels. Passing it level by level, each from
its own residual, would multiply it by the number of levels. Each level's loss reaches the input through its own
residual, as in the paper.

Quantize dropout trains the stack to be cut after any level: in training, the number of levels in use is drawn for
each batch. It is drawn and applied on the device; the levels beyond it are computed (and their codebooks go on
following their residuals) but leave no trace in values, codes and loss. So the host never waits, and every rank runs
the same collectives.

Letters: b batch, n positions, d feature size, r rows, c size of a code vector, q levels, g groups.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from helicon.quantize.base import Quantized
from helicon.quantize.finite_scalar import FiniteScalarQuantizer
from helicon.quantize.lookup_free import LookupFreeQuantizer, num_bits
from helicon.quantize.rows import QuantizedRows, RowQuantizer, rotate_onto, straight_through
from helicon.quantize.vector import VectorQuantizer


class ResidualQuantizer(RowQuantizer):
    """Features `[b, ..., d]` to codes `[b, ..., q]`; the loss is the sum of the levels'.

    dim, layers: feature size, and the quantizers, one code a row each; or one for all levels, given `num_quantizers`.
        Features are projected to the layers' size, and back, when that is not `dim`.
    scales: per level, what the residual is divided by before it is quantized, and the outcome multiplied by.
    soft_clamp: rows are first kept below this by a tanh.
    rotation_trick: gradients pass by rotation instead of straight through.
    quantize_dropout: in training, use only a random number of levels: more than `quantize_dropout_cutoff_index`,
        rounded up to a multiple of `quantize_dropout_multiple_of`. Codes of the other levels are -1.
    """

    scales: Tensor
    soft_clamp: Tensor | None

    def __init__(
        self,
        dim: int,
        layers: Sequence[RowQuantizer],
        *,
        num_quantizers: int | None = None,
        scales: Float[Tensor, "q c"] | None = None,
        soft_clamp: Float[Tensor, " c"] | None = None,
        rotation_trick: bool = False,
        quantize_dropout: bool = False,
        quantize_dropout_cutoff_index: int = 0,
        quantize_dropout_multiple_of: int = 1,
    ):
        num_quantizers = len(layers) if num_quantizers is None else num_quantizers
        if len(layers) not in (1, num_quantizers):
            raise ValueError(f"{num_quantizers=} levels need one layer for all or one each, not {len(layers)}")
        unfit = [layer for layer in layers if layer.has_projections or layer.num_codes is not None]
        if unfit:
            raise ValueError(
                f"a level is a quantizer of one code and no projection, not {type(unfit[0]).__name__} with them"
            )
        if not 0 <= quantize_dropout_cutoff_index < num_quantizers:
            raise ValueError(f"{quantize_dropout_cutoff_index=} must be 0 ... {num_quantizers - 1}")
        super().__init__(dim, layers[0].code_dim, num_quantizers)
        self.layers = nn.ModuleList(layers)
        self.num_quantizers = num_quantizers
        self.codebook_size = layers[0].codebook_size
        self.rotation_trick = rotation_trick
        self.quantize_dropout = quantize_dropout and quantize_dropout_cutoff_index < num_quantizers - 1
        self.quantize_dropout_cutoff_index = quantize_dropout_cutoff_index
        self.quantize_dropout_multiple_of = quantize_dropout_multiple_of
        scales = torch.ones(num_quantizers, self.code_dim) if scales is None else scales
        self.register_buffer("scales", scales, persistent=False)
        self.register_buffer("soft_clamp", soft_clamp, persistent=False)

    def forward(
        self,
        features: Float[Tensor, "b *n d"],
        mask: Bool[Tensor, "b *n"] | None = None,
        kept_levels: Int64[Tensor, ""] | None = None,
    ) -> Quantized:
        """`kept_levels` is how many levels to use; without it, all of them, or by quantize dropout."""
        if kept_levels is None:
            kept_levels = self.draw_kept_levels(features.device)
        return self._over_rows(features, mask, partial(self.quantize_rows, kept_levels=kept_levels))

    def draw_kept_levels(self, device: torch.device) -> Int64[Tensor, ""] | None:
        """How many levels quantize dropout leaves this time, from the device's generator; None for all."""
        if not (self.training and self.quantize_dropout):
            return None
        last = torch.randint(self.quantize_dropout_cutoff_index, self.num_quantizers, (), device=device)
        multiple = self.quantize_dropout_multiple_of
        return (last // multiple + 1) * multiple

    def quantize_rows(
        self, rows: Float[Tensor, "r c"], keep: Bool[Tensor, " r"], kept_levels: Int64[Tensor, ""] | None = None
    ) -> QuantizedRows:
        rows = self._clamped(rows)
        residual, total, loss = rows, torch.zeros_like(rows), rows.new_zeros(())
        parts: dict[str, Tensor] = {}
        inputs, chosen, codes = [], [], []
        for level in range(self.num_quantizers):
            inputs.append(residual / self.scales[level])
            result = self._layer(level).quantize_rows(inputs[-1], keep)
            step = result.values.detach() * self.scales[level]
            residual = residual - step
            is_used = True if kept_levels is None else level < kept_levels
            total = total + step * is_used
            loss = loss + result.loss * is_used
            chosen.append(result.codes)
            codes.append(result.codes if kept_levels is None else torch.where(level < kept_levels, result.codes, -1))
            parts.update({f"{name}_{level}": value for name, value in result.parts.items()})
        if self.training:
            self._learn(inputs, chosen, keep)
        pass_through = rotate_onto if self.rotation_trick else straight_through
        return QuantizedRows(pass_through(rows, total), torch.stack(codes, dim=-1), loss, parts)

    def encode_rows(self, rows: Float[Tensor, "r c"]) -> Int64[Tensor, "r q"]:
        residual, codes = self._clamped(rows), []
        for level, scale in enumerate(self.scales):
            layer = self._layer(level)
            codes.append(layer.encode_rows(residual / scale))
            residual = residual - layer.decode_rows(codes[-1]) * scale
        return torch.stack(codes, dim=-1)

    def decode_rows(self, codes: Int64[Tensor, "r p"]) -> Float[Tensor, "r c"]:
        """From the codes of all levels, or of the first p."""
        if not 1 <= codes.shape[-1] <= self.num_quantizers:
            raise ValueError(f"codes of {codes.shape[-1]} levels were given to a stack of {self.num_quantizers}")
        total = self.scales.new_zeros(len(codes), self.code_dim)
        for level, code in enumerate(codes.unbind(-1)):
            total = total + self._layer(level).decode_rows(code) * self.scales[level]
        return total

    def _layer(self, level: int) -> RowQuantizer:
        layer = self.layers[level if len(self.layers) > 1 else 0]
        assert isinstance(layer, RowQuantizer)
        return layer

    def _clamped(self, rows: Tensor) -> Tensor:
        return rows if self.soft_clamp is None else (rows / self.soft_clamp).tanh() * self.soft_clamp

    def _learn(self, inputs: list[Tensor], codes: list[Tensor], keep: Tensor) -> None:
        """One step of statistics for each codebook; a shared one sees all levels' rows at once."""
        if len(self.layers) == self.num_quantizers:
            for level in range(self.num_quantizers):
                self._layer(level).learn_rows(inputs[level].detach(), codes[level], keep)
        else:
            # Level after level of each row, so that ranks side by side are in the order of one process.
            rows = torch.stack(inputs, dim=1).flatten(0, 1).detach()
            self._layer(0).learn_rows(rows, torch.stack(codes, dim=1).flatten(), keep.repeat_interleave(len(inputs)))


class ResidualVQ(ResidualQuantizer):
    """`VectorQuantizer`s in a stack, with `vector_options`; or one for all levels, with `shared_codebook`."""

    def __init__(
        self,
        dim: int,
        num_quantizers: int,
        codebook_size: int,
        *,
        codebook_dim: int | None = None,
        shared_codebook: bool = False,
        rotation_trick: bool = False,
        quantize_dropout: bool = False,
        quantize_dropout_cutoff_index: int = 0,
        quantize_dropout_multiple_of: int = 1,
        **vector_options: Any,
    ):
        num_layers = 1 if shared_codebook else num_quantizers
        super().__init__(
            dim,
            [VectorQuantizer(codebook_dim or dim, codebook_size, **vector_options) for _ in range(num_layers)],
            num_quantizers=num_quantizers,
            rotation_trick=rotation_trick,
            quantize_dropout=quantize_dropout,
            quantize_dropout_cutoff_index=quantize_dropout_cutoff_index,
            quantize_dropout_multiple_of=quantize_dropout_multiple_of,
        )


class ResidualLFQ(ResidualQuantizer):
    """`LookupFreeQuantizer`s in a stack, with `lookup_free_options`; each has half the scale of the one before.

    soft_clamp_input_value: what enters the stack is kept below this by a tanh. Not what enters each level: what the first one
        clamps would be residual again for the second, and a number that has grown beyond all levels would be stuck there.
    """

    def __init__(
        self,
        dim: int,
        num_quantizers: int,
        codebook_size: int,
        *,
        soft_clamp_input_value: float | None = None,
        quantize_dropout: bool = False,
        quantize_dropout_cutoff_index: int = 0,
        quantize_dropout_multiple_of: int = 1,
        **lookup_free_options: Any,
    ):
        bits, limit = num_bits(codebook_size), soft_clamp_input_value
        if limit is not None and limit < 1:
            raise ValueError(f"soft_clamp_input_value={limit} must be at least 1, the scale of the first level")
        super().__init__(
            dim,
            [
                LookupFreeQuantizer(bits, codebook_scale=2.0**-level, **lookup_free_options)
                for level in range(num_quantizers)
            ],
            soft_clamp=None if limit is None else torch.full((bits,), float(limit)),
            quantize_dropout=quantize_dropout,
            quantize_dropout_cutoff_index=quantize_dropout_cutoff_index,
            quantize_dropout_multiple_of=quantize_dropout_multiple_of,
        )


class ResidualFSQ(ResidualQuantizer):
    """Symmetric `FiniteScalarQuantizer`s in a stack, each on a grid `levels` times finer than the one before."""

    def __init__(
        self,
        dim: int,
        num_quantizers: int,
        levels: Sequence[int],
        *,
        quantize_dropout: bool = False,
        quantize_dropout_cutoff_index: int = 0,
        quantize_dropout_multiple_of: int = 1,
    ):
        sizes = torch.tensor(list(levels)).float()
        layers = [
            FiniteScalarQuantizer(len(levels), levels, preserve_symmetry=True, bound_hard_clamp=True)
            for _ in range(num_quantizers)
        ]
        super().__init__(
            dim,
            layers,
            scales=torch.stack([sizes**-level for level in range(num_quantizers)]),
            soft_clamp=1
            + 1 / (sizes - 1),  # up to here the first level's rounding error is one that the second can code
            quantize_dropout=quantize_dropout,
            quantize_dropout_cutoff_index=quantize_dropout_cutoff_index,
            quantize_dropout_multiple_of=quantize_dropout_multiple_of,
        )


class GroupedResidual(nn.Module):
    """Features cut into groups, each with a stack of its own (HiFi-Codec, arXiv:2305.02765).

    Codes are `[b, ..., g * q]`, all levels of the first group first. The loss is the sum of the groups'; quantize
    dropout leaves the same number of levels in every group.
    """

    def __init__(self, stacks: Sequence[ResidualQuantizer]):
        super().__init__()
        self.stacks = nn.ModuleList(stacks)
        self.groups = len(stacks)
        self.dim = stacks[0].dim * len(stacks)
        self.codebook_size = stacks[0].codebook_size
        self.num_quantizers = stacks[0].num_quantizers

    def forward(self, features: Float[Tensor, "b *n d"], mask: Bool[Tensor, "b *n"] | None = None) -> Quantized:
        stacks = self._stacks()
        kept_levels = stacks[0].draw_kept_levels(features.device)
        results = [stack(part, mask, kept_levels) for stack, part in zip(stacks, self._split(features), strict=True)]
        return Quantized(
            values=torch.cat([result.values for result in results], dim=-1),
            codes=torch.cat([result.codes for result in results], dim=-1),
            loss=torch.stack([result.loss for result in results]).sum(),
            parts={
                f"group_{group}_{name}": value
                for group, result in enumerate(results)
                for name, value in result.parts.items()
            },
        )

    def encode(self, features: Float[Tensor, "b *n d"]) -> Int64[Tensor, "b *n q"]:
        parts = zip(self._stacks(), self._split(features), strict=True)
        return torch.cat([stack.encode(part) for stack, part in parts], dim=-1)

    def decode(self, codes: Int64[Tensor, "b *n q"]) -> Float[Tensor, "b *n d"]:
        """From the codes of all levels, or of the first few of every group."""
        if codes.shape[-1] % self.groups:
            raise ValueError(f"{codes.shape[-1]} codes a position cannot be shared out to {self.groups} groups")
        parts = zip(self._stacks(), codes.chunk(self.groups, dim=-1), strict=True)
        return torch.cat([stack.decode(part) for stack, part in parts], dim=-1)

    def _split(self, features: Tensor) -> tuple[Tensor, ...]:
        if features.shape[-1] != self.dim:
            raise ValueError(f"features of shape {tuple(features.shape)} must have {self.dim} in the last dimension")
        nan_if_not_finite = (features - features).sum(-1, keepdim=True).detach()  # a bad row is bad in every group
        return (features + nan_if_not_finite).chunk(self.groups, dim=-1)

    def _stacks(self) -> list[ResidualQuantizer]:
        return [stack for stack in self.stacks if isinstance(stack, ResidualQuantizer)]


class GroupedResidualVQ(GroupedResidual):
    """`groups` stacks like `ResidualVQ(dim / groups, **stack_options)`."""

    def __init__(self, dim: int, *, groups: int = 1, **stack_options: Any):
        super().__init__([ResidualVQ(_group_dim(dim, groups), **stack_options) for _ in range(groups)])


class GroupedResidualLFQ(GroupedResidual):
    """`groups` stacks like `ResidualLFQ(dim / groups, **stack_options)`."""

    def __init__(self, dim: int, *, groups: int = 1, **stack_options: Any):
        super().__init__([ResidualLFQ(_group_dim(dim, groups), **stack_options) for _ in range(groups)])


class GroupedResidualFSQ(GroupedResidual):
    """`groups` stacks like `ResidualFSQ(dim / groups, **stack_options)`."""

    def __init__(self, dim: int, *, groups: int = 1, **stack_options: Any):
        super().__init__([ResidualFSQ(_group_dim(dim, groups), **stack_options) for _ in range(groups)])


def _group_dim(dim: int, groups: int) -> int:
    if groups < 1 or dim % groups:
        raise ValueError(f"dim={dim} cannot be cut into groups={groups} of equal size")
    return dim // groups
