"""The commands, on a toy family that is registered for these tests and trained by the real loop."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import helicon
from helicon import config, registry
from helicon.cli import app
from helicon.config import Recipe, load_recipe, signature_without
from helicon.engine.checkpoint import locked
from toys import Line, LineTask, Points, ToyTrainer

RECIPE = """\
# A line through points.
# Command: helicon train toy.yaml
# Time: a second
trains: toy
model: {dim: 3}
data: {count: 16}
trainer: {num_train_steps: 4, batch_size: 4, results_folder: runs/toy}
"""


def build_toy(recipe: Recipe, *, results_folder: Path | None = None, resume: bool = False) -> ToyTrainer:
    torch.manual_seed(0)
    options: dict[str, Any] = {**recipe.trainer, "resume": resume}
    if results_folder is not None:
        options["results_folder"] = results_folder
    return ToyTrainer(LineTask(Line(**recipe.model)), dataset=Points(**recipe.data), **options)


def toy_sections() -> Mapping[str, Any]:
    return {"model": Line, "data": Points, "trainer": signature_without(ToyTrainer, "task")}


TOY = SimpleNamespace(recipe_sections=toy_sections, summary="lines through points")


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a recipe of the toy family."""
    monkeypatch.setattr(registry, "entries", {"toy": TOY}, raising=False)
    monkeypatch.setattr(registry, "build_trainer", build_toy, raising=False)
    monkeypatch.delenv("HELICON_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.yaml").write_text(RECIPE)
    return tmp_path


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def assert_one_sentence(result: Result, sentence: str, status: int = 1) -> None:
    assert (result.exit_code, result.stderr.strip()) == (status, f"error: {sentence}")


def losses(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def test_train_with_overrides(toy: Path) -> None:
    result = call("train", "toy.yaml", "num_train_steps=3", "model.width=7", "lr=1e-3", "results_folder=here")
    assert result.exit_code == 0, result.output
    assert "here" in result.stdout
    recipe = load_recipe(toy / "here" / "recipe.yaml")
    assert (recipe.model, recipe.trainer["num_train_steps"], recipe.trainer["lr"]) == ({"dim": 3, "width": 7}, 3, 1e-3)
    assert recipe.summary == "A line through points."
    assert helicon.load(toy / "here").layers[0].weight.shape == (7, 3)


def test_a_resume_that_is_refused_leaves_the_recipe_of_the_run_that_goes_on(toy: Path) -> None:
    call("train", "toy.yaml")
    before = Path("runs/toy/recipe.yaml").read_text()
    with locked(Path("runs/toy")):
        result = call("resume", "runs/toy", "num_train_steps=6", "lr=0.5")
    assert result.exit_code == 1 and "another process is training in runs/toy" in result.stderr
    assert Path("runs/toy/recipe.yaml").read_text() == before


def test_resume_continues_the_run_as_if_it_had_not_stopped(toy: Path) -> None:
    assert call("train", "toy.yaml", "log_every=1", "num_train_steps=6", "results_folder=whole").exit_code == 0
    assert call("train", "toy.yaml", "log_every=1").exit_code == 0
    result = call("resume", "runs/toy", "num_train_steps=6")
    assert result.exit_code == 0, result.output
    assert losses(toy / "runs/toy") == losses(toy / "whole") and len(losses(toy / "whole")) == 6
    assert load_recipe(toy / "runs/toy/recipe.yaml").trainer["num_train_steps"] == 6


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "toy.yaml", "batch_sise=2"], "model, data, trainer have no argument 'batch_sise': did you mean trainer.batch_size?"),
        (["train", "toy.yaml", "batch_size=two"], "trainer.batch_size wants int, not 'two'"),
        (["train", "toy.yaml", "batch_size=0"], "batch_size=0 must be at least 1"),
        (["train", "absent.yaml"], "absent.yaml cannot be read: No such file or directory"),
        (["train", "other.yaml"], "nothing that can be trained is called 'tay': did you mean toy?"),
        (["resume", "absent"], "there is no run at absent: give the folder that `helicon train` named"),
        (["resume", "empty"], "empty has no recipe.yaml: it is not a run of `helicon train`"),
        (["resume", "begun", "results_folder=x"], "a run is resumed where it is: leave results_folder out, or move begun first"),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_one_sentence(toy: Path, arguments: list[str], sentence: str) -> None:
    (toy / "other.yaml").write_text(RECIPE.replace("trains: toy", "trains: tay"))
    (toy / "empty").mkdir()
    (toy / "begun").mkdir()
    (toy / "begun" / "recipe.yaml").write_text(RECIPE)
    assert_one_sentence(call(*arguments), sentence)


def test_a_folder_in_use_is_not_overwritten(toy: Path) -> None:
    assert call("train", "toy.yaml").exit_code == 0
    before = (toy / "runs/toy/recipe.yaml").read_bytes()
    result = call("train", "toy.yaml", "lr=0.5")
    assert result.exit_code == 1 and result.stderr.count("\n") == 1 and "resume=True" in result.stderr
    assert (toy / "runs/toy/recipe.yaml").read_bytes() == before


def test_a_run_that_diverges_ends_in_one_sentence(toy: Path) -> None:
    result = call("train", "toy.yaml", "lr=1e30", "max_grad_norm=null", "num_train_steps=50", "max_bad_steps=2")
    assert result.exit_code == 1 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


