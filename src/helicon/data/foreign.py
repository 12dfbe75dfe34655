"""A user's own DataLoader, or any iterable of batches, behind the interface of the Loader. Its order is its own.

Each batch is fetched under global generators seeded from (seed, epoch, number of the batch), so a shuffled DataLoader
has the same order on every rank and again after a resume, and the training's randomness is left alone. A resume uses
the source's `state_dict`/`load_state_dict` where it has them (torchdata's StatefulDataLoader), else skips batches.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DistributedSampler, IterableDataset

from helicon.data.loader import Position
from helicon.data.seeds import global_seed, mix

logger = logging.getLogger(__name__)


class ForeignLoader:
    """Here a `Position` counts batches: those of the epoch where the source has a length, else all since the start."""

    def __init__(self, source: Any, *, grad_accum_every: int = 1, rank: int = 0, world_size: int = 1, seed: int = 0):
        if grad_accum_every < 1:
            raise ValueError(f"grad_accum_every={grad_accum_every}: it must be at least 1")
        assert 0 <= rank < world_size
        if not hasattr(source, "__iter__"):
            raise ValueError(
                f"{type(source).__name__} cannot be iterated: pass a DataLoader or another iterable of batches"
            )
        self.source = source
        self.grad_accum_every, self.rank, self.world_size, self.seed = grad_accum_every, rank, world_size, seed
        self.bad: list[str] = []  # what a foreign loader skips, it does not tell
        samplers = (getattr(source, "sampler", None), getattr(getattr(source, "batch_sampler", None), "sampler", None))
        self.is_sharded = world_size == 1 or any(isinstance(sampler, DistributedSampler) for sampler in samplers)
        if not self.is_sharded:
            is_stream = isinstance(getattr(source, "dataset", source), IterableDataset)  # which takes no sampler
            logger.warning(
                "each of the %d processes reads every batch of this %s and keeps its share: %s",
                world_size,
                type(source).__name__,
                "its dataset must not split itself by rank as well, or the rest of each part is never seen"
                if is_stream
                else "give it a DistributedSampler to read only that",
            )
        # The first batch given in training, to look at: a second pass over the source may disturb the one under way.
        self.first: Any = None
        self._loaded: Mapping[str, Any] | None = None
        self._position = Position()

    def steps(self, start: Position = Position()) -> Iterator[list[Any]]:  # noqa: B008 (it is frozen)
        """Without end: the `grad_accum_every` micro-batches of one optimizer step, for this rank."""
        stream = self._stream(start)
        while True:
            step = [next(stream) for _ in range(self._batches_per_step)]
            yield step if self.is_sharded else step[self.rank :: self.world_size]

    def after(self, position: Position, steps: int = 1) -> Position:
        """The position when so many more steps are done."""
        offset = position.offset + steps * self._batches_per_step
        if self._length is None:
            return Position(position.epoch, offset)
        epochs, offset = divmod(offset, self._length)
        return Position(position.epoch + epochs, offset)

    def validation(self, num_batches: int | None = None) -> Iterator[Any]:
        """This rank's share of the first `num_batches` (over all ranks) of the source, the same ones each time."""
        is_empty = True
        for number, batch in enumerate(self._epoch(0)):
            is_empty = False
            among_all = number * self.world_size + self.rank if self.is_sharded else number
            if num_batches is not None and among_all >= num_batches:
                return
            if self.is_sharded or number % self.world_size == self.rank:
                yield batch
        if is_empty:
            self._raise_empty()

    @property
    def state(self) -> dict[str, Any] | None:
        """Where the source stands after the batches given out so far, if it can say; `load_state` goes on there."""
        if not hasattr(self.source, "state_dict") or not hasattr(self.source, "load_state_dict"):
            return None
        position = {"epoch": self._position.epoch, "offset": self._position.offset}
        return {**position, "source": self.source.state_dict()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """The next `steps` goes on from this `state`, whatever its `start`."""
        self._loaded = state

    @property
    def num_parts(self) -> int:
        """Among how many processes the source itself is split: a position counts the batches of one part."""
        return self.world_size if self.is_sharded else 1

    @property
    def _batches_per_step(self) -> int:
        return self.grad_accum_every * self.world_size // self.num_parts

    @property
    def _length(self) -> int | None:
        """Batches of an epoch, where the source has a length."""
        if not hasattr(self.source, "__len__"):
            return None
        try:
            length = len(self.source)
        except TypeError:  # a DataLoader over an iterable dataset has the method, but no answer
            return None
        return length or self._raise_empty()

    def _stream(self, start: Position) -> Iterator[Any]:
        epoch, number, num_skipped = start.epoch, 0, start.offset
        is_resumed = self._loaded is not None
        if self._loaded is not None:
            self.source.load_state_dict(self._loaded["source"])
            epoch, number, num_skipped = self._loaded["epoch"], self._loaded["offset"], 0
            self._loaded = None
        elif num_skipped:
            logger.info("skipping %d batches to where the run stood", num_skipped)
        while True:
            is_empty = not is_resumed  # a state from the very end of an epoch has nothing left of it
            for batch in self._epoch(epoch, number):
                is_empty = False
                number += 1
                if num_skipped:
                    num_skipped -= 1
                    continue
                self._position = Position(epoch, number)
                self.first = batch if self.first is None else self.first
                yield batch
            if is_empty:
                self._raise_empty()
            epoch, number, is_resumed = epoch + 1, 0, False

    def _epoch(self, epoch: int, number: int = 0) -> Iterator[Any]:
        """One pass over the source, `number` of whose batches are already behind it."""
        samplers = (getattr(self.source, name, None) for name in ("sampler", "batch_sampler"))
        for part in (self.source, *samplers):
            if part is not None and hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        with global_seed(mix(self.seed, "foreign", epoch)):
            iterator = iter(self.source)
        while True:
            with global_seed(mix(self.seed, "foreign", epoch, number)):
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            number += 1
            yield batch

    def _raise_empty(self) -> Any:
        raise ValueError(
            f"this {type(self.source).__name__} gives no batches (any more): "
            "pass one that is not empty and can be iterated again, such as a DataLoader or a list"
        )
