"""What a run says while it goes: the console, metrics.jsonl, TensorBoard and any Accelerate tracker."""

import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
SHOWN = ("loss", "valid_loss")  # on the progress line, before throughput


class Reporter:
    """Reports of the main process; on every other process it says nothing."""

    def __init__(self, run: Path, title: str, unit: str, total_steps: int, active: bool, tensorboard: bool):
        self.run, self.title, self.unit, self.total_steps, self.active = run, title, unit, total_steps, active
        self.console = Console(quiet=not active, highlight=False)
        self._wants_tensorboard = tensorboard and active
        self._tensorboard: Any = None
        self._progress: Progress | None = None
        self._task: Any = None
        self._latest: dict[str, float] = {}

    def take_back(self, step: int) -> None:
        """Forgets what an interrupted run logged after `step`: it will be logged again."""
        if self.active:
            _drop_lines_after(self.run / METRICS_FILE, step)

    def start(self, step: int) -> None:
        """Opens the reports at `step`."""
        if not self.active:
            return
        self.take_back(step)
        if self._wants_tensorboard and self._tensorboard is None:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(self.run / "tensorboard"), purge_step=step + 1)
        if self.console.is_terminal:
            columns = [
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed}/{task.total}"),
                TextColumn("{task.fields[status]}"),
            ]
            self._progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self.console)
            self._task = self._progress.add_task(self.title, total=self.total_steps, completed=step, status="")
            self._progress.start()

    @contextmanager
    def _on_console(self) -> Iterator[None]:
        """A terminal that has been closed is told nothing more; the run goes on, or saves what it has learned."""
        try:
            yield
        except OSError:
            self.console.quiet, self._progress = True, None

    def advance(self, step: int) -> None:
        with self._on_console():
            if self._progress is not None:
                self._progress.update(self._task, completed=step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One line of numbers, everywhere."""
        if not self.active:
            return
        self._latest |= values
        self._to_file(step, values)
        self._to_tensorboard(step, values)
        status = self._status()
        with self._on_console():
            if self._progress is not None:
                self._progress.update(self._task, completed=step, status=status)
            else:
                self.say(f"{self.title} step {step}/{self.total_steps} {status}")

    def _to_file(self, step: int, values: Mapping[str, float]) -> None:
        path = self.run / METRICS_FILE
        before = path.stat().st_size if path.exists() else 0
        try:
            with path.open("a") as file:
                file.write(json.dumps({"step": step, **{k: _plain(v) for k, v in values.items()}}) + "\n")
        except OSError as error:
            logger.error("the numbers of step %d could not be written (%s); the run goes on", step, error)
            with suppress(OSError):
                os.truncate(path, before)  # or half a line would run into the next one

    def _to_tensorboard(self, step: int, values: Mapping[str, float]) -> None:
        try:
            for name, value in values.items() if self._tensorboard is not None else ():
                self._tensorboard.add_scalar(name, value, step)
        except OSError as error:  # of any write before: its thread has ended with it
            logger.error("TensorBoard's file could not be written (%s); the run goes on without it", error)
            self._tensorboard = None

    def _status(self) -> str:
        known = self._latest
        parts = [f"{name.replace('_', ' ')} {known[name]:.4g}" for name in SHOWN if name in known]
        rate = f"{self.unit}_per_second"
        if rate in known:
            parts.append(f"{known[rate]:,.0f} {self.unit}/s")
        if known.get("skipped_steps"):
            parts.append(f"{known['skipped_steps']:.0f} steps skipped")
        return "  ".join(parts)

    def say(self, message: str) -> None:
        with self._on_console():
            self.console.print(message, soft_wrap=True, markup=False)

    def stop(self) -> None:
        with self._on_console():
            if self._progress is not None:
                self._progress.stop()
                self._progress = None
        if self._tensorboard is not None:
            try:
                self._tensorboard.close()
            except OSError as error:
                logger.error("TensorBoard's file could not be written (%s)", error)
            self._tensorboard = None


class Pending:
    """Named 0-d tensors of a step on their way to main memory, so that reading them does not wait for later steps."""

    def __init__(self, step: int, *groups: Mapping[str, Tensor]):
        self.step = step
        named = {name: value.detach() for group in groups for name, value in group.items()}
        on_device = {name: value for name, value in named.items() if value.is_cuda}
        self._here = {name: value for name, value in named.items() if not value.is_cuda}
        self._names = list(on_device)
        self._event: torch.cuda.Event | None = None
        if on_device:
            stacked = torch.stack([value.double() for value in on_device.values()])
            self._values = torch.empty(len(on_device), dtype=torch.float64, pin_memory=True).copy_(
                stacked, non_blocking=True
            )
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> dict[str, float]:
        values = {name: float(value) for name, value in self._here.items()}
        if self._event is not None:
            self._event.synchronize()
            values |= dict(zip(self._names, self._values.tolist(), strict=True))
        return values


class Clock:
    """Training time, units and operations since the last report; looking and saving do not count."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Counts from now on."""
        self._start = time.perf_counter()
        self._paused = self._waited = self._flops = 0.0
        self._units = 0

    def count(self, units: int, flops: float) -> None:
        self._units += units
        self._flops += flops

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start

    @contextmanager
    def paused(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._paused += time.perf_counter() - max(start, self._start)  # the report may have been made meanwhile

    def read(self, unit: str, processes: int, peak: float | None) -> dict[str, float]:
        seconds = max(time.perf_counter() - self._start - self._paused, 1e-9)
        values = {
            f"{unit}_per_second": self._units * processes / seconds,
            "data_wait_fraction": min(self._waited / seconds, 1.0),
        }
        if peak is not None and self._flops:
            values["flop_utilisation"] = self._flops / seconds / peak
        self.start()
        return values


class Trackers:
    """The trackers of an Accelerator, if it has any: started once, told the hyper-parameters, ended also when training raises."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.wanted = bool(accelerator.log_with)
        self.started = False
        self.run_id: str | None = None

    def start(self, project: str, hyper_parameters: Mapping[str, Any], run: str | None = None) -> None:
        if not self.wanted or self.started:
            return
        wandb = {key: value for key, value in (("name", run), ("id", self.run_id)) if value is not None}
        if self.run_id is not None:
            wandb["resume"] = "allow"
        self.accelerator.init_trackers(
            project, config=dict(hyper_parameters), init_kwargs={"wandb": wandb} if wandb else {}
        )
        self.started = True
        for tracker in self.accelerator.trackers:
            if tracker.name == "wandb" and self.accelerator.is_main_process:
                self.run_id = tracker.run.id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self.started:
            self.accelerator.log(dict(values), step=step)

    def end(self) -> None:
        """`Accelerator.end_training` would also destroy the process group; the trackers alone are finished here."""
        if self.started:
            self.started = False
            for tracker in self.accelerator.trackers:
                tracker.finish()
            self.accelerator.trackers = []


def plain_hyper_parameters(values: Mapping[str, Any]) -> dict[str, Any]:
    """Hyper-parameters as every tracker can store them."""
    return {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in values.items() if v is not None}


def _drop_lines_after(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            logger.warning("%s: an unfinished line of the interrupted run was dropped", path)
    temporary = path.with_suffix(".writing")
    temporary.write_text("".join(f"{line}\n" for line in kept))
    temporary.replace(path)


def _plain(value: float) -> float | str:
    """json has no NaN: written as text, so that every reader of the file survives it."""
    return value if math.isfinite(value) else str(value)
