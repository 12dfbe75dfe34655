import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torchdiffeq import odeint

from helicon.nn.ode import EVALUATIONS, PRUNED, integrate, pruned_grid, swayed, uniform_grid

START = torch.tensor([[1.0, -0.5, 2.0]], dtype=torch.float64)
ORDERS = {"euler": 1, "midpoint": 2, "rk4": 4}


def turning(t: float | Tensor, y: Tensor) -> Tensor:
    """Neither linear in the state nor the same at all times."""
    return torch.sin(3 * y) * (1 + 2 * t) - 0.3 * y.flip(-1)


def exact() -> Tensor:
    return integrate(turning, START, uniform_grid(4000), "rk4").value


@pytest.mark.parametrize("method", EVALUATIONS)
@pytest.mark.parametrize("times", [uniform_grid(7), swayed(uniform_grid(5)), pruned_grid(6), [0.2, 0.25, 0.9]], ids=len)
def test_fixed_solvers_equal_torchdiffeqs(method: str, times: list[float]) -> None:
    counted = []

    def velocity(t: float | Tensor, y: Tensor) -> Tensor:
        counted.append(float(t))
        return turning(t, y)

    found = integrate(velocity, START, times, method)
    expected = odeint(turning, START, torch.tensor(times, dtype=torch.float64), method=method)
    torch.testing.assert_close(found.value, expected[-1], atol=1e-12, rtol=0)
    assert found.evaluations == len(counted) == EVALUATIONS[method] * (len(times) - 1)


@pytest.mark.parametrize(("method", "order"), ORDERS.items())
def test_an_error_falls_with_the_order_of_the_solver(method: str, order: int) -> None:
    truth = exact()
    errors = [(integrate(turning, START, uniform_grid(n), method).value - truth).abs().max() for n in (40, 80)]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.25)


@pytest.mark.parametrize("tolerance", [1e-3, 1e-6, 1e-9])
def test_the_adaptive_solver_keeps_its_errors_small_and_is_no_wasteful(tolerance: float) -> None:
    found = integrate(turning, START, [0.0, 1.0], "adaptive", atol=tolerance, rtol=tolerance)
    assert (found.value - exact()).abs().max() < 10 * tolerance
    counted = []

    def velocity(t: Tensor, y: Tensor) -> Tensor:
        counted.append(t)
        return turning(t, y)

    times = torch.tensor([0.0, 1.0], dtype=torch.float64)
    theirs = odeint(velocity, START, times, method="dopri5", atol=tolerance, rtol=tolerance)
    assert (found.value - theirs[-1]).abs().max() < 10 * tolerance
    assert found.evaluations <= 1.5 * len(counted)


def test_the_adaptive_solver_takes_more_steps_where_more_is_asked() -> None:
    coarse, fine = (
        integrate(turning, START, [0.0, 1.0], "adaptive", atol=a, rtol=a).evaluations for a in (1e-3, 1e-10)
    )
    assert fine > 2 * coarse


def test_a_straight_flow_is_exact_in_one_step_of_any_solver() -> None:
    target = torch.tensor([3.0, -1.0])
    for method in ORDERS:
        value = integrate(lambda t, y: target - torch.ones(2), torch.ones(2), [0.0, 1.0], method).value
        torch.testing.assert_close(value, target)
    adaptive = integrate(lambda t, y: target - torch.ones(2), torch.ones(2), [0.0, 1.0], "adaptive")
    torch.testing.assert_close(adaptive.value, target)


@pytest.mark.parametrize("times", [swayed(uniform_grid(9)), swayed(uniform_grid(9), 1.0), *map(pruned_grid, PRUNED)])
def test_grids_go_from_0_to_1_without_turning_back(times: list[float]) -> None:
    assert times[0] == pytest.approx(0) and times[-1] == pytest.approx(1)
    assert all(later > earlier for earlier, later in pairwise(times))


def test_a_negative_sway_makes_the_first_steps_short_and_none_changes_nothing() -> None:
    assert swayed(uniform_grid(4), 0.0) == uniform_grid(4)
    times = swayed(uniform_grid(4))
    assert times == pytest.approx([1 - math.cos(math.pi * t / 2) for t in uniform_grid(4)])
    assert times[1] - times[0] < times[-1] - times[-2]


def test_pruned_grids_have_as_many_steps_as_asked() -> None:
    assert all(len(pruned_grid(steps)) == steps + 1 for steps in PRUNED)


@pytest.mark.parametrize(
    ("sentence", "call"),
    [
        ("method='heun' is none of euler", lambda: integrate(turning, START, [0.0, 1.0], "heun")),
        ("must be at least two", lambda: integrate(turning, START, [0.0])),
        ("each after the one before", lambda: integrate(turning, START, [0.0, 0.5, 0.5])),
        ("steps=0 must be at least 1", lambda: uniform_grid(0)),
        ("one of 5, 6, 7", lambda: pruned_grid(8)),
        ("times would turn back", lambda: swayed([0.0, 1.0], -1.5)),
        ("must not be negative", lambda: integrate(turning, START, [0.0, 1.0], "adaptive", atol=-1.0)),
        ("max_steps=2 did not suffice", lambda: integrate(turning, START, [0.0, 1.0], "adaptive", max_steps=2)),
        (
            "not finite near t=0.",
            lambda: integrate(lambda t, y: y / (0 if t > 0.5 else 1), START, [0.0, 1.0], "adaptive"),
        ),
        ("not finite at t=0", lambda: integrate(lambda t, y: y / 0, START, [0.0, 1.0], "adaptive")),
    ],
)
def test_what_cannot_be_integrated_is_told(sentence: str, call: object) -> None:
    with pytest.raises((ValueError, TypeError), match=sentence):
        call()  # type: ignore[operator]
