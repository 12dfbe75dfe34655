"""How a token cache is made, or brought up to date (`helicon.data.tokens` reads it).

Each item is known by its fingerprint. Those that the cache has are kept; the others are read, encoded in batches and written to
shards as they come, so that a kill costs one shard. The table of items and the index are written last.

Letters: n items.
"""

import dataclasses
import fcntl
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from safetensors.numpy import save
from torch import Tensor

from helicon.data.collate import Batch, collate
from helicon.data.dataset import BadFile, keys_of, read, unaugmented
from helicon.data.loader import NUM_BAD_FILES_TOLD, Loader
from helicon.data.tokens import (
    BAD_FILES,
    INDEX_FILE,
    NO_HASH,
    SHARDS_FOLDER,
    Array,
    Columns,
    Hashes,
    Index,
    Source,
    Strings,
    Tokenizer,
    content_of,
    encoded,
    fields_of,
    files_behind,
    mapped,
    short_hash,
    stamp_of,
    value_of,
    write_whole,
)
from helicon.nn.network import sha256

logger = logging.getLogger(__name__)

SHARD_ITEMS = 4096  # what a kill can cost
SHARD_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Tokenized:
    """What `tokenize` did, in numbers of items."""

    encoded: int
    kept: int
    bad: int  # of files
    gone: int  # from the source, since the cache was made before


