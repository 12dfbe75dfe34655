"""`helicon train RECIPE key=value ...`"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from helicon.config import ConfigError, Constructor, Recipe, load_recipe, nearest

RECIPE_FILE = "recipe.yaml"

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Changes to the recipe: trainer.lr=1e-4, or batch_size=4 where it is clear."
    ),
]


def train(
    recipe: Annotated[str, typer.Argument(help="The name of a shipped recipe (see: helicon recipes), or a YAML file.")],
    overrides: Overrides = None,
) -> None:
    """Train what a recipe describes."""
    run(load_recipe(recipe, overrides or [], sections=sections))


def sections(trains: str) -> Mapping[str, Constructor]:
    """The constructors that a recipe's sections are checked against."""
    from helicon import registry

    if trains not in registry.entries:
        raise ConfigError(f"nothing that can be trained is called {trains!r}: {nearest(trains, registry.entries)}")
    return registry.entries[trains].recipe_sections()


def run(recipe: Recipe, results_folder: Path | None = None, resume: bool = False) -> Path:
    """Trains to the end, with the recipe beside the run (`helicon resume` reads it); returns the run's folder."""
    from helicon import registry
    from helicon.engine.checkpoint import locked
    from helicon.engine.trainer import TrainingDiverged

    trainer = registry.build_trainer(recipe, results_folder=results_folder, resume=resume)
    if trainer.is_main:
        once = ("resume", "force_clear_prev_results", "results_folder")  # of this start of the run, not of the run
        kept = {key: value for key, value in recipe.trainer.items() if key not in once}
        # Or a run that goes on elsewhere would be resumed with what is refused here.
        with locked(trainer.results_folder):
            replace(recipe, trainer=kept).dump(trainer.results_folder / RECIPE_FILE)
    try:
        trainer.train()
    except TrainingDiverged as error:
        raise ValueError(str(error)) from error
    return trainer.results_folder
