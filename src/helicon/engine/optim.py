"""Optimizers, schedules and clipping: one `NetworkOptimizer` per network, and no one else's gradients enter it.

A step is skipped by a flag that never leaves the device: a step with a non-finite loss or gradient changes neither the
weights nor the optimizer's state, and costs no host synchronisation to find out.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, ReduceLROnPlateau

from helicon.engine.optimizers import Lion, Muon
from helicon.engine.options import TrainerOptions


@dataclass(frozen=True)
class OptimizerSettings:
    """What one network's optimizer is made of."""

    optimizer: str = "adamw"
    lr: float = 3e-4
    wd: float = 0.0
    betas: tuple[float, float] = (0.9, 0.99)
    optimizer_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_grad_norm: float | None = None
    warmup_steps: int = 0
    initial_lr: float = 0.0
    scheduler: Any = None
    scheduler_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, options: TrainerOptions, first: bool) -> "OptimizerSettings":
        """The first network's settings, or those of the others: the discr_* options over the first's."""
        low, high = options.betas
        settings = {
            "optimizer": options.optimizer,
            "lr": options.lr,
            "wd": options.wd,
            "betas": (low, high),
            "optimizer_kwargs": dict(options.optimizer_kwargs),
            "max_grad_norm": options.max_grad_norm,
            "warmup_steps": options.warmup_steps,
            "initial_lr": options.initial_lr,
            "scheduler": options.scheduler,
            "scheduler_kwargs": dict(options.scheduler_kwargs),
        }
        if not first:
            own = {
                "lr": options.discr_lr,
                "max_grad_norm": options.discr_max_grad_norm,
                "warmup_steps": options.discr_warmup_steps,
            }
            settings |= {name: value for name, value in own.items() if value is not None}
            if options.discr_scheduler is not None:
                settings["scheduler"] = options.discr_scheduler
            if options.discr_scheduler is not None or options.discr_scheduler_kwargs:
                settings["scheduler_kwargs"] = dict(options.discr_scheduler_kwargs)
        return cls(**settings)


@contextmanager
def _keywords_named(option: str, keywords: Mapping[str, Any]) -> Iterator[None]:
    """What torch refuses of the keywords that a user passes on to it is told with the option they came from."""
    try:
        yield
    except TypeError as error:
        raise ValueError(f"{option}={dict(keywords)!r} will not do: {error}") from error


class Schedule:
    """Learning rate at each step: linear warm-up times a scheduler.

    The scheduler follows the steps of the run, so that it ends with the run also for a network that starts late or is not
    updated at each step; the warm-up is over the network's own first updates.
    The scheduler drives an optimizer of its own that never sees the warm-up. (Built on the real one after the warm-up
    has lowered its rate, it would take the lowered rate for the base, and training would stay there for ever.)
    """

    def __init__(self, settings: OptimizerSettings, num_train_steps: int):
        self.settings = settings
        self.step = 0  # of the run
        self.updates = 0  # of the network
        self._carrier = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=settings.lr, momentum=0.9)
        self._scheduler = self._build(settings, num_train_steps)

    def _build(self, settings: OptimizerSettings, num_train_steps: int) -> LRScheduler | None:
        chosen, kwargs = settings.scheduler, dict(settings.scheduler_kwargs)
        if chosen is None or chosen == "constant":
            return None
        if chosen == "cosine":
            chosen, kwargs = CosineAnnealingLR, {"T_max": max(num_train_steps, 1), **kwargs}
        if isinstance(chosen, str):
            chosen = getattr(torch.optim.lr_scheduler, chosen, None)
        if not (isinstance(chosen, type) and issubclass(chosen, LRScheduler)):
            raise ValueError(
                f"scheduler={settings.scheduler!r} is neither 'constant', 'cosine' nor a class of torch.optim.lr_scheduler"
            )
        if issubclass(chosen, ReduceLROnPlateau):
            raise ValueError(
                "scheduler=ReduceLROnPlateau needs a metric at each step: use 'cosine' or another schedule of the step"
            )
        with _keywords_named("scheduler_kwargs", kwargs):
            return chosen(self._carrier, **kwargs)

    @property
    def lr(self) -> float:
        """The rate of the coming step."""
        target = self._carrier.param_groups[0]["lr"]
        low, warmup = self.settings.initial_lr, self.settings.warmup_steps
        done = min(1.0, (self.updates + 1) / warmup) if warmup else 1.0
        return float(low + (target - low) * done)

    def advance(self, updates: int = 1) -> None:
        self.updates += updates
        self.catch_up(self.step + updates)

    def catch_up(self, step: int) -> None:
        """To a step of the run. A schedule is a function of it: resuming replays it, so that no state of it is ever stored."""
        if self._scheduler is not None:
            for _ in range(self.step, step):
                self._carrier.step()
                self._scheduler.step()
        self.step = max(self.step, step)


