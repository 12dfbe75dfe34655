"""What every quantizer does around its own arithmetic: features of any shape become float32 rows, and come back.

Features are `[b, ..., d]` with any number of position dimensions, features last (`[b, n, d]`, `[b, h, w, d]`).
Inside, all positions are rows of one matrix, in float32 and outside autocast: distances and running statistics do not
survive bfloat16. Rows are never picked out by a boolean index, which would make the host wait for the device; they
carry a flag instead.

A row that is masked, or that is not finite, takes no part in losses or statistics and has code -1. A masked row's
value is zero. A row that is not finite and not masked has the value NaN, so that the training loop sees it, and
leaves the codebook as it was.

Letters: b batch, n positions, d feature size, r rows (b times all positions), c size of a code vector, q codes per row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor, nn
from torch.nn import functional as F

from helicon.quantize.base import Quantized

TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class QuantizedRows:
    """The outcome for rows `[r, c]`, before the mask is applied to values and codes."""

    values: Tensor  # [r, c]
    codes: Tensor  # int64 [r] or [r, q]
    loss: Tensor  # 0-d
    parts: dict[str, Tensor]


class RowQuantizer(nn.Module):
    """The frame of a quantizer: projections, flattening, mask, precision. A subclass says what happens to rows.

    `num_codes` is how many codes a row has, as the last dimension of `codes`; None stands for one code and no such
    dimension.
    """

    codebook_size: int

    def __init__(self, dim: int, code_dim: int, num_codes: int | None = None, projection_has_bias: bool = True):
        super().__init__()
        self.dim = dim
        self.code_dim = code_dim
        self.num_codes = num_codes
        self.has_projections = dim != code_dim
        self.project_in: nn.Module = nn.Identity()
        self.project_out: nn.Module = nn.Identity()
        if self.has_projections:
            self.project_in = nn.Linear(dim, code_dim, bias=projection_has_bias)
            self.project_out = nn.Linear(code_dim, dim, bias=projection_has_bias)

    def quantize_rows(self, rows: Float[Tensor, "r c"], keep: Bool[Tensor, " r"]) -> QuantizedRows:
        """Quantizes finite rows; losses and parts are over the rows to `keep`. Running statistics stay as they are."""
        raise NotImplementedError

    def encode_rows(self, rows: Float[Tensor, "r c"]) -> Int64[Tensor, "r *q"]:
        raise NotImplementedError

    def decode_rows(self, codes: Int64[Tensor, "r *q"]) -> Float[Tensor, "r c"]:
        """The code vectors of the rows; a code of -1 contributes zero."""
        raise NotImplementedError

    def learn_rows(self, rows: Float[Tensor, "r c"], codes: Int64[Tensor, "r *q"], keep: Bool[Tensor, " r"]) -> None:
        """Moves running statistics, in training. Nothing for quantizers that have none."""

    def forward(self, features: Float[Tensor, "b *n d"], mask: Bool[Tensor, "b *n"] | None = None) -> Quantized:
        return self._over_rows(features, mask, self.quantize_rows)

    @torch.no_grad()
    def encode(self, features: Float[Tensor, "b *n d"]) -> Int64[Tensor, "b ..."]:
        """Codes alone, with no loss and no change of state; -1 for a row that is not finite."""
        with torch.autocast(features.device.type, enabled=False):
            rows = self.project_in(self._rows(features))
            keep = rows.isfinite().all(-1)
            codes = self.encode_rows(torch.where(keep[:, None], rows, 0.0))
        return where_rows(keep, codes, -1).reshape(*features.shape[:-1], *codes.shape[1:])

    def decode(self, codes: Int64[Tensor, "b ..."]) -> Float[Tensor, "b ... d"]:
        """Codes to float32 features; -1 contributes zero, and a row that has nothing but -1 is zero."""
        positions = codes.shape if self.num_codes is None else codes.shape[:-1]
        rows = codes.reshape(-1, *codes.shape[len(positions) :])
        with torch.autocast(codes.device.type, enabled=False):
            values = self.project_out(self.decode_rows(rows))
        is_known = (rows >= 0).flatten(1).any(1) if rows.ndim > 1 else rows >= 0
        return where_rows(is_known, values, 0.0).reshape(*positions, self.dim)

    def _over_rows(
        self, features: Tensor, mask: Tensor | None, quantize: Callable[[Tensor, Tensor], QuantizedRows]
    ) -> Quantized:
        rows = self._rows(features)
        unmasked = torch.ones_like(rows[:, 0], dtype=torch.bool) if mask is None else mask.reshape(-1)
        with torch.autocast(features.device.type, enabled=False):
            # Padding may hold anything, NaN included: it is replaced before any arithmetic, or zero times NaN would
            # spread.
            projected = self.project_in(torch.where(unmasked[:, None], rows, 0.0))
            keep = unmasked & projected.isfinite().all(-1)
            clean = torch.where(keep[:, None], projected, 0.0)
            result = quantize(clean, keep)
            if self.training:
                self.learn_rows(clean.detach(), result.codes, keep)
            nan_if_not_finite = (projected - projected).sum(-1, keepdim=True).detach()
            values = where_rows(unmasked, self.project_out(result.values) + nan_if_not_finite, 0.0)
        codes = where_rows(keep, result.codes, -1)
        return Quantized(
            values=values.reshape(features.shape).to(features.dtype),
            codes=codes.reshape(*features.shape[:-1], *codes.shape[1:]),
            loss=result.loss,
            parts=result.parts,
        )

    def _rows(self, features: Tensor) -> Tensor:
        if features.shape[-1] != self.dim:
            raise ValueError(
                f"{type(self).__name__}(dim={self.dim}) was given features of shape {tuple(features.shape)}: "
                f"the last dimension must be {self.dim} (move channels last)"
            )
        return features.reshape(-1, self.dim).float()


def where_rows(keep: Bool[Tensor, " r"], rows: Shaped[Tensor, "r *s"], other: float) -> Shaped[Tensor, "r *s"]:
    return torch.where(keep.reshape(-1, *(1,) * (rows.ndim - 1)), rows, other)


def mean_over(keep: Bool[Tensor, " r"], rows: Float[Tensor, "r *s"]) -> Float[Tensor, ""]:
    """The mean over all elements of the rows to keep; zero when there are none."""
    per_row = rows.reshape(len(rows), -1).mean(1)
    return (per_row * keep).sum() / keep.sum().clamp(min=1)


def straight_through(rows: Float[Tensor, "*s c"], quantized: Float[Tensor, "*s c"]) -> Float[Tensor, "*s c"]:
    """Exactly `quantized` forward, the gradient of `rows` backward (Bengio et al. 2013, arXiv:1308.3432)."""
    return quantized.detach() + (rows - rows.detach())


def entropy(probabilities: Float[Tensor, "*s p"]) -> Float[Tensor, "*s"]:
    """In nats. A probability that underflowed to zero adds zero, and its gradient stays finite."""
    return -(probabilities * probabilities.clamp(min=TINY).log()).sum(-1)


@torch.no_grad()
def usage(codes: Int64[Tensor, "r *q"], keep: Bool[Tensor, " r"], codebook_size: int) -> dict[str, Tensor]:
    """How evenly this rank's batch uses the codes: the exponential of their entropy, and the share that occurs."""
    weights = keep.float().reshape(-1, *(1,) * (codes.ndim - 1)).expand_as(codes)
    counts = weights.new_zeros(codebook_size).index_add_(0, codes.reshape(-1), weights.reshape(-1))
    perplexity = entropy(counts / counts.sum().clamp(min=1)).exp()
    return {"perplexity": perplexity, "codebook_use": (counts > 0).float().mean()}


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum over all ranks, without a gradient."""
    if num_ranks() == 1:
        return values
    total = values.detach().clone()
    dist.all_reduce(total)
    return total


class _DifferentiableSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return sum_over_ranks(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        # Each rank's loss depends on every rank's values, so the gradients of all the losses add up here too.
        return sum_over_ranks(gradients[0].contiguous())


def differentiable_sum_over_ranks(values: Tensor) -> Tensor:
    """The sum over all ranks; backward, each rank receives the sum of all ranks' gradients (all must call backward)."""
    return values if num_ranks() == 1 else _DifferentiableSum.apply(values)


def rotate_onto(rows: Float[Tensor, "r c"], quantized: Float[Tensor, "r c"]) -> Float[Tensor, "r c"]:
    """Exactly `quantized` forward; backward, the gradient turned and scaled as `quantized` is to `rows`.

    The rotation trick (Fifty et al. 2024, arXiv:2410.06424, section 4.2): with unit vectors e of the row and q of its
    code, and w the unit vector between them, the code is |code| / |row| R row with R = I - 2 w w' + 2 q e' held
    constant.
    """
    size = rows.detach().norm(dim=-1, keepdim=True)
    e, q = F.normalize(rows.detach(), dim=-1), F.normalize(quantized.detach(), dim=-1)
    w = F.normalize(e + q, dim=-1)
    scale = quantized.detach().norm(dim=-1, keepdim=True) / size.clamp(min=TINY)
    along_w, along_e = (rows * w).sum(-1, keepdim=True), (rows * e).sum(-1, keepdim=True)
    rotated = scale * (rows - 2 * w * along_w + 2 * q * along_e)
    # A row of (nearly) no length has no direction to turn, and its scale would blow the gradient up.
    return straight_through(torch.where(size < 1e-6, rows, rotated), quantized)
