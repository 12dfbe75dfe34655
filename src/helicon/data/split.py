"""Training and validation parts of a dataset, the same on every machine and hardly moved by new files.

Items are ranked by a hash of (seed, name), where the name is the relative path or, without one, the index. Items of one name (segments
of a recording, captions of a picture) stay together.
"""

import logging
import unicodedata
from collections.abc import Sequence
from typing import Any

import torch.utils.data

from helicon.data.dataset import View, keys_of, unaugmented
from helicon.data.seeds import mix

logger = logging.getLogger(__name__)


class Subset(View):
    """Some items of a dataset."""

    def __init__(self, dataset: Any, indices: Sequence[int]):
        super().__init__(dataset)
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def keys(self) -> Sequence[str] | None:
        keys = keys_of(self.dataset)
        return None if keys is None else [keys[index] for index in self.indices]

    def place(self, index: int) -> int:
        return self.indices[index]


def split(dataset: Any, valid_frac: float, seed: int) -> tuple[Subset, Subset | None]:
    """Training part, and validation part without augmentation (None if `valid_frac` is 0)."""
    keys = keys_of(dataset)
    train, valid = split_indices(range(len(dataset)) if keys is None else keys, valid_frac, seed)
    return Subset(dataset, train), Subset(unaugmented(dataset), valid) if valid else None


def split_indices(keys: Sequence[str | int], valid_frac: float, seed: int) -> tuple[list[int], list[int]]:
    """The positions in `keys` of the training and of the validation items, both ascending.

    Of the different names, validation has `valid_frac`, at least one, and leaves at least one. Where all items have one name, it has
    that part of the items; of a single item, both have it.
    """
    if not 0 <= valid_frac < 1:
        raise ValueError(f"valid_frac={valid_frac}: it must be at least 0 and less than 1")
    everything = list(range(len(keys)))
    if valid_frac == 0:
        return everything, []
    if len(keys) == 1:
        logger.warning("the dataset has one item: it is used for training and for validation")
        return everything, everything.copy()
    names = list(dict.fromkeys(keys))
    if len(names) == 1:
        num_valid = min(max(round(valid_frac * len(keys)), 1), len(keys) - 1)
        return everything[num_valid:], everything[:num_valid]
    num_valid = min(max(round(valid_frac * len(names)), 1), len(names) - 1)
    held_out = set(sorted(names, key=lambda name: _rank(seed, name))[:num_valid])
    places = lambda of_valid: [index for index in everything if (keys[index] in held_out) == of_valid]
    return places(False), places(True)


def _rank(seed: int, key: str | int) -> int:
    """(One file name may be composed differently by different file systems: é is one character or two.)"""
    return mix(seed, "split", unicodedata.normalize("NFC", key) if isinstance(key, str) else key)


def unwrapped(source: Any) -> tuple[Any, list[int] | None]:
    """A dataset without the choices that are made of it, and which of its items these leave; None: all.

    (A part of a dataset says nothing of the rate of its sounds.)
    """
    places = None
    while isinstance(source, torch.utils.data.Subset):
        places = [source.indices[place] for place in (range(len(source)) if places is None else places)]
        source = source.dataset
    return source, places
