"""Token caches: what frozen networks make of each item, computed once and read many times faster than the media.

    cache/
        tokens.json                           what made it, and every other file with its size and sha256
        items-<hash>.safetensors              of each item, in the source's order: its key, the place of its tokens, its hashes
        shards/<making>-<hash>.safetensors    tokens and strings of some thousand items, read by memory map
        bad_files.txt                         the items that could not be read, and why

A file is named by its content and never changes. `tokens.json` is replaced last, in one rename: a kill at any moment leaves the
cache there was, and the next attempt finds the shards written so far and encodes only what is not in them.

Tokens are known by a fingerprint of what they came from: an item's key, its row of the manifest and the bytes of its files; or,
where items are no files, the sample itself. All else they depend on (the networks, the arguments of the data) is the *making*.

Letters: n items.
"""

import copy
import dataclasses
import functools
import hashlib
import json
import logging
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.utils.data import Dataset

from helicon.data.collate import Batch
from helicon.data.dataset import BadFile, View
from helicon.data.files import Files
from helicon.data.paired import CaptionsBeside
from helicon.nn.network import Network, load_state, sha256

logger = logging.getLogger(__name__)

INDEX_FILE = "tokens.json"
SHARDS_FOLDER = "shards"
BAD_FILES = "bad_files.txt"
FORMAT = 1  # raised when older readers could not understand a cache
MAX_LOOKED_AT = 100_000  # files that are looked at when a cache is opened: more would take minutes on a network disk

Array = np.ndarray
Columns = dict[str, Array]
Hashes = UInt8[Array, "n 16"]
NO_HASH = bytes(16)
NEVER_LOADED = "one that was never loaded"


class Tokenizer:
    """What a family gives to make token caches with: frozen networks, and how they read a batch."""

    networks: Mapping[str, Network]  # that the tokens depend on, by the names a model gives to these stages
    sizes: Mapping[
        str, int
    ]  # the fields of tensors it makes: of whole numbers, how many codes there are; of float32, 0
    settings: Mapping[str, Any] = {}  # whatever else the tokens depend on
    arguments: Mapping[str, Any] = {}  # of the data section, where they follow from the networks
    path: Path | None = None  # where it was loaded from
    options: Mapping[str, str] = {}  # of `helicon tokenize`, by which a network is named that is not the first

    def items(self, data: Any) -> Any:
        """The dataset to encode, of what the `data` section gives: that itself, where it does not depend on the networks."""
        return data

    def __call__(self, batch: Batch) -> Mapping[str, Any]:
        """All that is learned from: for each field one tensor of whole numbers or float32 (without padding), bool or string an item."""
        raise NotImplementedError


@dataclass(frozen=True)
class Source:
    """Where items came from, and how to see whether they have changed since."""

    name: str  # a folder or manifest, absolute, or what else the data is called
    root: str | None = None  # the folder that keys start from; None where items are not files
    beside: Sequence[str] = ()  # suffixes of an item's other files
    manifest_sha256: str | None = None

    @classmethod
    def of(cls, dataset: Any, name: str | Path) -> "Source":
        path = Path(name).expanduser()
        called = str(path.resolve() if path.exists() else name)
        views, files = files_behind(dataset)
        if files is None:
            return cls(called)
        is_beside = any(isinstance(getattr(view, "captions", None), CaptionsBeside) for view in views)
        return cls(called, root_of(files), [".txt"] if is_beside else [], sha256(path) if path.is_file() else None)

    def paths(self, key: str) -> list[Path]:
        assert self.root is not None
        path = Path(self.root, key)
        return [path, *(path.with_suffix(suffix) for suffix in self.beside)]


