"""Recipes, overrides and the check against constructors' signatures."""

import functools
import inspect
import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from jaxtyping import Float
from torch import Tensor, nn

from helicon.config import (
    ConfigError,
    Recipe,
    argument_texts,
    check,
    load_recipe,
    recipe_names,
    setting_of,
    signature_without,
)
from helicon.nn.network import Network

RECIPE = """\
# A tiny tokenizer of pictures.
# Command: helicon train toy/tiny
# Expected time: 3 s
#
# Result: loss under 0.1

trains: toy
model: {dim: 32, vq_kwargs: {decay: 0.8}}  # not the head
data:
  source: synthetic
trainer: {num_train_steps: 1000, lr: 3e-4, betas: [0.9, 0.99], mixed_precision: no}
"""


class Model(Network):
    def __init__(self, dim: int, *, channels: tuple[int, ...] = (1, 2), vq_kwargs: dict[str, Any] | None = None):
        super().__init__()


def data(source: str = "synthetic", folder: str | Path | None = None, seed: int = 0) -> None: ...


class Trainer:
    def __init__(
        self,
        model: nn.Module,
        *,
        num_train_steps: int,
        batch_size: int = 1,
        seed: int = 0,
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.99),
        mixed_precision: Literal["auto", "no", "bf16"] = "auto",
        use_ema: bool = True,
        compile: bool | Literal["auto"] = "auto",
        max_grad_norm: float | None = None,
        **others: Any,
    ): ...


def sections(trains: str) -> Mapping[str, Callable[..., Any] | inspect.Signature]:
    assert trains == "toy"
    return {"model": Model, "data": data, "trainer": signature_without(Trainer, "model")}


@pytest.fixture
def recipes(tmp_path: Path) -> Path:
    (tmp_path / "recipes" / "toy").mkdir(parents=True)
    (tmp_path / "recipes" / "toy" / "tiny.yaml").write_text(RECIPE)
    return tmp_path / "recipes"


def load(recipes: Path, *overrides: str) -> Recipe:
    return load_recipe("toy/tiny", overrides, sections=sections, search=[recipes])


def written(folder: Path, text: str) -> Path:
    path = folder / "written.yaml"
    path.write_text(text)
    return path


def test_a_recipe_is_found_by_name_and_by_path(recipes: Path) -> None:
    recipe = load(recipes)
    assert recipe == load_recipe(recipes / "toy" / "tiny.yaml", sections=sections, search=[recipes])
    assert (recipe.name, recipe.trains, recipe.path) == ("toy/tiny", "toy", recipes / "toy" / "tiny.yaml")
    assert recipe.model == {"dim": 32, "vq_kwargs": {"decay": 0.8}}
    assert recipe.trainer == {
        "num_train_steps": 1000,
        "lr": 3e-4,
        "betas": [0.9, 0.99],
        "mixed_precision": "no",
    }
    assert recipe_names([recipes, recipes / "absent"]) == ["toy/tiny"]
    assert load_recipe(recipes / "toy" / "tiny.yaml", search=[]).name == "tiny"


