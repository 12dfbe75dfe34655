"""How masked tokens become tokens: the samplers, guidance, and the loop over steps.

At every step the network predicts all masked tokens at once; some of the predictions stay, the rest is masked again.

    confidence  the likeliest stay, by log-probability plus Gumbel noise that fades (MaskGIT, Chang et al. 2022)
    reference   the likeliest stay, and tokens are drawn at a temperature that fades (muse-maskgit-pytorch)
    halton      those that come first in a fixed order which spreads evenly over the picture stay (Besnier et al. 2025,
                arXiv 2503.17076): no score, so a critic has no say either

A step touches the device only, and what differs from step to step are numbers on the device: on CUDA one step is captured
in a graph and replayed. Noise is drawn outside of it, from the caller's generator: eager and replayed steps see the same.

Letters: b batch, r rows of the network (2 b under guidance: with the condition, then without), n tokens, v vocabulary,
h and w the sides of the token grid.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel

from helicon.models.muse.transformer import Context, SelfCritic, Transformer
from helicon.nn.attention import ContextKeys
from helicon.nn.capture import REPRODUCIBLE, Weights, captured, compiled, evaluating, lasting
from helicon.nn.numbers import check_finite_numbers
from helicon.nn.sampling import keep_top_k, num_kept, sample_gumbel
from helicon.nn.transformer import run_layer

Sampler = Literal["confidence", "reference", "halton"]
Schedule = Callable[[Tensor], Tensor]  # from how far decoding has come, 0 to 1, to the part that is masked, 1 to 0

SAMPLERS = ("confidence", "reference", "halton")
CONTEXT_LENGTHS = 16  # on CUDA a context and its null key are padded to a multiple of this: few shapes, aligned ones
MAX_SESSIONS = 4  # shapes for which captured steps are kept


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
        check_finite_numbers(
            temperature=self.temperature,
            topk_filter_thres=self.topk_filter_thres,
            choice_temperature=self.choice_temperature,
            cond_scale=self.cond_scale,
            critic_noise_scale=self.critic_noise_scale,
        )
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

    def token_temperature(self, step: int) -> float:
        return self.temperature * (self.left(step) if self.sampler == "reference" else 1.0)

    def numbers(self) -> Float[Tensor, "t 5"]:
        """What differs from step to step (see `Numbers`). Made on the host, in its precision, and rounded once."""
        rows = [
            (
                self.token_temperature(step),
                self.choice_temperature * self.left(step),
                self.scale(step) - 1,
                self.critic_noise_scale,
                self.left(step),
            )
            for step in range(self.timesteps)
        ]
        return torch.tensor(rows, dtype=torch.float32)


class Numbers(NamedTuple):
    """Of one step, each 0-d and on the device."""

    temperature: Tensor  # of the tokens
    choice: Tensor  # of the noise on the confidence
    push: Tensor  # of guidance, beyond the conditional logits: its scale - 1
    critic_noise: Tensor
    left: Tensor  # the part of the steps that follows


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
            context: Context | None = transformer.guided_context(rows, negative_text, **condition)
        else:
            context = transformer.context(**condition) or transformer.no_context(rows)
        if context is not None and context.mask.is_cuda:
            missing = -(1 + context.mask.shape[1]) % CONTEXT_LENGTHS
            context = Context(
                F.pad(context.embeddings, (0, 0, 0, missing)), F.pad(context.mask, (0, missing), value=False)
            )
        return cls(network, transformer.read_context(context), is_guided)

    def __call__(self, ids: Int[Tensor, "b n"], **options: Any) -> Any:
        return self.network(torch.cat((ids, ids)) if self.is_guided else ids, context=self.context, **options)

    def at_own_place(self) -> "Reader":
        """The same with a copy of the context, which `read` changes."""
        if self.context is None:
            return self
        bias = None if self.context.bias is None else self.context.bias.clone()
        keys, values = ([x.clone() for x in part] for part in (self.context.keys, self.context.values))
        return replace(self, context=ContextKeys(keys, values, bias))

    def read(self, other: "Reader") -> None:
        """Takes over the context of another reader, of the same shape."""
        if self.context is not None:
            torch._foreach_copy_(_tensors(self.context), _tensors(other.context))

    @property
    def shape(self) -> tuple[Any, ...]:
        return type(self.network), self.is_guided, *(x.shape for x in _tensors(self.context)[:1])


def _tensors(context: ContextKeys | None) -> list[Tensor]:
    if context is None:
        return []
    return [*context.keys, *context.values, *([] if context.bias is None else [context.bias])]


@dataclass(frozen=True)
class Canvas:
    """The tokens to start from, which of them are to be found, and the grid they stand in, row by row."""

    ids: Int[Tensor, "b n"]
    unknown: Bool[Tensor, "b n"]
    grid: tuple[int, int]


class Filler:
    """Fills the masked tokens of a model's pictures, keeping weights and captured steps for calls of the same shape.

    The model's weights are read anew at each call, so it may be trained in between.

    dtype    the type to run in: bf16 on CUDA by default, the model's own elsewhere
    capture  whether to capture steps in a CUDA graph; on CUDA by default
    compile  whether to compile the layers and the choice of tokens first; where steps are captured, by default
    """

    def __init__(self, *, dtype: torch.dtype | None = None, capture: bool | None = None, compile: bool | None = None):
        self.dtype, self.capture, self.compile = dtype, capture, compile
        self._weights: Weights | None = None
        self._sessions: dict[Any, _Session] = {}  # the last used at the end
        self._pool: Any = None

    def __reduce__(self) -> Any:
        """A copied model has a filler of its own, with nothing kept."""
        return _filler, (self.dtype, self.capture, self.compile)

    @contextmanager
    def running(self, model: nn.Module) -> Iterator[torch.dtype]:
        """Inside, the model is in evaluation mode and has weights of the type that is given."""
        if self._weights is None or not self._weights.are_of(model):
            self._sessions.clear()
            self._weights = Weights(model, self.dtype)
        weights = self._weights
        # A model that runs in its own type is left to the caller's autocast.
        uncast = torch.autocast(weights.device.type, enabled=False) if weights.copies else nullcontext()
        with weights.in_place(), evaluating(model), sdpa_kernel(REPRODUCIBLE), uncast:
            yield weights.dtype

    @torch.no_grad()
    def fill(
        self,
        predictor: Reader,
        critic: Reader | None,
        canvas: Canvas,
        decoding: Decoding,
        schedule: Schedule,
        generator: torch.Generator | None = None,
        judges_visible: bool = False,
    ) -> Int[Tensor, "b n"]:
        """Tokens where they are unknown, and the given ids elsewhere; inside `running`.

        The loop never waits for the device: how many tokens are masked at each step is known beforehand.
        `judges_visible` says that the network has learned to predict tokens it sees; otherwise a token that stayed and may
        be masked again keeps the confidence it was chosen with.
        """
        is_cuda = canvas.ids.is_cuda
        captures = is_cuda if self.capture is None else self.capture
        if captures and not is_cuda:
            raise ValueError(f"capture=True needs a CUDA device, and the model is on {canvas.ids.device}")
        compiles = captures if self.compile is None else self.compile
        rules = Rules.of(decoding, critic is not None, judges_visible)
        key = (rules, compiles, canvas.ids.shape, predictor.shape, None if critic is None else critic.shape)
        with lasting():
            session = self._sessions.pop(key, None) or _Session(predictor, critic, canvas.ids, rules, compiles)
        if captures or compiles:
            self._sessions[key] = session
            for oldest in list(self._sessions)[:-MAX_SESSIONS]:
                del self._sessions[oldest]
        if captures and session.graph is None:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            session.graph = captured(session.step, self._pool)
        session.start(predictor, critic, canvas, decoding, schedule)
        return session.run(decoding, generator)


def _filler(dtype: torch.dtype | None, capture: bool | None, compile: bool | None) -> Filler:
    return Filler(dtype=dtype, capture=capture, compile=compile)


@dataclass(frozen=True)
class Rules:
    """What makes one step another, where `Numbers` only make it the same with other numbers."""

    sampler: Sampler
    topk_filter_thres: float
    can_remask_prev_masked: bool
    is_greedy: bool  # takes the likeliest tokens
    has_critic: bool
    judges_visible: bool

    @classmethod
    def of(cls, decoding: Decoding, has_critic: bool, judges_visible: bool) -> "Rules":
        return cls(
            decoding.sampler,
            decoding.topk_filter_thres,
            decoding.can_remask_prev_masked,
            decoding.temperature == 0,
            has_critic and decoding.sampler != "halton",
            judges_visible,
        )

    @property
    def scores_by_confidence(self) -> bool:
        return not self.has_critic and self.sampler != "halton"

    @property
    def scores_are_noisy(self) -> bool:
        return self.has_critic or self.sampler == "confidence"

    def draw(
        self, logits: Float[Tensor, "b n v"], temperature: Float[Tensor, ""], uniform: Float[Tensor, "b n v"] | None
    ) -> Int[Tensor, "b n"]:
        """Tokens, from uniform numbers in [0, 1); at a temperature of 0 the likeliest."""
        if uniform is None:
            return logits.argmax(dim=-1)
        kept = keep_top_k(logits, num_kept(self.topk_filter_thres, logits.shape[-1]))
        drawn = sample_gumbel(kept / temperature, uniform)
        return torch.where(temperature > 0, drawn, logits.argmax(dim=-1)) if self.sampler == "reference" else drawn

    def choose(
        self,
        outputs: Float[Tensor, "r n v"],
        ids: Int[Tensor, "b n"],
        is_masked: Bool[Tensor, "b n"],
        now: Float[Tensor, "5"],
        uniform: Float[Tensor, "b n v"] | None,
    ) -> tuple[Int[Tensor, "b n"], Float[Tensor, "b n"] | None]:
        """The tokens, drawn where they were masked; and how likely each is, where it is scored by that."""
        numbers = Numbers(*now.unbind())
        logits = _guided(outputs, len(ids), numbers.push)
        ids = torch.where(is_masked, self.draw(logits, numbers.temperature, uniform), ids)
        if not self.scores_by_confidence:
            return ids, None
        return ids, logits.log_softmax(dim=-1).gather(-1, ids[..., None])[..., 0]


class _Session:
    """The static buffers of one shape, and the step that changes them."""

    graph: torch.cuda.CUDAGraph | None = None

    def __init__(self, predictor: Reader, critic: Reader | None, ids: Int[Tensor, "b n"], rules: Rules, compiles: bool):
        transformer = predictor.network
        assert isinstance(transformer, Transformer) and transformer.mask_id is not None
        self.mask_id, self.rules = transformer.mask_id, rules
        self.predictor, self.critic = predictor.at_own_place(), None if critic is None else critic.at_own_place()
        self.run_layer = compiled(run_layer) if compiles else run_layer
        self.choose = compiled(Rules.choose) if compiles else Rules.choose
        batch, n = ids.shape

        def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=ids.device)

        self.ids, self.unknown = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
        self.scores, self.confidence, self.score_noise = (buffer(batch, n) for _ in range(3))
        self.uniform = None if rules.is_greedy else buffer(batch, n, transformer.dim_out)
        self.count, self.now = buffer(batch, 1), buffer(len(Numbers._fields))
        rows = 2 * batch if predictor.is_guided else batch
        weight = transformer.token_emb.own.weight
        self.embed = buffer(rows, n, transformer.dim, dtype=weight.dtype) if transformer.self_cond else None

    def start(
        self, predictor: Reader, critic: Reader | None, canvas: Canvas, decoding: Decoding, schedule: Schedule
    ) -> None:
        self.predictor.read(predictor)
        if self.critic is not None and critic is not None:
            self.critic.read(critic)
        self.ids.copy_(canvas.ids)
        self.unknown.copy_(canvas.unknown)
        self.scores.copy_(torch.tensor(halton_order(*canvas.grid), dtype=torch.float32))
        self.confidence.zero_()
        if self.embed is not None:
            self.embed.zero_()
        self.numbers = decoding.numbers().to(self.now.device)
        fractions = torch.tensor(decoding.masked_fractions(schedule), dtype=torch.float32, device=self.now.device)
        self.counts = (fractions[:, None, None] * self.unknown.sum(dim=1, keepdim=True)).floor().clamp(min=1)
        self.counts[0] = self.ids.shape[1]  # all that are unknown, whatever the schedule says

    def run(self, decoding: Decoding, generator: torch.Generator | None) -> Int[Tensor, "b n"]:
        for step in range(decoding.timesteps):
            self.now.copy_(self.numbers[step])
            self.count.copy_(self.counts[step])
            if self.uniform is not None and decoding.token_temperature(step) > 0:
                self.uniform.uniform_(generator=generator)
            if self.rules.scores_are_noisy:
                self.score_noise.uniform_(generator=generator)
            if self.graph is None:
                self.step()
            else:
                self.graph.replay()
        return self.ids.clone()

    def step(self) -> None:
        """Masks the tokens with the highest scores, predicts them, and scores what was predicted."""
        numbers = Numbers(*self.now.unbind())
        is_masked = _highest(self.scores, self.unknown, self.count)
        outputs, embed = self.predictor(
            torch.where(is_masked, self.mask_id, self.ids),
            return_embed=True,
            self_cond_embed=self.embed,
            run_layer=self.run_layer,
        )
        ids, log_probability = self.choose(self.rules, outputs, self.ids, is_masked, self.now, self.uniform)
        self.ids.copy_(ids)
        if self.embed is not None:
            self.embed.copy_(embed)
        if self.critic is not None and self.rules.has_critic:
            self.scores.copy_(self._critic_scores(self.critic, numbers))
        elif log_probability is not None:
            self.scores.copy_(self._confidence_scores(log_probability, is_masked, numbers))

    def _confidence_scores(
        self, log_probability: Float[Tensor, "b n"], is_masked: Bool[Tensor, "b n"], numbers: Numbers
    ) -> Float[Tensor, "b n"]:
        """How little each token is to be trusted."""
        if not self.rules.judges_visible:
            log_probability = torch.where(is_masked, log_probability, self.confidence)
        self.confidence.copy_(log_probability)
        noisy = log_probability
        if self.rules.scores_are_noisy:
            inside = self.score_noise.clamp(min=torch.finfo(torch.float32).tiny, max=1 - 1e-7)
            noisy = log_probability - numbers.choice * (-inside.log()).log()
        return -noisy if self.rules.can_remask_prev_masked else (-noisy).masked_fill(~is_masked, -torch.inf)

    def _critic_scores(self, critic: Reader, numbers: Numbers) -> Float[Tensor, "b n"]:
        """How likely each token is not the true one, by the critic's logit."""
        outputs = critic(self.ids, run_layer=self.run_layer)
        scores = _guided(outputs, len(self.ids), numbers.push)[..., 0]
        return scores + (self.score_noise - 0.5) * numbers.critic_noise * numbers.left


def _guided(outputs: Float[Tensor, "r n v"], batch: int, push: Float[Tensor, ""]) -> Float[Tensor, "b n v"]:
    """Classifier-free guidance (`helicon.nn.sampling.guide`), where there are outputs with and without the condition."""
    outputs = outputs.float()
    if len(outputs) == batch:
        return outputs
    cond, null = outputs.chunk(2)
    return cond + push * (cond - null)


def _highest(
    scores: Float[Tensor, "b n"], unknown: Bool[Tensor, "b n"], count: Float[Tensor, "b 1"]
) -> Bool[Tensor, "b n"]:
    """The `count` highest scores of each row, among the unknown tokens."""
    ranks = scores.masked_fill(~unknown, -torch.inf).argsort(dim=1, descending=True).argsort(dim=1)
    return (ranks < count) & unknown
