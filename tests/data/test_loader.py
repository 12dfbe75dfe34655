import gc
import itertools
import logging
import multiprocessing
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from helicon.data.dataset import BadFile
from helicon.data.loader import Loader, Position
from helicon.data.split import split


class Numbers(Dataset):
    """Tells the index, and draws from its generator."""

    def __init__(self, length: int, bad: tuple[int, ...] = ()):
        self.length, self.bad = length, bad

    def __len__(self) -> int:
        return self.length

    def fetch(self, index: int, generator: torch.Generator) -> dict:
        if index in self.bad:
            raise BadFile(f"files/{index}.png", "it is\tcut\noff")
        return {"index": index, "noise": torch.rand(2, generator=generator)}


class GlobalNoise(Dataset):
    """An ordinary dataset that augments from the global generators."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> dict:
        noise = [torch.rand(()).item(), float(np.random.rand()), random.random()]
        return {"index": index, "noise": torch.tensor(noise)}


START = Position()


def take(loader: Loader, steps: int, start: Position = START) -> list[list[dict]]:
    stream = loader.steps(start)
    taken = list(itertools.islice(stream, steps))
    stream.close()
    return taken


def indices(steps: list[list[dict]]) -> list[list[list[int]]]:
    return [[batch["index"].tolist() for batch in step] for step in steps]


def flat(steps: list[list[dict]]) -> list[int]:
    return [index for step in indices(steps) for micro in step for index in micro]


def assert_same(left: list[list[dict]], right: list[list[dict]]) -> None:
    assert indices(left) == indices(right)
    for a, b in zip(itertools.chain(*left), itertools.chain(*right), strict=True):
        assert torch.equal(a["noise"], b["noise"])


def test_an_epoch_is_a_permutation_drawn_from_seed_and_epoch():
    loader = Loader(Numbers(12), batch_size=3)
    epochs = [flat(take(loader, 4, Position(epoch))) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3
    assert flat(take(loader, 12)) == [*epochs[0], *epochs[1], *epochs[2]]
    assert flat(take(Loader(Numbers(12), batch_size=3, seed=1), 4)) != epochs[1]  # not seed + epoch
    assert flat(take(Loader(Numbers(12), batch_size=3, shuffle=False), 5)) == [*range(12), 0, 1, 2]


@pytest.mark.parametrize("num_samples", [6, 7, 11, 12, 13])
def test_drop_last_leaves_out_the_rest_of_each_epoch(num_samples: int):
    loader = Loader(Numbers(num_samples), batch_size=2, grad_accum_every=3)
    per_epoch = num_samples // 6
    taken = flat(take(loader, 3 * per_epoch))
    assert taken == [index for epoch in range(3) for index in loader.order(epoch)[: 6 * per_epoch].tolist()]


@pytest.mark.parametrize("num_samples", [6, 7, 11, 13])
def test_without_drop_last_nothing_is_lost_and_every_batch_is_full(num_samples: int):
    loader = Loader(Numbers(num_samples), batch_size=2, grad_accum_every=3, drop_last=False)
    steps = take(loader, num_samples)
    assert all(len(micro) == 2 for step in indices(steps) for micro in step)
    assert flat(steps) == [index for epoch in range(6) for index in loader.order(epoch).tolist()]


@pytest.mark.parametrize("drop_last", [True, False])
def test_the_global_batch_does_not_depend_on_the_number_of_processes(drop_last: bool):
    def global_batches(world_size: int, accumulation: int) -> list[list[int]]:
        ranks = [
            indices(take(Loader(Numbers(29), batch_size=2, grad_accum_every=accumulation, rank=rank,
                                world_size=world_size, drop_last=drop_last), 9))
            for rank in range(world_size)
        ]  # fmt: skip
        return [
            [index for micro in range(accumulation) for rank in ranks for index in rank[step][micro]]
            for step in range(9)
        ]

    assert global_batches(1, 4) == global_batches(2, 2) == global_batches(4, 1)


@pytest.mark.parametrize("drop_last", [True, False])
def test_after_agrees_with_the_stream_from_any_position(drop_last: bool):
    for num_samples in (4, 5, 8, 9, 11):
        loader = Loader(Numbers(num_samples), batch_size=2, grad_accum_every=2, drop_last=drop_last)
        for start in (
            Position(),
            Position(2, 4),
            Position(1, 3),
            Position(0, num_samples),
            Position(0, num_samples + 1),
        ):
            stream = take(loader, 7, start)
            position = start
            for done in range(7):
                assert loader.after(start, done) == loader.after(loader.after(start, 0), done)
                assert_same(take(loader, 1, position), stream[done : done + 1])
                position = loader.after(position)
                assert position == loader.after(start, done + 1)


@pytest.mark.parametrize("dataset", [Numbers(11), GlobalNoise()], ids=["fetch", "global generators"])
def test_workers_change_nothing_and_a_resume_may_change_them(dataset: Dataset):
    plain = Loader(dataset, batch_size=2, grad_accum_every=2, seed=3)
    expected = take(plain, 6)
    assert len({tuple(b["noise"].flatten().tolist()) for step in expected for b in step}) == 12  # epochs differ too
    for num_workers in (1, 2):
        loader = Loader(dataset, batch_size=2, grad_accum_every=2, seed=3, num_workers=num_workers)
        assert_same(take(loader, 6), expected)
        assert_same(take(loader, 3, plain.after(Position(), 3)), expected[3:])  # in the middle of epoch 1


def test_there_are_no_more_workers_than_cpus(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """(Of which torch would warn, and warnings are errors here.)"""
    expected = take(Loader(Numbers(11), batch_size=2), 3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0}, raising=False)
    caplog.set_level(logging.INFO)
    loader = Loader(Numbers(11), batch_size=2, num_workers=8)
    assert "num_workers=8: there are 1 CPUs, so as many processes read data" in caplog.text
    stream = loader.steps()
    first = next(stream)
    assert len(multiprocessing.active_children()) == 1
    stream.close()
    assert_same([first], expected[:1])
    caplog.clear()
    Loader(Numbers(11), batch_size=2, num_workers=1)
    assert not caplog.text


@pytest.mark.parametrize("num_workers", [0, 1])
def test_iterating_leaves_the_global_generators_alone(num_workers: int):
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # the run-time type checker draws from `random`
    loader = Loader(GlobalNoise(), batch_size=2, num_workers=num_workers, collate=random_collate)
    take(loader, 3)
    list(loader.validation(2))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()


def random_collate(samples: list[dict]) -> dict:
    return {"index": torch.tensor([s["index"] for s in samples]), "noise": torch.rand(3)}


def test_a_users_collate_replays_too():
    loaders = [Loader(Numbers(11), batch_size=2, num_workers=n, collate=random_collate) for n in (0, 1)]
    expected = take(loaders[0], 7)
    assert_same(take(loaders[1], 7), expected)
    assert len({tuple(step[0]["noise"].tolist()) for step in expected}) == 7


def test_a_sample_is_drawn_anew_each_epoch():
    loader = Loader(Numbers(4), batch_size=4, shuffle=False)
    (first,), (second,) = take(loader, 2)
    assert not torch.equal(first["noise"], second["noise"])


def test_workers_end_with_the_iterator():
    loader = Loader(Numbers(11), batch_size=2, num_workers=2)
    closed, dropped = loader.steps(), loader.steps()
    next(closed), next(dropped)
    assert len(multiprocessing.active_children()) == 4
    closed.close()
    assert len(multiprocessing.active_children()) == 2
    del dropped
    gc.collect()
    assert multiprocessing.active_children() == []


def test_a_signal_to_the_process_group_does_not_reach_the_workers():
    class Group(Numbers):
        def fetch(self, index: int, generator: torch.Generator) -> dict:
            return {"group": os.getpgrp()}

    stream = Loader(Group(4), batch_size=2, num_workers=1).steps()
    assert next(stream)[0]["group"][0] != os.getpgrp()
    stream.close()


def test_workers_persist_over_epochs():
    stream = Loader(Numbers(4), batch_size=2, num_workers=1).steps()
    next(stream)
    workers = {child.pid for child in multiprocessing.active_children()}
    for _ in range(9):
        next(stream)
    assert {child.pid for child in multiprocessing.active_children()} == workers
    stream.close()


def test_fewer_samples_than_a_step_is_an_error_at_once():
    loader = Loader(Numbers(11), batch_size=2, grad_accum_every=3, world_size=2)
    for call in (loader.steps, loader.check, lambda: loader.after(Position())):
        with pytest.raises(ValueError, match=r"has 11 samples, fewer than the 12 of one step.*lower batch_size"):
            call()
    assert len(list(loader.validation(None))) == 3  # validation can do with less


def test_of_fewer_samples_than_a_step_it_is_said_which_cannot_be_read(tmp_path: Path):
    listed = tmp_path / "bad_files.txt"
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=rf"add data; 2 of the 3 cannot be read \(see {listed}\)$"):
        Loader(Numbers(3, bad=(0, 2)), batch_size=4, bad_files=listed).check()
    assert [line.partition("\t")[0] for line in listed.read_text().splitlines()] == ["files/0.png", "files/2.png"]
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(ValueError, match=r"or add data$"):
        Loader(Numbers(3), batch_size=4, bad_files=listed).check()


def test_what_validation_has_is_told_where_samples_are_too_few():
    training, _ = split(Numbers(5), 0.4, seed=0)
    with pytest.raises(ValueError, match=r"has 3 samples.*\(2 more are held out for validation: valid_frac\)"):
        Loader(training, batch_size=4).check()


class Unequal(Numbers):
    def fetch(self, index: int, generator: torch.Generator) -> dict[str, Any]:
        return {"x": torch.zeros(2, index)}


class Wrong(Numbers):
    def fetch(self, index: int, generator: torch.Generator) -> dict[str, Any]:
        raise ValueError("this dataset is wrong")


@pytest.mark.parametrize(
    ("dataset", "sentence", "place"),
    [(Unequal, "only the first dimension may differ", "in _tensors"), (Wrong, "this dataset is wrong", "in fetch")],
)
def test_a_mistake_met_by_a_worker_is_one_sentence_whose_cause_says_where(
    dataset: type[Numbers], sentence: str, place: str
):
    with pytest.raises(ValueError, match=sentence) as caught:
        take(Loader(dataset(4), batch_size=2, num_workers=1), 1)
    assert "\n" not in str(caught.value) and place in str(caught.value.__cause__)


def test_a_list_of_bad_files_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "bad_files.txt").mkdir()
    loader = Loader(Numbers(7, bad=(2, 3)), batch_size=2, bad_files=tmp_path / "bad_files.txt")
    take(loader, 3)
    assert sorted(loader.bad) == ["files/2.png", "files/3.png"]
    assert caplog.text.count("could not be written") == 1


def test_unusable_datasets_and_numbers_are_refused():
    with pytest.raises(ValueError, match="empty"):
        Loader(Numbers(0), batch_size=1)
    with pytest.raises(ValueError, match=r"has no length.*DataLoader"):
        Loader(iter([1]), batch_size=1)
    with pytest.raises(ValueError, match="batch_size=0"):
        Loader(Numbers(1), batch_size=0)
    with pytest.raises(ValueError, match=r"\(0, -1\)"):
        Position(0, -1)
    with pytest.raises(ValueError, match="num_batches=0"):
        Loader(Numbers(1), batch_size=1).validation(0)
    with pytest.raises(ValueError, match="a sample is a tuple"):
        take(Loader(TensorDataset(torch.zeros(4, 1)), batch_size=2), 1)


@pytest.mark.parametrize("num_batches", [None, 1, 3, 99])
@pytest.mark.parametrize("num_samples", [1, 5, 12, 13])
def test_validation_is_fixed_whole_and_shared_out(num_samples: int, num_batches: int | None):
    def shares(world_size: int) -> list[list[list[int]]]:
        loaders = [
            Loader(Numbers(num_samples), batch_size=3, rank=rank, world_size=world_size) for rank in range(world_size)
        ]
        return [[batch["index"].tolist() for batch in loader.validation(num_batches)] for loader in loaders]

    alone = shares(1)[0]
    expected = Loader(Numbers(num_samples), batch_size=3).order(0).tolist()
    assert [index for batch in alone for index in batch] == expected[: 3 * (num_batches or 99)]
    for world_size in (2, 3, 5):
        dealt = shares(world_size)
        assert sorted(batch for share in dealt for batch in share) == sorted(alone)
        assert dealt == [alone[rank::world_size] for rank in range(world_size)]


def test_two_validations_agree_whatever_the_workers():
    loader, other = (Loader(GlobalNoise(), batch_size=3, num_workers=n) for n in (0, 2))
    first, again, elsewhere = ([[b] for b in x.validation(3)] for x in (loader, loader, other))
    assert_same(first, again)
    assert_same(first, elsewhere)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_files_give_way_to_the_next_and_are_listed_once(tmp_path: Path, num_workers: int):
    listed = tmp_path / "run" / "bad_files.txt"
    loader = Loader(Numbers(7, bad=(2, 3, 6)), batch_size=2, shuffle=False, num_workers=num_workers, bad_files=listed)
    assert flat(take(loader, 6)) == [0, 1, 4, 4, 4, 5] * 2
    assert loader.bad == ["files/2.png", "files/3.png"]  # 6 is in the part that is dropped
    assert listed.read_text() == "files/2.png\tit is cut off\nfiles/3.png\tit is cut off\n"
    list(loader.validation(None))
    assert loader.bad == ["files/2.png", "files/3.png", "files/6.png"]


def test_a_replacement_is_the_sample_itself():
    good, bad = (take(Loader(Numbers(7, bad=b), batch_size=1, shuffle=False), 4) for b in ((), (2,)))
    assert torch.equal(bad[2][0]["noise"], good[3][0]["noise"])


def test_ranks_and_resumed_runs_share_one_list(tmp_path: Path):
    listed = tmp_path / "bad_files.txt"
    loaders = [Loader(Numbers(8, bad=(1, 6)), batch_size=2, shuffle=False, bad_files=listed) for _ in range(3)]
    take(loaders[0], 1)
    take(loaders[1], 4)
    take(loaders[0], 4)
    take(loaders[2], 4)
    assert [line.split("\t")[0] for line in listed.read_text().splitlines()] == ["files/1.png", "files/6.png"]
    assert all(loader.bad == ["files/1.png", "files/6.png"] for loader in loaders)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_nothing_readable_is_one_error_with_an_example(
    tmp_path: Path, num_workers: int, caplog: pytest.LogCaptureFixture
):
    loader = Loader(
        Numbers(5, bad=tuple(range(5))), batch_size=2, num_workers=num_workers, bad_files=tmp_path / "bad.txt"
    )
    with pytest.raises(ValueError, match=r"^none of the 5 files can be read, for example files/\d.png") as error:
        take(loader, 1)
    assert "Traceback" not in str(error.value)
    assert len((tmp_path / "bad.txt").read_text().splitlines()) == 5
    assert "skipped" not in caplog.text


def test_file_names_that_are_not_text_can_be_listed(tmp_path: Path):
    class Odd(Numbers):
        def fetch(self, index: int, generator: torch.Generator) -> dict:
            if index == 0:
                raise BadFile("a\tb\n\udcff.png", "no")
            return {"index": index, "noise": torch.zeros(1)}

    listed = tmp_path / "bad.txt"
    for _ in range(2):
        take(Loader(Odd(4), batch_size=2, bad_files=listed), 2)
    assert listed.read_bytes() == b"a\\tb\\n\xff.png\tno\n"
