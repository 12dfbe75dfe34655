"""What a script reaches for on a trainer beside its loop: where it runs, what it says and to whom."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Self

import torch

from helicon.engine.options import TrainerOptions
from helicon.engine.runtime import Runtime
from helicon.engine.task import Task
from helicon.engine.tracking import Reporter, Trackers, plain_hyper_parameters
from helicon.nn.network import Network


class Surface:
    """Names that scripts know from other trainers. A `Trainer` has the state behind them."""

    task: Task
    options: TrainerOptions
    runtime: Runtime
    reporter: Reporter
    trackers: Trackers
    step: int

    @contextmanager
    def wandb_tracker(
        self, project: str, run: str | None = None, hps: Mapping[str, Any] | None = None
    ) -> Iterator[None]:
        """Inside, the trackers log to this project and run, with `hps` (by default the run's own options) as hyper-parameters."""
        if not self.trackers.wanted:
            raise ValueError("this trainer has no tracker: build it with use_wandb_tracking=True, or trackers=[...]")
        self.trackers.start(project, plain_hyper_parameters(hps) if hps else self._hyper_parameters(), run)
        try:
            yield
        finally:
            self.trackers.end()

    wandb_tracking = wandb_tracker

    def log(self, **values: float) -> None:
        """Numbers of this step, to the console, metrics.jsonl, TensorBoard and the trackers."""
        self._log_at(self.step, values)

    def _log_at(self, step: int, values: Mapping[str, float]) -> None:
        self.reporter.log(step, values)
        self.trackers.log(step, values)

    def print(self, message: str) -> None:
        self.reporter.say(message)

    def wait(self) -> None:
        """Until every process has come here."""
        self.runtime.wait()

    def to(self, *_: Any, **__: Any) -> Self:
        """The trainer chooses its device itself; kept so that `trainer.to(...)` and `trainer.cuda()` can stand in a script."""
        return self

    cuda = to

    @property
    def steps(self) -> int:
        return self.step

    @property
    def device(self) -> torch.device:
        return self.runtime.device

    @property
    def is_main(self) -> bool:
        return self.runtime.is_main

    @property
    def is_local_main(self) -> bool:
        return self.runtime.is_local_main

    @property
    def is_distributed(self) -> bool:
        return self.runtime.is_distributed

    @property
    def accelerator(self) -> Any:
        return self.runtime.accelerator

    @property
    def unwrapped_model(self) -> Network:
        return self.task.model

    def _hyper_parameters(self) -> dict[str, Any]:
        # (Not `asdict`, which copies what stands in the values, and a tracker of the user's own may hold a lock.)
        names = (entry.name for entry in fields(self.options) if entry.name not in ("accelerator", "trackers"))
        return plain_hyper_parameters(
            {**self.task.model.arguments, **{name: getattr(self.options, name) for name in names}}
        )
