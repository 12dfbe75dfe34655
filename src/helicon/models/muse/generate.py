"""How masked tokens become tokens: the samplers, guidance, and the loop over steps.

At every step the network predicts all masked tokens at once; some of the predictions stay, the rest is masked again.

    confidence  the likeliest stay, by log-probability plus Gumbel noise that fades (MaskGIT, Chang et al. 2022)
    reference   the likeliest stay, and tokens are drawn at a temperature that fades (muse-maskgit-pytorch)
    halton      those that come first in a fixed order which spreads evenly over the picture stay (Besnier et al. 2025,
                arXiv 2503.17076): no score, so a critic has no say either

Letters: b batch, n tokens, v vocabulary, h and w the sides of the token grid.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from helicon.models.muse.transformer import SelfCritic, Transformer
from helicon.nn.attention import ContextKeys
from helicon.nn.sampling import guide, keep_top_k, num_kept, sample_gumbel

Sampler = Literal["confidence", "reference", "halton"]
Schedule = Callable[[Tensor], Tensor]  # from how far decoding has come, 0 to 1, to the part that is masked, 1 to 0

SAMPLERS = ("confidence", "reference", "halton")


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; after it every module has the mode it had."""
    before = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, was_training in before:
            part.training = was_training


@cache
def halton_order(height: int, width: int) -> tuple[int, ...]:
    """When each cell of a grid (row by row) is first met by the Halton sequence of bases 2 (across) and 3 (down)."""
    turns: dict[int, int] = {}
    index = 1
    while len(turns) < height * width:
        cell = int(_radical_inverse(index, 3) * height) * width + int(_radical_inverse(index, 2) * width)
        turns.setdefault(cell, len(turns))
        index += 1
    return tuple(turns[cell] for cell in range(height * width))


def _radical_inverse(index: int, base: int) -> float:
    """The digits of the index, mirrored at the point."""
    value, place = 0.0, 1.0
    while index:
        place /= base
        index, digit = divmod(index, base)
        value += digit * place
    return value


@dataclass(frozen=True)
class Decoding:
    """How to sample."""

    sampler: Sampler = "confidence"
    timesteps: int = 18
    temperature: float = 1.0  # of the tokens; 0 takes the likeliest
    topk_filter_thres: float = 0.9  # drawn from the likeliest 1 - topk_filter_thres of the codebook
    choice_temperature: float = 4.5  # of the noise on the confidence, at the first step
    can_remask_prev_masked: bool = False  # tokens that stayed may be masked again
    cond_scale: float = 3.0
    cond_scale_schedule: Literal["constant", "linear"] = (
        "constant"  # linear: from 1 at the first step (Muse, section 2.7)
    )
    critic_noise_scale: float = 1.0  # of the noise on the critic's scores, at the first step

    def __post_init__(self) -> None:
        if self.timesteps < 1:
            raise ValueError(f"timesteps={self.timesteps} must be at least 1")
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature} must not be negative (0 takes the likeliest token)")
        if not 0 <= self.topk_filter_thres <= 1:
            raise ValueError(f"topk_filter_thres={self.topk_filter_thres} must be between 0 and 1")
        if self.sampler not in SAMPLERS:
            raise ValueError(f"sampler={self.sampler!r} is none of {', '.join(SAMPLERS)}")
        if self.cond_scale_schedule not in ("constant", "linear"):
            raise ValueError(f'cond_scale_schedule={self.cond_scale_schedule!r} is neither "constant" nor "linear"')

    def masked_fractions(self, schedule: Schedule) -> list[float]:
        """The part of the unknown tokens that is masked at each step. (The reference's last step always has one token.)"""
        last = self.timesteps - 1 if self.sampler == "reference" else self.timesteps
        progress = torch.arange(self.timesteps, dtype=torch.float64) / max(1, last)
        return schedule(progress).tolist()

    def left(self, step: int) -> float:
        """The part of the steps that follows this one: what fades fades with it."""
        return (self.timesteps - 1 - step) / self.timesteps

    def scale(self, step: int) -> float:
        """Of the guidance at a step."""
        if self.cond_scale_schedule == "constant" or self.timesteps == 1:
            return self.cond_scale
        return 1 + (self.cond_scale - 1) * step / (self.timesteps - 1)

    def draw(self, logits: Float[Tensor, "b n v"], step: int, generator: torch.Generator | None) -> Int[Tensor, "b n"]:
        temperature = self.temperature * (self.left(step) if self.sampler == "reference" else 1.0)
        if temperature == 0:
            return logits.argmax(dim=-1)
        logits = keep_top_k(logits, num_kept(self.topk_filter_thres, logits.shape[-1]))
        return sample_gumbel(logits / temperature, _uniform(logits, generator))