@dataclass(frozen=True)
class Index:
    """What `tokens.json` says; without files the cache was never finished."""

    making: str  # a hash of all that tokens depend on, beside their item
    networks: Mapping[str, Mapping[str, str]]  # path and sha256 of each
    settings: Mapping[str, Any]
    sizes: Mapping[str, int]
    arguments: Mapping[str, Any]
    source: Source
    path: str | None  # of the tokenizer
    options: Mapping[str, str | None] = field(default_factory=dict)  # the paths of further networks
    fields: Sequence[str] = ()
    files: Sequence[Mapping[str, Any]] = ()  # the table of items, then the shards

    @classmethod
    def of(cls, tokenizer: Tokenizer, arguments: Mapping[str, Any], source: Source) -> "Index":
        networks = {name: _described(network) for name, network in tokenizer.networks.items()}
        settings, sizes = dict(tokenizer.settings), dict(tokenizer.sizes)
        # Where the hash of a sample is its fingerprint, that says all that the arguments could.
        hashes = {name: known["sha256"] for name, known in networks.items()}
        parts = [FORMAT, hashes, settings, sizes, arguments if source.root else None]
        making = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
        path, options = _command_paths(tokenizer, _sources(tokenizer))
        return cls(making, networks, settings, sizes, dict(arguments), source, path, options)

    @classmethod
    def read(cls, folder: Path) -> "Index":
        path = folder / INDEX_FILE
        if not path.is_file():
            raise ValueError(f"{folder} is no token cache, as it has no {INDEX_FILE}: make one with `helicon tokenize`")
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
            written = known.pop("format")
            index = cls(**{**known, "source": Source(**known["source"])}) if written == FORMAT else None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged: delete {folder} and make it again with `helicon tokenize`") from error
        if index is None:
            raise ValueError(f"{folder} is in format {written}, and this Helicon reads {FORMAT}: make it with this one")
        return index

    def write(self, folder: Path) -> None:
        text = json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1, default=str)
        write_whole(folder / INDEX_FILE, text.encode())

    def command(self, folder: Path, tokenizer: Tokenizer | None = None) -> str:
        """What brings this cache up to date; or, in another folder, makes one like it with the networks of another tokenizer."""
        path, options = self.path, self.options
        if tokenizer is not None:
            recorded = {name: known["path"] for name, known in self.networks.items() if known["path"] != NEVER_LOADED}
            path, options = _command_paths(tokenizer, {**recorded, **_sources(tokenizer)})
            folder = folder.with_name(f"{folder.name}-new")
        words = ["helicon", "tokenize", path or "RUN"]
        for name, further in options.items():
            words += [f"--{name}", further or "RUN"]
        words += ["--data", self.source.name, "-o", str(folder)]
        plain = lambda value: value if isinstance(value, str) else json.dumps(value)
        return f"`{shlex.join([*words, *(f'{key}={plain(value)}' for key, value in self.arguments.items())])}`"


def _sources(tokenizer: Tokenizer) -> dict[str, str | None]:
    known = lambda path: None if path is None else str(path)
    return {name: known(network.source) for name, network in tokenizer.networks.items()}


def _command_paths(tokenizer: Tokenizer, sources: Mapping[str, str | None]) -> tuple[str | None, dict[str, str | None]]:
    """The first of networks, and the others by their options. (Where there are no options, the tokenizer's own path stands for all.)"""
    options = tokenizer.options
    if not options or not sources:
        return None if tokenizer.path is None else str(tokenizer.path), {}
    first, *further = [
        *(name for name in sources if name not in options),
        *(name for name in options if name in sources),
    ]
    return sources[first], {options[name]: sources[name] for name in further}


def network_hash(network: Network) -> str:
    """Of a network's weights and configuration, its stages included: the same wherever it was loaded from and to."""
    digest = hashlib.sha256(json.dumps(_without_version(network.config()), sort_keys=True).encode())
    for name, value in sorted(network.own_state().items()):
        digest.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        digest.update(raw_bytes(value))
    for name, stage in sorted(network.stages().items()):
        digest.update(f"{name} {network_hash(stage)}".encode())
    return digest.hexdigest()


def _without_version(config: Any) -> Any:
    """(A part has a config of its own inside.)"""
    if not isinstance(config, dict):
        return config
    return {key: _without_version(value) for key, value in config.items() if key != "helicon"}


def _described(network: Network) -> dict[str, str]:
    return {"path": str(network.source or NEVER_LOADED), "sha256": network_hash(network)}


def is_token_cache(source: Any) -> bool:
    return isinstance(source, (str, Path)) and (Path(source).expanduser() / INDEX_FILE).is_file()


