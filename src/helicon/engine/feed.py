"""What a trainer learns from and is validated on, for the rank and the batch that hold now."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helicon.data.dataset import unaugmented
from helicon.data.foreign import ForeignLoader
from helicon.data.loader import Loader
from helicon.data.split import split
from helicon.engine.options import TrainerOptions
from helicon.engine.runtime import Runtime
from helicon.engine.task import Batch


class Feed:
    """The training loader and, where there is something to validate on, the validation loader."""

    def __init__(
        self,
        options: TrainerOptions,
        runtime: Runtime,
        folder: Path,
        dataset: Any,
        val_dataset: Any,
        train_dataloader: Any,
        val_dataloader: Any,
        collate: Callable[[list[Any]], Batch] | None,
    ):
        if (dataset is None) == (train_dataloader is None):
            raise ValueError("give either a dataset (or folder) or a train_dataloader")
        if dataset is not None and val_dataset is None and val_dataloader is None and options.valid_frac > 0:
            dataset, val_dataset = split(dataset, options.valid_frac, options.random_split_seed)
        val_dataset = None if val_dataset is None else unaugmented(val_dataset)  # also the one a user gives
        self.options, self.runtime, self.dataset, self.val_dataset = options, runtime, dataset, val_dataset
        self._collate, self._bad_files = collate, folder / "bad_files.txt"
        self.batch_size, self.grad_accum_every = self._local_batch(), options.grad_accum_every
        self.train: Loader | ForeignLoader = self._own() if dataset is not None else self._foreign(train_dataloader)
        self.valid: Loader | ForeignLoader | None = None
        together = runtime.shards
        if val_dataloader is not None:
            self.valid = self._foreign(val_dataloader, together)
        elif val_dataset is not None:
            self.valid = self._validation(val_dataset, together)

    def set_batch(self, batch_size: int, grad_accum_every: int) -> None:
        """Another division of a step into micro-batches; the batches of a user's own loader stay as large as they are."""
        self.batch_size, self.grad_accum_every = batch_size, grad_accum_every
        if isinstance(self.train, Loader):
            self.train = self._own()
        else:
            self.train.grad_accum_every = grad_accum_every

    def first_batch(self) -> Any:
        """The first validation batch, or else the first training samples: the same on every process, and again after a resume.
        (Of a user's own training loader the first batch this process has met.)"""
        source = self.val_dataset if self.val_dataset is not None else self.dataset
        if source is not None:
            return next(self._validation(source, together=True).validation(1))
        chosen = self.valid or self.train
        assert isinstance(chosen, ForeignLoader)
        if chosen.first is not None:
            return chosen.first
        return next(self._foreign(chosen.source, together=True).validation(1))

    def _own(self) -> Loader:
        options = self.options
        loader = Loader(
            self.dataset,
            batch_size=self.batch_size,
            grad_accum_every=self.grad_accum_every,
            **self._ranks(together=False),
            seed=options.seed,
            drop_last=options.drop_last,
            num_workers=options.num_workers,
            collate=self._collate,
            pin_memory=self.runtime.device.type == "cuda",
            bad_files=self._bad_files,
        )
        loader.check()
        return loader

    def _validation(self, source: Any, together: bool) -> Loader:
        return Loader(
            source,
            batch_size=self.batch_size,
            **self._ranks(together),
            seed=self.options.seed,
            collate=self._collate,
            bad_files=self._bad_files,
        )

    def _foreign(self, source: Any, together: bool = False) -> ForeignLoader:
        # It shares out batches too, and a part of each share would be lost.
        if type(source).__module__.startswith("accelerate."):
            raise ValueError(
                f"this {type(source).__name__} was prepared by Accelerate: give the DataLoader it was made from, which the "
                "trainer shares out over the processes itself"
            )
        return ForeignLoader(
            source, grad_accum_every=self.grad_accum_every, seed=self.options.seed, **self._ranks(together)
        )

    def _ranks(self, together: bool) -> dict[str, Any]:
        """This process's share of the data; all of it where the processes must go through the same batches together
        (a sharded network needs every process in each forward)."""
        if together:
            return {"rank": 0, "world_size": 1}
        return {"rank": self.runtime.rank, "world_size": self.runtime.world_size}

    def _local_batch(self) -> int:
        size, processes = self.options.batch_size, self.runtime.world_size
        if not self.options.split_batches:
            return size
        if size % processes:
            raise ValueError(
                f"batch_size={size} cannot be split over {processes} processes: make it a multiple of {processes}"
            )
        return size // processes


def steps_of_epochs(epochs: int, dataset: Any, is_split: bool, options: TrainerOptions) -> int:
    """Optimizer steps of so many epochs of the part of a dataset that is learned from, where a part `is_split` off to validate on."""
    if is_split and options.valid_frac > 0:
        dataset, _ = split(dataset, options.valid_frac, options.random_split_seed)
    if options.accelerator is not None:
        processes = options.accelerator.num_processes
    else:
        processes = int(os.environ.get("WORLD_SIZE", "1"))  # as launchers tell it; the processes themselves meet later
    size = options.batch_size * options.grad_accum_every * (1 if options.split_batches else processes)
    if options.drop_last:
        return epochs * (len(dataset) // size)
    return math.ceil(epochs * len(dataset) / size)
