"""Captions beside media of any kind. Where the text comes from is one thing, how the media are read another.

A source of captions is a sequence of strings, one an item: a column of a manifest, a text file beside each file
(`x.txt` beside `x.png`), or the name of the folder a file is in.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from helicon.data.dataset import BadFile, View
from helicon.data.files import Files

CaptionSource = Literal["column", "beside", "folder"]


@runtime_checkable
class Captions(Protocol):
    """One string an item; an item whose text cannot be read, or says nothing, raises BadFile."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> str: ...


@dataclass(frozen=True)
class ColumnCaptions:
    """The texts in one column of a manifest."""

    rows: Any  # rows[index][column]: a list of dicts, or a Hugging Face dataset
    column: str
    keys: Sequence[str] | None = None  # what to call the items that have none

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> str:
        text = self.rows[index][self.column]
        if not isinstance(text, str) or not text.strip():
            name = self.keys[index] if self.keys else f"row {index}"
            raise BadFile(name, f"its column {self.column} holds no text, but {text!r}")
        return text


@dataclass(frozen=True)
class CaptionsBeside:
    """`x.txt` beside `x.png`: read when it is asked for."""

    paths: Sequence[Path]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> str:
        path = self.paths[index].with_suffix(".txt")
        try:
            text = path.read_text(encoding="utf-8-sig").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = "it is not in UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror or str(error)
            raise BadFile(self.paths[index], f"its caption {path.name} cannot be read ({why})") from error
        if not text:
            raise BadFile(self.paths[index], f"its caption {path.name} is empty")
        return text


@dataclass(frozen=True)
class FolderCaptions:
    """The name of the folder a file is in: "red_fox/001.png" is "red fox"."""

    keys: Sequence[str]

    def __post_init__(self) -> None:
        for key in self.keys:
            if not Path(key).parent.name:
                raise ValueError(f"{key} is in no subfolder, so no folder's name can be its caption or class")

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> str:
        return Path(self.keys[index]).parent.name.replace("_", " ")


def captions_of(files: Files, source: CaptionSource, text_column: str = "text") -> Captions:
    """The captions of the files of a folder or a manifest."""
    if source == "column":
        if not files.rows:
            raise ValueError('a folder has no columns: use captions="beside" or "folder", or give a manifest')
        return ColumnCaptions(files.rows, text_column, files.keys)
    return CaptionsBeside(files.paths) if source == "beside" else FolderCaptions(files.keys)


class Paired(View):
    """Media with their captions: {media: sample, "texts": caption}."""

    def __init__(self, dataset: Any, captions: Captions, media: str):
        if len(dataset) != len(captions):
            raise ValueError(f"there are {len(dataset)} items and {len(captions)} captions: each item needs one")
        super().__init__(dataset)
        self.captions, self.media = captions, media

    def change(self, sample: Any, index: int, generator: torch.Generator | None) -> dict[str, Any]:
        return {self.media: sample, "texts": self.captions[index]}


class FolderClasses(View):
    """Adds "classes": the number of the folder a file is in among all `names` of folders (by default those there are, sorted)."""

    def __init__(self, dataset: Any, names: Sequence[str] | None = None):
        super().__init__(dataset)
        if self.keys is None:
            raise ValueError('classes="folder" is for files in folders: let the dataset itself return the classes')
        self.folders = FolderCaptions(self.keys)
        found = {self.folders[index] for index in range(len(self.folders))}
        self.names = sorted(found) if names is None else list(names)
        if unknown := sorted(found - set(self.names)):
            raise ValueError(f"{unknown[0]} is a folder of pictures and none of the classes {', '.join(self.names)}")
        self.numbers = {name: number for number, name in enumerate(self.names)}

    def change(self, sample: Any, index: int, generator: torch.Generator | None) -> dict[str, Any]:
        return {**sample, "classes": self.numbers[self.folders[index]]}


def check_columns(source: Any, column: str, text_column: str, captions: CaptionSource | None) -> None:
    """Raises where a dataset with columns (a Hugging Face one) has not those that are asked for."""
    if isinstance(source, dict) or not hasattr(source, "__len__"):
        raise ValueError(
            f"a {type(source).__name__} is not one dataset with a length: choose a split, as in dataset['train'], "
            "or put a streaming dataset into a torch DataLoader"
        )
    if captions not in (None, "column"):
        raise ValueError(f'captions={captions!r} is for files: the texts of a dataset with columns are in a "column"')
    for name in (column, text_column) if captions else (column,):
        if name not in source.column_names:
            raise ValueError(f"the dataset has no column {name!r}: its columns are {', '.join(source.column_names)}")
