"""Vector quantization: each row becomes the nearest vector of a learned codebook.

VQ-VAE, van den Oord et al. 2017, arXiv:1711.00937. The codebook follows the rows by exponential moving averages of
what falls on each code (its appendix A.1, with the Laplace smoothing of VQ-VAE-2), or by gradient. It may start from
k-means of the first batch (SoundStream, arXiv:2107.03312), and codes that have fallen out of use can be moved onto
rows of the batch. On several ranks the statistics are of all ranks' rows, so every rank holds the same codebook,
which is the one a single process would have on the concatenated batch.

Letters: b batch, n positions, d feature size, r rows, c size of a code vector, k codes.
"""

import math

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from helicon.quantize.rows import (
    QuantizedRows,
    RowQuantizer,
    mean_over,
    num_ranks,
    rotate_onto,
    straight_through,
    sum_over_ranks,
    usage,
    where_rows,
)

GOLDEN_PRIME = 2654435761  # near 2^32 / golden ratio: its multiples, taken modulo anything smaller, are well spread
GOLDEN_WEYL = 0x9E3779B97F4A7C15 - 2**64  # 2^64 / golden ratio, as a signed integer
RARELY = 1e-3  # how often a code that gets its even share of the rows may be taken for dead


def _may_start_from_data(quantizer: nn.Module, _: object) -> None:
    """(No lambda: a network that another process is given is pickled, with its hooks.)"""
    quantizer.starts_from_data = True  # type: ignore[assignment]


