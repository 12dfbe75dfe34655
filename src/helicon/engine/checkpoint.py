"""Checkpoint folders: written whole or not at all, verified before they are trusted.

    run/checkpoints/step-00001000/
        config.json          class and constructor arguments, and the stages (path, hash, config) the network stands on
        model.safetensors    weights
        ema.safetensors      averaged weights, where there are some
        state/               optimizers, loss scale, random states of every rank, data position, step, tracker run
        manifest.json        size and sha256 of every other file, and of itself; written last

A folder is filled under a temporary name, every file is flushed to the disk, and the folder is renamed into place. A kill
at any moment leaves either the old state or the new one. Hashing and writing happen in a background thread on copies in
main memory, while training goes on.
"""

import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from helicon.nn.network import (
    CONFIG_FILE,
    EMA_FILE,
    WEIGHTS_FILE,
    Network,
    load_network,
    load_state,
    save_state,
    sha256,
)

logger = logging.getLogger(__name__)

MANIFEST_FILE = "manifest.json"
STATE_FOLDER = "state"
TRAINER_FILE = f"{STATE_FOLDER}/trainer.json"
RANDOM_FILE = f"{STATE_FOLDER}/random.json"
CHECKPOINTS_FOLDER = "checkpoints"
BEST = "best"  # RUN/best: the checkpoint of the lowest validation loss
LOCK_FILE = ".lock"
FORMAT = 1  # raised when older readers could not understand a checkpoint


class DamagedCheckpoint(ValueError):
    """A checkpoint folder whose files are not those its manifest names."""


@dataclass(frozen=True)
class Snapshot:
    """All of a checkpoint in main memory: safe to write while training goes on."""

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]  # file -> named tensors
    documents: Mapping[str, Any]  # file -> json
    facts: Mapping[str, Any] = field(default_factory=dict)  # for the manifest: lineage, validation loss
    shards: Path | None = None  # a folder of files already written, taken in as they are


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def write(snapshot: Snapshot, folder: Path) -> None:
    """Writes a checkpoint at `folder`, replacing one that is there only once the new one is whole."""
    if folder.exists() and not _is_replaceable(folder):
        raise ValueError(f"{folder} holds something that is no checkpoint: choose another path for this one")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        (temporary / STATE_FOLDER).mkdir(parents=True)
        for name, tensors in snapshot.tensors.items():
            save_state(tensors, temporary / name)
        for name, document in snapshot.documents.items():
            (temporary / name).write_text(json.dumps(document, indent=2) + "\n")
        if snapshot.shards is not None:
            snapshot.shards.rename(temporary / STATE_FOLDER / "shards")
        files = sorted(path for path in temporary.rglob("*") if path.is_file())
        listed = {
            str(path.relative_to(temporary)): {"size": path.stat().st_size, "sha256": sha256(path)} for path in files
        }
        manifest = {"format": FORMAT, "step": snapshot.step, **snapshot.facts, "files": listed}
        (temporary / MANIFEST_FILE).write_text(json.dumps({**manifest, "sha256": _seal(manifest)}, indent=2) + "\n")
        for path in [*temporary.rglob("*"), temporary]:
            flush(path)
        _replace(temporary, folder)
    except BaseException:
        for leftover in (temporary, snapshot.shards):
            if leftover is not None:
                shutil.rmtree(leftover, ignore_errors=True)
        raise
    flush(folder.parent)


def _is_replaceable(folder: Path) -> bool:
    return folder.is_dir() and ((folder / MANIFEST_FILE).exists() or not any(folder.iterdir()))


def _replace(temporary: Path, folder: Path) -> None:
    """Puts a finished folder in place; one of that name steps aside first, and returns if the rename fails."""
    aside = _aside(folder)
    if folder.exists():
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
    try:
        temporary.rename(folder)
    except OSError:
        if aside.exists():
            aside.rename(folder)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _aside(folder: Path) -> Path:
    """Where a checkpoint stands for the moment in which another takes its place (and stays, if a kill comes just then)."""
    return folder.with_name(f".{folder.name}.old")


