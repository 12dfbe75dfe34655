"""Samples as users write them (tuples, dicts, bare tensors) to samples as a family names them (dicts).

A family declares its fields, each with what fits it. A dict is checked; a tuple is named by the declared `ds_fields`,
or else by the one assignment of its entries to fields that fits (`X_lengths` only beside X). Where there is none, or more than one, the error lists
what was found.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from helicon.data.dataset import View


@dataclass(frozen=True)
class Field:
    """One entry of a family's samples."""

    fits: Callable[[Any], bool]  # not a lambda: datasets are pickled where processes that read data are spawned
    looks_like: str  # for the error message
    is_required: bool = True


def is_text(value: Any) -> bool:
    # (torch's own collate makes a list of the strings of dicts, and a tuple of those of tuples.)
    return isinstance(value, str) or (isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value))


def is_label(value: Any) -> bool:
    is_scalar = isinstance(value, Tensor) and value.ndim == 0 and not value.is_floating_point()
    return is_scalar or (isinstance(value, (int, np.integer)) and not isinstance(value, bool))


def is_tensor(is_float: bool, *dimensions: int, width: int | None = None) -> Callable[[Any], bool]:
    """Whether a value is a tensor of floats (or of whole numbers) with one of these numbers of dimensions, and so wide."""
    return partial(_is_tensor, is_float, dimensions, width)


def _is_tensor(is_float: bool, dimensions: tuple[int, ...], width: int | None, value: Any) -> bool:
    is_one = isinstance(value, Tensor) and value.is_floating_point() == is_float and value.ndim in dimensions
    return is_one and (width is None or value.shape[-1] == width)


def is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def are_flags(value: Any) -> bool:
    """Whether a value is one flag for each row of a batch."""
    return isinstance(value, Tensor) and value.ndim == 1 and value.dtype == torch.bool


def by_name_only(value: Any) -> bool:
    """Of an entry that looks like another: it is never found by its type."""
    return False


TEXT = Field(is_text, "a string or a list of strings")
LABEL = Field(is_label, "an integer")


class Routed(View):
    """A dataset whose samples are dicts with the names of `fields`."""

    def __init__(self, dataset: Any, fields: Mapping[str, Field], ds_fields: Sequence[str] | None = None):
        super().__init__(dataset)
        self.fields, self.ds_fields = fields, ds_fields

    def change(self, sample: Any, index: int, generator: torch.Generator | None) -> dict[str, Any]:
        return route(sample, self.fields, self.ds_fields)


def route(
    sample: Any, fields: Mapping[str, Field], ds_fields: Sequence[str] | None = None, in_order: Sequence[str] = ()
) -> dict[str, Any]:
    """The sample as a dict; an entry that `ds_fields` names "_" is left out. Fields that look alike and come `in_order` are told by that."""
    if isinstance(sample, Mapping):
        return _checked(dict(sample), fields)
    is_one = not isinstance(sample, (tuple, list)) or (isinstance(sample, list) and is_text(sample))
    values: Sequence[Any] = [sample] if is_one else sample
    if ds_fields is not None:
        if len(values) != len(ds_fields):
            raise ValueError(
                f"ds_fields={tuple(ds_fields)} names {len(ds_fields)} entries, and a sample has {len(values)}: "
                f"{_found(values)}"
            )
        named = zip(ds_fields, values, strict=True)
        return _checked({name: value for name, value in named if name != "_"}, fields)
    ways = (way for way in _assignments(values, fields) if _has_lengths_in_order(way) and _is_in_order(way, in_order))
    way, other = next(ways, None), next(ways, None)
    if way is None or other is not None:
        problem = (
            "the entries of a sample fit no fields"
            if way is None
            else "the entries of a sample fit the fields in more than one way"
        )
        raise ValueError(
            f"{problem}: found {_found(values)}; the fields are {_described(fields)}; "
            f'name the entries in order with ds_fields=(...), "_" for one to leave out'
        )
    return way


def _checked(sample: dict[str, Any], fields: Mapping[str, Field]) -> dict[str, Any]:
    for name in sample:
        if name not in fields:
            near = difflib.get_close_matches(str(name), fields, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the fields are {_described(fields)}"
            raise ValueError(f"a sample has an entry {name!r}, which is not known here: {hint}")
    missing = [name for name, field in fields.items() if field.is_required and name not in sample]
    if missing:
        raise ValueError(f"a sample lacks {', '.join(missing)}; it has {', '.join(map(str, sample)) or 'nothing'}")
    return sample


def _assignments(values: Sequence[Any], fields: Mapping[str, Field]) -> Iterator[dict[str, Any]]:
    """Every way to give each value a field of its own that it fits, with no required field left over."""
    if not values:
        if not any(field.is_required for field in fields.values()):
            yield {}
        return
    for name, field in fields.items():
        if field.fits(values[0]):
            rest = {other: fields[other] for other in fields if other != name}
            for way in _assignments(values[1:], rest):
                yield {name: values[0], **way}


def _has_lengths_in_order(way: Mapping[str, Any]) -> bool:
    """Lengths are of entries that are there, and come in the order of these."""
    of = [name.removesuffix("_lengths") for name in way if name.endswith("_lengths")]
    return of == [name for name in way if f"{name}_lengths" in way]


def _is_in_order(way: Mapping[str, Any], names: Sequence[str]) -> bool:
    return [name for name in way if name in names] == [name for name in names if name in way]


def _found(values: Sequence[Any]) -> str:
    def look(value: Any) -> str:
        if isinstance(value, (Tensor, np.ndarray)):
            return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        return type(value).__name__

    return ", ".join(map(look, values)) or "nothing"


def _described(fields: Mapping[str, Field]) -> str:
    return ", ".join(
        f"{name} ({field.looks_like}{'' if field.is_required else '; optional'})" for name, field in fields.items()
    )
