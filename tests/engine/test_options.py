"""Options: one table of spellings, mistakes answered with the remedy, and a signature that tells the truth."""

import inspect
from dataclasses import MISSING, fields
from typing import Any, ClassVar

import jaxtyping
import pytest

from helicon.engine.options import ALIASES, TrainerOptions
from helicon.engine.trainer import Trainer
from toys import LineTask, ToyTrainer, line_task

NEEDED = {"num_train_steps": 1, "batch_size": 2}
NAMES = {entry.name for entry in fields(TrainerOptions)}
DEFAULTS = {
    e.name: e.default_factory() if e.default_factory is not MISSING else e.default for e in fields(TrainerOptions)
}


def options(**keywords: Any) -> TrainerOptions:
    return TrainerOptions.from_keywords({**NEEDED, **keywords}, {}, "SomeTrainer")


def other_than(name: str) -> Any:
    """A value of the option's type that is not its default."""
    default = DEFAULTS[name]
    if isinstance(default, bool):
        return not default
    if isinstance(default, (int, float)):
        return type(default)(default + 2)
    return {"project_dir": "logs"} if name == "accelerate_kwargs" else "elsewhere"


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_every_alias_sets_the_option_it_stands_for(alias: str, name: str) -> None:
    value = other_than(name)
    assert getattr(options(**{alias: value}), name) == value != DEFAULTS[name]
    assert alias not in NAMES, "an alias that is an option itself would hide it"


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_both_spellings_at_once_are_an_error(alias: str, name: str) -> None:
    value = other_than(name)
    with pytest.raises(TypeError, match=f"SomeTrainer was given '{name}' twice.*another spelling"):
        options(**{alias: value, name: value})


@pytest.mark.parametrize(
    ("wrong", "near"), [("learing_rate", "learning_rate"), ("warmup_step", "warmup_steps"), ("ema_betta", "ema_beta")]
)
def test_an_unknown_name_names_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(TypeError, match=f"SomeTrainer has no option '{wrong}'; did you mean '{near}'\\?"):
        options(**{wrong: 1})


def test_a_name_near_nothing_is_refused_without_a_guess() -> None:
    with pytest.raises(TypeError, match=r"has no option 'xyzzy'$"):
        options(xyzzy=1)


@pytest.mark.parametrize("left_out", sorted(NEEDED))
def test_what_has_no_default_must_be_given(left_out: str) -> None:
    keywords = {name: value for name, value in NEEDED.items() if name != left_out}
    with pytest.raises(TypeError, match=f"SomeTrainer needs {left_out}"):
        TrainerOptions.from_keywords(keywords, {}, "SomeTrainer")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 0),
        ("grad_accum_every", 0),
        ("num_train_steps", -1),
        ("log_every", 0),
        ("save_results_every", 0),
        ("save_model_every", 0),
        ("val_every", 0),
        ("val_num_batches", 0),
        ("warmup_steps", -1),
        ("discr_warmup_steps", -1),
        ("num_workers", -1),
        ("keep_last", -1),
        ("max_bad_steps", 0),
        ("ema_update_every", 0),
        ("ema_update_after_step", -1),
        ("ema_beta", 1.5),
        ("ema_beta", -0.1),
        ("valid_frac", 1.0),
        ("valid_frac", -0.1),
        ("lr", -1e-4),
        ("lr", float("nan")),
        ("discr_lr", -1e-4),
        ("initial_lr", -1e-4),
        ("wd", -0.1),
        ("max_grad_norm", 0.0),
        ("max_grad_norm", -1.0),
        ("discr_max_grad_norm", 0.0),
        ("mixed_precision", "fp32"),
        ("compile", "yes"),
        ("optimizer", "sgd"),
        ("save_results_every", None),
        ("save_model_every", None),
        ("num_train_steps", None),
        ("lr", "1e-4"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name_and_value(
    name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # a user's run has no type checker to catch it
    with pytest.raises(ValueError, match=f"{name}={value!r} must"):
        options(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("val_num_batches", None),
        ("val_every", None),
        ("discr_lr", None),
        ("max_grad_norm", None),
        ("keep_last", 0),
        ("num_train_steps", 0),
        ("compile", False),
    ],
)
def test_the_values_at_the_edge_of_a_range_are_allowed(name: str, value: Any) -> None:
    assert getattr(options(**{name: value}), name) == value


def test_a_trainers_defaults_stand_below_what_the_user_says() -> None:
    defaults = {"num_train_steps": 9, "batch_size": 3, "lr": 0.5, "wd": 0.25}
    chosen = TrainerOptions.from_keywords({"learning_rate": 0.125}, defaults, "SomeTrainer")
    assert (chosen.num_train_steps, chosen.batch_size, chosen.lr, chosen.wd) == (9, 3, 0.125, 0.25)
    assert chosen.betas == DEFAULTS["betas"]


def test_mappings_are_not_shared_between_two_sets_of_options() -> None:
    assert options().scheduler_kwargs is not options().scheduler_kwargs


class CodecTrainer(Trainer):
    name = "codec"
    defaults: ClassVar = {"batch_size": 7, "lr": 2e-4, "ema_beta": 0.9}

    def __init__(self, model: str, *, folder: str | None = None, num_train_steps: int, **options: Any):
        super().__init__(LineTask(model), num_train_steps=num_train_steps, **options)  # type: ignore[arg-type]


def test_the_signature_shows_own_keywords_and_every_option_with_the_classs_defaults() -> None:
    parameters = inspect.signature(CodecTrainer).parameters
    assert list(parameters)[:3] == ["model", "folder", "num_train_steps"]
    assert parameters["folder"].default is None
    assert parameters.keys() == {"model", "folder"} | NAMES
    assert parameters["num_train_steps"].default is inspect.Parameter.empty
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    shown = {name: parameters[name].default for name in NAMES - {"num_train_steps"}}
    expected = {name: value for name, value in DEFAULTS.items() if name != "num_train_steps"}
    assert shown == expected | CodecTrainer.defaults


def test_a_class_of_a_class_has_its_own_defaults_and_its_parents_keywords() -> None:
    class Smaller(CodecTrainer):
        defaults: ClassVar = {**CodecTrainer.defaults, "batch_size": 2}

    parameters = inspect.signature(Smaller).parameters
    assert list(parameters)[:2] == ["model", "folder"]
    assert (parameters["batch_size"].default, parameters["lr"].default) == (2, 2e-4)
    assert inspect.signature(CodecTrainer).parameters["batch_size"].default == 7


def test_a_trainer_takes_every_spelling_and_refuses_the_rest() -> None:
    trainer = ToyTrainer(line_task(), learning_rate=0.25, checkpoint_every=3, results_folder="run")
    assert (trainer.options.lr, trainer.options.save_model_every) == (0.25, 3)
    with pytest.raises(TypeError, match="ToyTrainer has no option 'bach_size'; did you mean 'batch_size'"):
        ToyTrainer(line_task(), bach_size=3)