def _seal(manifest: Mapping[str, Any]) -> str:
    """A hash of all that a manifest says."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def flush(path: Path) -> None:
    """Makes the disk hold what a file or folder holds now."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST_FILE
    if not path.exists():
        raise DamagedCheckpoint(f"{folder} has no {MANIFEST_FILE}: it is no checkpoint, or was never finished")
    try:
        manifest = json.loads(path.read_text())
        is_whole = manifest.pop("sha256") == _seal(manifest)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{path} is damaged") from error
    if not is_whole:
        raise DamagedCheckpoint(f"{path} is damaged: its content has changed since it was written")
    if manifest["format"] > FORMAT:
        raise ValueError(
            f"{folder} is in checkpoint format {manifest['format']}, and this version of Helicon reads up to {FORMAT}: upgrade Helicon"
        )
    return manifest


def verify(folder: Path) -> dict[str, Any]:
    """The manifest, once every file is seen to be the one it names."""
    manifest = read_manifest(folder)
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise DamagedCheckpoint(f"{folder} is damaged: {name} is missing")
        if path.stat().st_size != expected["size"]:
            raise DamagedCheckpoint(
                f"{folder} is damaged: {name} has {path.stat().st_size} bytes instead of {expected['size']}"
            )
        if sha256(path) != expected["sha256"]:
            raise DamagedCheckpoint(f"{folder} is damaged: the content of {name} has changed since it was written")
    return manifest


def checkpoints(run: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first. (Names that start with a dot are unfinished.)"""
    return sorted((run / CHECKPOINTS_FOLDER).glob("step-*"))


def newest_whole(run: Path) -> Path | None:
    """The newest checkpoint of a run that is whole; damaged ones are passed over with a warning."""
    aside = [path for path in (run / CHECKPOINTS_FOLDER).glob(".step-*.old") if not _home(path).exists()]
    for folder in sorted([*checkpoints(run), *aside], key=lambda path: path.name.lstrip("."), reverse=True):
        try:
            verify(folder)
        except DamagedCheckpoint as error:
            logger.warning("%s; trying the one before", error)
        else:
            return folder
    return None


def best_first(folders: Sequence[Path]) -> dict[Path, float]:
    """The checkpoints whose validation loss is known, the lowest first."""
    known = {folder: loss for folder in folders if (loss := _valid_loss(folder)) is not None}
    return dict(sorted(known.items(), key=lambda item: item[1]))


def best_whole(run: Path) -> Path:
    """The checkpoint of the lowest validation loss that is whole."""
    for folder in best_first(checkpoints(run)):
        try:
            verify(folder)
        except DamagedCheckpoint as error:
            logger.warning("%s; trying the next best", error)
        else:
            return folder
    raise FileNotFoundError(f"the run {run} has no whole checkpoint with a validation loss: {run} means its newest one")


def _home(aside: Path) -> Path:
    return aside.with_name(aside.name.removeprefix(".").removesuffix(".old"))


def resolve(path: Path) -> Path:
    """The checkpoint (or saved network) that a user's path means: itself, or a run's newest whole one, or, of RUN/best, that of its
    lowest validation loss. Verified."""
    path = path.expanduser()
    if path.is_file():
        raise ValueError(
            f"{path} is a file, and Helicon loads folders (config.json + safetensors): "
            "files of other packages are never unpickled; train anew or convert the weights"
        )
    if not path.exists() and (_aside(path) / MANIFEST_FILE).exists():
        logger.warning("%s was being replaced when its process died: using the one before", path)
        path = _aside(path)
    if path.name == BEST and not path.exists() and (path.parent / CHECKPOINTS_FOLDER).is_dir():
        return best_whole(path.parent)
    if not path.is_dir():
        raise FileNotFoundError(f"there is no checkpoint or run folder at {path}")
    if (path / CHECKPOINTS_FOLDER).is_dir():
        newest = newest_whole(path)
        if newest is None:
            count = len(checkpoints(path))
            state = (
                f"none of its {count} is whole: put one back" if count else "it was stopped before the first: train on"
            )
            raise FileNotFoundError(f"the run {path} has no whole checkpoint ({state}, or name another run)")
        return newest
    if (path / MANIFEST_FILE).exists():
        verify(path)
    elif not (path / CONFIG_FILE).exists():
        raise FileNotFoundError(f"{path} is neither a run, a checkpoint nor a saved network: it has no {CONFIG_FILE}")
    return path


def load_stage(source: str | Path, key: str, how: str) -> Network:
    """The network that a recipe's `key` names; `how` is the command that makes one."""
    try:
        folder = resolve(Path(source))
    except FileNotFoundError as error:
        raise ValueError(f"{key}: {error}; make one first ({how}), or give the folder of another") from error
    return load_network(folder)


@dataclass(frozen=True)
class Loaded:
    """A verified checkpoint, its tensors read on demand."""

    folder: Path
    manifest: Mapping[str, Any]

    @classmethod
    def open(cls, path: Path, is_verified: bool = False) -> "Loaded":
        folder = path if is_verified else resolve(path)
        if not (folder / TRAINER_FILE).exists():
            raise ValueError(
                f"{folder} holds a network without training state: start from its weights with init_from={str(folder)!r}"
            )
        return cls(folder, read_manifest(folder))

    def document(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())

    def tensors(self, name: str) -> dict[str, Tensor]:
        return load_state(self.folder / name)

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    @property
    def weights(self) -> dict[str, Tensor]:
        return self.tensors(WEIGHTS_FILE)

    @property
    def averaged(self) -> dict[str, Tensor] | None:
        return self.tensors(EMA_FILE) if self.has(EMA_FILE) else None


def prune(run: Path, keep_last: int, written: Path) -> None:
    """Deletes old checkpoints, all but the newest `keep_last` up to `written` and the one of the lowest validation loss.

    Later ones than `written` are not counted: the run fell back from them because they are damaged, and will write them anew.
    """
    for leftover in written.parent.glob(".step-*"):  # of a kill in the middle of a write or of a deletion
        shutil.rmtree(leftover, ignore_errors=True)
    folders = [folder for folder in checkpoints(run) if folder.name <= written.name]
    if keep_last == 0 or len(folders) <= keep_last:
        return
    kept = set(folders[-keep_last:])
    kept |= set(list(best_first(folders))[:1])
    for folder in folders:
        if folder not in kept:
            # Renamed first: a kill half-way through the deletion must not leave a folder that looks like a checkpoint.
            doomed = folder.with_name(f".{folder.name}.deleted")
            folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def _valid_loss(folder: Path) -> float | None:
    try:
        loss = read_manifest(folder).get("valid_loss")
    except ValueError:  # damaged, or of a later version: not the best that is known here
        return None
    return loss if loss is not None and math.isfinite(loss) else None


@contextmanager
def writable(run: Path) -> Iterator[None]:
    """Says what to do where nothing can be written in a run's folder. (A full disk is told by itself.)"""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            f"{run} cannot be written: {error.strerror or error}; choose another results_folder (to go on with a run, copy it there)"
        ) from error


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """One process at a time trains in a folder: two would delete each other's half-written checkpoints."""
    with writable(run):
        lock = (run / LOCK_FILE).open("w")
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(
                f"another process is training in {run}: wait for it, or choose another results_folder"
            ) from error
        except OSError as error:  # some network file systems have no locks
            logger.warning("%s cannot be locked (%s): see to it that one process alone trains there", run, error)
        yield