@dataclass(frozen=True)
class Reader:
    """A network with the context it attends to, whose keys were computed once for all steps.

    With guidance the context has twice as many rows as there are pictures, and so has each pass.
    """

    network: Transformer | SelfCritic
    context: ContextKeys | None
    is_guided: bool

    @classmethod
    def of(
        cls, network: Transformer | SelfCritic, rows: int, is_guided: bool, negative_text: Any, **condition: Any
    ) -> "Reader":
        transformer = network.net if isinstance(network, SelfCritic) else network
        if is_guided:
            both = transformer.guided_context(rows, negative_text, **condition)
            return cls(network, transformer.read_context(both), is_guided)
        context = transformer.context(**condition) or transformer.no_context(rows)
        return cls(network, transformer.read_context(context), is_guided)

    def rows(self, x: Int[Tensor, "b n"]) -> Int[Tensor, "rows n"]:
        return torch.cat((x, x)) if self.is_guided else x

    def guided(self, outputs: Float[Tensor, "rows n v"], scale: float) -> Float[Tensor, "b n v"]:
        if not self.is_guided:
            return outputs.float()
        cond, null = outputs.float().chunk(2)
        return guide(cond, null, scale)


@torch.no_grad()
def fill_masked(
    predictor: Reader,
    critic: Reader | None,
    ids: Int[Tensor, "b n"],
    unknown: Bool[Tensor, "b n"],
    grid: tuple[int, int],
    decoding: Decoding,
    schedule: Schedule,
    generator: torch.Generator | None = None,
    judges_visible: bool = False,
) -> Int[Tensor, "b n"]:
    """Tokens where `unknown`, and the given ids elsewhere.

    Nothing here waits for the device: how many tokens are masked at each step is known beforehand.
    `judges_visible` says that the network has learned to predict tokens it sees; otherwise a token that stayed and may
    be masked again keeps the confidence it was chosen with.
    """
    transformer = predictor.network
    assert isinstance(transformer, Transformer) and transformer.mask_id is not None
    num_unknown, is_masked, embed = unknown.sum(dim=1, keepdim=True), unknown, None
    scores = torch.tensor(halton_order(*grid), device=ids.device, dtype=torch.float32).expand(ids.shape)
    confidence = torch.zeros_like(scores)
    for step, fraction in enumerate(decoding.masked_fractions(schedule)):
        if step:
            is_masked = _highest(scores, unknown, (fraction * num_unknown).floor().clamp(min=1))
        x = torch.where(is_masked, transformer.mask_id, ids)
        outputs, embed = transformer(
            predictor.rows(x),
            return_embed=True,
            context=predictor.context,
            self_cond_embed=embed if transformer.self_cond else None,
        )
        logits = predictor.guided(outputs, decoding.scale(step))
        ids = torch.where(is_masked, decoding.draw(logits, step, generator), ids)
        if decoding.sampler == "halton":
            continue
        if critic is not None:
            scores = _critic_scores(critic, ids, decoding, step, generator)
            continue
        log_probability = logits.log_softmax(dim=-1).gather(-1, ids[..., None])[..., 0]
        confidence = log_probability if judges_visible else torch.where(is_masked, log_probability, confidence)
        scores = -_noisy(confidence, decoding, step, generator)
        if not decoding.can_remask_prev_masked:
            scores = scores.masked_fill(~is_masked, -torch.inf)
    return ids


def _highest(
    scores: Float[Tensor, "b n"], unknown: Bool[Tensor, "b n"], count: Float[Tensor, "b 1"]
) -> Bool[Tensor, "b n"]:
    """The `count` highest scores of each row, among the unknown tokens."""
    ranks = scores.masked_fill(~unknown, -torch.inf).argsort(dim=1, descending=True).argsort(dim=1)
    return (ranks < count) & unknown


def _noisy(
    confidence: Float[Tensor, "b n"], decoding: Decoding, step: int, generator: torch.Generator | None
) -> Float[Tensor, "b n"]:
    if decoding.sampler == "reference":
        return confidence
    uniform = _uniform(confidence, generator).clamp(min=torch.finfo(torch.float32).tiny, max=1 - 1e-7)
    return confidence - decoding.choice_temperature * decoding.left(step) * (-uniform.log()).log()


def _critic_scores(
    critic: Reader, ids: Int[Tensor, "b n"], decoding: Decoding, step: int, generator: torch.Generator | None
) -> Float[Tensor, "b n"]:
    """How likely each token is not the true one, by the critic's logit."""
    logits = critic.network(critic.rows(ids), context=critic.context)
    scores = critic.guided(logits, decoding.scale(step))[..., 0]
    return scores + (_uniform(scores, generator) - 0.5) * decoding.critic_noise_scale * decoding.left(step)


def _uniform(like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.rand(like.shape, generator=generator, device=like.device)