def tokenize(
    dataset: Any,
    tokenizer: Tokenizer,
    folder: str | Path,
    *,
    source: str | Path,
    arguments: Mapping[str, Any],
    batch_size: int = 32,
    num_workers: int = 0,
    shard_items: int = SHARD_ITEMS,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Tokenized:
    """Makes the token cache of a dataset, less its augmentation; or brings one up to date, encoding only what is new or changed.

    Args:
        source: the folder or manifest that the dataset reads, or a name for what else it is.
        arguments: the others that its samples depend on, as in the `data` section of a recipe.
        shard_items: how many items go into one file.
        progress: called with the number of items done, and of all.
    """
    folder, dataset = Path(folder).expanduser(), unaugmented(dataset)
    if len(dataset) == 0:
        raise ValueError(f"{source} holds no items: there is nothing to encode")
    index = Index.of(tokenizer, arguments, Source.of(dataset, source))
    with _claimed(folder):
        before = _Before(_earlier(folder, index, keys_of(dataset)))
        shards = _Shards(folder / SHARDS_FOLDER, index, shard_items)
        table = _Table(len(dataset))
        reading = _Reading(dataset, index.source, shards.places(), before)
        loader = Loader(reading, batch_size=batch_size, shuffle=False, num_workers=num_workers, collate=_gathered)
        try:
            for items, batch in loader.validation():
                if batch is not None:
                    encoded = {name: _on_host(values) for name, values in tokenizer(batch).items()}
                    for place, item in enumerate(item for item in items if item.is_new):
                        shards.add(item.fingerprint, {name: values[place] for name, values in encoded.items()})
                table.fill(items)
                progress(table.num_done, len(dataset))
        except BaseException:
            with suppress(OSError):
                shards.flush()  # what is encoded is kept, whatever it was that stopped this
            raise
        shards.flush()
        fingerprints = table.fingerprints()
        shards.pack(fingerprints)
        table.locate(shards, fingerprints)
        _finish(folder, index, shards, table, keys_of(dataset))
    kept = len(fingerprints) - table.num_encoded
    num_bad = len({path for path, _ in table.problems.values()})
    return Tokenized(table.num_encoded, kept, num_bad, before.num_gone(table.hashes[:, 0]))


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """The folder of a cache, for this process alone; one that holds anything else is refused."""
    is_cache = (folder / INDEX_FILE).exists()
    if folder.exists() and not is_cache and (not folder.is_dir() or any(folder.glob("[!.]*"))):
        raise FileExistsError(f"{folder} is there already and no token cache: choose another folder for the tokens")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise OSError(f"{folder} cannot be written ({error.strerror}): choose another folder for the tokens") from error
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise BlockingIOError(
                f"another process is making {folder}: wait for it, or choose another folder"
            ) from error
        yield


def _earlier(folder: Path, index: Index, keys: Sequence[str] | None) -> Columns | None:
    """The items that the cache has. A new or unfinished one is marked as that; one of other data is not overwritten."""
    earlier = Index.read(folder) if (folder / INDEX_FILE).exists() else None
    items = None
    if earlier is not None and earlier.files:
        path = folder / earlier.files[0]["file"]
        if path.is_file() and sha256(path) == earlier.files[0]["sha256"]:
            items = mapped(path)
        else:
            logger.warning("%s is damaged: every file is read again", path)
    if earlier is not None and earlier.source.name != index.source.name and any(folder.glob(f"{SHARDS_FOLDER}/*")):
        known = Strings(items, "keys") if items is not None and "keys.starts" in items else ()
        if set(keys or ()).isdisjoint(known):
            raise FileExistsError(
                f"{folder} was made from {earlier.source.name}, and nothing of that is in {index.source.name}: "
                "choose another folder for the tokens, or delete this one"
            )
    further = [name for name in earlier.sizes if name not in index.sizes] if earlier is not None else []
    if further and any(folder.glob(f"{SHARDS_FOLDER}/*")):
        raise FileExistsError(
            f"{folder} also holds {' and '.join(further)}, which the networks given here do not make: "
            "name those that do as well, or choose another folder for the tokens"
        )
    if earlier is not None and earlier.making != index.making:
        logger.info("%s was made with another tokenizer or other arguments: everything is encoded anew", folder)
    if earlier is None or not earlier.files:
        index.write(folder)
    return items


class _Places:
    """Where each of many hashes stands: arrays, far smaller than a dict, which worker processes share."""

    def __init__(self, hashes: Hashes):
        words = _words(hashes)
        self.order = np.argsort(words, kind="stable")
        self.sorted = words[self.order]

    def rows(self, wanted: Hashes) -> Int64[Array, "n"]:
        """The place of each hash, -1 for one that is not there."""
        words = _words(wanted)
        if len(self.sorted) == 0:
            return np.full(len(words), -1)
        nearest = np.searchsorted(self.sorted, words).clip(max=len(self.sorted) - 1)
        return np.where(self.sorted[nearest] == words, self.order[nearest], -1)

    def find(self, wanted: bytes) -> int:
        return int(self.rows(_bytes(wanted)[None])[0])


def _words(hashes: Hashes) -> Array:
    """As what numpy can sort. (Trailing zero bytes do not count for it, but here all words are of one length.)"""
    return np.ascontiguousarray(hashes).view("S16")[:, 0]


def _bytes(value: bytes) -> UInt8[Array, "n"]:
    return np.frombuffer(value, np.uint8)


class _Before:
    """The items a cache had, by context: where their files have the same size and date, the content is known."""

    def __init__(self, items: Columns | None):
        self.hashes = np.zeros((0, 3, 16), np.uint8) if items is None else items["hashes"]
        self.places = _Places(self.hashes[:, 0])

    def content(self, context: bytes, stamp: bytes) -> bytes | None:
        row = self.places.find(context)
        is_same = row >= 0 and self.hashes[row, 1].tobytes() == stamp
        return self.hashes[row, 2].tobytes() if is_same else None

    def num_gone(self, contexts: Hashes) -> int:
        rows = self.places.rows(contexts)
        return len(self.hashes) - len(np.unique(rows[rows >= 0]))


@dataclass(frozen=True)
class _Item:
    """What is known of an item beside its tokens."""

    index: int
    context: bytes = NO_HASH  # of what it is called
    stamp: bytes = NO_HASH  # of the sizes and dates of its files
    content: bytes = NO_HASH  # of its files, or else of the sample
    fingerprint: bytes = NO_HASH
    is_new: bool = False
    problem: tuple[str, str] | None = None  # the path and the reason of a BadFile


class _Reading:
    """A dataset whose samples are read only where their tokens are not known."""

    def __init__(self, dataset: Any, source: Source, known: _Places, before: _Before):
        self.dataset, self.source, self.known, self.before = dataset, source, known, before
        self.keys, files = keys_of(dataset) or (), files_behind(dataset)[1]
        self.rows: dict[str, list[Any]] = {}
        for key, row in zip(files.keys, files.rows, strict=True) if files is not None and files.rows else ():
            self.rows.setdefault(key, []).append(row)
        self.ordinals = _ordinals(self.keys)

    def __len__(self) -> int:
        return len(self.dataset)

    def fetch(self, index: int, generator: torch.Generator) -> tuple[_Item, Any]:
        if self.source.root is None:
            return self._sample(index, generator)
        key = self.keys[index]
        # Items may share a file: its segments, or the parts that rows of a manifest name, which may also hold the texts.
        context = short_hash(key, int(self.ordinals[index]), self.rows.get(key))
        try:
            stamp, content = self._hashes(self.source.paths(key), context)
            fingerprint = short_hash(context.hex(), content.hex())
            is_new = self.known.find(fingerprint) < 0
            sample = read(self.dataset, index, generator) if is_new else None
        except BadFile as error:
            return _Item(index, context, problem=(error.path, error.reason)), None
        return _Item(index, context, stamp, content, fingerprint, is_new), sample

    def _sample(self, index: int, generator: torch.Generator) -> tuple[_Item, Any]:
        try:
            sample = read(self.dataset, index, generator)
        except BadFile as error:
            return _Item(index, short_hash(index), problem=(error.path, error.reason)), None
        content = short_hash(sample)
        return _Item(index, short_hash(index), NO_HASH, content, content, self.known.find(content) < 0), sample

    def _hashes(self, paths: Sequence[Path], context: bytes) -> tuple[bytes, bytes]:
        try:
            stamp = stamp_of(paths)
            return stamp, self.before.content(context, stamp) or content_of(tuple(paths), stamp)
        except OSError as error:
            raise BadFile(paths[0], f"{error.filename} cannot be read ({error.strerror})") from error


def _ordinals(keys: Sequence[str]) -> Int64[Array, "n"]:
    """The how-manieth of its key each item is."""
    seen: dict[str, int] = {}
    found = np.zeros(len(keys), np.int64)
    for index, key in enumerate(keys):
        found[index] = seen[key] = seen.get(key, -1) + 1
    return found


def _gathered(fetched: Sequence[tuple[_Item, Any]]) -> tuple[list[_Item], Batch | None]:
    samples = [sample for item, sample in fetched if item.is_new]
    return [item for item, _ in fetched], collate(samples) if samples else None


class _Table:
    """What is known of every item, filled in as they are read."""

    def __init__(self, count: int):
        self.hashes = np.zeros((count, 3, 16), np.uint8)  # context, stamp, content
        self.places = np.full((count, 2), -1, np.int32)  # shard and row; of a bad item -1, and its number among these
        self.problems: dict[int, tuple[str, str]] = {}
        self._fingerprints = np.zeros((count, 16), np.uint8)
        self._untold: list[str] = []
        self.num_done = self.num_encoded = 0

    def fill(self, items: Sequence[_Item]) -> None:
        for item in items:
            self.hashes[item.index] = _bytes(item.context + item.stamp + item.content).reshape(3, 16)
            self._fingerprints[item.index] = _bytes(item.fingerprint)
            if item.problem is not None:
                # One of many, or of another segment of the same sound.
                is_enough = len(self.problems) >= NUM_BAD_FILES_TOLD or item.problem in self.problems.values()
                self.problems[item.index] = item.problem
                if not is_enough:
                    self._untold.append(": ".join(item.problem).encode(errors="backslashreplace").decode())
        self.num_done += len(items)
        if len(self.problems) < self.num_done:  # or else one sentence may tell it all, at the end
            for problem in self._untold:
                logger.warning("skipped %s", problem)
            self._untold = []
        self.num_encoded += sum(item.is_new for item in items)

    def good(self) -> Array:
        return np.setdiff1d(np.arange(len(self.hashes)), list(self.problems))

    def fingerprints(self) -> Hashes:
        """Of the items that could be read; there must be some."""
        if len(self.problems) == len(self.hashes):
            path, reason = self.problems[0]
            raise ValueError(
                f"none of the {len(self.hashes)} items can be read, for example {path} ({reason}): "
                "check the format, the path and the captions of the data"
            )
        return self._fingerprints[self.good()]

    def locate(self, shards: "_Shards", fingerprints: Hashes) -> None:
        rows, starts = shards.places().rows(fingerprints), shards.starts()
        assert (rows >= 0).all()
        number = np.searchsorted(starts, rows, side="right") - 1
        self.places[self.good()] = np.stack([number, rows - starts[number]], axis=1)
        self.places[sorted(self.problems), 1] = np.arange(len(self.problems))


class _Shards:
    """The shards of one making: those that are there, and a growing one in memory."""

    def __init__(self, folder: Path, index: Index, shard_items: int):
        self.folder, self.prefix, self.sizes, self.shard_items = folder, index.making[:16], index.sizes, shard_items
        self.entries: list[dict[str, Any]] = []  # file, size, sha256 and number of items of each
        self._rows: list[dict[str, Array | bytes]] = []
        self._fingerprints: list[bytes] = []
        self._num_bytes = 0
        folder.mkdir(exist_ok=True)
        for path in sorted(folder.glob(f"{self.prefix}-*.safetensors")):
            known = sha256(path)
            if path.name == self._name(known):
                self._note(path.stat().st_size, known, len(mapped(path)["fingerprints"]))
            else:
                logger.warning("%s is damaged: its items are encoded again", path)

    def places(self) -> _Places:
        """Where the tokens of a fingerprint are, counted through all shards."""
        found = [mapped(self.folder / entry["file"])["fingerprints"] for entry in self.entries]
        return _Places(np.concatenate([np.zeros((0, 16), np.uint8), *found]))

    def starts(self) -> Int64[Array, "n"]:
        return np.cumsum([0, *(entry["items"] for entry in self.entries)])

    def add(self, fingerprint: bytes, values: Mapping[str, Any]) -> None:
        row = {name: self._stored(name, value) for name, value in values.items()}
        if self._rows and row.keys() != self._rows[0].keys():
            raise ValueError(f"items have different fields, {sorted(self._rows[0])} and {sorted(row)}")
        self._rows.append(row)
        self._fingerprints.append(fingerprint)
        self._num_bytes += sum(len(value) if isinstance(value, bytes) else value.nbytes for value in row.values())
        if len(self._rows) >= self.shard_items or self._num_bytes >= SHARD_BYTES:
            self.flush()

    def _stored(self, name: str, value: Any) -> Array | bytes:
        if isinstance(value, str):
            return encoded(value)
        array = np.asarray(value)
        if array.dtype == np.bool_ and array.ndim == 0:
            return array
        size = self.sizes[name]
        if size == 0:
            return array.astype(np.float32)
        if array.size and not 0 <= array.min() <= array.max() < size:
            raise ValueError(f"the tokenizer gave {name} from {array.min()} to {array.max()}, and names {size} codes")
        kinds = (np.uint8, np.uint16, np.int32, np.int64)
        return array.astype(next(kind for kind in kinds if size - 1 <= np.iinfo(kind).max))

    def flush(self) -> None:
        """Writes what is in memory."""
        if not self._rows:
            return
        columns = {"fingerprints": _bytes(b"".join(self._fingerprints)).reshape(-1, 16)}
        for name in self._rows[0]:
            columns |= _column(name, [row[name] for row in self._rows])
        content = save(columns)
        known = hashlib.sha256(content).hexdigest()
        write_whole(self.folder / self._name(known), content)
        self._note(len(content), known, len(self._rows))
        self._rows, self._fingerprints, self._num_bytes = [], [], 0

    def pack(self, wanted: Hashes) -> None:
        """Shards with something in them that is not wanted, and small ones if there are several, are written anew without it."""
        entries, starts, places = self.entries, self.starts(), self.places()
        used = np.unique(places.rows(wanted))
        bounds = np.searchsorted(used, starts)
        has_gaps = np.diff(bounds) < np.diff(starts)
        is_small = [entry["items"] < self.shard_items and entry["size"] < SHARD_BYTES for entry in entries]
        if not has_gaps.any() and sum(is_small) <= 1:
            return
        self.entries = [entry for entry, loose in zip(entries, has_gaps | is_small, strict=True) if not loose]
        for number in np.flatnonzero(has_gaps | is_small):
            columns = mapped(self.folder / entries[number]["file"])
            for row in (used[bounds[number] : bounds[number + 1]] - starts[number]).tolist():
                values = {name: value_of(columns, name, row) for name in fields_of(columns)}
                self.add(columns["fingerprints"][row].tobytes(), values)
        self.flush()

    def _name(self, known: str) -> str:
        return f"{self.prefix}-{known[:16]}.safetensors"

    def _note(self, size: int, known: str, items: int) -> None:
        self.entries.append({"file": self._name(known), "size": size, "sha256": known, "items": items})


def _column(name: str, values: Sequence[Array | bytes]) -> Columns:
    """Values one after another, where each starts, and, of what is no string, the shapes."""
    arrays = [_bytes(value) if isinstance(value, bytes) else value for value in values]
    dtype = arrays[0].dtype if arrays else np.uint8
    columns = {
        f"{name}.values": np.concatenate([np.zeros(0, dtype), *map(np.ravel, arrays)]),
        f"{name}.starts": np.cumsum([0, *(array.size for array in arrays)], dtype=np.int64),
    }
    if values and not isinstance(values[0], bytes):
        if len({array.ndim for array in arrays}) > 1:
            raise ValueError(f"the tokenizer gave {name} of different numbers of dimensions")
        columns[f"{name}.shapes"] = np.array([array.shape for array in arrays], np.int32)
    return columns


def _on_host(values: Any) -> Any:
    if isinstance(values, Tensor):
        return values.cpu().numpy()
    return [value.cpu().numpy() if isinstance(value, Tensor) else value for value in values]


def _finish(folder: Path, index: Index, shards: _Shards, table: _Table, keys: Sequence[str] | None) -> None:
    """Writes the table of items and then the index; deletes what that does not name."""
    problems = [table.problems[place] for place in sorted(table.problems)]
    strings: dict[str, Sequence[str]] = {"bad_paths": [path for path, _ in problems]}
    strings |= {"bad_reasons": [reason for _, reason in problems], **({} if keys is None else {"keys": keys})}
    columns: Columns = {"places": table.places, "hashes": table.hashes}
    for name, values in strings.items():
        columns |= _column(name, [encoded(value) for value in values])
    content = save(columns)
    known = hashlib.sha256(content).hexdigest()
    name = f"items-{known[:16]}.safetensors"
    write_whole(folder / name, content)
    items = {"file": name, "size": len(content), "sha256": known}
    files = [items, *({**entry, "file": f"{SHARDS_FOLDER}/{entry['file']}"} for entry in shards.entries)]
    fields = fields_of(mapped(folder / files[1]["file"]))
    dataclasses.replace(index, fields=fields, files=files).write(folder)
    named = {entry["file"] for entry in files}
    for path in [*folder.glob("items-*"), *folder.glob(".*.partial"), *(folder / SHARDS_FOLDER).iterdir()]:
        if path.relative_to(folder).as_posix() not in named:
            path.unlink()
    lines = [f"{path}\t{' '.join(reason.split())}\n" for path, reason in dict.fromkeys(problems)]
    (folder / BAD_FILES).unlink(missing_ok=True)
    if lines:
        write_whole(folder / BAD_FILES, "".join(lines).encode(errors="surrogateescape"))
