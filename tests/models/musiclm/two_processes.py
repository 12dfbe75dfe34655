"""What one of two gloo processes does with its half of a batch of pairs, for test_contrastive.py; or one with the whole."""

import copy
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from helicon.models.musiclm.contrastive import ContrastiveLoss

LOSSES: dict[str, dict[str, Any]] = {
    "decoupled": {},
    "softmax": {"decoupled": False},
    "sigmoid": {"sigmoid": True},
}
LOSSES |= {f"{name}, equals": {"has_equals": True, **options} for name, options in LOSSES.items()}
PAIRS = 6  # of all processes
CAPTIONS = [0, 1, 1, 1, 0, 2]  # some are equal in one process, and some in both


class Toy(nn.Module):
    """Two towers of one layer each, and the loss between them."""

    def __init__(self, has_equals: bool = False, **options: Any):
        super().__init__()
        self.has_equals = has_equals
        self.audio, self.text = nn.Linear(7, 4), nn.Linear(5, 4)
        self.loss = ContrastiveLoss(**options)
        self.latents: tuple[Tensor, Tensor] | None = None

    def forward(self, audio: Tensor, text: Tensor, captions: Tensor) -> Tensor:
        latents = F.normalize(self.audio(audio), dim=-1), F.normalize(self.text(text), dim=-1)
        self.latents = latents
        return self.loss(*latents, captions if self.has_equals else None)


def batch(rank: int, world: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(PAIRS, 7, generator=generator), torch.randn(PAIRS, 5, generator=generator)
    return [part.chunk(world)[rank] for part in (*latents, torch.tensor(CAPTIONS))]


def toys() -> dict[str, Toy]:
    torch.manual_seed(0)
    return {name: Toy(**options) for name, options in LOSSES.items()}


def evaluated_alone(name: str, rank: int) -> Tensor:
    """The loss of one half of the batch, where there is no other process."""
    with torch.no_grad():
        return toys()[name].eval()(*batch(rank, 2))


def run(toy: Toy, rank: int, world: int) -> dict[str, Tensor]:
    inputs = batch(rank, world)
    network = toy if world == 1 else DistributedDataParallel(toy)
    loss = network(*inputs)
    assert toy.latents is not None
    for value in toy.latents:
        value.retain_grad()
    loss.backward()
    found: dict[str, Any] = {"loss": loss.detach()}
    found |= {name: value.grad for name, value in zip(("audio", "text"), toy.latents, strict=True)}
    found |= {f"gradient.{name}": value.grad for name, value in toy.named_parameters()}
    with torch.no_grad():
        evaluated = copy.copy(toy).eval()(*inputs)
    return {**found, "evaluated": evaluated}


def main(rank: int, world: int, folder: Path) -> None:
    networks = toys()  # before the processes know of each other, as users build them
    if world > 1:
        meeting = f"file://{folder}/meeting"
        dist.init_process_group("gloo", meeting, timedelta(seconds=60), world_size=world, rank=rank)
    torch.save({name: run(toy, rank, world) for name, toy in networks.items()}, folder / f"{rank}-of-{world}.pt")
    if world > 1:
        dist.barrier()
        os._exit(0)  # gloo's threads do not always end in order
