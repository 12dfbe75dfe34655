import itertools
import logging
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from helicon.data.foreign import ForeignLoader
from helicon.data.loader import Position


class Noisy(Dataset):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.stack([torch.tensor(float(index)), torch.rand(())])


class Stateful:
    """As torchdata's StatefulDataLoader: goes on in the middle of an epoch after load_state_dict."""

    def __init__(self, length: int):
        self.length, self.begin, self.given = length, 0, 0

    def __iter__(self) -> Iterator[tuple[int, float]]:
        begin, self.begin = self.begin, 0
        for value in range(begin, self.length):
            self.given = value + 1
            yield value, torch.rand(()).item()

    def state_dict(self) -> dict:
        return {"given": self.given}

    def load_state_dict(self, state: dict) -> None:
        self.begin = state["given"]


def take(loader: ForeignLoader, steps: int, start: Position | None = None) -> list[list]:
    return list(itertools.islice(loader.steps(start or Position()), steps))


def shuffled(num_workers: int = 0) -> DataLoader:
    return DataLoader(Noisy(), batch_size=3, shuffle=True, num_workers=num_workers)


def assert_same(left: list, right: list) -> None:
    assert len(left) == len(right)
    for a, b in zip(itertools.chain(*left), itertools.chain(*right), strict=True):
        assert torch.equal(a, b)


def test_begins_again_at_the_end():
    assert take(ForeignLoader([1, 2, 3], grad_accum_every=2), 4) == [[1, 2], [3, 1], [2, 3], [1, 2]]


@pytest.mark.parametrize("source", [[], (), DataLoader(TensorDataset(torch.zeros(2, 1)), batch_size=3, drop_last=True)])
def test_an_empty_one_is_an_error_not_a_hang(source: object):
    with pytest.raises(ValueError, match=r"gives no batches"):
        take(ForeignLoader(source), 1)
    with pytest.raises(ValueError, match=r"gives no batches"):
        list(ForeignLoader(source).validation(2))


def test_an_iterator_that_ends_is_an_error():
    with pytest.raises(ValueError, match=r"any more.*can be iterated again"):
        take(ForeignLoader(iter([1, 2])), 3)
    with pytest.raises(ValueError, match="int cannot be iterated"):
        ForeignLoader(3)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_shuffled_data_loader_replays_from_any_step(num_workers: int):
    loader = ForeignLoader(shuffled(num_workers), grad_accum_every=2, seed=4)
    state = torch.get_rng_state()
    expected = take(loader, 5)
    assert torch.equal(state, torch.get_rng_state())
    orders = [b[:, 0].tolist() for step in expected for b in step]
    assert orders[:4] != orders[4:8] and sorted(itertools.chain(*orders[:4])) == list(range(10))
    position = Position()
    for done in range(5):
        assert position == Position(*divmod(2 * done, 4))
        assert_same(
            take(ForeignLoader(shuffled(num_workers), grad_accum_every=2, seed=4), 5 - done, position), expected[done:]
        )
        position = loader.after(position)


def test_without_a_length_all_batches_count():
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            return iter(range(5))

    loader = ForeignLoader(DataLoader(Stream(), batch_size=None))
    assert loader.after(Position(), 7) == Position(0, 7)
    assert take(loader, 3, Position(0, 7)) == [[2], [3], [4]]


def test_processes_share_out_the_batches(caplog: pytest.LogCaptureFixture):
    def ranks(world_size: int, accumulation: int) -> list[list[list[torch.Tensor]]]:
        loaders = [
            ForeignLoader(shuffled(), grad_accum_every=accumulation, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        return [take(loader, 3) for loader in loaders]

    (alone,) = ranks(1, 4)
    assert not caplog.records
    two = ranks(2, 2)
    assert "DistributedSampler" in caplog.text
    assert_same([[two[r][step][m] for m in range(2) for r in range(2)] for step in range(3)], alone)


def test_a_stream_is_not_told_of_a_sampler_that_it_cannot_take(caplog: pytest.LogCaptureFixture):
    """One that splits itself by rank is split twice: it was told to take a sampler instead."""

    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            yield from range(8)

    for source in (DataLoader(Stream(), batch_size=2), Stream()):
        caplog.clear()
        ForeignLoader(source, rank=0, world_size=2)
        assert "its dataset must not split itself by rank as well" in caplog.text
        assert "DistributedSampler" not in caplog.text


def test_a_distributed_sampler_is_left_to_itself_and_told_the_epoch(caplog: pytest.LogCaptureFixture):
    data = TensorDataset(torch.arange(12))
    epochs = []
    for rank in range(2):
        sampler = DistributedSampler(data, num_replicas=2, rank=rank, seed=1)
        loader = ForeignLoader(DataLoader(data, batch_size=2, sampler=sampler), rank=rank, world_size=2)
        epochs.append([[i for (micro,) in take(loader, 3, Position(e)) for i in micro[0].tolist()] for e in range(2)])
        assert len(list(loader.validation(3))) == 2 - rank
    assert not caplog.records
    for epoch in range(2):
        assert sorted(epochs[0][epoch] + epochs[1][epoch]) == list(range(12))
    assert epochs[0][0] != epochs[0][1]


@pytest.mark.parametrize("done", [1, 2, 3, 5])
def test_a_source_with_a_state_goes_on_from_it(done: int):
    first = ForeignLoader(Stateful(6), grad_accum_every=2)
    stream = first.steps()
    for _ in range(done):
        next(stream)
    state = first.state
    assert state == {
        "epoch": (2 * done - 1) // 6,
        "offset": (2 * done - 1) % 6 + 1,
        "source": {"given": state["offset"]},
    }
    second = ForeignLoader(Stateful(6), grad_accum_every=2)
    second.load_state(state)
    assert take(second, 4, first.after(Position(), done)) == list(itertools.islice(stream, 4))


def test_a_source_without_a_state_has_none():
    assert ForeignLoader([1]).state is None


def test_skipping_is_logged(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        assert take(ForeignLoader([1, 2, 3]), 1, Position(0, 2)) == [[3]]
    assert "skipping 2 batches" in caplog.text


@pytest.mark.parametrize("num_batches", [None, 1, 3])
def test_validation_is_fixed_and_shared_out(num_batches: int | None):
    alone = list(ForeignLoader(shuffled()).validation(num_batches))
    assert len(alone) == (num_batches or 4)
    assert_same([alone], [list(ForeignLoader(shuffled()).validation(num_batches))])
    dealt = [list(ForeignLoader(shuffled(), rank=r, world_size=3).validation(num_batches)) for r in range(3)]
    assert_same(dealt, [alone[r::3] for r in range(3)])
