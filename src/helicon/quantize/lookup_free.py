"""Lookup-free quantization: each row is a vector of signs, its code their bits.

MAGVIT-v2, Yu et al. 2023, arXiv:2310.05737. An entropy loss wants each row sure of its code and all codes used alike:
`H(code | row) - gamma H(code)`. With probabilities `p(code | row) = softmax(2 T <row, code>)` over all 2^k sign
vectors the bits are independent, bit i being set with probability sigmoid(4 T s row_i) for codes of entries ±s. So
the entropy of a row is the sum of its bits' entropies, and the mean distribution over the batch is `A B' / r`, with A
and B the distributions of the upper and the lower half of the bits, row by row. That costs 2^k + r 2^(k/2) numbers
where the definition costs r 2^k, and is the same loss to rounding.

Letters: b batch, n positions, d feature size, r rows, m codebooks, k bits of a code.
"""

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional as F

from helicon.quantize.rows import (
    QuantizedRows,
    RowQuantizer,
    differentiable_sum_over_ranks,
    entropy,
    mean_over,
    straight_through,
    sum_over_ranks,
    usage,
)

MAX_BITS = 24  # the mean distribution has 2^bits entries


class LookupFreeQuantizer(RowQuantizer):
    """Features `[b, ..., d]` to codes `[b, ...]`, or `[b, ..., num_codebooks]` for several codebooks.

    dim, codebook_size: feature size, and number of codes, a power of two (2^dim by default); features are projected to
        `num_codebooks` times log2(codebook_size) numbers, and back, when that is not `dim`.
    entropy_loss_weight, diversity_gamma: weight of the entropy loss; in it, of the entropy of the mean distribution. In
        training that is the distribution over all ranks' rows; in evaluation, over this rank's.
    commitment_loss_weight: weight of the mean squared distance that pulls features to their codes.
    inv_temperature: T above.
    codebook_scale: s above, the size of a code's entries (or the length of codes that are spherical).
    spherical: rows and codes have one length (binary spherical quantization, arXiv:2406.07548).
    soft_clamp_input_value: rows are kept below this by a tanh.
    experimental_softplus_entropy_loss, entropy_loss_offset: the entropy loss becomes softplus(loss + offset), never
        negative.
    frac_per_sample_entropy: the share of rows, drawn at random, that enter the entropies.
    """

    shifts: Tensor

    def __init__(
        self,
        dim: int,
        codebook_size: int | None = None,
        *,
        num_codebooks: int = 1,
        entropy_loss_weight: float = 0.1,
        commitment_loss_weight: float = 0.0,
        diversity_gamma: float = 1.0,
        inv_temperature: float = 100.0,
        codebook_scale: float = 1.0,
        spherical: bool = False,
        soft_clamp_input_value: float | None = None,
        experimental_softplus_entropy_loss: bool = False,
        entropy_loss_offset: float = 5.0,
        frac_per_sample_entropy: float = 1.0,
        projection_has_bias: bool = True,
    ):
        bits = num_bits(2**dim if codebook_size is None else codebook_size)
        super().__init__(dim, bits * num_codebooks, num_codebooks if num_codebooks > 1 else None, projection_has_bias)
        if soft_clamp_input_value is not None and soft_clamp_input_value < codebook_scale:
            raise ValueError(f"soft_clamp_input_value={soft_clamp_input_value} must be at least {codebook_scale=}")
        if not 0 < frac_per_sample_entropy <= 1:
            raise ValueError(f"frac_per_sample_entropy={frac_per_sample_entropy} must be over 0 and at most 1")
        self.codebook_size = 2**bits
        self.bits = bits
        self.num_codebooks = num_codebooks
        self.entropy_loss_weight = entropy_loss_weight
        self.commitment_loss_weight = commitment_loss_weight
        self.diversity_gamma = diversity_gamma
        self.inv_temperature = inv_temperature
        self.code_entry = codebook_scale / bits**0.5 if spherical else codebook_scale
        self.codebook_scale = codebook_scale
        self.spherical = spherical
        self.soft_clamp_input_value = soft_clamp_input_value
        self.experimental_softplus_entropy_loss = experimental_softplus_entropy_loss
        self.entropy_loss_offset = entropy_loss_offset
        self.frac_per_sample_entropy = frac_per_sample_entropy
        self.register_buffer("shifts", torch.arange(bits - 1, -1, -1), persistent=False)  # the first bit counts most

    def quantize_rows(self, rows: Float[Tensor, "r c"], keep: Bool[Tensor, " r"]) -> QuantizedRows:
        signals = self._signals(rows)
        codes = self._codes(signals)
        quantized = torch.where(signals > 0, self.code_entry, -self.code_entry)
        commitment = mean_over(keep, (signals - quantized) ** 2)
        per_sample, codebook = self._entropies(signals, keep)
        entropy_loss = per_sample - self.diversity_gamma * codebook
        if self.experimental_softplus_entropy_loss:
            entropy_loss = F.softplus(entropy_loss + self.entropy_loss_offset)
        parts = {
            "commitment": commitment.detach(),
            "per_sample_entropy": per_sample.detach(),
            "codebook_entropy": codebook.detach(),
            **usage(codes, keep, self.codebook_size),
        }
        return QuantizedRows(
            values=straight_through(signals, quantized).flatten(1),
            codes=codes,
            loss=self.entropy_loss_weight * entropy_loss + self.commitment_loss_weight * commitment,
            parts=parts,
        )

    def encode_rows(self, rows: Float[Tensor, "r c"]) -> Int64[Tensor, "r *q"]:
        return self._codes(self._signals(rows))

    def decode_rows(self, codes: Int64[Tensor, "r *q"]) -> Float[Tensor, "r c"]:
        is_set = (codes[..., None] >> self.shifts) & 1 == 1
        values = torch.where(is_set, self.code_entry, -self.code_entry)
        return torch.where(codes[..., None] >= 0, values, 0.0).flatten(1)

    def _signals(self, rows: Float[Tensor, "r c"]) -> Float[Tensor, "r m k"]:
        """What the signs are taken of: clamped, apart by codebook, on the sphere."""
        if self.soft_clamp_input_value is not None:
            rows = (rows / self.soft_clamp_input_value).tanh() * self.soft_clamp_input_value
        signals = rows.unflatten(-1, (self.num_codebooks, self.bits))
        return F.normalize(signals, dim=-1) * self.codebook_scale if self.spherical else signals

    def _codes(self, signals: Float[Tensor, "r m k"]) -> Int64[Tensor, "r *q"]:
        codes = ((signals > 0).long() << self.shifts).sum(-1)
        return codes[:, 0] if self.num_codes is None else codes

    def _entropies(
        self, signals: Float[Tensor, "r m k"], keep: Bool[Tensor, " r"]
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """The mean entropy of a row's code, and the entropy of the mean distribution, averaged over codebooks."""
        if self.frac_per_sample_entropy < 1:
            keep = keep & (torch.rand_like(signals[:, 0, 0]) < self.frac_per_sample_entropy)
        logits = 4 * self.inv_temperature * self.code_entry * signals
        per_sample = mean_over(keep, bit_entropy(logits).sum(-1))
        total, num_rows = summed_distribution(logits, keep), keep.sum()
        if self.training:
            # All ranks' rows, as in one process on the whole batch. The gradient crosses ranks too: each rank's entropy
            # depends on every rank's rows, so that the mean of the ranks' gradients is that of the one entropy.
            total, num_rows = differentiable_sum_over_ranks(total), sum_over_ranks(num_rows)
        mean_distribution = total / num_rows.clamp(min=1)
        return per_sample, entropy(mean_distribution.flatten(1)).mean()


def num_bits(codebook_size: int) -> int:
    bits = codebook_size.bit_length() - 1
    if codebook_size < 2 or codebook_size != 2**bits:
        raise ValueError(f"codebook_size={codebook_size} must be a power of two (the nearest above: {2 ** (bits + 1)})")
    if bits > MAX_BITS:
        raise ValueError(
            f"codebook_size=2^{bits} is over 2^{MAX_BITS}: give codebook_size, and num_codebooks for more bits"
        )
    return bits


def bit_entropy(logits: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Entropy, in nats, of a bit that is set with probability sigmoid(logits); exact for large ones too."""
    size = logits.abs()
    return F.softplus(-size) + size * torch.sigmoid(-size)


def summed_distribution(logits: Float[Tensor, "r m k"], keep: Bool[Tensor, " r"]) -> Float[Tensor, "m u v"]:
    """The distribution over all 2^k codes, summed over the rows to keep: upper half of the bits by lower half."""
    by_bit = logits.permute(1, 2, 0)  # rows last: the products below run along memory
    bits = torch.stack((torch.sigmoid(-by_bit), torch.sigmoid(by_bit)), dim=2)  # m k 2 r
    half = bits.shape[1] // 2
    weights = torch.stack((keep.float(), torch.ones_like(keep, dtype=torch.float32)))[:, None]
    start = weights.expand(bits.shape[0], 2, 1, -1)  # counts the upper half's rows, once
    halves = joint_distribution([start, *bits[:, : 2 * half].unflatten(1, (2, half)).unbind(2)])
    upper, lower = halves.unbind(1)
    if bits.shape[1] % 2:
        lower = joint_distribution([lower, bits[:, -1]])
    return upper @ lower.transpose(1, 2)


def joint_distribution(parts: list[Float[Tensor, "..."]]) -> Float[Tensor, "..."]:
    """Of independent parts `[..., values, r]`, the first of which counts most.

    By halves, because that writes and keeps hardly more than the outcome; one by one would be several times as much.
    """
    if len(parts) == 1:
        return parts[0]
    middle = len(parts) // 2
    upper, lower = joint_distribution(parts[:middle]), joint_distribution(parts[middle:])
    return rearrange(upper[..., :, None, :] * lower[..., None, :, :], "... u v r -> ... (u v) r")
