"""Every option of the loop, once. A trainer class changes defaults (`Trainer.defaults`), never the list.

The five reference packages spell several of these differently; `ALIASES` is the one table of their spellings.
"""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, Literal

ALIASES = {
    "learning_rate": "lr",
    "weight_decay": "wd",
    "checkpoint_every": "save_model_every",
    "checkpoint_folder": "results_folder",
    "log_losses_every": "log_every",
    "num_warmup_steps": "warmup_steps",
    "dl_num_workers": "num_workers",
    "dataloader_drop_last": "drop_last",
    "accelerator_kwargs": "accelerate_kwargs",
    "random_seed": "seed",
}

_AT_LEAST = {
    0: (
        "num_train_steps",
        "warmup_steps",
        "discr_warmup_steps",
        "num_workers",
        "keep_last",
        "ema_update_after_step",
        "lr",
        "discr_lr",
        "initial_lr",
        "wd",
    ),
    1: (
        "batch_size",
        "grad_accum_every",
        "log_every",
        "save_results_every",
        "save_model_every",
        "ema_update_every",
        "val_every",
        "val_num_batches",
        "max_bad_steps",
    ),
}
_MAY_BE_NONE = ("discr_lr", "warmup_steps", "discr_warmup_steps", "val_every", "val_num_batches")
_CHOICES = {
    "optimizer": ("adamw", "adam", "lion", "muon"),
    "mixed_precision": ("auto", "no", "bf16", "fp16"),
    "compile": ("auto", "graphs", True, False),
}


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    # How long, and how much at a time.
    num_train_steps: int  # optimizer steps in all, also when the run was resumed
    batch_size: int  # samples per process and micro-batch; the whole batch where split_batches is set
    grad_accum_every: int = 1  # micro-batches per optimizer step
    split_batches: bool = False  # batch_size is divided over the processes instead of multiplied by them

    # Data.
    seed: int = 0  # of the order, the augmentation and the training noise
    valid_frac: float = 0.05  # part of the data held out where no validation set is given; 0 for none
    random_split_seed: int = 42  # chooses the held-out part
    drop_last: bool = True  # leave out an epoch's last incomplete batch; otherwise it is filled from the next epoch
    num_workers: int = 0  # processes that read data, per training process; at most as many as there are CPUs

    # Optimizer of the first network; the discr_* options are the second's, and follow the first where None.
    # A scheduler follows the steps of the run, a warm-up is over the network's own first updates.
    optimizer: Literal["adamw", "adam", "lion", "muon"] = "adamw"
    lr: float = 3e-4
    wd: float = 0.0  # weight decay, on tensors of two dimensions or more
    betas: Sequence[float] = (0.9, 0.99)
    optimizer_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_grad_norm: float | None = 0.5  # each network's gradients are clipped by their own norm; None for no clipping
    warmup_steps: int = 0  # linear, from initial_lr to lr
    initial_lr: float = 0.0
    scheduler: Any = None  # "constant", "cosine", or a class of torch.optim.lr_scheduler or its name; times the warm-up
    scheduler_kwargs: Mapping[str, Any] = field(default_factory=dict)
    discr_lr: float | None = None
    discr_max_grad_norm: float | None = None
    discr_warmup_steps: int | None = None
    discr_scheduler: Any = None
    discr_scheduler_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_bad_steps: int = 50  # steps in a row with a non-finite loss or gradient (each is skipped) before the run stops

    # Averaged weights, used to validate, sample and generate.
    use_ema: bool = True
    ema_beta: float = 0.995
    ema_update_after_step: int = 0
    ema_update_every: int = 1

    # When to look and to save, in steps.
    log_every: int = 10
    save_results_every: int = 100  # samples
    val_every: int | None = None  # validation; None: with the samples
    val_num_batches: int | None = 10  # over all processes; None for the whole validation set
    save_model_every: int = 1000  # checkpoints; the last step is always saved
    keep_last: int = 3  # checkpoints kept, besides the one of best validation loss; 0 keeps all

    # The run's folder.
    results_folder: str | Path | None = None  # None: runs/<name of the trainer>
    resume: bool = False  # continue from the folder's newest whole checkpoint; an empty folder starts a run
    force_clear_prev_results: bool | None = None  # delete what an earlier run left in the folder
    init_from: str | Path | None = None  # start from the weights of a checkpoint, run or saved network

    # The machine.
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = "auto"  # auto: bf16 where CUDA has it, else no
    # torch.compile; auto: on CUDA; graphs: and recorded as CUDA graphs, for many small kernels and few different shapes
    compile: bool | Literal["auto", "graphs"] = "auto"
    shard: bool = False  # parameters, gradients and optimizer state split over the processes (one-network tasks)
    accelerator: Any = None  # an accelerate.Accelerator of your own
    accelerate_kwargs: Mapping[str, Any] = field(default_factory=dict)  # for the one made here
    init_process_group_timeout_seconds: int = 1800

    # Tracking, besides the console and metrics.jsonl.
    tensorboard: bool = True
    trackers: Sequence[Any] = ()  # names or objects that accelerate.Accelerator(log_with=...) takes
    use_wandb_tracking: bool = False  # the tracker "wandb"

    def __post_init__(self) -> None:
        for least, names in _AT_LEAST.items():
            for name in names:
                value = getattr(self, name)
                if value is None and name in _MAY_BE_NONE:
                    continue
                if not isinstance(value, Real):
                    raise ValueError(f"{name}={value!r} must be a number, at least {least}")
                if not float(value) >= least:
                    raise ValueError(f"{name}={value!r} must be at least {least}")
        for name, low, high in (("ema_beta", 0.0, 1.0), ("valid_frac", 0.0, 0.999)):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name}={getattr(self, name)!r} must lie between {low} and {high}")
        if len(self.betas) != 2:
            raise ValueError(f"betas={list(self.betas)} must be two numbers, such as [0.9, 0.99]")
        for name in ("max_grad_norm", "discr_max_grad_norm"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value!r} must be positive (at 0 nothing would be learned), or None")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(map(repr, choices))}")

    @classmethod
    def from_keywords(cls, keywords: Mapping[str, Any], defaults: Mapping[str, Any], owner: str) -> "TrainerOptions":
        """Options from what a user wrote, in any known spelling, over a trainer's own defaults."""
        names = {entry.name for entry in dataclasses.fields(cls)}
        chosen: dict[str, Any] = {}
        for key, value in keywords.items():
            name = ALIASES.get(key, key)
            if name not in names:
                near = difflib.get_close_matches(key, [*names, *ALIASES], n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise TypeError(f"{owner} has no option {key!r}{hint}")
            if name in chosen:
                raise TypeError(f"{owner} was given {name!r} twice: {key!r} is another spelling of it")
            chosen[name] = value
        missing = [name for name in ("num_train_steps", "batch_size") if name not in chosen and name not in defaults]
        if missing:
            raise TypeError(f"{owner} needs {' and '.join(missing)}")
        return cls(**{**defaults, **chosen})
