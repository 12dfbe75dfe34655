"""Lion and Muon. A step that is to be skipped is skipped on the device, as torch's fused optimizers do it (`found_inf`).

Letters: k matrices of one shape, m rows, n columns.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

MOST_AT_ONCE = 2**27  # numbers of parameters of one shape that are stepped together: it takes a few times their memory


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