class VectorQuantizer(RowQuantizer):
    """Features `[b, ..., d]` to codes `[b, ...]`. The loss is the commitment (and, by gradient, the codebook) loss.

    dim, codebook_size: feature size and number of codes.
    codebook_dim: size of a code vector; features are projected to it and back when it is not `dim`.
    decay, eps: of the moving averages, and of their smoothing.
    commitment_weight: weight of the mean squared distance that pulls features to their codes.
    ema_update: False lets the optimizer move the codebook, by a codebook loss of weight 1.
    kmeans_init, kmeans_iters: start from k-means of the first batch in training.
    threshold_ema_dead_code: a code whose average count per step falls below this moves onto a row of the batch; below less,
        where a batch has so few rows that codes of an even share would fall below it (`_dead_below`).
    use_cosine_sim: rows and codes are unit vectors.
    rotation_trick: gradients pass by rotation instead of straight through.
    stochastic_sample_codes, sample_codebook_temp: in training, sample codes by softmax(-distance / temperature).
    """

    codebook: Tensor
    cluster_size: Tensor
    cluster_sum: Tensor
    initialised: Tensor
    draws: Tensor

    def __init__(
        self,
        dim: int,
        codebook_size: int,
        *,
        codebook_dim: int | None = None,
        decay: float = 0.8,
        commitment_weight: float = 1.0,
        ema_update: bool = True,
        kmeans_init: bool = False,
        kmeans_iters: int = 10,
        threshold_ema_dead_code: float = 0,
        use_cosine_sim: bool = False,
        rotation_trick: bool = False,
        stochastic_sample_codes: bool = False,
        sample_codebook_temp: float = 1.0,
        eps: float = 1e-5,
    ):
        super().__init__(dim, codebook_dim or dim)
        if use_cosine_sim and not ema_update:
            raise ValueError("use_cosine_sim=True keeps codes at unit length, which needs ema_update=True")
        if not 0 <= decay < 1:
            raise ValueError(f"decay={decay} must be at least 0 and less than 1")
        if stochastic_sample_codes and sample_codebook_temp <= 0:
            raise ValueError(f"sample_codebook_temp={sample_codebook_temp} must be positive")
        self.codebook_size = codebook_size
        self.decay = decay
        self.commitment_weight = commitment_weight
        self.ema_update = ema_update
        self.kmeans_iters = kmeans_iters
        self.threshold_ema_dead_code = threshold_ema_dead_code
        self.use_cosine_sim = use_cosine_sim
        self.rotation_trick = rotation_trick
        self.stochastic_sample_codes = stochastic_sample_codes
        self.sample_codebook_temp = sample_codebook_temp
        self.eps = eps
        self._create_state(kmeans_init)

    def _create_state(self, kmeans_init: bool) -> None:
        bound = math.sqrt(6 / (self.codebook_size * self.code_dim))
        codebook = torch.empty(self.codebook_size, self.code_dim).uniform_(-bound, bound)
        codebook = F.normalize(codebook, dim=-1) if self.use_cosine_sim else codebook
        if self.ema_update:
            self.register_buffer("codebook", codebook)
            self.register_buffer("cluster_sum", codebook.clone())
        else:
            self.codebook = nn.Parameter(codebook)
        self.register_buffer("cluster_size", torch.ones(self.codebook_size))
        self.register_buffer("initialised", torch.tensor(not kmeans_init))
        self.register_buffer("draws", torch.tensor(0))
        # Whether k-means may still be due. The buffer decides, on the device; this only spares the host from asking it
        # at every step. After loading, k-means may run once and be thrown away. (The training loop looks for it, too: a step
        # that is the only one of its kind is not worth compiling.)
        self.starts_from_data = kmeans_init
        if kmeans_init:
            self.register_load_state_dict_post_hook(_may_start_from_data)

    def quantize_rows(self, rows: Float[Tensor, "r c"], keep: Bool[Tensor, " r"]) -> QuantizedRows:
        rows = self._comparable(rows)
        if self.training and self.starts_from_data:
            self._start(rows.detach(), keep)
            self.starts_from_data = False
        codes = self._choose(rows, self.codebook, is_sampled=self.training and self.stochastic_sample_codes)
        chosen = F.embedding(codes, self.codebook)
        commitment = mean_over(keep, (rows - chosen.detach()) ** 2)
        loss = self.commitment_weight * commitment
        parts = {"commitment": commitment.detach(), **usage(codes, keep, self.codebook_size)}
        if not self.ema_update:
            loss = loss + mean_over(keep, (rows.detach() - chosen) ** 2)
        values = rotate_onto(rows, chosen) if self.rotation_trick else straight_through(rows, chosen)
        return QuantizedRows(values, codes, loss, parts)

    def encode_rows(self, rows: Float[Tensor, "r c"]) -> Int64[Tensor, " r"]:
        return self._choose(self._comparable(rows), self.codebook)

    def decode_rows(self, codes: Int64[Tensor, " r"]) -> Float[Tensor, "r c"]:
        return where_rows(codes >= 0, F.embedding(codes.clamp(min=0), self.codebook), 0.0)

    @torch.no_grad()
    def learn_rows(self, rows: Float[Tensor, "r c"], codes: Int64[Tensor, " r"], keep: Bool[Tensor, " r"]) -> None:
        if not self.ema_update and self.threshold_ema_dead_code == 0:
            return
        rows = self._comparable(rows)
        counts, sums = self._cluster(rows, codes, keep)
        has_rows = counts.sum() > 0
        rate = torch.where(has_rows, 1 - self.decay, 0.0)  # a batch with nothing to learn from is no evidence of disuse
        self.cluster_size.lerp_(counts, rate)
        if self.ema_update:
            self.cluster_sum.lerp_(sums, rate)
            self.codebook.copy_(torch.where(has_rows, self._codes_from_averages(), self.codebook))
        if self.threshold_ema_dead_code > 0:
            self._revive(rows, keep)

    def _comparable(self, rows: Tensor) -> Tensor:
        return F.normalize(rows, dim=-1) if self.use_cosine_sim else rows

    @torch.no_grad()
    def _choose(
        self, rows: Float[Tensor, "r c"], codebook: Float[Tensor, "k c"], is_sampled: bool = False
    ) -> Int64[Tensor, " r"]:
        similarity = rows @ codebook.T
        if not self.use_cosine_sim:
            similarity = 2 * similarity - codebook.square().sum(-1)  # the squared distance, less what all codes share
        if is_sampled:
            if not self.use_cosine_sim:
                similarity = -(rows.square().sum(-1, keepdim=True) - similarity).clamp(min=0).sqrt()
            gumbel = -torch.empty_like(similarity).exponential_().log()
            similarity = similarity / self.sample_codebook_temp + gumbel
        return similarity.argmax(-1)

    def _cluster(
        self, rows: Float[Tensor, "r c"], codes: Int64[Tensor, " r"], keep: Bool[Tensor, " r"]
    ) -> tuple[Float[Tensor, " k"], Float[Tensor, "k c"]]:
        """How many rows of all ranks have each code, and their sums."""
        weighted = torch.cat((keep[:, None].float(), where_rows(keep, rows, 0.0)), dim=1)
        total = weighted.new_zeros(self.codebook_size, 1 + self.code_dim).index_add_(0, codes, weighted)
        total = sum_over_ranks(total)
        return total[:, 0], total[:, 1:]

    def _codes_from_averages(self) -> Float[Tensor, "k c"]:
        size, total = self.cluster_size, self.cluster_size.sum()
        smoothed = (size + self.eps) / (total + self.codebook_size * self.eps) * total
        return self._comparable(self.cluster_sum / smoothed[:, None])

    @torch.no_grad()
    def _start(self, rows: Float[Tensor, "r c"], keep: Bool[Tensor, " r"]) -> None:
        """k-means over all ranks' rows, unless the codebook is initialised already (or there are no rows)."""
        # (Counted, because the compiler multiplies what it knows to be a range in 32 bits, where the prime does not fit.)
        place = torch.ones_like(self.cluster_size, dtype=torch.long).cumsum(0) - 1
        means, num_rows = self._draw_rows(rows, keep, place)
        counts = self.cluster_size
        for _ in range(self.kmeans_iters):
            counts, sums = self._cluster(rows, self._choose(rows, means), keep)
            nearest = self._comparable(sums / counts.clamp(min=1)[:, None])
            means = torch.where(counts[:, None] > 0, nearest, means)
        is_due = ~self.initialised & (num_rows > 0)
        counts = counts.clamp(min=1)  # an empty cluster (fewer distinct rows than codes) stays where it was drawn
        self.cluster_size.copy_(torch.where(is_due, counts, self.cluster_size))
        self.codebook.copy_(torch.where(is_due, means, self.codebook))
        if self.ema_update:
            self.cluster_sum.copy_(torch.where(is_due, means * counts[:, None], self.cluster_sum))
        self.draws.add_(is_due.long())
        self.initialised.logical_or_(is_due)

    def _dead_below(self) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """The average count below which a code is dead, and the one it starts again with.

        That is the threshold, unless steps have few rows for each code (m on average). A code of that share, with rows at random,
        has an average count below (1 - decay) (1 + 0.7 m / (1 - decay)) p^((1 - decay) / m) with a probability of about p (the
        lower tail of shot noise, for small m). A higher threshold would move codes that are in use, in turn and for ever.
        What the smoothing (`eps`) has drawn to the origin is dead all the same.
        """
        rate, mean = 1 - self.decay, self.cluster_size.mean()
        chance = RARELY ** (rate / mean)
        dead = ((rate + 0.7 * mean) * chance).clamp(min=self.eps, max=self.threshold_ema_dead_code)
        return dead, torch.maximum(dead, mean.clamp(max=self.threshold_ema_dead_code))

    def _revive(self, rows: Float[Tensor, "r c"], keep: Bool[Tensor, " r"]) -> None:
        dead_below, size = self._dead_below()
        is_dead = self.cluster_size < dead_below
        place = is_dead.long().cumsum(0) - 1
        drawn, num_rows = self._draw_rows(rows, keep, place.clamp(min=0))
        is_moved = is_dead & (
            place < num_rows
        )  # with fewer rows than dead codes the rest wait, or there would be twins
        self.codebook.copy_(where_rows(~is_moved, self.codebook, 0.0) + where_rows(is_moved, drawn, 0.0))
        self.cluster_size.copy_(torch.where(is_moved, size, self.cluster_size))
        if self.ema_update:
            self.cluster_sum.copy_(torch.where(is_moved[:, None], drawn * size, self.cluster_sum))
        self.draws.add_((num_rows > 0).long())

    def _draw_rows(
        self, rows: Float[Tensor, "r c"], keep: Bool[Tensor, " r"], place: Int64[Tensor, " k"]
    ) -> tuple[Float[Tensor, "k c"], Int64[Tensor, ""]]:
        """The rows at the given places of a shuffle of all ranks' kept rows, and the number of those.

        The shuffle is place -> (prime * place + start) mod rows, a permutation because the prime exceeds the number
        of rows; `start` comes from the buffer `draws`. No random generator is used: ranks have different ones, and
        agreeing on a draw would need a broadcast, while a counter in a buffer is equal on all ranks and is saved with
        the network. Each rank fills in the rows it owns, and a sum gives them to all; nothing leaves the device.
        """
        counts = rows.new_zeros(num_ranks(), dtype=torch.long)
        rank = dist.get_rank() if num_ranks() > 1 else 0
        counts[rank] = keep.sum()
        counts = sum_over_ranks(counts)
        num_rows = counts.sum()
        start = (self.draws * GOLDEN_WEYL >> 32) & 0x7FFFFFFF
        position = (place * GOLDEN_PRIME + start) % num_rows.clamp(min=1)
        own = position - counts[:rank].sum()
        is_own = (own >= 0) & (own < counts[rank])
        row = torch.searchsorted(keep.long().cumsum(0), own + 1).clamp(max=len(rows) - 1)
        return sum_over_ranks(where_rows(is_own, rows[row], 0.0)), num_rows