class TokenCache(Dataset[dict[str, Any]]):
    """The items of a cache: dicts of int64 or float32 tensors, bools and strings. Keys and order are the source's, and so are splits and epochs.

    Only what is asked for is read, from files that all processes share in memory.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).expanduser()
        self.index = Index.read(self.folder)
        if not self.index.files:
            raise ValueError(f"{folder} was never finished: go on with {self.index.command(self.folder)}")
        for entry in self.index.files:
            path = self.folder / entry["file"]
            if not path.is_file():
                raise ValueError(self._damage(f"{path} is missing"))
            if path.stat().st_size != entry["size"]:
                raise ValueError(self._damage(f"{path} has {path.stat().st_size} bytes instead of {entry['size']}"))
        self.fields = tuple(self.index.fields)
        self._mapped: dict[int, Columns] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": {}}  # another process maps the files itself

    @property
    def keys(self) -> Sequence[str] | None:
        return Strings(self._file(0), "keys") if "keys.starts" in self._file(0) else None

    def __len__(self) -> int:
        return len(self._file(0)["places"])

    def fetch(self, index: int, generator: torch.Generator | None = None) -> dict[str, Any]:
        shard, row = self._file(0)["places"][index].tolist()
        if shard < 0:
            raise BadFile(*(Strings(self._file(0), name)[row] for name in ("bad_paths", "bad_reasons")))
        columns = self._file(1 + shard)
        return {name: value_of(columns, name, row) for name in self.fields}

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.fetch(index)

    def verify(self) -> None:
        """Reads everything, and raises if a file is not the one that was written. (Opening a cache compares sizes alone.)"""
        for entry in self.index.files:
            if sha256(self.folder / entry["file"]) != entry["sha256"]:
                raise ValueError(self._damage(f"the content of {self.folder / entry['file']} has changed"))

    def made_by(self, tokenizer: Tokenizer) -> Self:
        """This cache with the tokenizer's fields, and the strings, once it is seen to be what that would make of the source now."""
        index, remedy = self.index, f"make a new one with {self.index.command(self.folder, tokenizer)}"
        for name, network in tokenizer.networks.items():
            own, known = _described(network), index.networks.get(name)
            if known is None or known["sha256"] != own["sha256"]:
                before = f"with {known['path']} ({known['sha256'][:12]})" if known else "without one"
                raise ValueError(
                    f"the {name} of this model is {own['path']} ({own['sha256'][:12]}), and {self.folder} was made {before}: {remedy}"
                )
        recorded = {**index.settings, **index.sizes}
        for name, value in {**tokenizer.settings, **tokenizer.sizes}.items():
            if recorded.get(name) != value:
                raise ValueError(f"{self.folder} was made with {name}={recorded.get(name)}, not {value}: {remedy}")
        self.check_source()
        chosen = copy.copy(self)
        chosen.fields = tuple(name for name in self.fields if name in tokenizer.sizes or name not in index.sizes)
        return chosen

    def check_source(self) -> None:
        """Raises if the files the cache was made from are no longer the same; if none of them is there, it was made elsewhere.

        Size and date are compared, and where they differ the content. Of very many files `MAX_LOOKED_AT`, evenly spread, are looked
        at; `tokenize` looks at all, and finds new ones too.
        """
        source, keys, items = self.index.source, self.keys, self._file(0)
        if source.root is None or keys is None:
            return
        remedy = f"bring it up to date with {self.index.command(self.folder)}"
        if Path(source.name).is_file() and source.manifest_sha256 not in (None, sha256(Path(source.name))):
            raise ValueError(f"{self.folder} is stale, as {source.name} has changed: {remedy}")
        readable = np.flatnonzero(items["places"][:, 0] >= 0)
        looked_at = readable[:: max(1, -(-len(readable) // MAX_LOOKED_AT))].tolist()
        gone = [index for index in looked_at if not source.paths(keys[index])[0].exists()]
        if len(gone) == len(looked_at):
            logger.info("%s: the files it was made from are not there to be compared", self.folder)
            return
        stale = gone or [index for index in looked_at if self._is_changed(index, source.paths(keys[index]))]
        if stale:
            more = f" and {len(stale) - 1} more" if len(stale) > 1 else ""
            state = "gone" if gone else "not what it was"
            raise ValueError(f"{self.folder} is stale, as {source.paths(keys[stale[0]])[0]} is {state}{more}: {remedy}")

    def _is_changed(self, index: int, paths: Sequence[Path]) -> bool:
        _, stamp, content = (known.tobytes() for known in self._file(0)["hashes"][index])
        try:
            found = stamp_of(paths)
            return found != stamp and content_of(tuple(paths), found) != content
        except OSError:
            return True

    def _file(self, number: int) -> Columns:
        if number not in self._mapped:
            path = self.folder / self.index.files[number]["file"]
            try:
                self._mapped[number] = mapped(path)
            except ValueError as error:
                raise ValueError(self._damage(f"{path} cannot be read")) from error
        return self._mapped[number]

    def _damage(self, what: str) -> str:
        return f"{what}: put it back, or mend the cache with {self.index.command(self.folder)}"


class Strings(Sequence[str]):
    """The strings of a column, decoded when they are asked for."""

    def __init__(self, columns: Columns, name: str):
        self.values, self.starts = columns[f"{name}.values"], columns[f"{name}.starts"]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: Any) -> Any:
        place = range(len(self))[index]
        if isinstance(place, range):
            return [self[one] for one in place]
        return self.values[self.starts[place] : self.starts[place + 1]].tobytes().decode(errors="surrogatepass")


def encoded(text: str) -> bytes:
    """(File names need not be valid UTF-8, and json may hold half a character: Python has both as surrogates.)"""
    return text.encode(errors="surrogatepass")


def mapped(path: Path) -> Columns:
    return {name: value.numpy() for name, value in load_state(path).items()}


def value_of(columns: Columns, name: str, row: int) -> Tensor | bool | str:
    shapes = columns.get(f"{name}.shapes")
    if shapes is None:
        return Strings(columns, name)[row]
    starts = columns[f"{name}.starts"]
    values = columns[f"{name}.values"][starts[row] : starts[row + 1]]
    if values.dtype == np.bool_:
        return bool(values[0])
    kind = np.float32 if values.dtype == np.float32 else np.int64
    return torch.from_numpy(values.astype(kind)).reshape(shapes[row].tolist())


def fields_of(columns: Columns) -> list[str]:
    return [name.removesuffix(".starts") for name in columns if name.endswith(".starts")]


def files_behind(dataset: Any) -> tuple[list[View], Files | None]:
    """The views through which a dataset is seen, and the files below them, where its items are those in their order."""
    views = []
    while isinstance(dataset, View):
        views.append(dataset)
        dataset = dataset.dataset
    files = getattr(dataset, "files", dataset)
    is_whole = isinstance(files, Files) and all(type(view).place is View.place for view in views)
    return views, files if is_whole else None


def root_of(files: Files) -> str:
    for path, key in zip(files.paths, map(Path, files.keys), strict=True):
        if not key.is_absolute():
            return str(path.absolute().parents[len(key.parts) - 1])
    return os.sep


def short_hash(*parts: Any) -> bytes:
    return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=_plain).encode(), digest_size=16).digest()


def _plain(value: Any) -> Any:
    """What json has no word for. (Not `str` of an array, which leaves out its middle.)"""
    if isinstance(value, (Tensor, np.ndarray)):
        tensor = torch.as_tensor(value)
        return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(raw_bytes(tensor)).hexdigest()]
    return str(value)


def raw_bytes(value: Tensor) -> memoryview:
    return value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def stamp_of(paths: Sequence[Path]) -> bytes:
    return short_hash(*((found.st_size, found.st_mtime_ns) for found in (path.stat() for path in paths)))


@functools.lru_cache(maxsize=64)
def content_of(paths: tuple[Path, ...], stamp: bytes) -> bytes:
    """(Remembered while the stamp is the same: the segments of a long recording ask for one file again and again.)"""
    return short_hash(*(sha256(path) for path in paths))


def write_whole(path: Path, content: bytes) -> None:
    """A file that is there whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(
            f"{path} cannot be written ({error.strerror}): put that right and do the same again, which goes on from here"
        ) from error
