import numpy as np
import pytest
import torch

from helicon.data.collate import collate


def test_each_kind_of_value():
    samples = [
        {"images": torch.full((3, 2, 2), float(i)), "texts": f"t{i}", "label": i, "weight": i / 2, "is_real": i > 0,
         "array": np.arange(2) + i, "many": ["a", "b"], "mixed": [1, 2.5][i]}
        for i in range(2)
    ]  # fmt: skip
    batch = collate(samples)
    assert batch["images"].shape == (2, 3, 2, 2) and batch["images"][1].eq(1).all()
    assert batch["texts"] == ["t0", "t1"] and batch["many"] == [["a", "b"], ["a", "b"]]
    assert batch["label"].tolist() == [0, 1] and batch["label"].dtype == torch.int64
    assert batch["weight"].tolist() == [0, 0.5] and batch["weight"].dtype == torch.float32
    assert batch["is_real"].tolist() == [False, True] and batch["is_real"].dtype == torch.bool
    assert batch["array"].tolist() == [[0, 1], [1, 2]]
    assert batch["mixed"].tolist() == [1, 2.5]
    assert list(batch) == list(samples[0])


def test_unequal_first_dimensions_are_padded_with_lengths():
    batch = collate([{"x": torch.ones(length, 2), "y": torch.ones(3)} for length in (3, 1, 0)])
    assert batch["x"].shape == (3, 3, 2)
    assert batch["x_lengths"].tolist() == [3, 1, 0]
    assert batch["x"].sum(dim=(1, 2)).tolist() == [6, 2, 0]
    assert "y_lengths" not in batch


def test_scalar_tensors_stack():
    assert collate([{"x": torch.tensor(1)}, {"x": torch.tensor(2)}])["x"].tolist() == [1, 2]


@pytest.mark.parametrize("shapes", [[(2, 3), (2, 4)], [(2,), (2, 1)], [(), (1,)]])
def test_other_differences_are_an_error_with_the_shapes(shapes: list):
    with pytest.raises(ValueError, match=r"wave has the shapes .*only the first dimension may differ"):
        collate([{"wave": torch.zeros(shape)} for shape in shapes])


def test_tuples_and_unequal_entries_are_errors():
    with pytest.raises(ValueError, match=r"a sample is a tuple.*ds_fields"):
        collate([(torch.zeros(1),)])
    with pytest.raises(ValueError, match=r"\['a'\] and \['a', 'b'\]"):
        collate([{"a": 1}, {"a": 1, "b": 2}])
