"""`helicon resume RUN [key=value ...]`"""

from pathlib import Path
from typing import Annotated

import typer

from helicon.cli.train import RECIPE_FILE, Overrides, run, sections
from helicon.config import load_recipe


def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of the run.")],
    overrides: Overrides = None,
) -> None:
    """Continue a run where its newest checkpoint left it."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no run at {folder}: give the folder that `helicon train` named")
    if not (folder / RECIPE_FILE).is_file():
        raise FileNotFoundError(f"{folder} has no {RECIPE_FILE}: it is not a run of `helicon train`")
    recipe = load_recipe(folder / RECIPE_FILE, overrides or [], sections=sections)
    if not any(folder.glob("checkpoints/step-*")):
        raise FileNotFoundError(f"{folder} has no checkpoint to resume from: start it again with helicon train")
    run(recipe, results_folder=folder, resume=True)
