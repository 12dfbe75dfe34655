"""`helicon train RECIPE key=value ...`"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from helicon.config import ConfigError, Constructor, Recipe, load_recipe, nearest, setting_of, signature_without

RECIPE_FILE = "recipe.yaml"

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Changes to the recipe: trainer.lr=1e-4, or batch_size=4 where only one section has that key.",
    ),
]


def train(
    recipe: Annotated[str, typer.Argument(help="The name of a shipped recipe (see: helicon recipes), or a YAML file.")],
    overrides: Overrides = None,
    options: Annotated[
        bool, typer.Option("--options", help="List every key that can be set, with its value here, and stop.")
    ] = False,
) -> None:
    """Train what a recipe describes."""
    chosen = load_recipe(recipe, overrides or [], sections=sections)
    if options:
        typer.echo("\n".join(keys_of(chosen)))
        return
    run(chosen)


def keys_of(recipe: Recipe) -> Iterator[str]:
    """Every argument of a recipe's sections: `trainer.lr: float = 0.001`."""
    from helicon.engine.options import ALIASES

    for section, constructor in sections(recipe.trains).items():
        given = getattr(recipe, section)
        for name, parameter in signature_without(constructor).parameters.items():
            if name in ALIASES and name not in given:
                continue
            shown = parameter.replace(default=given[name]) if name in given else parameter
            yield f"{section}.{setting_of(shown)}"


def sections(trains: str) -> Mapping[str, Constructor]:
    """The constructors that a recipe's sections are checked against."""
    from helicon import registry

    if trains not in registry.entries:
        raise ConfigError(f"nothing that can be trained is called {trains!r}: {nearest(trains, registry.entries)}")
    return registry.entries[trains].recipe_sections()


def run(recipe: Recipe, results_folder: Path | None = None, resume: bool = False) -> Path:
    """Trains to the end, with the recipe beside the run (`helicon resume` reads it); returns the run's folder."""
    import torch

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
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"step {trainer.step + 1} does not fit into the GPU's memory: lower batch_size, and raise grad_accum_every by the same "
            f"factor to keep the samples of a step"
        ) from error
    return trainer.results_folder
