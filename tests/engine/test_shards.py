"""Sharded state goes to disk piece by piece and comes back whole. (Two real processes: tests/engine/test_distributed.py.)"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from helicon.engine.shards import read_shards, write_shards

SHARDS = Path("shards")


@contextmanager
def pretending_to_be(rank: int, ranks: int) -> Iterator[DeviceMesh]:
    """One rank of several, whose communication does nothing: writing shards needs none."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()


def sharded(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    """The rank's rows, cut as fully_shard cuts them."""
    pieces = whole.chunk(mesh.size())
    rank = mesh.get_local_rank()
    local = pieces[rank] if rank < len(pieces) else whole[:0]
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_rows_of_any_number_of_ranks_come_back_whole(ranks: int) -> None:
    """Also where the rows do not divide evenly, or are fewer than the ranks."""
    whole = {f"model:w{rows}/exp_avg": torch.randn(rows, 3, 2) for rows in (1, 2, 4, 5, 7)}
    whole["model:b/exp_avg"] = torch.randn(6)
    plain = {"model:b/step": torch.tensor(7.0), "model:c": torch.arange(4), "model:half": torch.ones(2).bfloat16()}
    for rank in range(ranks):
        with pretending_to_be(rank, ranks) as mesh:
            replicated = DTensor.from_local(torch.ones(3), mesh, [Replicate()], run_check=False)
            split = {name: sharded(value, mesh) for name, value in whole.items()}
            write_shards(SHARDS, {**split, **plain, "model:r": replicated}, rank)
    found = read_shards(SHARDS)
    expected = {**whole, **plain, "model:r": torch.ones(3)}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def test_each_rank_writes_its_own_rows_alone() -> None:
    for rank in range(3):
        with pretending_to_be(rank, 3) as mesh:
            write_shards(SHARDS, {"w": sharded(torch.arange(5.0), mesh), "step": torch.tensor(1)}, rank)
    index = [json.loads((SHARDS / f"rank-{rank:05d}.json").read_text()) for rank in range(3)]
    assert [entry["w"]["start"] for entry in index] == [0, 2, 4]
    assert all(entry["w"]["shape"] == [5] for entry in index)
    assert ["step" in entry for entry in index] == [True, False, False], "what is not split is written once"


def test_nothing_in_the_folder_is_nothing() -> None:
    assert read_shards(SHARDS) == {}
