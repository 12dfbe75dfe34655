"""Solvers of y' = velocity(t, y): how samples of a flow are drawn. No step waits for the host, but for the adaptive solver's.

A *grid* of times says where the fixed solvers stop. Flows do most of their work early, so that grids whose steps are short there
reach the same quality in fewer of them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

Velocity = Callable[[float, Tensor], Tensor]  # of a time and a state; as the state is shaped

# Evaluations of the velocity in one step.
EVALUATIONS = {"euler": 1, "midpoint": 2, "rk4": 4}
METHODS = (*EVALUATIONS, "adaptive")

# Steps that are left when those of 32 equal ones that matter least are taken out (Zheng et al. 2025, arXiv:2505.19931).
PRUNED = {
    5: (0, 2, 4, 8, 16, 32),
    6: (0, 2, 4, 6, 8, 16, 32),
    7: (0, 2, 4, 6, 8, 16, 24, 32),
    10: (0, 2, 4, 6, 8, 12, 16, 20, 24, 28, 32),
    12: (0, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32),
    16: (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32),
}

# Dormand and Prince (1980): where the velocity is evaluated, with what of the earlier ones, and the weights of the fifth order
# (the last row: its end is the next step's beginning) less those of the fourth.
PLACES = (0.0, 1 / 5, 3 / 10, 4 / 5, 8 / 9, 1.0, 1.0)
PORTIONS = (
    (),
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
FOURTH = (5179 / 57600, 0.0, 7571 / 16695, 393 / 640, -92097 / 339200, 187 / 2100, 1 / 40)
ORDER, SAFETY, SMALLEST, LARGEST = 5, 0.9, 0.2, 10.0  # how a step may shrink and grow


@dataclass(frozen=True)
class Solution:
    value: Tensor  # at the last time
    evaluations: int  # of the velocity


def uniform_grid(steps: int) -> list[float]:
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1")
    return [step / steps for step in range(steps + 1)]


def swayed(times: Sequence[float], sway: float = -1.0) -> list[float]:
    """The times moved towards 0 by a negative `sway`, towards 1 by a positive one (Chen et al. 2024, arXiv:2410.06885).

    t + sway (cos(pi t / 2) - 1 + t), which grows with t as long as `sway` is between -1 and 2 / (pi - 2).
    """
    if not -1 <= sway <= 2 / (math.pi - 2):
        raise ValueError(f"sway={sway} must be from -1 to {2 / (math.pi - 2):.2f}, or times would turn back")
    return [t + sway * (math.cos(math.pi * t / 2) - 1 + t) for t in times]


def pruned_grid(steps: int) -> list[float]:
    """Steps that are short where a flow turns most; of 5, 6, 7, 10, 12 or 16 steps."""
    if steps not in PRUNED:
        raise ValueError(f"steps={steps}: a pruned grid has one of {', '.join(map(str, PRUNED))} steps")
    return [place / 32 for place in PRUNED[steps]]


def integrate(
    velocity: Velocity,
    start: Float[Tensor, "*s"],
    times: Sequence[float],
    method: str = "midpoint",
    *,
    atol: float = 1e-5,
    rtol: float = 1e-5,
    max_steps: int = 10_000,
) -> Solution:
    """The state at the last of the times, from `start` at the first.

    "euler", "midpoint" and "rk4" (the 3/8 rule) step from each time to the next. "adaptive" (Dormand and Prince, of fifth order)
    takes the steps it needs between the first and the last for errors below `atol` + `rtol` |y|, `max_steps` at most.
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r} is none of {', '.join(METHODS)}")
    if len(times) < 2 or any(later <= earlier for earlier, later in pairwise(times)):
        raise ValueError(f"times={list(times)} must be at least two, each after the one before")
    if method == "adaptive":
        return _Adaptive(velocity, atol, rtol, max_steps).solve(start, times[0], times[-1])
    step, y = STEPS[method], start
    for t, later in pairwise(times):
        y = y + (later - t) * step(velocity, t, y, later - t)
    return Solution(y, EVALUATIONS[method] * (len(times) - 1))


def _euler(velocity: Velocity, t: float, y: Tensor, h: float) -> Tensor:
    return velocity(t, y)


