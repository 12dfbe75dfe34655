"""Learning rates by value: warm-up, schedules of every kind, and the settings of a second network."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, ReduceLROnPlateau, StepLR

from helicon.engine.optim import OptimizerSettings, Schedule
from helicon.engine.options import TrainerOptions


def rates(steps: list[int], num_train_steps: int = 10_000, **settings: Any) -> list[float]:
    schedule = Schedule(OptimizerSettings(**settings), num_train_steps)
    found = {}
    for step in range(max(steps) + 1):
        if step in steps:
            found[step] = schedule.lr
        schedule.advance()
    return [found[step] for step in steps]


def test_without_a_warm_up_the_rate_is_there_from_the_first_step() -> None:
    assert rates([0, 1, 500], lr=1e-4) == [1e-4] * 3


@pytest.mark.parametrize("scheduler", [None, "constant"])
def test_a_warm_up_ends_at_the_full_rate_and_stays_there(scheduler: str | None) -> None:
    """D-T1: the reference's rate stayed at lr / warmup_steps (here 1e-7) for ever."""
    found = rates([0, 1, 499, 998, 999, 1000, 5000], lr=1e-4, warmup_steps=1000, scheduler=scheduler)
    assert found == pytest.approx([1e-7, 2e-7, 5e-5, 0.999e-4, 1e-4, 1e-4, 1e-4])


def test_a_warm_up_starts_from_the_initial_rate() -> None:
    found = rates([0, 1, 3, 9, 10, 50], lr=1.0, initial_lr=0.5, warmup_steps=10)
    assert found == pytest.approx([0.55, 0.6, 0.7, 1.0, 1.0, 1.0])


def test_cosine_falls_to_nothing_at_the_last_step() -> None:
    found = rates([0, 25, 50, 99], num_train_steps=100, lr=2.0, scheduler="cosine")
    assert found == pytest.approx([1 + math.cos(math.pi * step / 100) for step in (0, 25, 50, 99)], abs=1e-9)
    floor = rates([100], num_train_steps=100, lr=2.0, scheduler="cosine", scheduler_kwargs={"eta_min": 0.5})
    assert floor == pytest.approx([0.5])


def test_a_warm_up_multiplies_the_schedule_below_it() -> None:
    kwargs = {"lr": 1.0, "scheduler": "ExponentialLR", "scheduler_kwargs": {"gamma": 0.5}}
    assert rates([0, 1, 2, 3, 4], **kwargs, warmup_steps=4) == pytest.approx([1 / 4, 2 / 8, 3 / 16, 4 / 32, 1 / 16])


@pytest.mark.parametrize("scheduler", ["StepLR", StepLR])
def test_a_scheduler_is_named_or_given_as_a_class_with_its_keywords(scheduler: Any) -> None:
    kwargs = {"step_size": 3, "gamma": 0.1}
    found = rates([0, 2, 3, 5, 6], lr=1.0, scheduler=scheduler, scheduler_kwargs=kwargs)
    assert found == pytest.approx([1.0, 1.0, 0.1, 0.1, 0.01])


def test_a_scheduler_equals_torchs_own_driven_by_hand() -> None:
    settings: dict[str, Any] = {"scheduler": OneCycleLR, "scheduler_kwargs": {"max_lr": 0.7, "total_steps": 20}}
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3, momentum=0.9)
    plain = OneCycleLR(optimizer, max_lr=0.7, total_steps=20)
    expected = []
    for _ in range(20):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        plain.step()
    assert rates(list(range(20)), lr=0.3, **settings) == pytest.approx(expected)


@pytest.mark.parametrize("scheduler", [None, "cosine", "StepLR", "CosineAnnealingWarmRestarts"])
def test_advancing_many_steps_at_once_equals_single_steps(scheduler: str | None) -> None:
    kwargs = {"StepLR": {"step_size": 4}, "CosineAnnealingWarmRestarts": {"T_0": 5}}.get(scheduler or "", {})
    settings = OptimizerSettings(lr=1.0, warmup_steps=7, scheduler=scheduler, scheduler_kwargs=kwargs)
    single = Schedule(settings, 40)
    for step in range(30):
        replayed = Schedule(settings, 40)
        replayed.advance(step)
        assert (replayed.step, replayed.lr) == (step, single.lr)
        single.advance()


