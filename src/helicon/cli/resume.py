"""`helicon resume RUN [key=value ...]`"""

from pathlib import Path
from typing import Annotated

import typer

from helicon.cli.train import RECIPE_FILE, Overrides, run, sections
from helicon.config import ConfigError, load_recipe


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
    if "results_folder" in recipe.trainer:
        raise ConfigError(f"a run is resumed where it is: leave results_folder out, or move {folder} first")
    if not any(folder.glob("checkpoints/*")):
        typer.echo(f"{folder} has no checkpoint yet: it starts from the beginning.")
    run(recipe, results_folder=folder, resume=True)