class NetworkOptimizer:
    """The optimizer, schedule and clipping of one network."""

    def __init__(self, network: nn.Module, settings: OptimizerSettings, num_train_steps: int):
        self.settings = settings
        # Named and ordered as in the network: state is stored by name, so it never lands on another parameter.
        self.named = {name: p for name, p in network.named_parameters() if p.requires_grad}
        if not self.named:
            raise ValueError(f"{type(network).__name__} has no trainable parameter: there is nothing to optimise")
        self.parameters = list(self.named.values())
        self._num_train_steps = num_train_steps
        self.schedule = Schedule(settings, num_train_steps)
        with _keywords_named("optimizer_kwargs", settings.optimizer_kwargs):
            self.optimizers = _build_optimizers(network, self.named, settings)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def gradient_norm(self) -> Tensor:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def set_rate(self) -> float:
        """The learning rate of the coming step, which it returns."""
        rate = self.schedule.lr
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        return rate

    def record(self) -> None:
        """The rates become tensors on the device, which a recorded step reads anew."""
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = torch.tensor(float(group["lr"]), device=group["params"][0].device)
            if "capturable" in group:
                group["capturable"] = True

    def apply(self, bad: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Clips, steps unless `bad`, and clears the gradients; returns the gradient norm before clipping, and `bad or not finite`.

        The device's part of a step, between `set_rate` and the schedule's `advance`, which are the host's."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if scale is not None:
            torch._foreach_div_(gradients, scale)
        norm = self.gradient_norm()
        bad = bad | ~torch.isfinite(norm)
        if self.settings.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.settings.max_grad_norm, norm, foreach=True)
        for optimizer in self.optimizers:
            optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
            optimizer.grad_scale = None  # type: ignore[attr-defined]
            optimizer.step()
        self.zero_grad()
        return norm, bad

    def state(self) -> dict[str, Tensor]:
        """Optimizer state as flat named tensors: `<parameter>/<entry>`."""
        flat = {}
        for name, parameter in self.named.items():
            for optimizer in self.optimizers:
                for entry, value in optimizer.state.get(parameter, {}).items():
                    flat[f"{name}/{entry}"] = value if isinstance(value, Tensor) else torch.tensor(value)
        return flat

    def check_state(self, flat: Mapping[str, Tensor]) -> None:
        """Raises if this is not what `state` gives for this network and these optimizers."""
        by_parameter = _by_parameter(flat)
        unknown = sorted(by_parameter.keys() - self.named.keys())
        if unknown:
            raise ValueError(
                f"the checkpoint has optimizer state for {unknown[0]}, which this network lacks: it is another model's"
            )
        for optimizer, name, parameter in self._owned():
            saved = by_parameter.get(name)
            if saved is None:
                continue
            if saved.keys() != _entries(optimizer):
                raise ValueError(
                    f"the checkpoint holds the state of another optimizer than {self.settings.optimizer} "
                    f"({', '.join(sorted(saved))}): resume with the one it was trained with, or start anew with init_from"
                )
            for entry, value in saved.items():  # fused optimizers would read past the end of a shorter one
                if value.shape != (() if entry == "step" else parameter.shape):
                    raise ValueError(
                        f"the checkpoint has {entry} of shape {tuple(value.shape)} for {name}, which has "
                        f"shape {tuple(parameter.shape)}: it is another model's"
                    )

    def load_state(self, flat: Mapping[str, Tensor], updates: int) -> None:
        """What `state` gave after so many updates; nothing is changed if it was another network's."""
        self.check_state(flat)
        by_parameter = _by_parameter(flat)
        for optimizer in self.optimizers:
            optimizer.state.clear()
        for optimizer, name, parameter in self._owned():
            if name in by_parameter:
                saved = by_parameter[name]
                optimizer.state[parameter] = {entry: _placed(value, parameter) for entry, value in saved.items()}
        self.schedule = Schedule(self.settings, self._num_train_steps)
        self.schedule.advance(updates)

    def _owned(self) -> Iterator[tuple[torch.optim.Optimizer, str, nn.Parameter]]:
        """Every parameter with its name and the optimizer that steps it."""
        names = {id(parameter): name for name, parameter in self.named.items()}
        for optimizer in self.optimizers:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                yield optimizer, names[id(parameter)], parameter


