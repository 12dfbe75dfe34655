"""`helicon demo image`"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from helicon.cli.train import Overrides, run, sections
from helicon.config import load_recipe


class Kind(StrEnum):
    image = "image"


RECIPES = {Kind.image: "muse/vqgan-demo"}
SHOWN = {
    Kind.image: "pictures it never learned from, and below them what 256 codes keep of each (online, then averaged weights)"
}


def demo(
    kind: Annotated[Kind, typer.Argument(help="What to make.")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the run; runs/demo-KIND by default.")] = None,
) -> None:
    """Train a small model on made-up data in a few minutes, and say where to look."""
    recipe = load_recipe(RECIPES[kind], overrides or [], sections=sections)
    # resume: a demo that was interrupted goes on, and one that is done shows itself again.
    folder = run(recipe, results_folder=out or Path("runs") / f"demo-{kind}", resume=True)
    samples = sorted(folder.glob("samples/**/*.png"), key=lambda path: path.stat().st_mtime)
    if samples:
        typer.echo(f"Look at {samples[-1]}: {SHOWN[kind]}.")
    typer.echo(f"The numbers are in {folder / 'metrics.jsonl'}, the model in {folder / 'checkpoints'}.")
