"""Optimizers, schedules and clipping: one `NetworkOptimizer` per network, and no one else's gradients enter it.

A step is skipped by a flag that never leaves the device: a step with a non-finite loss or gradient changes neither the
weights nor the optimizer's state, and costs no host synchronisation to find out.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, ReduceLROnPlateau

from helicon.engine.options import TrainerOptions

MOST_AT_ONCE = 2**27  # numbers of parameters of one shape that are stepped together: it takes a few times their memory


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
            return CosineAnnealingLR(self._carrier, **{"T_max": max(num_train_steps, 1), **kwargs})
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


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023: sign of an interpolated momentum, decoupled weight decay."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        keep = _keep_flag(self)
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameters, averages in _alike(self, group["params"], "exp_avg"):
                gradient = torch.where(keep, _stacked([p.grad for p in parameters]), 0)
                momentum = _stacked(averages)
                direction = momentum.lerp(gradient, 1 - beta1).sign_()
                _move(parameters, direction * (group["lr"] * keep), 1 - group["lr"] * group["weight_decay"] * keep)
                _fill(averages, torch.where(keep, momentum.lerp(gradient, 1 - beta2), momentum))


class Muon(torch.optim.Optimizer):
    """Jordan et al. 2024: momentum orthogonalised by a Newton-Schulz iteration, for the matrices inside a network.

    The step is scaled by 0.2 sqrt(max(rows, columns)) (Liu et al. 2025), which gives it the size of an AdamW step, so
    one learning rate serves both.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 3e-4,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        ns_steps: int = 5,
    ):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, ns_steps=ns_steps))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        keep = _keep_flag(self)
        for group in self.param_groups:
            for parameters, averages in _alike(self, group["params"], "momentum"):
                gradient = torch.where(keep, _stacked([p.grad for p in parameters]), 0)
                momentum = _stacked(averages)
                updated = momentum.lerp(gradient, 1 - group["momentum"])
                matrices = gradient.lerp(updated, group["momentum"]).flatten(
                    2
                )  # Nesterov; a convolution is a matrix too
                directions = orthogonalise(matrices, group["ns_steps"]).view_as(gradient).to(gradient.dtype)
                scale = 0.2 * math.sqrt(max(matrices.shape[1:]))
                decay = 1 - group["lr"] * group["weight_decay"] * keep
                _move(parameters, directions * (group["lr"] * scale * keep), decay)
                _fill(averages, torch.where(keep, updated, momentum))


def _alike(
    optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], name: str
) -> Iterator[tuple[list[nn.Parameter], list[Tensor]]]:
    """Parameters of one shape that have a gradient, with their averages of this name: a network has a hundred matrices but few
    shapes of them, and a step that treats them one by one keeps the host busier than the device."""
    together: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            alone = id(parameter) if isinstance(parameter, DTensor) else 0
            together.setdefault((parameter.shape, parameter.dtype, parameter.device, alone), []).append(parameter)
    for alike in together.values():
        many = max(1, MOST_AT_ONCE // max(1, alike[0].numel()))
        for start in range(0, len(alike), many):
            part = alike[start : start + many]
            for parameter in part:
                if name not in optimizer.state[parameter]:
                    optimizer.state[parameter][name] = torch.zeros_like(parameter)
            yield part, [optimizer.state[parameter][name] for parameter in part]


def _stacked(tensors: Sequence[Tensor | None]) -> Tensor:
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.stack(present) if len(present) > 1 else present[0].unsqueeze(0)


def _move(parameters: list[nn.Parameter], step: Tensor, decay: Tensor) -> None:
    here = [_here(parameter) for parameter in parameters]
    torch._foreach_mul_(here, decay)
    torch._foreach_sub_(here, [_here(each) for each in step.unbind()])


def _fill(tensors: list[Tensor], values: Tensor) -> None:
    torch._foreach_copy_([_here(tensor) for tensor in tensors], [_here(each) for each in values.unbind()])


def _here(tensor: Tensor) -> Tensor:
    """What this process has of it: several shards are not stepped at once otherwise."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def orthogonalise(matrices: Float[Tensor, "k m n"], steps: int) -> Float[Tensor, "k m n"]:
    """About U V^T of each matrix's singular value decomposition, by a quintic Newton-Schulz iteration."""
    if isinstance(matrices, DTensor):  # each process has some rows, and the iteration needs all of them
        whole = orthogonalise(matrices.full_tensor(), steps)
        return distribute_tensor(whole, matrices.device_mesh, matrices.placements, src_data_rank=None)
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


def _keep_flag(optimizer: torch.optim.Optimizer) -> Tensor:
    """1 where this step counts, 0 where it is skipped; set beforehand in the place torch's fused optimizers read."""
    found = getattr(optimizer, "found_inf", None)
    if found is None:
        return torch.ones((), device=optimizer.param_groups[0]["params"][0].device, dtype=torch.bool)
    return found == 0


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
        self.optimizers = _build_optimizers(network, self.named, settings)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def gradient_norm(self) -> Tensor:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def step(self, bad: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Clips, steps unless `bad`, and clears the gradients; returns the gradient norm before clipping, and `bad or not finite`."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if scale is not None:
            torch._foreach_div_(gradients, scale)
        norm = self.gradient_norm()
        bad = bad | ~torch.isfinite(norm)
        if self.settings.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.settings.max_grad_norm, norm, foreach=True)
        lr = self.schedule.lr
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
            optimizer.grad_scale = None  # type: ignore[attr-defined]
            optimizer.step()
        self.zero_grad()
        self.schedule.advance()
        return norm, bad

    def state(self) -> dict[str, Tensor]:
        """Optimizer state as flat named tensors: `<parameter>/<entry>`."""
        flat = {}
        for name, parameter in self.named.items():
            for optimizer in self.optimizers:
                for entry, value in optimizer.state.get(parameter, {}).items():
                    flat[f"{name}/{entry}"] = value if isinstance(value, Tensor) else torch.tensor(value)
        return flat

    def load_state(self, flat: Mapping[str, Tensor], updates: int) -> None:
        """What `state` gave after so many updates."""
        by_parameter: dict[str, dict[str, Tensor]] = {}
        for key, value in flat.items():
            name, _, entry = key.rpartition("/")
            by_parameter.setdefault(name, {})[entry] = value
        unknown = sorted(by_parameter.keys() - self.named.keys())
        if unknown:
            raise ValueError(
                f"the checkpoint has optimizer state for {unknown[0]}, which this network lacks: it is another model's"
            )
        names = {id(parameter): name for name, parameter in self.named.items()}
        for optimizer in self.optimizers:
            optimizer.state.clear()
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                saved = by_parameter.get(names[id(parameter)])
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
                            f"the checkpoint has {entry} of shape {tuple(value.shape)} for {names[id(parameter)]}, which has "
                            f"shape {tuple(parameter.shape)}: it is another model's"
                        )
                optimizer.state[parameter] = {k: _placed(v, parameter) for k, v in saved.items()}
        self.schedule = Schedule(self.settings, self._num_train_steps)
        self.schedule.advance(updates)


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
