"""One of two gloo processes: quantizes its share of each batch and saves what came out, for test_distributed.py.

    python two_processes.py RANK WORLD_SIZE FOLDER

The shares have different lengths and masks. With one process (WORLD_SIZE 1), the batch is the shares side by side.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from helicon.quantize import LookupFreeQuantizer, ResidualVQ, VectorQuantizer

STEPS = 4
SHARES = (9, 16)  # positions of each rank's share


def shares(step: int) -> list[tuple[Tensor, Tensor]]:
    """Features `[1, n, 5]` and mask `[1, n]` of each rank."""
    generator = torch.Generator().manual_seed(step)
    return [(torch.randn(1, n, 5, generator=generator), torch.rand(1, n, generator=generator) > 0.25) for n in SHARES]


def quantizers() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "averages": VectorQuantizer(5, 7),
        "cosine": VectorQuantizer(5, 7, use_cosine_sim=True),
        "k-means and revival": VectorQuantizer(5, 7, kmeans_init=True, threshold_ema_dead_code=2),
        "more dead codes than rows": VectorQuantizer(5, 60, threshold_ema_dead_code=2),
        "residual": ResidualVQ(5, 3, 6, kmeans_init=True, threshold_ema_dead_code=1, quantize_dropout=True),
        "shared": ResidualVQ(5, 3, 6, shared_codebook=True, kmeans_init=True, threshold_ema_dead_code=1),
        "lookup-free": LookupFreeQuantizer(5, 2**6, inv_temperature=1.0, diversity_gamma=2.0),
    }


def run(quantizer: nn.Module, rank: int, world_size: int) -> dict[str, Tensor]:
    """Statistics after some steps; and the loss and gradients of the last, weighted as the training loop weights ranks."""
    parts: dict[str, Tensor] = {}
    for step in range(STEPS):
        everything = shares(step)
        mine = everything if world_size == 1 else everything[rank : rank + 1]
        features, mask = (torch.cat(tensors, dim=1) for tensors in zip(*mine, strict=True))
        torch.manual_seed(100 + rank)  # each rank draws its own quantize dropout
        quantizer.zero_grad()
        loss = quantizer(features, mask).loss
        num_rows = sum(int(part_mask.sum()) for _, part_mask in everything)
        loss = loss * (int(mask.sum()) * world_size / num_rows)
        if loss.requires_grad:
            loss.backward()
        parts = {"loss": loss.detach()}
    parts |= {f"gradient.{name}": value.grad for name, value in quantizer.named_parameters() if value.grad is not None}
    for value in parts.values():
        if world_size > 1:
            dist.all_reduce(value)
            value /= world_size
    return {**parts, **quantizer.state_dict()}


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group(
            "gloo", f"file://{folder}/meeting", timedelta(seconds=60), world_size=world_size, rank=rank
        )
    outcome = {name: run(quantizer, rank, world_size) for name, quantizer in quantizers().items()}
    torch.save(outcome, folder / f"{rank}-of-{world_size}.pt")
    if world_size > 1:
        dist.barrier()
        os._exit(0)  # gloo's threads do not always end in order


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]).resolve())
