"""Batches in an order that is a pure function of (seed, epoch): the data position is two integers.

Epoch e is a permutation of the dataset drawn from (seed, e), and everything random about a sample comes from
(seed, e, index). Neither workers nor processes have a say: rank r of w takes, for micro-batch m of b samples, the
samples [(m w + r) b, (m w + r + 1) b) of the global batch. So runs with equal b * accumulation * w see equal global
batches, and a run goes on anywhere, with another number of workers or processes, with the samples it would have seen.
"""

import logging
import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from helicon.data.collate import collate as default_collate
from helicon.data.dataset import BadFile, read
from helicon.data.seeds import global_seed, mix, preserved, seeded_generator
from helicon.data.split import Subset

logger = logging.getLogger(__name__)

NUM_BAD_FILES_TOLD = 10  # the rest is in the list

Place = tuple[int, int]  # epoch and index: all that a sample and its randomness depend on, beside the seed


@dataclass(frozen=True)
class Position:
    """Where the data stands."""

    epoch: int = 0
    offset: int = 0  # samples of this epoch already consumed, over all ranks

    def __post_init__(self) -> None:
        if self.epoch < 0 or self.offset < 0:
            raise ValueError(f"a data position is two counts from 0, not ({self.epoch}, {self.offset})")


class Loader:
    """An endless stream of training batches, and a fixed set of validation batches, of one dataset."""

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        grad_accum_every: int = 1,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        num_workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        bad_files: Path | None = None,
    ):
        if not hasattr(dataset, "__len__"):
            raise ValueError(
                f"{type(dataset).__name__} has no length, so its order is its own: put it into a torch DataLoader"
            )
        if len(dataset) == 0:
            raise ValueError(f"the dataset ({type(dataset).__name__}) is empty")
        for name, value in {
            "batch_size": batch_size,
            "grad_accum_every": grad_accum_every,
            "world_size": world_size,
        }.items():
            if value < 1:
                raise ValueError(f"{name}={value}: it must be at least 1")
        assert 0 <= rank < world_size
        self.dataset = dataset
        self.batch_size, self.grad_accum_every = batch_size, grad_accum_every
        self.rank, self.world_size = rank, world_size
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self.num_workers, self.collate, self.pin_memory = _capped(num_workers), collate or default_collate, pin_memory
        self.bad: list[str] = []
        self._bad_list = _BadList(bad_files)
        self.global_batch = batch_size * grad_accum_every * world_size

    def check(self) -> None:
        """Raises if the dataset cannot fill one global batch. (`steps` asks this; validation can do with less.)"""
        if len(self.dataset) < self.global_batch:
            raise ValueError(
                f"the dataset has {len(self.dataset)} samples, fewer than the {self.global_batch} of one step "
                f"(batch_size {self.batch_size} x grad_accum_every {self.grad_accum_every} x "
                f"{self.world_size} processes): lower batch_size or grad_accum_every, or add data{self._held_out()}{self._unreadable()}"
            )

    def _held_out(self) -> str:
        if not isinstance(self.dataset, Subset):
            return ""
        return f" ({len(self.dataset.dataset) - len(self.dataset)} more are held out for validation: valid_frac)"

    def _unreadable(self) -> str:
        """How many of a few samples cannot be read: they count as samples, but may be why there are few."""
        num_bad = 0
        with preserved():
            for index in range(len(self.dataset)):
                try:
                    read(self.dataset, index, seeded_generator(self.seed, "sample", 0, index))
                except BadFile as error:
                    num_bad += 1
                    self._note(error.path, error.reason, is_told=True)
        if not num_bad:
            return ""
        where = "" if self._bad_list.path is None else f" (see {self._bad_list.path})"
        return f"; {num_bad} of the {len(self.dataset)} cannot be read{where}"

    def steps(self, start: Position = Position()) -> Iterator[list[Any]]:  # noqa: B008 (it is frozen)
        """Without end: the `grad_accum_every` micro-batches of one optimizer step, for this rank."""
        self.check()
        return self._steps(start)

    def _steps(self, start: Position) -> Iterator[list[Any]]:
        batches = self._deliver(self._training_plan(start))
        while True:
            yield [next(batches) for _ in range(self.grad_accum_every)]

    def after(self, position: Position, steps: int = 1) -> Position:
        """The position when so many more steps are done."""
        self.check()
        total, batch = len(self.dataset), self.global_batch
        if not self.drop_last:
            epochs, offset = divmod(position.offset + steps * batch, total)
            return Position(position.epoch + epochs, offset)
        left = max(0, total - position.offset) // batch  # steps left in this epoch
        if steps < left:
            return Position(position.epoch, position.offset + steps * batch)
        epochs, steps = divmod(steps - left, total // batch)
        return Position(position.epoch + 1 + epochs, steps * batch)

    def validation(self, num_batches: int | None = None) -> Iterator[Any]:
        """This rank's share of the validation batches: always the same, in the order of epoch 0, the last included.

        `num_batches` counts over all ranks, so that the samples do not depend on the number of processes; the share of
        a rank is every `world_size`-th batch, which may be none.
        """
        if num_batches is not None and num_batches < 1:
            raise ValueError(f"num_batches={num_batches}: it must be at least 1, or None for all")
        return self._deliver(self._validation_plan(num_batches))

    def order(self, epoch: int) -> Tensor:
        """The permutation of the dataset's indices that is epoch `epoch`."""
        if not self.shuffle:
            return torch.arange(len(self.dataset))
        return torch.randperm(len(self.dataset), generator=seeded_generator(self.seed, "order", epoch))

    def _training_plan(self, position: Position) -> Iterator[list[Place]]:
        epoch, order = -1, torch.empty(0)
        while True:
            step: list[Place] = []
            position = self.after(position, 0)
            while len(step) < self.global_batch:
                if position.epoch != epoch:
                    epoch, order = position.epoch, self.order(position.epoch)
                indices = order[position.offset : position.offset + self.global_batch - len(step)].tolist()
                step += [(epoch, index) for index in indices]
                position = Position(epoch, position.offset + len(indices))
                if position.offset == len(order):
                    position = Position(epoch + 1, 0)
            for micro in range(self.grad_accum_every):
                begin = (micro * self.world_size + self.rank) * self.batch_size
                yield step[begin : begin + self.batch_size]

    def _validation_plan(self, num_batches: int | None) -> Iterator[list[Place]]:
        batches = self.order(0).split(self.batch_size)[:num_batches]
        for indices in batches[self.rank :: self.world_size]:
            yield [(0, index) for index in indices.tolist()]

    def _deliver(self, plan: Iterable[list[Place]]) -> Iterator[Any]:
        """The batches of a plan. The workers live as long as this generator: closing or dropping it ends them."""
        batches: DataLoader[Any] = DataLoader(
            _Samples(self.dataset, self.seed),
            batch_sampler=plan,
            collate_fn=_Collate(self.collate, self.seed),
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            worker_init_fn=_leave_process_group,
            generator=torch.Generator(),  # or it would draw the workers' seed from the training's own randomness
        )
        for batch, bad, is_readable in batches:
            if isinstance(batch, _Mistake):
                raise ValueError(batch.sentence) from _InWorker(batch.traceback)
            for path, reason in bad:
                self._note(path, reason, is_told=is_readable)  # or else one sentence tells it all
            if not is_readable:
                path, reason = bad[0]
                raise ValueError(
                    f"none of the {len(self.dataset)} files can be read, for example {path} ({reason}): "
                    "check the format, the path and the captions of the data"
                )
            yield batch

    def _note(self, path: str, reason: str, is_told: bool) -> None:
        if self._bad_list.add(path, reason):
            self.bad.append(path)
            level = logging.WARNING if is_told and len(self.bad) <= NUM_BAD_FILES_TOLD else logging.DEBUG
            logger.log(level, "skipped %s: %s", _printable(path), _printable(reason))


def _capped(num_workers: int) -> int:
    """More processes than CPUs that this one may use are no faster, and change nothing else; torch would warn of them."""
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if num_workers > num_cpus:
        logger.info("num_workers=%d: there are %d CPUs, so as many processes read data", num_workers, num_cpus)
    return min(num_workers, num_cpus)


def _leave_process_group(worker: int) -> None:
    """A signal to the group of the run (Ctrl-C, say) is for the main process, which still wants batches to end well."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()


def _printable(text: str) -> str:
    """File names need not be valid UTF-8, and a console need not take what is not."""
    return text.encode(errors="backslashreplace").decode()


class _BadList:
    """The bad files met, each once; and once in the list on disk, to which other ranks and earlier runs write too."""

    def __init__(self, path: Path | None):
        self.path = path
        self.met: set[str] = set()
        self._listed: set[str] = set()
        self._end = 0  # how far the list on disk has been read

    def add(self, name: str, reason: str) -> bool:
        """True if it was not met before."""
        if name in self.met:
            return False
        self.met.add(name)
        if self.path is not None:
            try:
                self._list(name.replace("\t", "\\t").replace("\n", "\\n"), " ".join(reason.split()), self.path)
            except OSError as error:
                logger.error("%s could not be written (%s); the run goes on without it", self.path, error)
                self.path = None
        return True

    def _list(self, name: str, reason: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            file.seek(self._end)
            self._listed |= {line.partition(b"\t")[0].decode(errors="surrogateescape") for line in file}
            if name not in self._listed:
                file.write(f"{name}\t{reason}\n".encode(errors="surrogateescape"))  # file names need not be valid UTF-8
            self._end = file.tell()
            self._listed.add(name)


@dataclass(frozen=True)
class _Sample:
    place: Place
    value: Any
    bad: list[tuple[str, str]]  # what could not be read on the way to it
    is_readable: bool = True


@dataclass(frozen=True)
class _Mistake:
    """A sentence for the user on its way from a worker process. (Left to torch, its traceback would be part of it.)"""

    sentence: str
    traceback: str

    @classmethod
    def of(cls, error: ValueError) -> "_Mistake":
        return cls(str(error), "".join(traceback.format_exception(error)))


class _InWorker(Exception):
    """The cause of an error that a worker process met: its traceback there."""

    def __str__(self) -> str:
        return f"in a process that reads data:\n{self.args[0]}"


@dataclass(frozen=True)
class _Samples(Dataset[_Sample]):
    """The dataset, asked for by (epoch, index). An item that cannot be read gives way to the next one that can."""

    dataset: Any
    seed: int

    def __getitems__(self, places: list[Place]) -> list[_Sample] | _Mistake:
        try:
            with preserved():
                return [self[place] for place in places]
        except ValueError as error:
            if torch.utils.data.get_worker_info() is None:
                raise
            return _Mistake.of(error)

    def __getitem__(self, place: Place) -> _Sample:
        epoch, wanted = place
        bad = []
        for shift in range(len(self.dataset)):
            index = (wanted + shift) % len(self.dataset)
            try:
                value = read(self.dataset, index, seeded_generator(self.seed, "sample", epoch, index))
            except BadFile as error:
                bad.append((error.path, error.reason))
                continue
            return _Sample(place, value, bad)
        return _Sample(place, None, bad, is_readable=False)


@dataclass(frozen=True)
class _Collate:
    """The batch, beside the bad files met: so that what a worker process saw reaches the main one, in order."""

    collate: Callable[[list[Any]], Any]
    seed: int

    def __call__(self, samples: list[_Sample] | _Mistake) -> tuple[Any, list[tuple[str, str]], bool]:
        if isinstance(samples, _Mistake):
            return samples, [], True
        bad = [report for sample in samples for report in sample.bad]
        if not all(sample.is_readable for sample in samples):
            return None, bad, False
        # A user's own may draw random numbers: they too replay, and disturb nobody's.
        with global_seed(mix(self.seed, "collate", *samples[0].place)):
            try:
                return self.collate([sample.value for sample in samples]), bad, True
            except ValueError as error:
                if torch.utils.data.get_worker_info() is None:
                    raise
                return _Mistake.of(error), bad, True
