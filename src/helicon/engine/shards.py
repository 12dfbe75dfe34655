"""Sharded state on disk: each process writes the rows it owns, and any number of processes can read them back.

    shards/rank-00000.safetensors    named pieces
    shards/rank-00000.json           for each piece the shape of the whole and the row it starts at

(torch.distributed.checkpoint would do this too, but its index is a pickle, and Helicon unpickles nothing.)
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from helicon.nn.network import save_state


def write_shards(folder: Path, tensors: Mapping[str, Tensor], rank: int) -> None:
    """Writes this process's part. Tensors that are not split are written by process 0 alone."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces: dict[str, Tensor] = {}
    index: dict[str, dict[str, object]] = {}
    for name, value in tensors.items():
        if isinstance(value, DTensor) and value.placements[0].is_shard():
            assert value.placements == (Shard(0),), "fully_shard splits rows"
            piece, start = value.to_local(), _first_row(value)
        elif rank == 0:
            piece, start = value.full_tensor() if isinstance(value, DTensor) else value, 0
        else:
            continue
        if piece.numel():
            pieces[name] = piece.cpu()
            index[name] = {"shape": list(value.shape), "start": start}
    save_state(pieces, folder / f"rank-{rank:05d}.safetensors")
    (folder / f"rank-{rank:05d}.json").write_text(json.dumps(index))


def read_shards(folder: Path) -> dict[str, Tensor]:
    """The whole tensors, put together from the pieces of all processes that wrote."""
    whole: dict[str, Tensor] = {}
    for path in sorted(folder.glob("rank-*.safetensors")):
        index = json.loads(path.with_suffix(".json").read_text())
        with safe_open(path, framework="pt") as file:
            for name, entry in index.items():
                piece = file.get_tensor(name)
                if piece.ndim == 0:
                    whole[name] = piece
                    continue
                target = whole.setdefault(name, torch.empty(entry["shape"], dtype=piece.dtype))
                target[entry["start"] : entry["start"] + len(piece)] = piece
    return whole


def _first_row(value: DTensor) -> int:
    """fully_shard cuts rows as torch.chunk does: equal pieces, the last ones smaller or empty."""
    ranks = value.device_mesh.size()
    rows = -(-value.shape[0] // ranks)
    return min(rows * value.device_mesh.get_local_rank(), value.shape[0])