class BackgroundWriter:
    """Writes snapshots one after another in a thread. A write that fails is reported at once; the run goes on."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self.failure: Exception | None = None

    def submit(self, snapshot: Snapshot, run: Path, keep_last: int) -> None:
        self.wait()
        self.failure = None
        run = run.absolute()  # a script may change its working directory meanwhile
        self._thread = threading.Thread(target=self._write, args=(snapshot, run, keep_last), name="helicon-checkpoint")
        self._thread.start()

    def _write(self, snapshot: Snapshot, run: Path, keep_last: int) -> None:
        folder = run / CHECKPOINTS_FOLDER / folder_name(snapshot.step)
        try:
            write(snapshot, folder)
        except Exception as error:  # noqa: BLE001 (whatever the disk or the library raises: kept, reported, raised at the end)
            self.fail(snapshot.step, run, error)
            return
        try:
            prune(run, keep_last, folder)
        except OSError as error:
            logger.warning("old checkpoints of %s could not be deleted (%s)", run, error)

    def fail(self, step: int, run: Path, error: Exception) -> None:
        """Says that a checkpoint could not be written; another may be."""
        self.failure = error
        before = "the checkpoints before it are whole" if checkpoints(run) else "there is no checkpoint before it"
        logger.error("step %d could not be saved (%s); %s", step, error, before)

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def finish(self) -> None:
        """Waits, and raises if the last write failed: a run must not end as if it had been saved."""
        self.wait()
        if self.failure is not None:
            raise OSError(
                f"the last checkpoint could not be written ({self.failure}): free some space and resume"
            ) from self.failure
