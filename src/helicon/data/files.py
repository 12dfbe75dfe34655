"""Which files there are: those of a folder, or those a manifest lists (jsonl, csv or parquet, one row an item).

Both give paths to open and keys (relative paths) that are the same on every machine.
"""

import csv
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MANIFEST_EXTENSIONS = (".jsonl", ".csv", ".parquet")


@dataclass(frozen=True)
class Files:
    """Paths, their keys, and where they come from a manifest its other columns, row by row."""

    paths: list[Path]
    keys: list[str]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.paths)


def find_files(folder: str | Path, exts: Sequence[str]) -> Files:
    """The files below `folder` with one of the extensions (of any case), sorted; hidden ones are not looked at."""
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        problem = "is a file, not a folder" if folder.exists() else "does not exist"
        raise ValueError(
            f"the data folder {folder} {problem}: name the folder of your data (data.source=... in a recipe; relative paths "
            f"start at the current folder)"
        )
    suffixes = tuple("." + ext.lower().removeprefix(".") for ext in exts)
    keys = sorted(path.relative_to(folder).as_posix() for path in _walk(folder) if path.suffix.lower() in suffixes)
    if not keys:
        raise ValueError(
            f"{folder} holds no {', '.join(suffix[1:] for suffix in suffixes)} file, nor do its subfolders: "
            "name the folder of your data, or convert it to one of these formats"
        )
    return Files([folder / key for key in keys], keys)


def read_manifest(path: str | Path, columns: Sequence[str] = ("path",)) -> Files:
    """The rows of a manifest. `columns` must be there; the first is the file, absolute or relative to the manifest.

    A relative path that leads out of the manifest's folder is refused: a data set that travels brings its files along.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise ValueError(f"the manifest {path} does not exist")
    rows = _read_rows(path)
    if not rows:
        raise ValueError(f"the manifest {path} has no rows")
    for number, row in enumerate(rows, start=1):
        missing = [column for column in columns if column not in row]
        if missing:
            found = ", ".join(map(str, row)) or "none"
            raise ValueError(f"row {number} of {path} has no column {', '.join(missing)}: its columns are {found}")
    keys = [_relative_key(row[columns[0]], path, number) for number, row in enumerate(rows, start=1)]
    return Files([path.parent / key for key in keys], keys, rows)


def words_in(row: Mapping[str, Any], column: str, name: str) -> list[str] | None:
    """The entries of a column that holds a list, or words with spaces between them; None where it holds nothing.

    `name` is what to call the row.
    """
    value = row.get(column)
    if value is None or value == "" or value != value:  # (NaN, which a table has where there is nothing)
        return None
    words = value.split() if isinstance(value, str) else value
    if not isinstance(words, (list, tuple)) or not all(isinstance(word, (str, int, float)) for word in words):
        raise ValueError(f"{name} has {column}={value!r}: it must be a list, or words with spaces between them")
    return [str(word) for word in words]


def seconds_in(row: Mapping[str, Any], column: str, name: str) -> list[float] | None:
    """The same of a column whose entries are numbers of seconds."""
    words = words_in(row, column, name)
    try:
        seconds = [float(word) for word in words or ()]
        is_right = all(0 <= number < math.inf for number in seconds)
    except ValueError:
        is_right = False
    if not is_right:
        raise ValueError(f"{name} has {column}={row[column]!r}: each must be a number of seconds")
    return None if words is None else seconds


def _walk(folder: Path) -> Iterator[Path]:
    """Every file below; links are followed, but no folder is entered twice, so a link to a parent does no harm."""
    entered: set[str] = set()

    def fail(error: OSError) -> None:
        raise error

    for here, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        real = os.path.realpath(here)
        if real in entered:
            folders.clear()
            continue
        entered.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(here, name) for name in names if not name.startswith("."))


def _relative_key(value: Any, manifest: Path, number: int) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"row {number} of {manifest} names no file, but {value!r}")
    key = Path(os.path.normpath(value))
    if key.parts[0] == os.pardir:
        raise ValueError(
            f"row {number} of {manifest} names {value}, which is outside of the manifest's folder: "
            "move the manifest above the files, or write absolute paths"
        )
    return key.as_posix()


def _read_rows(path: Path) -> list[dict[str, Any]]:
    try:
        return _read_table(path)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not in UTF-8 ({error.reason} at byte {error.start}): save it in that encoding"
        ) from error


def _read_table(path: Path) -> list[dict[str, Any]]:
    extension = path.suffix.lower()
    if extension == ".jsonl":
        return _read_jsonl(path)
    if extension == ".csv":
        with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets begin their csv with a byte-order mark
            return list(csv.DictReader(file))
    if extension == ".parquet":
        return _read_parquet(path)
    raise ValueError(
        f"{path} is neither a folder nor a manifest that can be read: it must end in {', '.join(MANIFEST_EXTENSIONS)}"
    )


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} of {path} is not json ({error})") from error
        if not isinstance(row, dict):
            raise ValueError(f"line {number} of {path} is a {type(row).__name__}, not an object with columns")
        rows.append(row)
    return rows


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(
            f"to read {path}, install pyarrow (pip install pyarrow), or convert it to csv or jsonl"
        ) from error
    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a parquet file ({error})") from error
