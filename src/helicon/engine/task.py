"""The contract between a family of models and the loop: what a family implements, and nothing else.

A `Task` says what is trained and how a batch becomes losses. The loop (trainer.py) does the rest.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from helicon.nn.network import Network

Batch = dict[
    str, Any
]  # tensors with the batch first, or lists of strings; lengths and masks stand beside what they describe


@dataclass(frozen=True)
class Loss:
    """A total to differentiate (or to report) and its named parts, all 0-d tensors; the parts carry no gradient.

    Of validation batches the loop averages total and parts, and adds up `counts`, tensors of any shape, for `Task.summary`.
    """

    total: Tensor
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    counts: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    """One optimizer step of one network. `loss` maps what `Task.forward` returned to the loss that only `network` descends."""

    network: str
    loss: Callable[[Any], Loss]
    kind: Hashable = (
        None  # what tells this update from others of the network that do something else (with a penalty, say)
    )


def without_texts(batch: Batch) -> Batch:
    """All entries but those that are strings."""

    def is_text(value: Any) -> bool:
        return isinstance(value, str) or (isinstance(value, (list, tuple)) and all(isinstance(x, str) for x in value))

    return {name: value for name, value in batch.items() if not is_text(value)}


class Task:
    """What a family gives to the loop.

    `networks` are parts of `model` (or `model` itself): trained, each with its own optimizer, and called through this mapping
    alone (`self.networks["generator"](x)`), because the loop puts the distributed wrapper there. During an update the
    other networks are frozen and unwrapped. Everything in `model` is saved; what is in `frozen` is moved to the device,
    kept in evaluation mode, never optimised and never saved.
    """

    model: Network
    networks: dict[str, nn.Module]
    frozen: Mapping[str, nn.Module]
    averaged: tuple[str, ...]  # the networks whose weights are averaged (EMA); all but adversaries
    compiled: dict[
        str, tuple[nn.Module, ...]
    ]  # what torch.compile takes of each network: it as a whole, or parts of it
    unit: str = "samples"  # what throughput counts

    def __init__(
        self,
        model: Network,
        networks: Mapping[str, nn.Module] | None = None,
        frozen: Mapping[str, nn.Module] | None = None,
        averaged: Sequence[str] | None = None,
    ):
        self.model = model
        self.networks = dict(networks or {"model": model})
        self.frozen = dict(frozen or {})
        self.averaged = tuple(self.networks) if averaged is None else tuple(averaged)
        self.compiled = {name: (network,) for name, network in self.networks.items()}

    def weight(self, batch: Batch) -> Tensor | float:
        """How many items the mean loss of this batch is over (tokens, frames, faces): the weight of its gradient."""
        return 1.0

    def units(self, batch: Batch) -> int:
        """How many units (`unit`) of throughput a batch counts; known without asking the device."""
        first = next(iter(batch.values()))
        return len(first)

    def read(self, batch: Batch) -> Batch:
        """What of a batch a training step needs, as tensors: here strings are read, and frozen networks run whose work is not
        differentiated. The rest of the step must leave the host alone where it is to be recorded (`compile="graphs"`)."""
        return batch

    def forward(self, batch: Batch) -> Any:
        """Runs once per micro-batch; its result is shared by all updates of the step."""
        raise NotImplementedError

    def updates(self, step: int) -> Sequence[Update]:
        """The updates of this step (counted from 0), in order."""
        raise NotImplementedError

    def validate(self, batch: Batch) -> Loss:
        """The loss to watch, in evaluation mode and without gradients."""
        raise NotImplementedError

    def summary(self, counts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Numbers of the whole validation set, from the sums of its batches' `Loss.counts`: those that are no means of batches."""
        return {}

    def sample(self, batch: Batch, seed: int) -> Any:
        """What the model makes of `batch` with the weights it has now; called with the same batch and seed each time."""
        return None

    def present(self, batch: Batch, samples: Mapping[str, Any]) -> Mapping[str, Callable[[Path], object]]:
        """Samples as files: name with its ending -> a function that writes it. `samples` holds what `sample` returned
        with the online weights ("online") and, where there are some, with the averaged ones ("ema")."""
        return {}

    def flops(self, batch: Batch) -> float | None:
        """Forward and backward floating-point operations of one batch, where the family knows them (for utilisation)."""
        return None

    def train_mode(self, training: bool) -> None:
        """Networks into train or evaluation mode; frozen modules always stay in evaluation mode."""
        for network in self.networks.values():
            network.train(training)
        for module in self.frozen.values():
            module.eval()

    def move_to(self, device: torch.device) -> None:
        self.model.to(device)
        for module in self.frozen.values():
            module.to(device)
