"""From logits to a token: guidance, filters and Gumbel sampling.

Pure functions without host syncs, so a CUDA graph can hold them. All randomness comes in as uniform numbers: the
caller's generator decides, and one seed gives one result.

Letters: b batch, v vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from helicon.nn.numbers import check_finite_numbers


def keep_top_k(logits: Float[Tensor, "*b v"], k: int) -> Float[Tensor, "*b v"]:
    """All but the k largest become minus infinity; what ties with the k-th stays."""
    smallest = logits.topk(min(k, logits.shape[-1]), dim=-1).values[..., -1:]
    return logits.masked_fill(logits < smallest, -torch.inf)


def keep_top_p(logits: Float[Tensor, "*b v"], p: float) -> Float[Tensor, "*b v"]:
    """Keeps the fewest tokens, largest first, whose probabilities reach p together; the largest always stays."""
    descending = logits.sort(dim=-1, descending=True).values
    probabilities = descending.softmax(dim=-1)
    kept = (probabilities.cumsum(dim=-1) - probabilities < p).sum(dim=-1, keepdim=True)
    smallest = descending.gather(-1, (kept - 1).clamp(min=0))
    return logits.masked_fill(logits < smallest, -torch.inf)


def num_kept(filter_thres: float, vocabulary: int) -> int:
    """How many tokens `filter_thres` keeps: ceil((1 - filter_thres) * vocabulary), at least one."""
    # Rounded first: (1 - 0.7) * 10 is 3.0000000000000004.
    return max(1, math.ceil(round((1 - filter_thres) * vocabulary, 6)))


def sample_gumbel(logits: Float[Tensor, "*b v"], uniform: Float[Tensor, "*b v"]) -> Int[Tensor, "*b"]:
    """A token from softmax(logits), given one uniform number in [0, 1) for each (the Gumbel-max trick)."""
    # Numbers at the very ends have no finite noise.
    inside = uniform.clamp(min=torch.finfo(uniform.dtype).tiny, max=1 - torch.finfo(uniform.dtype).eps / 2)
    return (logits - (-inside.log()).log()).argmax(dim=-1)


def guide(
    cond: Float[Tensor, "*b v"],
    null: Float[Tensor, "*b v"],
    scale: float,
    *,
    remove_parallel_component: bool = False,
    rescale_phi: float = 0.0,
) -> Float[Tensor, "*b v"]:
    """Classifier-free guidance, `null + scale * (cond - null)` (Ho and Salimans, 2022).

    remove_parallel_component  drops from the guiding direction what is parallel to `cond` (Sadat et al., 2024)
    rescale_phi                how much of the standard deviation of `cond` is restored (Lin et al., 2023, section 3.4)
    """
    direction = cond - null
    if remove_parallel_component:
        unit = torch.nn.functional.normalize(cond, dim=-1)
        direction = direction - (direction * unit).sum(dim=-1, keepdim=True) * unit
    guided = cond + (scale - 1) * direction
    if rescale_phi:
        restored = guided * (cond.std(dim=-1, keepdim=True) / guided.std(dim=-1, keepdim=True))
        guided = rescale_phi * restored + (1 - rescale_phi) * guided
    return guided


FILTER_THRES = 0.9  # where nothing is said


@dataclass(frozen=True)
class Sampling:
    """How logits become a token: guidance, then what is allowed, the temperature, the filters, and the draw."""

    temperature: float = 1.0  # 0 takes the largest
    top_k: int | None = None
    top_p: float | None = None
    filter_thres: float | None = None  # keeps the top 1 - filter_thres of the vocabulary
    cond_scale: float = 1.0  # other than 1: the logits are two batches, with the condition and without
    remove_parallel_component: bool = False
    rescale_phi: float = 0.0

    @classmethod
    def asked(
        cls,
        temperature: float,
        top_k: int | None,
        top_p: float | None,
        filter_thres: float | None,
        cond_scale: float,
    ) -> "Sampling":
        """With the usual `filter_thres`, where neither that nor another filter is asked for."""
        is_asked = any(given is not None for given in (top_k, top_p, filter_thres))
        return cls(temperature, top_k, top_p, filter_thres if is_asked else FILTER_THRES, cond_scale)

    def __post_init__(self) -> None:
        check_finite_numbers(temperature=self.temperature, cond_scale=self.cond_scale, rescale_phi=self.rescale_phi)
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature} must not be negative (0 takes the likeliest token)")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1 (None keeps all)")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")
        if self.filter_thres is not None and not 0 <= self.filter_thres <= 1:
            raise ValueError(f"filter_thres={self.filter_thres} must be between 0 and 1")

    @property
    def is_guided(self) -> bool:
        return self.cond_scale != 1

    def filter(self, logits: Float[Tensor, "*b v"]) -> Float[Tensor, "*b v"]:
        sizes = [] if self.top_k is None else [self.top_k]
        if self.filter_thres is not None:
            sizes.append(num_kept(self.filter_thres, logits.shape[-1]))
        if sizes:
            logits = keep_top_k(logits, min(sizes))
        return logits if self.top_p is None else keep_top_p(logits, self.top_p)

    def token(
        self,
        logits: Float[Tensor, "rows *k v"],
        uniform: Float[Tensor, "b *k v"],
        allowed: Bool[Tensor, "v"] | Bool[Tensor, "*k v"] | Bool[Tensor, "b *k v"] | None = None,
    ) -> Int[Tensor, "b *k"]:
        """The next token of each row. Guided logits have 2 b rows: b with the condition, then b without."""
        logits = logits.float()
        if self.is_guided:
            cond, null = logits.chunk(2)
            logits = guide(
                cond,
                null,
                self.cond_scale,
                remove_parallel_component=self.remove_parallel_component,
                rescale_phi=self.rescale_phi,
            )
        if allowed is not None:
            logits = logits.masked_fill(~allowed, -torch.inf)
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        return sample_gumbel(self.filter(logits / self.temperature), uniform)