@pytest.mark.parametrize("scheduler", ["ReduceLROnPlateau", ReduceLROnPlateau])
def test_a_schedule_that_needs_a_metric_is_refused_in_one_sentence(scheduler: Any) -> None:
    with pytest.raises(ValueError, match="ReduceLROnPlateau needs a metric at each step: use 'cosine' or"):
        Schedule(OptimizerSettings(scheduler=scheduler), 10)


@pytest.mark.parametrize("scheduler", ["cosin", "Optimizer", torch.optim.SGD, lambda step: 1.0])
def test_what_is_no_scheduler_is_refused_by_value(scheduler: Any) -> None:
    with pytest.raises(ValueError, match=r"is neither 'constant', 'cosine' nor a class of torch.optim.lr_scheduler"):
        Schedule(OptimizerSettings(scheduler=scheduler), 10)


@pytest.mark.parametrize(
    ("scheduler", "kwargs", "what"),
    [("cosine", {"T_maximum": 3}, "T_maximum"), ("StepLR", {}, "step_size"), (StepLR, {"gamma": 0.5}, "step_size")],
)
def test_keywords_a_scheduler_lacks_or_needs_are_told_with_the_option_they_belong_to(
    scheduler: Any, kwargs: dict[str, Any], what: str
) -> None:
    with pytest.raises(ValueError, match=f"scheduler_kwargs=.* will not do: .*{what}"):
        Schedule(OptimizerSettings(scheduler=scheduler, scheduler_kwargs=kwargs), 10)


def test_a_network_that_starts_late_warms_up_and_ends_with_the_run() -> None:
    settings = OptimizerSettings(lr=2.0, warmup_steps=2, scheduler="cosine")
    usual, late = Schedule(settings, 10), Schedule(settings, 10)
    usual.advance(6)
    late.catch_up(6)
    assert late.lr == pytest.approx(usual.lr / 2), "the first of two steps of warm-up"
    usual.advance()
    late.advance()
    assert late.lr == usual.lr
    usual.advance(3)
    late.advance(3)
    assert late.lr == pytest.approx(0.0, abs=1e-12) and (late.step, late.updates) == (10, 4)


def test_a_schedule_has_no_part_in_the_warm_up_of_another() -> None:
    """Two networks built from the same settings keep their own count."""
    settings = OptimizerSettings(lr=1.0, scheduler=ExponentialLR, scheduler_kwargs={"gamma": 0.5})
    one, other = Schedule(settings, 10), Schedule(settings, 10)
    one.advance(3)
    assert (one.lr, other.lr) == (0.125, 1.0)


# ---------------------------------------------------------------------- settings of the second network


def settings_of(first: bool, **options: Any) -> OptimizerSettings:
    return OptimizerSettings.of(TrainerOptions(num_train_steps=1, batch_size=1, **options), first)


def test_the_second_network_follows_the_first_where_nothing_is_said() -> None:
    common = {"lr": 0.1, "warmup_steps": 5, "scheduler": "cosine", "scheduler_kwargs": {"eta_min": 0.01}, "wd": 0.3}
    assert settings_of(False, **common) == settings_of(True, **common)


def test_the_discr_options_are_the_second_networks_alone() -> None:
    own = {"discr_lr": 0.2, "discr_max_grad_norm": 9.0, "discr_warmup_steps": 0, "discr_scheduler": "StepLR"}
    chosen = {**own, "discr_scheduler_kwargs": {"step_size": 2}, "lr": 0.1, "warmup_steps": 5, "scheduler": "cosine"}
    first, second = settings_of(True, **chosen), settings_of(False, **chosen)
    assert (first.lr, first.warmup_steps, first.scheduler, first.max_grad_norm) == (0.1, 5, "cosine", 0.5)
    assert (second.lr, second.warmup_steps, second.scheduler, second.max_grad_norm) == (0.2, 0, "StepLR", 9.0)
    assert (first.scheduler_kwargs, second.scheduler_kwargs) == ({}, {"step_size": 2})


def test_keywords_for_the_second_schedule_alone_are_not_lost() -> None:
    second = settings_of(False, scheduler="cosine", discr_scheduler_kwargs={"eta_min": 0.5})
    assert (second.scheduler, second.scheduler_kwargs) == ("cosine", {"eta_min": 0.5})
