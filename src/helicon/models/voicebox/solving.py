"""How sounds are drawn from a flow: the canvas of given and hidden frames, and the velocity that fills it.

An evaluation of the velocity touches the device only, and what differs from one to the next are the features and the time, both on the
device: on CUDA it is captured in a graph once, and replayed for all steps of all sounds of the same shape.

Letters: b batch, n frames, p frames of a prompt, d features, m tokens.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel

from helicon.models.voicebox.model import Prepared, VoiceBox
from helicon.nn.capture import REPRODUCIBLE, Weights, captured, compiled, evaluating, lasting
from helicon.nn.numbers import check_finite_numbers
from helicon.nn.ode import METHODS, Solution, integrate, pruned_grid, swayed, uniform_grid

Grid = Literal["uniform", "sway", "pruned"]

GRIDS = {"uniform": uniform_grid, "sway": lambda steps: swayed(uniform_grid(steps)), "pruned": pruned_grid}
MAX_SESSIONS = 4  # shapes for which captured evaluations are kept


@dataclass(frozen=True)
class Solving:
    """How to follow the velocity from noise at t = 0 to features at t = 1.

    steps              of the solver; "midpoint" evaluates the velocity twice in each, "rk4" four times
    method             "euler", "midpoint", "rk4", or "adaptive", which takes the steps it needs for errors below atol + rtol |x|
    grid               where the steps are: "uniform", "sway" (shorter at first), or "pruned" (of 5, 6, 7, 10, 12 or 16 steps)
    cond_scale         guidance by text and context; 1 for none
    guidance_interval  the times at which there is guidance
    """

    steps: int = 16
    method: str = "midpoint"
    grid: Grid = "sway"
    cond_scale: float = 1.0
    guidance_interval: tuple[float, float] = (0.0, 1.0)
    atol: float = 1e-5
    rtol: float = 1e-5

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method={self.method!r} is none of {', '.join(METHODS)}")
        if self.grid not in GRIDS:
            raise ValueError(f"grid={self.grid!r} is none of {', '.join(GRIDS)}")
        if not 0 <= self.guidance_interval[0] <= self.guidance_interval[1] <= 1:
            raise ValueError(
                f"guidance_interval={self.guidance_interval} must be two times from 0 to 1, the later last"
            )
        check_finite_numbers(cond_scale=self.cond_scale, atol=self.atol, rtol=self.rtol)
        self.times()  # which refuses steps that cannot be

    @property
    def is_guided(self) -> bool:
        return self.cond_scale != 1

    def is_guided_at(self, time: float) -> bool:
        return self.is_guided and self.guidance_interval[0] <= time <= self.guidance_interval[1]

    def times(self) -> list[float]:
        return GRIDS[self.grid](self.steps)

    def solve(
        self,
        network: VoiceBox,
        noise: Float[Tensor, "b n d"],
        hidden: Bool[Tensor, "b n"],
        condition: Mapping[str, Tensor | None],
        known: Float[Tensor, "b n d"] | None = None,
        evaluator: "Evaluator | None" = None,
    ) -> Solution:
        """Where the velocity leads from noise. What does not change on the way is computed once; `condition` as for
        `VoiceBox.prepare`. An `evaluator` is `running`.

        The network has learned the velocity of hidden frames alone. Those that are given take the `known` one, so that they are at
        every time what they were in training.
        """
        prepared = (network.prepare_guided if self.is_guided else network.prepare)(hidden, **condition)
        evaluate = (evaluator or Evaluator()).ready(network, prepared, noise, self.cond_scale)

        def velocity(time: float, x: Tensor) -> Tensor:
            found = evaluate(x, time, self.is_guided_at(time))
            return found if known is None else torch.where(hidden[..., None], found, known)

        return integrate(velocity, noise, self.times(), self.method, atol=self.atol, rtol=self.rtol)


Evaluate = Callable[[Tensor, float, bool], Tensor]  # the velocity of features [b, n, d] at a time, guided or not


class Evaluator:
    """Evaluates the velocity of a network, keeping weights and captured evaluations for sounds of the same shape.

    The weights are read anew for each sound, so the network may be trained in between. On CUDA they are bf16, and what the layers add up
    is in single precision; elsewhere all is in the network's own type.

    capture  whether to capture evaluations in CUDA graphs; on CUDA by default. Equal, to the last bit, to those that are not
    compile  whether to compile whole evaluations first, for each shape anew: for many sounds of few lengths
    """

    def __init__(self, *, capture: bool | None = None, compile: bool = False):
        self.capture, self.compile = capture, compile
        self._weights: Weights | None = None
        self._sessions: dict[Any, _Session] = {}  # the last used at the end
        self._pool: Any = None

    def __reduce__(self) -> Any:
        """A copied network has an evaluator of its own, with nothing kept."""
        return _evaluator, (self.capture, self.compile)

    @contextmanager
    def running(self, network: VoiceBox) -> Iterator[None]:
        """Inside, the network is in evaluation mode and has weights of the type that it is evaluated in."""
        if self._weights is None or not self._weights.are_of(network):
            self._sessions.clear()
            self._weights = Weights(network, None)
        weights = self._weights
        is_cuda = weights.device.type == "cuda"
        # What autocast keeps would belong to the graph that is captured first.
        half = torch.autocast(weights.device.type, torch.bfloat16, enabled=is_cuda, cache_enabled=False)
        with weights.in_place(), evaluating(network), sdpa_kernel(REPRODUCIBLE), half:
            yield

    def ready(
        self, network: VoiceBox, prepared: Prepared, noise: Float[Tensor, "b n d"], cond_scale: float
    ) -> Evaluate:
        """How to evaluate the velocity of features like the noise; inside `running`, until the next call of this."""
        captures = self._captures(noise.device)
        if not (captures or self.compile):
            return _Session(network, prepared, noise, cond_scale).evaluate
        key = (noise.shape, prepared.embedding.shape, prepared.mask is None, cond_scale)
        with lasting():
            session = self._sessions.pop(key, None) or _Session(
                network, prepared.copy(), noise, cond_scale, self.compile
            )
        self._sessions[key] = session
        for oldest in list(self._sessions)[:-MAX_SESSIONS]:
            del self._sessions[oldest]
        session.prepared.read(prepared)
        if not captures:
            return session.evaluate
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return lambda x, time, is_guided: session.replay(x, time, is_guided, self._pool)

    def _captures(self, device: torch.device) -> bool:
        if self.capture and device.type != "cuda":
            raise ValueError(f"capture=True needs a CUDA device, and the network is on {device}")
        return device.type == "cuda" if self.capture is None else self.capture


def _evaluator(capture: bool | None, compile: bool) -> Evaluator:
    return Evaluator(capture=capture, compile=compile)


class _Session:
    """The static buffers of one shape, and the evaluation that reads them."""

    def __init__(
        self,
        network: VoiceBox,
        prepared: Prepared,
        noise: Float[Tensor, "b n d"],
        cond_scale: float,
        compiles: bool = False,
    ):
        self.network, self.prepared, self.cond_scale = network, prepared, cond_scale
        self.velocity = compiled(_velocity) if compiles else _velocity
        self.x, self.found, self.time = torch.empty_like(noise), torch.empty_like(noise), noise.new_zeros(())
        self.graphs: dict[bool, torch.cuda.CUDAGraph] = {}  # with guidance, and without

    def evaluate(self, x: Float[Tensor, "b n d"], time: float, is_guided: bool) -> Float[Tensor, "b n d"]:
        return self._at(x, x.new_full((), time), is_guided)

    def replay(self, x: Float[Tensor, "b n d"], time: float, is_guided: bool, pool: Any) -> Float[Tensor, "b n d"]:
        self.x.copy_(x)
        self.time.fill_(time)
        if is_guided not in self.graphs:
            step = lambda: self.found.copy_(self._at(self.x, self.time, is_guided))
            self.graphs[is_guided] = captured(step, pool)
        self.graphs[is_guided].replay()
        return self.found.clone()  # solvers look at several velocities at once

    def _at(self, x: Float[Tensor, "b n d"], time: Float[Tensor, ""], is_guided: bool) -> Float[Tensor, "b n d"]:
        return self.velocity(self.network, self.prepared, x, time, self.cond_scale if is_guided else None)


def _velocity(
    network: VoiceBox,
    prepared: Prepared,
    x: Float[Tensor, "b n d"],
    time: Float[Tensor, ""],
    cond_scale: float | None,
) -> Float[Tensor, "b n d"]:
    """Guided, where there is a cond_scale."""
    if cond_scale is None:
        return network.velocity(prepared.first(len(x)), x, time).float()
    return network.guided_velocity(prepared, x, time, cond_scale)


@dataclass(frozen=True)
class Drawn:
    """Features as the feature space has them: given ones, and those that were made in their hidden frames."""

    features: Float[Tensor, "b n d"]  # 0 past the end of a row
    mask: Bool[Tensor, "b n"]  # True = a real frame
    hidden: Bool[Tensor, "b n"]  # True = made, not given
    evaluations: int = 0  # of the velocity; with and without the condition together are one

    @property
    def lengths(self) -> Int[Tensor, " b"]:
        return self.mask.sum(dim=1)

    def filled(self, features: Float[Tensor, "b n d"], evaluations: int) -> "Drawn":
        """With these features in the hidden frames; what was given stays as it is, to the last bit."""
        pasted = torch.where(self.hidden[..., None], features, self.features)
        return replace(self, features=pasted, evaluations=evaluations)


@dataclass(frozen=True)
class Prompt:
    """The sound that is given, and of which frames are made anew; all rows' or one for all."""

    features: Float[Tensor, "b p d"]
    frames: Int[Tensor, " b"]  # how many of them count
    remade: Bool[Tensor, "r q"] | None = None  # None: all are kept, and others follow

    def __post_init__(self) -> None:
        if self.remade is not None and self.remade.shape[1] != self.features.shape[1]:
            raise ValueError(f"cond_mask has {self.remade.shape[1]} frames, and cond {self.features.shape[1]}")


def canvas(frames: Int[Tensor, " b"], dim: int, prompt: Prompt | None) -> Drawn:
    """Rows of so many frames before anything is made: the prompt, and all else hidden."""
    n = int(frames.max())
    place = torch.arange(n, device=frames.device)
    mask = place < frames[:, None]
    if prompt is None:
        return Drawn(mask.new_zeros(*mask.shape, dim, dtype=torch.float32), mask, mask)
    hidden = (place >= prompt.frames[:, None]) & mask
    if prompt.remade is not None:
        hidden = hidden | (F.pad(prompt.remade, (0, n), value=True)[:, :n] & mask)
    elif not hidden.any(dim=1).all():
        raise ValueError(
            f"sounds of {frames.tolist()} frames are not longer than their prompts of {prompt.frames.tolist()}: give a greater "
            "length, or cond_mask for frames of cond that are to be made anew"
        )
    given = F.pad(prompt.features, (0, 0, 0, n))[:, :n]
    return Drawn(given.masked_fill((hidden | ~mask)[..., None], 0.0), mask, hidden)
