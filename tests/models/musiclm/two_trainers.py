"""What one of two gloo processes learns from its half of each batch, for test_trainer.py; or one from the whole."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from torch import Tensor
from torch.distributed.tensor import DTensor

from helicon.models.musiclm.trainers import MuLaNTrainer
from models.musiclm.tiny import PLAIN, mulan

# Chunks of the pairs of one process, and the keywords of the network.
RUNS: dict[str, tuple[int | None, dict[str, Any]]] = {
    "whole": (None, {}),
    "chunks": (2, {"hierarchical_contrastive_loss": True}),
    "sigmoid": (2, {"sigmoid_contrastive_loss": True}),
    "accumulated": (2, {"decoupled_contrastive_learning": False}),
    "sharded": (2, {}),
}
PAIRS = 6  # of a batch of all processes


def data(count: int, seed: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        # (Some texts are equal, in one process and over both.)
        {"audio": torch.randn(900 - 50 * n, generator=generator) * 0.1, "texts": f"number {n % 8}"}
        for n in range(count)
    ]


def learned(name: str, world: int, folder: Path) -> dict[str, Any]:
    chunk_size, options = RUNS[name]
    trainer = MuLaNTrainer(
        mulan(2, audio=PLAIN, **options),
        data(12, 0),
        val_dataset=data(7, 1),  # of which the last batch has one pair
        num_train_steps=50,
        batch_size=PAIRS // world,
        chunk_size=chunk_size,
        grad_accum_every=2 if name == "accumulated" else 1,
        lr=1e-2,
        optimizer="adam",
        optimizer_kwargs={"eps": 1e-2},  # or steps would hardly depend on the size of gradients
        max_grad_norm=None,
        shard=name == "sharded" and world > 1,
        tensorboard=False,
        results_folder=folder / f"{name}-of-{world}",
    )
    losses = []
    while trainer.step < 2:
        loss = trainer.train_step()["loss"]
        losses.append(torch.tensor(trainer.runtime.gather(loss.item())).mean())
    valid = {key: value for key, value in trainer.validate().items() if "loss" not in key}
    tensors = trainer.unwrapped_mulan.own_state().items()
    state: dict[str, Tensor] = {k: v.full_tensor() if isinstance(v, DTensor) else v.clone() for k, v in tensors}
    return {"losses": torch.stack(losses), "state": state, "valid": valid}


def main(rank: int, world: int, port: int, folder: Path) -> None:
    for shared in (PartialState, AcceleratorState):  # that of another test, before this process was
        shared._reset_state()
    if world > 1:
        settings = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        settings |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        os.environ.update({key: str(value) for key, value in settings.items()})
    torch.save({name: learned(name, world, folder) for name in RUNS}, folder / f"{rank}-of-{world}.pt")
    if world > 1:
        dist.barrier()
        os._exit(0)  # gloo's threads do not always end in order