def test_the_head_comment_describes_the_recipe(recipes: Path) -> None:
    recipe = load(recipes)
    assert recipe.summary == "A tiny tokenizer of pictures."
    assert recipe.description[3] == ""
    assert (recipe.note("command"), recipe.note("time")) == ("helicon train toy/tiny", "3 s")
    assert recipe.note("cost") == ""


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("model.dim=64", "model", "dim", 64),
        ("trainer.lr=1e-4", "trainer", "lr", 1e-4),
        ("lr=1E4", "trainer", "lr", 1e4),
        ("batch_size=4", "trainer", "batch_size", 4),
        ("num_train_steps=1_000", "trainer", "num_train_steps", 1000),
        ("mixed_precision=no", "trainer", "mixed_precision", "no"),
        ("use_ema=false", "trainer", "use_ema", False),
        ("max_grad_norm=null", "trainer", "max_grad_norm", None),
        ("max_grad_norm=.inf", "trainer", "max_grad_norm", math.inf),
        ("folder=2024-01-01", "data", "folder", "2024-01-01"),
        ("folder=12:30", "data", "folder", "12:30"),
        ("folder=off", "data", "folder", "off"),
        ("folder=a=b", "data", "folder", "a=b"),
        ("folder='7'", "data", "folder", "7"),
        ("folder=", "data", "folder", None),
        ("channels=[3, 5]", "model", "channels", [3, 5]),
        ("vq_kwargs.decay=0.9", "model", "vq_kwargs", {"decay": 0.9}),
        ("model.vq_kwargs.a.b=x", "model", "vq_kwargs", {"decay": 0.8, "a": {"b": "x"}}),
    ],
)
def test_overrides(recipes: Path, override: str, section: str, key: str, value: Any) -> None:
    found = getattr(load(recipes, override), section)[key]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("batch_sise=4", "model, data, trainer have no argument 'batch_sise': did you mean trainer.batch_size?"),
        ("trainer.batch_sise=4", "trainer has no argument 'batch_sise': did you mean batch_size?"),
        ("model.zzzz=4", "model has no argument 'zzzz': it knows dim, channels, vq_kwargs"),
        ("seed=4", "seed could be data.seed or trainer.seed: write which"),
        ("batch_size=abc", "trainer.batch_size wants int, not 'abc'"),
        ("batch_size=2.5", "trainer.batch_size wants int, not 2.5"),
        ("batch_size=true", "trainer.batch_size wants int, not True"),
        ("batch_size='4'", "trainer.batch_size wants int, not '4'"),
        ("batch_size=null", "trainer.batch_size wants int, not null"),
        ("use_ema=off", "trainer.use_ema wants true or false, not 'off'"),
        ("compile=maybe", "trainer.compile wants true or false or auto, not 'maybe'"),
        ("max_grad_norm=x", "trainer.max_grad_norm wants float or null, not 'x'"),
        ("mixed_precision=bf61", "trainer.mixed_precision wants auto or no or bf16, not 'bf61'"),
        ("channels=[1, x]", "model.channels wants tuple[int, ...], not [1, 'x']"),
        ("folder=7", "data.folder wants str or Path or null, not 7"),
        ("batch_size", "'batch_size' is no override: write key=value, as in trainer.batch_size=4"),
        ("model..dim=1", "'model..dim=1' is no override: write key=value, as in trainer.batch_size=4"),
        ("=1", "'=1' is no override: write key=value, as in trainer.batch_size=4"),
        ("model={dim: 1}", "'model={dim: 1}' replaces a whole section: write model.<argument>=<value>"),
        ("model.dim.x=1", "'model.dim.x=1' reaches into model.dim, which is 32 and has no parts"),
        ("betas=[0.9", "betas=[0.9: expected ',' or ']', but got '<stream end>'"),
        ("trains=other", "model, data, trainer have no argument 'trains': did you mean trainer.num_train_steps?"),
    ],
)
def test_wrong_overrides_are_told_in_one_sentence(recipes: Path, override: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(recipes, override)
    assert str(error.value) == sentence


def test_without_constructors_an_override_names_its_section(recipes: Path) -> None:
    assert load_recipe("toy/tiny", ["model.other=1"], search=[recipes]).model["other"] == 1
    with pytest.raises(
        ConfigError, match=r"^other names no section: write model\.other or data\.other or trainer\.other$"
    ):
        load_recipe("toy/tiny", ["other=1"], search=[recipes])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("trains: toy\nmodel: {dim: 1}\nmodel: {dim: 2}\n", ", line 3: the key 'model' stands twice"),
        ("trains: toy\nmodel:\n  dim: 1\n  dim: 2\n", ", line 4: the key 'dim' stands twice"),
        ("trains: toy\nmodel: {dim: 1\ndata: {}\n", ", line 3: expected ',' or '}', but got ':'"),
        ("trains: toy\nmodel: &m {dim: 1}\ndata: *m\n", ", line 3: an alias (*name) stands here: write the value out"),
        ("trains: toy\nmodel: {1: 1}\n", ", line 2: the key '1' is not a name"),
        ("trains: toy\nmodel: {[a]: 1}\n", ", line 2: the key here is not a name"),
        ("trains: toy\nmodel: !!python/name:os.system\n", ", line 2: could not determine a constructor"),
        ("trains: toy\n---\ntrains: toy\n", ", line 2: but found another document"),
        ("- trains\n", " holds a list, not a recipe: it needs trains, model, data and trainer"),
        ("", " holds nothing, not a recipe: it needs trains, model, data and trainer"),
        ("model: {}\n", " needs `trains: <a name>`"),
        ("trains: 5\n", " needs `trains: <a name>`"),
        ("trains: toy\nmodle: {dim: 1}\n", " has an unknown section 'modle': did you mean model?"),
        ("trains: toy\nmodel: 5\n", ": model is 5, not keyword arguments"),
        (
            "trains: toy\nmodel: \x01\n",
            " is not YAML: unacceptable character #x0001: special characters are not allowed",
        ),
        ("trains: " + "[" * 5000, " is not YAML: maximum recursion depth exceeded"),
        ("trains: toy\n", "model needs dim: add `model.dim=<value>`"),
    ],
)
def test_malformed_recipes_are_told_in_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load_recipe(path, sections=sections)
    message = str(error.value)
    assert message.removeprefix(str(path)).startswith(sentence), message
    assert "\n" not in message