def test_a_full_gpu_is_told_with_the_remedy(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(LineTask, "forward", fill)
    result = call("train", "toy.yaml")
    assert result.exit_code == 1 and result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: step 1 does not fit into the GPU's memory: lower batch_size")


def test_a_run_that_a_full_disk_kept_from_beginning_begins_later(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_text

    def fill(path: Path, *rest: Any, **options: Any) -> int:
        write(path, "# only a par")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", fill)
        result = call("train", "toy.yaml")
    assert_one_sentence(result, "No space left on device; free some space and give the same command again")
    Path("runs/toy/.recipe.yaml.partial").touch()  # what a kill leaves
    assert call("train", "toy.yaml").exit_code == 0


def test_errors_of_the_system_name_the_file_without_a_number(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: Any, **options: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "write_text", refuse)
    assert_one_sentence(call("train", "toy.yaml"), "runs/toy/.recipe.yaml.partial: Permission denied")


def test_a_place_that_cannot_be_written_is_told_with_the_remedy(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remedy = "; choose another results_folder (to go on with a run, copy it there)"
    Path("file").touch()
    folder_refused = call("train", "toy.yaml", "results_folder=file/new")
    assert_one_sentence(folder_refused, f"file/new cannot be written: Not a directory{remedy}")
    assert call("train", "toy.yaml").exit_code == 0
    opened = Path.open

    def refuse(path: Path, mode: str = "r", *rest: Any, **options: Any) -> Any:
        if mode == "w" and "runs" in path.parts:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return opened(path, mode, *rest, **options)

    monkeypatch.setattr(Path, "open", refuse)
    result = call("resume", "runs/toy", "num_train_steps=6")
    assert result.stderr.splitlines()[-1] == f"error: runs/toy cannot be written: Read-only file system{remedy}"


def test_the_keys_of_a_recipe_are_listed_with_their_values(toy: Path) -> None:
    result = call("train", "toy.yaml", "--options", "lr=1e-3")
    assert result.exit_code == 0 and not Path("runs").exists()
    lines = result.stdout.splitlines()
    assert "model.dim: int = 3" in lines and "data.count: int = 16" in lines and "trainer.lr: float = 0.001" in lines
    assert "trainer.warmup_steps: int = 0" in lines and not any("learning_rate" in line for line in lines)


def test_the_version_is_told() -> None:
    assert call("--version").stdout == f"helicon {helicon.__version__}\n"


@pytest.mark.parametrize("arguments", [["--debug", "train", "absent.yaml"], ["train", "absent.yaml"]])
def test_debug_shows_the_traceback(toy: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    if "--debug" not in arguments:
        monkeypatch.setenv("HELICON_DEBUG", "1")
    result = call(*arguments)
    assert result.exit_code == 1 and isinstance(result.exception, ValueError) and result.stderr == ""


def test_a_wrong_command_line_has_status_two(toy: Path) -> None:
    assert [call(*words).exit_code for words in (["tarin"], ["train"], ["train", "--fast"], ["demo", "smell"])] == [
        2
    ] * 4


def test_defects_keep_their_traceback(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "build_trainer", lambda recipe, **options: 1 / 0, raising=False)
    assert isinstance(call("train", "toy.yaml").exception, ZeroDivisionError)


@pytest.fixture
def shipped(toy: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of shipped recipes that holds the demo's."""
    (toy / "shipped" / "muse").mkdir(parents=True)
    (toy / "shipped" / "muse" / "vqgan-demo.yaml").write_text(RECIPE)
    monkeypatch.setattr(config, "RECIPE_FOLDERS", (toy / "shipped",))
    return toy / "shipped"


def test_recipes_lists_what_is_shipped(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    (shipped / "muse" / "vqgan.yaml").write_text(RECIPE)
    result = call("recipes")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[:3] == ["muse", "  lines through points", "    muse/vqgan  muse/vqgan-demo"]


def test_recipes_tells_more_of_a_family_or_of_one_recipe(shipped: Path) -> None:
    (shipped / "other").mkdir()
    (shipped / "other" / "vqgan.yaml").write_text(RECIPE)
    for asked in ("muse", "muse/vqgan-demo"):
        result = call("recipes", asked)
        assert result.exit_code == 0
        lines = ["A line through points.", "Command: helicon train toy.yaml", "Time: a second"]
        assert result.stdout.splitlines() == ["muse/vqgan-demo", *(f"  {line}" for line in lines)]
    assert_one_sentence(call("recipes", "mouse"), "there is no family and no recipe 'mouse': did you mean muse?")


def helicon_process(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(["-c", code] if code else ["-m", "helicon", *arguments])]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "100"}, check=False)


def test_help_loads_nothing_heavy() -> None:
    code = """
import sys
from helicon.cli import main
sys.argv = ["helicon", "--help"]
try:
    main()
except SystemExit as end:
    assert not end.code
heavy = {"torch", "transformers", "numpy", "pydantic", "accelerate", "huggingface_hub"} & sys.modules.keys()
assert not heavy, heavy
"""
    done = helicon_process(code=code)
    assert done.returncode == 0, done.stderr
    assert all(verb in done.stdout for verb in ("train", "resume", "recipes", "demo"))


def test_the_module_is_the_command(tmp_path: Path) -> None:
    done = helicon_process("resume", str(tmp_path / "absent"))
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr == f"error: there is no run at {tmp_path / 'absent'}: give the folder that `helicon train` named\n"
    )
