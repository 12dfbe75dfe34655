"""What can be trained: the only list. A new family adds one line to `entries` and a recipe.

Classes are named by text and imported when they are used, so that the list itself is light.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helicon.config import ConfigError, Constructor, Recipe, check, nearest, signature_without

if TYPE_CHECKING:
    from helicon.engine.trainer import Trainer
    from helicon.nn.network import Network


@dataclass(frozen=True)
class Entry:
    """One kind of model that can be trained from a recipe."""

    summary: str
    model: str  # module:class or function, gives the Network from the recipe's `model` section
    trainer: str  # module:class, a Trainer whose first argument is that network
    data: str  # module:function, gives the dataset from the recipe's `data` section
    debug_recipe: str  # trains in seconds on made-up data: what the contract test runs

    def recipe_sections(self) -> Mapping[str, Constructor]:
        """The constructors whose signatures are the schema of a recipe."""
        data, trainer = _named(self.data), _named(self.trainer)
        first = next(iter(signature_without(trainer).parameters))
        # What a program passes itself, and what the `data` section says already.
        given = {"dataset", "val_dataset", "train_dataloader", "val_dataloader", "folder", "accelerator", "ds_fields"}
        given |= signature_without(data).parameters.keys() - {"seed"}
        options = signature_without(trainer, first, *given)
        return {"model": _named(self.model), "data": data, "trainer": _with_aliases(options)}


entries: dict[str, Entry] = {
    "vqgan": Entry(
        summary="image tokenizer: pictures to a grid of codes and back",
        model="helicon.models.muse.vqgan:VQGanVAE",
        trainer="helicon.models.muse.trainers:VQGanVAETrainer",
        data="helicon.models.muse.trainers:training_images",
        debug_recipe="muse/vqgan-debug",
    ),
    "maskgit": Entry(
        summary="pictures from words: fills in the tokens of an image tokenizer",
        model="helicon.models.muse.trainers:build_maskgit",
        trainer="helicon.models.muse.trainers:MaskGitTrainer",
        data="helicon.models.muse.trainers:training_images",
        debug_recipe="muse/maskgit-debug",
    ),
}


def build_trainer(recipe: Recipe, *, results_folder: Path | None = None, resume: bool = False) -> "Trainer":
    """The trainer a recipe describes, with its network and its data."""
    from helicon.engine.runtime import seed_everything

    if recipe.trains not in entries:
        raise ConfigError(f"nothing that can be trained is called {recipe.trains!r}: {nearest(recipe.trains, entries)}")
    entry = entries[recipe.trains]
    sections = entry.recipe_sections()
    keywords = {name: check(constructor, getattr(recipe, name), name) for name, constructor in sections.items()}
    options = keywords["trainer"]
    if results_folder is not None:
        options["results_folder"] = results_folder
    options.setdefault("results_folder", Path("runs") / recipe.name.replace("/", "-"))
    if resume:
        options["resume"] = True
    seed_everything(options.get("seed", 0))
    network = _built("model", _named(entry.model), **keywords["model"])
    dataset = _built("data", _named(entry.data), **keywords["data"])
    return _built("trainer", _named(entry.trainer), network, dataset=dataset, **options)


def _built(section: str, constructor: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """What a section describes; a wrong keyword deep inside it (of a scheduler, a quantizer) is the user's to mend."""
    try:
        return constructor(*arguments, **keywords)
    except TypeError as error:
        raise ConfigError(f"the section {section} cannot be built: {error}") from error


def _with_aliases(options: inspect.Signature) -> inspect.Signature:
    """The options, also by the names other packages give them."""
    from helicon.engine.options import ALIASES

    known = options.parameters
    others = [known[name].replace(name=alias, default=None) for alias, name in ALIASES.items() if name in known]
    return options.replace(parameters=[*known.values(), *others])


def load(path: str | Path, use_ema: bool = True) -> "Network":
    """The network of a run, a checkpoint or a saved folder, with the stages it stands on."""
    from helicon.engine.checkpoint import resolve
    from helicon.nn.network import load_network

    return load_network(resolve(Path(path)), use_ema=use_ema)


def _named(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