def test_files_that_cannot_be_read(tmp_path: Path, recipes: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_recipe(tmp_path / "absent.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"trains: caf\xe9\n")
    with pytest.raises(ConfigError, match="is not a text file in UTF-8"):
        load_recipe(tmp_path / "latin.yaml")
    with pytest.raises(ConfigError, match=r"there is no recipe 'zzz': `helicon recipes` lists them\."):
        load_recipe("zzz", search=[recipes])
    with pytest.raises(ConfigError, match=r"there is no recipe 'toy/tinny': did you mean toy/tiny?"):
        load_recipe("toy/tinny", search=[recipes])


def test_a_dumped_recipe_loads_back_equal(recipes: Path, tmp_path: Path) -> None:
    recipe = load(
        recipes, "lr=1e-5", "folder='1e-4'", "model.vq_kwargs.words=[no, 'true', '1_000', ü, '2024-01-01', '']"
    )
    recipe.dump(tmp_path / "recipe.yaml")
    again = load_recipe(tmp_path / "recipe.yaml", sections=sections)
    assert again == recipe
    assert again.data["folder"] == "1e-4" and again.trainer["lr"] == 1e-5
    text = (tmp_path / "recipe.yaml").read_text()
    assert text.splitlines()[:5] == RECIPE.splitlines()[:5]
    again.dump(tmp_path / "again.yaml")
    assert (tmp_path / "again.yaml").read_text() == text


def test_only_plain_data_is_dumped(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="recipe toy cannot be written: cannot represent an object"):
        Recipe("toy", "toy", model={"net": nn.ReLU()}).dump(tmp_path / "recipe.yaml")


def test_a_recipe_shares_nothing_with_the_next(recipes: Path) -> None:
    load(recipes).model["vq_kwargs"]["decay"] = 0.1
    assert load(recipes).model["vq_kwargs"]["decay"] == 0.8


@dataclass
class Options:
    width: int = 1


def test_check_converts_where_nothing_is_lost() -> None:
    def build(
        a: float, b: tuple[int, ...], c: int | None, d: Path, e: tuple[int, int] | int, f: Options, g: set[str], h=None
    ) -> None: ...

    given = {"a": 1, "b": [1, 2], "c": 1e5, "d": "x", "e": [3, 4], "f": {"width": 2}, "g": ["y"], "h": {"k": 1}}
    got = check(build, given, "model")
    assert got == {
        "a": 1.0,
        "b": (1, 2),
        "c": 100_000,
        "d": Path("x"),
        "e": (3, 4),
        "f": Options(2),
        "g": {"y"},
        "h": {"k": 1},
    }
    assert isinstance(got["a"], float) and isinstance(got["c"], int)
    assert check(build, {**given, "c": None}, "model")["c"] is None


def test_check_takes_objects_a_program_passes() -> None:
    network = nn.ReLU()
    assert check(Trainer, {"model": network, "num_train_steps": 1}, "trainer")["model"] is network
    with pytest.raises(ConfigError, match=r"trainer.model wants Module, not 'a name'"):
        check(Trainer, {"model": "a name", "num_train_steps": 1}, "trainer")


def test_annotations_that_cannot_be_checked_do_not_break_it() -> None:
    def build(
        a: "int", b: "NotImported", c: Float[Tensor, "n d"] | None = None, d: list["NotImported"] | None = None
    ): ...

    assert check(build, {"a": 1, "b": "x", "d": [1]}, "model") == {"a": 1, "b": "x", "d": [1]}
    with pytest.raises(ConfigError, match=r"model.a wants int, not 'x'"):
        check(build, {"a": "x", "b": 1}, "model")
    with pytest.raises(ConfigError, match=r"model.c wants"):
        check(build, {"a": 1, "b": 1, "c": [1.0]}, "model")


def test_what_a_constructor_accepts_is_its_signature() -> None:
    def build(dim: int, /, width: int = 1, **others: Any) -> None: ...

    with pytest.raises(ConfigError, match="model has no argument 'others'"):
        check(build, {"others": 1}, "model")
    with pytest.raises(ConfigError, match="model has no argument 'dim'"):
        check(build, {"dim": 1}, "model")
    build.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter("depth", inspect.Parameter.KEYWORD_ONLY, annotation=int)]
    )
    assert check(build, {"depth": 3}, "model") == {"depth": 3}
    assert check(functools.partial(data, source="x"), {"seed": 1}, "data") == {"seed": 1}
    assert list(signature_without(Trainer, "model", "seed").parameters)[:2] == ["num_train_steps", "batch_size"]