def _by_parameter(flat: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = {}
    for key, value in flat.items():
        name, _, entry = key.rpartition("/")
        found.setdefault(name, {})[entry] = value
    return found


def _entries(optimizer: torch.optim.Optimizer) -> set[str]:
    """What an optimizer keeps of each parameter."""
    if isinstance(optimizer, (Lion, Muon)):
        return {"exp_avg"} if isinstance(optimizer, Lion) else {"momentum"}
    return {"step", "exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if optimizer.defaults["amsgrad"] else [])}


def _placed(value: Tensor, parameter: Tensor) -> Tensor:
    """State where its parameter is: on its device, split as it is, and laid out in memory as it is.

    (Fused optimizers walk parameter and state side by side in memory: with another layout they would pair wrong elements.)
    """
    if value.shape != parameter.shape:
        return value.to(parameter.device, copy=True)
    if isinstance(parameter, DTensor):
        return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def _build_optimizers(
    network: nn.Module, named: Mapping[str, nn.Parameter], settings: OptimizerSettings
) -> list[torch.optim.Optimizer]:
    name, common = settings.optimizer, dict(settings.optimizer_kwargs)
    if name == "lion":
        return [Lion(_groups(named.values(), settings.wd), lr=settings.lr, betas=settings.betas, **common)]
    if name in ("adam", "adamw"):
        return [_adam(name, named.values(), settings, common)]
    if name == "muon":
        embeddings = {id(m.weight) for m in network.modules() if isinstance(m, nn.Embedding)}
        matrices = [p for p in named.values() if p.ndim >= 2 and id(p) not in embeddings]
        rest = [p for p in named.values() if p.ndim < 2 or id(p) in embeddings]
        muon = [Muon(_groups(matrices, settings.wd), lr=settings.lr, **common)] if matrices else []
        return [*muon, *([_adam("adamw", rest, settings, {})] if rest else [])]
    raise ValueError(f"optimizer={name!r} is not one of adamw, adam, lion, muon")


def _adam(
    name: str, parameters: Iterable[nn.Parameter], settings: OptimizerSettings, kwargs: dict[str, Any]
) -> torch.optim.Optimizer:
    kind = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
    return kind(_groups(parameters, settings.wd), lr=settings.lr, betas=settings.betas, fused=True, **kwargs)


def _groups(parameters: Iterable[nn.Parameter], wd: float) -> list[dict[str, Any]]:
    """Weight decay on tensors of two dimensions or more alone: gains, biases and norms are left as they are."""
    parameters = list(parameters)
    parts = [([p for p in parameters if p.ndim >= 2], wd), ([p for p in parameters if p.ndim < 2], 0.0)]
    return [{"params": chosen, "weight_decay": decay} for chosen, decay in parts if chosen]


class LossScale:
    """Dynamic loss scaling for fp16, on the device: halved by a step that overflowed, doubled after 2,000 that did not."""

    def __init__(self, device: torch.device, initial: float = 2.0**16, interval: int = 2000):
        self.value = torch.tensor(initial, device=device)
        self.good_steps = torch.zeros((), device=device, dtype=torch.int64)
        self.interval = interval

    def update(self, bad: Tensor) -> None:
        self.good_steps = torch.where(bad, 0, self.good_steps + 1)
        grown = self.good_steps >= self.interval
        self.value = torch.where(bad, self.value * 0.5, torch.where(grown, self.value * 2.0, self.value))
        self.good_steps = torch.where(grown, 0, self.good_steps)

    def state(self) -> dict[str, Tensor]:
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.value, self.good_steps = (state[k].to(self.value.device) for k in ("value", "good_steps"))
