"""The loop. One for every family: a Task says what a batch becomes; everything else about training is here.

micro-batches -> shared forward -> losses -> backward -> clip -> step -> average -> log / validate / sample / save
"""

import inspect
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from helicon.data.loader import Loader, Position
from helicon.engine import state
from helicon.engine.checkpoint import BEST, BackgroundWriter, best_first, checkpoints, locked, resolve
from helicon.engine.ema import EMA
from helicon.engine.feed import Feed
from helicon.engine.optim import LossScale, NetworkOptimizer, OptimizerSettings
from helicon.engine.options import TrainerOptions
from helicon.engine.recording import Recorder
from helicon.engine.runtime import Runtime, fixed_randomness, seed_everything
from helicon.engine.surface import Surface
from helicon.engine.task import Batch, Task, Update
from helicon.engine.tracking import Clock, Pending, Reporter, Trackers

logger = logging.getLogger(__name__)

Logs = dict[str, Tensor]


class TrainingDiverged(RuntimeError):
    """The loss or the gradients were not finite for too many steps in a row, or at the end of the run."""


class Trainer(Surface):
    """Trains a Task. Families derive from it and change `name`, `defaults` and how their data is found."""

    name: str = "run"  # runs/<name> is the default folder
    defaults: ClassVar[Mapping[str, Any]] = {}  # of TrainerOptions

    def __init_subclass__(cls) -> None:
        """The signature a user (and the recipe checker) sees: the class's own keywords and every option of the loop."""
        own = [p for p in inspect.signature(cls.__init__).parameters.values() if p.kind is not p.VAR_KEYWORD][1:]
        for base in cls.__mro__[1 : cls.__mro__.index(Trainer)]:  # whose keywords go on to it
            inherited = inspect.signature(base.__init__).parameters.values()  # type: ignore[misc]
            known = {p.name for p in own}
            own += [p for p in inherited if p.kind is p.KEYWORD_ONLY and p.name not in known]
        taken = {p.name for p in own}
        options = [
            _option_parameter(entry, cls.defaults) for entry in fields(TrainerOptions) if entry.name not in taken
        ]
        cls.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]

    def __init__(
        self,
        task: Task,
        *,
        dataset: Any = None,
        val_dataset: Any = None,
        train_dataloader: Any = None,
        val_dataloader: Any = None,
        collate: Callable[[list[Any]], Batch] | None = None,
        **options: Any,
    ):
        self.task = task
        self.options = TrainerOptions.from_keywords(options, self.defaults, type(self).__name__)
        self.runtime = Runtime(self.options)
        if self.options.shard and len(task.networks) > 1:
            raise ValueError(
                f"shard=True trains one network, and {type(task).__name__} has {' and '.join(task.networks)}: leave it out"
            )
        self.results_folder = self._claim_folder()
        self.feed = Feed(
            self.options,
            self.runtime,
            self.results_folder,
            dataset,
            val_dataset,
            train_dataloader,
            val_dataloader,
            collate,
        )

        newest = state.newest_on_all(self.runtime, self.results_folder) if self.options.resume else None
        if self.options.init_from is not None and newest is None:
            state.load_weights(task.model, resolve(Path(self.options.init_from)))
        task.move_to(self.device)
        for module in task.frozen.values():
            self.runtime.freeze(module)
        self.raw = dict(task.networks)
        self.wrapped = {
            name: self.runtime.wrap(network, task.compiled.get(name, ())) for name, network in self.raw.items()
        }
        self._trainable = {name: [p for p in n.parameters() if p.requires_grad] for name, n in self.raw.items()}
        first = next(iter(self.raw))
        self.optimizers = {
            name: NetworkOptimizer(
                network, OptimizerSettings.of(self.options, name == first), self.options.num_train_steps
            )
            for name, network in self.raw.items()
        }
        self.ema = self._averaged()
        self.scale = LossScale(self.device) if self.runtime.precision == "fp16" else None
        self.recorder = self._recorder()

        self.step = 0
        self.position = Position()
        self.valid_loss: float | None = None
        self.valid_step: int | None = None  # at which it was measured
        self.bad_steps = torch.zeros((), device=self.device)
        self.bad_in_a_row = torch.zeros((), device=self.device)
        self.reporter = Reporter(
            self.results_folder,
            self.name,
            task.unit,
            self.options.num_train_steps,
            self.is_main,
            self.options.tensorboard,
        )
        self.trackers = Trackers(self.runtime.accelerator)
        self.writer = BackgroundWriter()
        self._saved_step: int | None = None
        self._owes_checkpoint = False  # one was due while steps were not finite
        self._batches: Iterator[list[Batch]] | None = None
        self._ahead: list[Batch] | None = None  # the batches of the coming step
        self._pending: Pending | None = None  # numbers on their way from the device
        self._sample_batch: Batch | None = None
        self._inside_session = False
        self._signal: int | None = None
        self._asked = torch.zeros_like(self.bad_steps)  # whether any process has got a signal
        self._told: Pending | None = None  # that, on its way from the device
        self._clock = Clock()
        seed_everything(self.options.seed * 1_000_003 + self.runtime.rank)
        if newest is not None:
            self._resume(newest)
        self._started_at = self.step
        # It is about to change: as a stage of something later it is not what it was loaded from.
        task.model.source = task.model.source_sha256 = None

    # ------------------------------------------------------------------ the loop

    def train(self, log_fn: Callable[[Logs], Any] | None = None) -> None:
        """Trains to `num_train_steps`, from wherever the run stands; `log_fn` gets each step's named tensors."""
        with self.session():
            while self.step < self.options.num_train_steps:
                logs = self.train_step()
                if log_fn is not None:
                    log_fn(logs)
            self._save_once(final=True)
            self.writer.finish()
            self._stop_if_asked()
        self.print(f"{self.name}: {self.step} steps done; the run is in {self.results_folder}")
        best = next(iter(best_first(checkpoints(self.results_folder)).items()), None)
        if best is not None and self.valid_loss is not None and best[1] < self.valid_loss:
            self.print(
                f"{self.name}: the validation loss was lower before, {best[1]:.4g} at {best[0].name}: "
                f"{self.results_folder / BEST} means that checkpoint"
            )

    __call__ = train

    def train_step(self) -> Logs:
        """One optimizer step, and what is due after it. Returns named 0-d tensors (on the device: reading one waits)."""
        if not self._inside_session and self.step == self._started_at:
            state.check_still_ours(self)
            self.reporter.take_back(self.step)
        with nullcontext() if self._inside_session else self._mode(True):
            micro = self._next_batches() if self._ahead is None else self._ahead
            with self.runtime.step(self.raw.values()):
                with self.runtime.autocast():
                    micro = [self.task.read(batch) for batch in micro]
                logs = self._optimize(micro)
            self.step += 1
            self.position = self.feed.train.after(self.position)
            if self.ema is not None:
                self.ema.update(self.step)
            self._clock.count(
                sum(self.task.units(batch) for batch in micro), sum(self.task.flops(b) or 0.0 for b in micro)
            )
            # The device is busy with what was just asked of it: time to fetch what comes next, and to read earlier numbers.
            self._ahead = self._fetch_ahead()
            self._report()
            self._do_what_is_due(logs)
        return logs

    def _optimize(self, micro: Sequence[Batch]) -> Logs:
        """One step of each network that is due: what the host says, around what the device does."""
        updates = self.task.updates(self.step)
        due = {
            "" if u.network == next(iter(self.raw)) else f"{u.network}_": self.optimizers[u.network] for u in updates
        }
        for optimizer in due.values():
            optimizer.schedule.catch_up(self.step)
        rates = {f"{prefix}lr": torch.tensor(optimizer.set_rate()) for prefix, optimizer in due.items()}
        work = partial(self._accumulate_and_step, updates)
        if self.recorder is None:
            logs = work(micro)
        else:
            logs = self.recorder(tuple((update.network, update.kind) for update in updates), micro, work)
        for optimizer in due.values():
            optimizer.schedule.advance()
        if self.runtime.is_distributed:
            self._asked = logs.pop("asked")
        return {**logs, **rates}

    def _accumulate_and_step(self, updates: Sequence[Update], micro: Sequence[Batch]) -> Logs:
        """Accumulates the gradients of every update over the micro-batches, then steps each network. On the device alone."""
        active = {update.network: self.wrapped[update.network] for update in updates}
        first = next(iter(self.raw))
        logs: Logs = {}
        for index, (batch, share) in enumerate(zip(micro, self._shares(micro), strict=True)):
            is_last = index == len(micro) - 1
            with nullcontext() if is_last else self.runtime.without_sync(active):
                with self._calling(active), self.runtime.autocast():
                    outputs = self.task.forward(batch)
                for update in updates:
                    with self._only(update.network):
                        with self.runtime.autocast():
                            loss = update.loss(outputs)
                        total = loss.total * share
                        (total if self.scale is None else total * self.scale.value).backward()
                    name = "loss" if update.network == first else f"{update.network}_loss"
                    for key, value in {name: total, **{k: v * share for k, v in loss.parts.items()}}.items():
                        logs[key] = logs[key] + value.detach() if key in logs else value.detach()
        bad = ~torch.isfinite(torch.stack([v for k, v in logs.items() if k.endswith("loss")]).sum())
        if self.runtime.is_distributed:
            asked = torch.full_like(bad, self._signal is not None)
            bad, logs["asked"] = self.runtime.any(torch.stack([bad, asked])).unbind()  # one message for both
        for update in updates:
            prefix = "" if update.network == first else f"{update.network}_"
            norm, bad_here = self.optimizers[update.network].apply(bad, self.scale.value if self.scale else None)
            logs[f"{prefix}grad_norm"] = norm
            bad = bad | bad_here
        if self.scale is not None:
            self.scale.update(bad)
        self.bad_steps += bad
        self.bad_in_a_row.copy_(torch.where(bad, self.bad_in_a_row + 1, 0.0))
        return logs

    def _shares(self, micro: Sequence[Batch]) -> list[Tensor | float]:
        """The part of each micro-batch in the step's loss: its weight over the mean weight of all micro-batches and ranks.

        Gradients are averaged over ranks, so this makes the step that of the concatenated batch, whatever the counts.
        """
        if type(self.task).weight is Task.weight:
            return [1.0 / len(micro)] * len(micro)
        weights = [self._on_device(self.task.weight(batch)) for batch in micro]
        whole = self.runtime.sum(torch.stack(weights).sum()) / self.runtime.world_size
        return [weight / whole for weight in weights]

    def _on_device(self, value: Tensor | float) -> Tensor:
        """As a number there; filled in, because a copy from the host could not be recorded."""
        if isinstance(value, Tensor):
            return value.to(self.device, torch.float32)
        return torch.full((), value, dtype=torch.float32, device=self.device)

    def _do_what_is_due(self, logs: Logs) -> None:
        options, step = self.options, self.step
        is_last = step == options.num_train_steps
        due = lambda every: step % every == 0 or is_last
        self.reporter.advance(step)
        logs_now = due(options.log_every)
        if logs_now:
            self._pending = Pending(step, logs, {"skipped_steps": self.bad_steps, "bad_in_a_row": self.bad_in_a_row})
            if not self._inside_session or self.device.type == "cpu" or is_last:
                self._report()
        with self._clock.paused():
            saves = due(options.save_model_every)
            # Also before each checkpoint, or its loss would not be known, and a better one would not be kept.
            if self.feed.valid is not None and (saves or due(options.val_every or options.save_results_every)):
                self._report()
                self.log(**self.validate())
            if saves or self._owes_checkpoint:
                self._save_once()
            if due(options.save_results_every):
                self._write_samples()
        if self._is_asked_to_stop():
            self._stop_if_asked()

    # ------------------------------------------------------------------ who is trained, and in which mode

    @contextmanager
    def _calling(self, active: Mapping[str, nn.Module]) -> Iterator[None]:
        """The task's `networks` are the wrapped ones for those in `active`, and the bare ones otherwise."""
        self.task.networks.update(active)
        try:
            yield
        finally:
            self.task.networks.update(self.raw)

    @contextmanager
    def _only(self, name: str) -> Iterator[None]:
        """Only this network is trainable; the others pass gradients through without keeping any."""
        others = [p for other, parameters in self._trainable.items() if other != name for p in parameters]
        for parameter in others:
            parameter.requires_grad_(False)
        try:
            with self._calling({name: self.wrapped[name]}):
                yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)

    @contextmanager
    def _mode(self, training: bool) -> Iterator[None]:
        """Train or evaluation mode inside; after it every module has the mode it had."""
        roots = [*self.raw.values(), *self.task.frozen.values()]
        before = [(module, module.training) for root in roots for module in root.modules()]
        self.task.train_mode(training)
        try:
            yield
        finally:
            for module, was_training in before:
                module.training = was_training

    @contextmanager
    def inference(self, seed: int | None = None) -> Iterator[None]:
        """Evaluation mode, no gradients, the averaged weights where there are some, and (with a seed) fixed randomness."""
        averaged = self.ema.swapped_in() if self.ema is not None else nullcontext()
        fixed = fixed_randomness(seed) if seed is not None else nullcontext()
        with self._mode(False), torch.no_grad(), averaged, fixed, self.runtime.autocast():
            yield

    # ------------------------------------------------------------------ looking

    def validate(self) -> dict[str, float]:
        """The validation losses of the averaged (or else the online) weights on the fixed validation batches, over all ranks."""
        if self.feed.valid is None:
            raise ValueError("there is no validation set: give val_dataset, or valid_frac > 0")
        names: list[str] = []
        sums: Tensor | None = None
        counts: dict[str, Tensor] = {}
        with self.inference(seed=self.options.seed):
            for number, batch in enumerate(self.feed.valid.validation(self.options.val_num_batches)):
                # By the batch's number among all, so that the loss is the same on any number of processes.
                seed_everything(self.options.seed + number * self.runtime.world_size + self.runtime.rank)
                batch = self.runtime.to_device(self.prepare(batch))
                weight = torch.as_tensor(self._items(batch), dtype=torch.float64, device="cpu")
                loss = self.task.validate(batch)
                names = ["valid_loss", *(f"valid_{name}" for name in loss.parts)]
                values = torch.stack([loss.total, *loss.parts.values()]).double().cpu()
                weighted = torch.cat([values * weight, weight.reshape(1)])
                sums = weighted if sums is None else sums + weighted
                counts = {name: counts.get(name, 0) + count.double().cpu() for name, count in loss.counts.items()}
        shares = [share for share in self.runtime.gather((names, sums, counts)) if share[0]]
        if not shares:
            raise ValueError("the validation set gave no batch on any process")
        totals = sum(sums for _, sums, _ in shares).tolist()
        if not totals[-1]:
            raise ValueError("the validation set has nothing that a loss is over: give a larger one, or larger batches")
        result = {name: total / totals[-1] for name, total in zip(shares[0][0], totals, strict=False)}
        summed = {name: sum(counts[name] for _, _, counts in shares) for name in shares[0][2]}
        result |= {f"valid_{name}": float(value) for name, value in self.task.summary(summed).items()}
        self.valid_loss, self.valid_step = result["valid_loss"], self.step
        return result

    def _items(self, batch: Batch) -> Tensor | float:
        """What a validation batch counts: the last one may be smaller than the others."""
        return float(self.task.units(batch)) if type(self.task).weight is Task.weight else self.task.weight(batch)

    def _write_samples(self) -> None:
        """Samples of the same inputs and seed at each time, written by the main process."""
        if not (self.is_main or self.runtime.shards):
            return
        if self._sample_batch is None:
            self._sample_batch = self.runtime.to_device(self.prepare(self.feed.first_batch()))
        samples = {}
        kinds: dict[str, AbstractContextManager[None]] = {"online": nullcontext()}
        if self.ema is not None:
            kinds["ema"] = self.ema.swapped_in()
        with self._mode(False), torch.no_grad():
            for name, weights in kinds.items():
                # Autocast keeps the weights it has cast until it is left: each has its own.
                with (
                    weights,
                    self.runtime.autocast(),
                    fixed_randomness(self.options.seed),
                    self.runtime.whole(self.raw),
                ):
                    samples[name] = self.task.sample(self._sample_batch, self.options.seed)
        if self.is_main:
            folder = self.results_folder / "samples"
            try:
                for name, write in self.task.present(self._sample_batch, samples).items():
                    folder.mkdir(parents=True, exist_ok=True)
                    write(folder / f"step-{self.step:08d}-{name}")
            except OSError as error:
                logger.error("the samples of step %d could not be written (%s); the run goes on", self.step, error)

    def _report(self) -> None:
        """Shows the numbers of the last step that logs, once, and stops a run that has diverged.

        They were sent from the device when that step was launched, and are read after the next one is: so the device never
        waits for the host to write a line.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        values = pending.read()
        in_a_row = int(values.pop("bad_in_a_row"))
        gathered = self.runtime.gather(values)
        values = {name: sum(each[name] for each in gathered) / len(gathered) for name in values}
        values |= self._clock.read(self.task.unit, self.runtime.world_size, self.runtime.peak_flops())
        if self.device.type == "cuda":
            values["peak_memory_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        self._log_at(pending.step, values)
        most = self.options.max_bad_steps
        if pending.step == self.options.num_train_steps:
            most = min(
                most, 2
            )  # a run that ends badly has not done its work; a single step may be a bad batch, or fp16's loss scale
        if in_a_row >= most:
            raise TrainingDiverged(
                f"the loss or a gradient has not been finite since step {pending.step - in_a_row + 1} ({in_a_row} steps, all skipped); "
                f"{self._last_good()}, with a lower lr or max_grad_norm"
            )

    def _last_good(self) -> str:
        self.writer.wait()
        found = [folder for folder in checkpoints(self.results_folder) if state.is_good(folder)]
        return (
            f"resume from {found[-1]}, the last good checkpoint" if found else "there is no checkpoint yet: start again"
        )

    # ------------------------------------------------------------------ saving, loading, stopping

    def save(self, path: str | Path) -> None:
        """Writes a checkpoint folder at `path` (and waits for it)."""
        state.save(self, Path(path))

    def load(self, path: str | Path) -> None:
        """Continues from a checkpoint folder, or from the newest whole checkpoint of a run folder."""
        self._restore(Path(path))

    def _restore(self, path: Path, is_verified: bool = False) -> None:
        self.writer.wait()
        try:
            state.restore(self, path, is_verified)
        finally:
            self.recorder = self._recorder()  # what was recorded reads the state that was there before
        self._batches = self._ahead = self._pending = self._saved_step = None
        self._owes_checkpoint = False

    def _save_once(self, final: bool = False) -> None:
        """A checkpoint of this step, unless there is one. While steps are not finite none is made (the weights themselves may
        be spoilt) until one is again, but for that of a run that is stopped, which then pushes no earlier one out."""
        self._report()
        if self._saved_step == self.step:
            return
        is_bad = bool(self.bad_in_a_row > 0)
        if is_bad and not final:
            if not self._owes_checkpoint:
                logger.warning("step %d is not saved: its loss or gradient was not finite", self.step)
            self._owes_checkpoint = True
            return
        self._owes_checkpoint = False
        state.save_in_background(self, keep_last=0 if is_bad else self.options.keep_last)
        self._saved_step = self.step

    def _resume(self, newest: Path) -> None:
        self._restore(newest, is_verified=True)  # hashing reads every byte of it
        self._saved_step = self.step
        self.print(f"{self.name}: resuming from step {self.step} ({newest})")

    def _is_asked_to_stop(self) -> bool:
        """Whether any process had got a signal when the step before this one was made.

        Processes see a signal at different moments, and launchers do not wait long: so each step tells all of them. What it
        told is read one step later, when it has arrived, so that nobody waits for the device.
        """
        if not self.runtime.is_distributed:
            return self._signal is not None
        told, self._told = self._told, Pending(self.step, {"asked": self._asked})
        return told is not None and bool(told.read()["asked"])

    def _stop_if_asked(self) -> None:
        asked = max((number or 0) for number in self.runtime.gather(self._signal))
        if not asked:
            return
        self._save_once(final=True)
        self.writer.finish()
        has_recipe = (self.results_folder / "recipe.yaml").exists()
        command = f"helicon resume {self.results_folder}" if has_recipe else "the same trainer with resume=True"
        self.print(
            f"{self.name}: stopped by {signal.Signals(asked).name} at step {self.step}, saved; continue with: {command}"
        )
        raise KeyboardInterrupt if asked == signal.SIGINT else SystemExit(128 + asked)

    @contextmanager
    def session(self) -> Iterator[None]:
        """Train mode, reports and signal handlers for the length of a run; all is put back and ended also when it raises."""
        self._clock = Clock()
        self._signal = self._told = None
        owns_trackers = not self.trackers.started  # or else a `wandb_tracker` block around this ends them
        handlers = {}
        with locked(self.results_folder) if self.is_main else nullcontext():
            try:
                state.check_still_ours(self)
                self.reporter.start(self.step)
                self.trackers.start(self.name, self._hyper_parameters())
                if threading.current_thread() is threading.main_thread():
                    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # which is nohup's
                            handlers[number] = signal.signal(number, self._on_signal)
                with self._mode(True):
                    self._inside_session = True
                    yield
            finally:
                self._inside_session = False
                for number, handler in handlers.items():
                    signal.signal(number, handler)
                self._signal = self._told = None
                self.writer.wait()
                self.reporter.stop()
                if owns_trackers:
                    self.trackers.end()
                self._batches = self._ahead = self._pending = None

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._signal is None:
            self._signal = number
        elif number != signal.SIGHUP:  # a terminal that closes may send it twice, or behind another
            signal.default_int_handler(number, frame)  # asked twice: stop now

    # ------------------------------------------------------------------ setting up

    def _claim_folder(self) -> Path:
        """The run's folder, new or empty, unless the run is resumed or the user asks for it to be cleared."""
        options = self.options
        folder = Path("runs") / self.name if options.results_folder is None else Path(options.results_folder)
        folder = folder.expanduser()
        state.claim_folder(folder, self.runtime, options.resume, bool(options.force_clear_prev_results))
        return folder

    def _recorder(self) -> Recorder | None:
        if not self.runtime.records:
            return None
        if self.scale is not None:
            raise ValueError('compile="graphs" is not for fp16, whose losses are scaled step by step: use bf16')
        for optimizer in self.optimizers.values():
            optimizer.record()
        return Recorder()

    def _averaged(self) -> EMA | None:
        options = self.options
        networks = {name: self.raw[name] for name in self.task.averaged}
        if not options.use_ema or not networks:
            return None
        return EMA(networks, options.ema_beta, options.ema_update_after_step, options.ema_update_every)

    def _next_batches(self) -> list[Batch]:
        with self._clock.waiting_for_data():
            if self._batches is None:
                self._batches = self.feed.train.steps(self.position)
            return [self.runtime.to_device(self.prepare(batch)) for batch in next(self._batches)]

    def _fetch_ahead(self) -> list[Batch] | None:
        """The coming step's batches; not of a user's own loader, whose state must not run ahead of what was learned."""
        is_own = isinstance(self.feed.train, Loader)
        return self._next_batches() if is_own and self.step < self.options.num_train_steps else None

    def prepare(self, batch: Any) -> Batch:
        """A batch of a user's own DataLoader as the task knows it; families name the entries of tuples here."""
        return batch

    # ------------------------------------------------------------------ the weights, for users

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own `generate`, with the averaged weights where there are some."""
        if self.ema is not None:
            logger.info("%s.generate uses the averaged (EMA) weights", type(self).__name__)
        with self.inference(), self.runtime.whole(self.raw):
            return self.task.model.generate(*args, **kwargs)  # type: ignore[operator]

    def set_model_as_ema_model_(self) -> None:
        """The online weights become the averaged ones."""
        if self.ema is None:
            raise ValueError("this trainer keeps no averaged weights: build it with use_ema=True")
        self.ema.copy_to_online()


def _option_parameter(entry: Any, defaults: Mapping[str, Any]) -> inspect.Parameter:
    default = entry.default_factory() if entry.default_factory is not MISSING else entry.default
    default = defaults.get(entry.name, inspect.Parameter.empty if default is MISSING else default)
    return inspect.Parameter(entry.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=entry.type)