def test_without_pydantic_names_are_still_checked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "pydantic", None)
    with caplog.at_level(logging.WARNING):
        assert check(data, {"seed": "x"}, "data") == {"seed": "x"}
    assert "pydantic is not installed" in caplog.text
    with pytest.raises(ConfigError, match=r"did you mean seed?"):
        check(data, {"sede": 1}, "data")


class Base:
    def __init__(self, first: int, second: str = "x"):
        """
        Args:
            first, second: what both
                are.
        """


class Derived(Base):
    def __init__(self, second: str, third: bool = True):
        """Something else: no argument.

        Args:
            second: another.
            The others: see `Base`.
        """


def test_docstrings_tell_of_arguments_also_those_of_a_base_class() -> None:
    assert argument_texts(Base) == {"first": "what both are.", "second": "what both are."}
    told = argument_texts(Derived)
    assert (told["first"], told["second"]) == ("what both are.", "another.") and "third" not in told


def test_a_setting_is_written_as_a_recipe_has_it() -> None:
    def build(
        size: Sequence[int] | None = None, *, kind: Literal["a", "b"] = "a", flag: bool = False, rest=(1, 2)
    ) -> None: ...

    listed = [setting_of(parameter) for parameter in signature_without(build).parameters.values()]
    assert listed == [
        "size: Sequence[int] or null = null",
        'kind: a or b = "a"',
        "flag: true or false = false",
        "rest = [1, 2]",
    ]
