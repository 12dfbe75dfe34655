import pickle

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset, random_split

from helicon.data.dataset import BadFile, View, keys_of, read, unaugmented
from helicon.data.fields import LABEL, Routed
from helicon.data.split import Subset


class GlobalNoise(TensorDataset):
    """Augments from the global generator."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tensors[0][index] + torch.rand(())


class Bits(Dataset):
    """Tells whether it augments."""

    def __init__(self) -> None:
        self.keys, self.augment = [f"{n}.png" for n in range(9)], True

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> int:
        return int(self.augment)


def test_a_bad_file_survives_the_way_between_processes():
    error = pickle.loads(pickle.dumps(BadFile("a.png", "cut off")))
    assert (error.path, error.reason, str(error)) == ("a.png", "cut off", "a.png: cut off")


def test_an_ordinary_dataset_replays_under_a_generator_through_views():
    data = GlobalNoise(torch.arange(5))
    first = read(data, 1, torch.Generator().manual_seed(9))
    subset = Subset(View(data), [3, 1])
    torch.rand(3)
    assert first == subset.fetch(1, torch.Generator().manual_seed(9)) and 1 <= first < 2
    assert first != subset.fetch(1, torch.Generator().manual_seed(8))
    assert subset[0] != subset[0] and subset[0] >= 3  # asked for directly, it draws as it always did
    with pytest.raises(IndexError):
        subset[2]


def test_augmentation_is_turned_off_through_any_number_of_views():
    bits = Bits()
    view = Subset(Routed(Subset(bits, [4, 5, 6]), {"bit": LABEL}), [0, 2])
    assert view[0] == {"bit": 1} and unaugmented(view)[0] == {"bit": 0} and view[1] == {"bit": 1}
    part, _ = random_split(bits, [3, 6])
    assert unaugmented(part)[0] == 0 and part[0] == 1 and bits.augment
    ordinary = [1, 2]
    assert unaugmented(ordinary) is ordinary


def test_keys_reach_through_views_and_a_method_is_none():
    view = Subset(Routed(Subset(Bits(), [4, 5, 6]), {"bit": LABEL}), [0, 2])
    assert keys_of(view) == ["4.png", "6.png"] == keys_of(unaugmented(view))
    assert keys_of({"a": 1}) is None and keys_of(View([1])) is None
