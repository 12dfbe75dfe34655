import logging
import math
import random

import pytest
import torch
from torch.utils.data import Dataset

from helicon.data.split import split, split_indices


class Named(Dataset):
    def __init__(self, keys: list[str]):
        self.keys, self.augment = keys, True

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> tuple[str, bool]:
        return self.keys[index], self.augment


NAMES = [f"{folder}/{number}.png" for folder in "abc" for number in range(20)]


def test_the_same_on_every_machine():
    assert split_indices([f"{n}.png" for n in range(20)], 0.2, 42)[1] == [7, 8, 9, 19]
    assert split_indices(range(20), 0.2, 42)[1] == [6, 8, 10, 14]


def test_every_size_and_fraction():
    for length in (2, 3, 7, 20, 99):
        for fraction in (0.001, 0.05, 0.5, 0.999):
            train, valid = split_indices(range(length), fraction, 1)
            assert sorted(train + valid) == list(range(length))
            assert train == sorted(train) and valid == sorted(valid)
            assert train and valid
            assert abs(len(valid) - fraction * length) <= 0.5 or 1 in (len(valid), len(train))


def test_items_are_chosen_by_name_not_by_place():
    moved = NAMES.copy()
    random.Random(0).shuffle(moved)
    chosen, again = ({names[i] for i in split_indices(names, 0.2, 7)[1]} for names in (NAMES, moved))
    assert chosen == again
    assert chosen != {NAMES[i] for i in split_indices(NAMES, 0.2, 8)[1]}
    assert len({name[0] for name in chosen}) == 3  # from all over


def test_new_files_hardly_move_the_others():
    before = {NAMES[i] for i in split_indices(NAMES, 0.2, 7)[1]}
    more = [*NAMES, "d/1.png", "d/2.png"]
    after = {more[i] for i in split_indices(more, 0.2, 7)[1]}
    assert len(before - after) <= 2


def test_one_file_name_composed_differently_is_the_same_file():
    ways = [[f"caf{e}/{i}.png" for i in range(50)] for e in ("\u00e9", "e\u0301")]
    assert split_indices(ways[0], 0.3, 0) == split_indices(ways[1], 0.3, 0)


def test_validation_is_not_augmented_and_training_still_is():
    data = Named(NAMES)
    train, valid = split(data, 0.1, 42)
    assert valid is not None and len(train) == 54 and len(valid) == 6
    assert all(train[i] == (train.keys[i], True) for i in range(54))
    assert all(valid[i] == (valid.keys[i], False) for i in range(6))
    assert data.augment


def test_no_validation():
    train, valid = split(Named(NAMES), 0, 42)
    assert valid is None and list(train.keys) == NAMES


def test_one_item_is_on_both_sides_with_a_warning(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        train, valid = split(Named(["x"]), 0.05, 0)
    assert valid is not None and train[0][0] == valid[0][0] == "x"
    assert "one item" in caplog.text


@pytest.mark.parametrize("fraction", [-0.1, 1, 1.5, math.nan])
def test_fractions_that_make_no_sense(fraction: float):
    with pytest.raises(ValueError, match="valid_frac="):
        split(Named(NAMES), fraction, 0)


def test_datasets_without_names_are_split_by_index_and_keep_fetch():
    class Drawn(Dataset):
        def __len__(self) -> int:
            return 9

        def fetch(self, index: int, generator: torch.Generator) -> tuple[int, float]:
            return index, torch.rand((), generator=generator).item()

    train, valid = split(Drawn(), 0.3, 5)
    assert valid is not None and train.keys is None
    assert [train.fetch(i, torch.Generator().manual_seed(0))[0] for i in range(6)] == list(train.indices)
    assert valid.fetch(0, torch.Generator().manual_seed(0)) == valid.fetch(0, torch.Generator().manual_seed(0))


def test_items_of_one_name_stay_together():
    """Segments of a recording, say: a network that has heard the others would be asked for what it knows."""
    keys = [f"{recording}.wav" for recording in range(10) for _ in range(recording + 1)]
    train, valid = split_indices(keys, 0.2, 3)
    assert sorted(train + valid) == list(range(len(keys)))
    held_out = {keys[index] for index in valid}
    assert len(held_out) == 2 and not held_out & {keys[index] for index in train}
    assert held_out == {f"{index}.wav" for index in split_indices([f"{n}.wav" for n in range(10)], 0.2, 3)[1]}


def test_of_one_recording_validation_has_one_piece():
    assert split_indices(["a.wav"] * 10, 0.2, 0) == (list(range(2, 10)), [0, 1])
