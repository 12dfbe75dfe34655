"""What a dataset is here: anything with a length and `dataset[index]`, and, where it can, a little more.

    fetch(index, generator)   the sample, with all its randomness from the generator (None: from the global one)
    keys                      one stable name per item (a relative path), by which a split is made
    augment                   True while samples are randomly changed; `unaugmented` gives the same data without
    raises BadFile            for an item that cannot be read: it is skipped, counted and listed

Datasets without `fetch` are called under seeded global generators, so even their augmentation replays.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from torch.utils.data import Dataset, Subset

from helicon.data.seeds import global_seed


class BadFile(Exception):
    """An item that cannot be read, and why."""

    def __init__(self, path: str | Path, reason: str):
        super().__init__(path, reason)
        self.path, self.reason = str(path), reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def read(dataset: Any, index: int, generator: torch.Generator) -> Any:
    """One sample, whose randomness depends on the generator alone."""
    if hasattr(dataset, "fetch"):
        return dataset.fetch(index, generator)
    with global_seed(generator.initial_seed()):
        return dataset[index]


def unaugmented(dataset: Any) -> Any:
    """The same data without its random changes; the dataset given stays as it was."""
    if hasattr(dataset, "unaugmented"):
        return dataset.unaugmented()
    plain = copy.copy(dataset)
    if isinstance(dataset, Subset):  # what torch's random_split gives
        plain.dataset = unaugmented(dataset.dataset)
    elif getattr(dataset, "augment", None) is True:
        plain.augment = False
    else:
        return dataset
    return plain


def keys_of(dataset: Any) -> Sequence[str] | None:
    """The stable names of the items, where the dataset has some (a method of that name, as dicts have, is none)."""
    keys = getattr(dataset, "keys", None)
    return None if keys is None or callable(keys) else keys


def refuse_choices(name: str, what: str, source: Any) -> NoReturn:
    """For what chooses among made-up samples where the samples are not made up."""
    raise ValueError(
        f"data.{name} chooses among made-up {what}, and the source is {source}: leave it out, or write data.{name}=null where a "
        "recipe has it"
    )


class View(Dataset[Any]):
    """A dataset seen through another: a choice of its items (`place`), a change of each sample (`change`), or both."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def keys(self) -> Sequence[str] | None:
        return keys_of(self.dataset)

    def place(self, index: int) -> int:
        """Which item of the dataset underneath is number `index` here."""
        return index

    def change(self, sample: Any, index: int, generator: torch.Generator | None) -> Any:
        """What the sample at `index` of the dataset underneath looks like here."""
        return sample

    def fetch(self, index: int, generator: torch.Generator | None = None) -> Any:
        place = self.place(index)
        sample = self.dataset[place] if generator is None else read(self.dataset, place, generator)
        return self.change(sample, place, generator)

    def __getitem__(self, index: int) -> Any:
        return self.fetch(index)

    def unaugmented(self) -> Self:
        view = copy.copy(self)
        view.dataset = unaugmented(self.dataset)
        if hasattr(view, "augment"):
            view.augment = False
        return view
