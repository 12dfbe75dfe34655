"""What the tests of pipelines share: how one is interrupted, and what it said and learned."""

import os
from collections.abc import Callable
from pathlib import Path

from typer.testing import Result

from helicon.cli import page
from helicon.engine.trainer import Trainer


def steps_taken(said: str) -> list[str]:
    return [line.split()[1].rstrip(":") for line in said.splitlines() if line.startswith("[")]


def losses(run: str) -> list[float]:
    return [value for _, value in page.metrics(Path(run))["loss"]]


def at_step(name: str, step: int, act: Callable[[], object]) -> Callable[[Trainer], object]:
    """A `train_step` of the trainer that does something else in the folder of this name, before that step."""
    take_step = Trainer.train_step

    def interrupted(trainer: Trainer) -> object:
        if (trainer.results_folder.name, trainer.step) == (name, step):
            act()
        return take_step(trainer)

    return interrupted


def gone_through(folder: Path, prepare: Callable[[], object], run: Callable[[], Result]) -> tuple[Path, str]:
    """The folder of a pipeline that went through there, and what it said."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        prepare()
        result = run()
    finally:
        os.chdir(before)
    assert result.exit_code == 0, result.output
    return folder, result.stdout