def _midpoint(velocity: Velocity, t: float, y: Tensor, h: float) -> Tensor:
    return velocity(t + h / 2, y + h / 2 * velocity(t, y))


def _three_eighths(velocity: Velocity, t: float, y: Tensor, h: float) -> Tensor:
    first = velocity(t, y)
    second = velocity(t + h / 3, y + h / 3 * first)
    third = velocity(t + 2 * h / 3, y + h * (second - first / 3))
    fourth = velocity(t + h, y + h * (first - second + third))
    return (first + 3 * (second + third) + fourth) / 8


STEPS: dict[str, Callable[[Velocity, float, Tensor, float], Tensor]] = {
    "euler": _euler,
    "midpoint": _midpoint,
    "rk4": _three_eighths,
}


class _Adaptive:
    def __init__(self, velocity: Velocity, atol: float, rtol: float, max_steps: int):
        if min(atol, rtol) < 0 or max(atol, rtol) == 0:
            raise ValueError(f"{atol=} and {rtol=} must not be negative, nor both 0")
        self.velocity, self.atol, self.rtol, self.max_steps = velocity, atol, rtol, max_steps
        self.evaluations = 0

    def solve(self, y: Tensor, t: float, end: float) -> Solution:
        slope = self._slope(t, y)
        if not slope.isfinite().all():
            raise ValueError(f"the velocity is not finite at t={t:.4g}: there is nothing to integrate")
        h = min(self._first_step(t, y, slope), end - t)
        for _ in range(self.max_steps):
            later, error, last_slope = self._try(t, y, slope, h)
            if not math.isfinite(error):
                raise ValueError(f"the velocity is not finite near t={t:.4g}: there is nothing to integrate")
            is_at_end = t + h >= end
            if error <= 1:
                t, y, slope = t + h, later, last_slope
                if is_at_end:
                    return Solution(y, self.evaluations)
            growth = LARGEST if error == 0 else SAFETY * error ** (-1 / ORDER)
            h *= min(LARGEST, max(SMALLEST if error > 1 else 1.0, growth))
            h = min(h, end - t)
        raise ValueError(
            f"max_steps={self.max_steps} did not suffice: allow for larger errors (atol, rtol) or more steps"
        )

    def _slope(self, t: float, y: Tensor) -> Tensor:
        self.evaluations += 1
        return self.velocity(t, y)

    def _try(self, t: float, y: Tensor, slope: Tensor, h: float) -> tuple[Tensor, float, Tensor]:
        """A step of this length: where it leads, how large its error is against what is allowed, and the velocity there."""
        slopes, state = [slope], y
        for place, portions in zip(PLACES[1:], PORTIONS[1:], strict=True):
            state = y + h * _combined(portions, slopes)
            slopes.append(self._slope(t + place * h, state))
        differences = [fifth - fourth for fifth, fourth in zip((*PORTIONS[-1], 0.0), FOURTH, strict=True)]
        allowed = self.atol + self.rtol * torch.maximum(y.abs(), state.abs())
        return state, _size(h * _combined(differences, slopes) / allowed), slopes[-1]

    def _first_step(self, t: float, y: Tensor, slope: Tensor) -> float:
        """Hairer, Norsett and Wanner, Solving Ordinary Differential Equations I, section II.4."""
        allowed = self.atol + self.rtol * y.abs()
        value, speed = _size(y / allowed), _size(slope / allowed)
        guess = 1e-6 if min(value, speed) < 1e-5 else 0.01 * value / speed
        bend = _size((self._slope(t + guess, y + guess * slope) - slope) / allowed) / guess
        steepest = max(speed, bend)
        better = max(1e-6, guess * 1e-3) if steepest <= 1e-15 else (0.01 / steepest) ** (1 / ORDER)
        return min(100 * guess, better)


def _combined(portions: Sequence[float], slopes: Sequence[Tensor]) -> Tensor:
    terms = [portion * slope for portion, slope in zip(portions, slopes, strict=True) if portion]
    return torch.stack(terms).sum(dim=0)


def _size(x: Tensor) -> float:
    return float(x.float().square().mean().sqrt())
