"""Samples (dicts) to a batch (a dict): tensors stacked or padded, numbers made tensors, everything else in lists."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

Batch = dict[str, Any]


def collate(samples: Sequence[Any]) -> Batch:
    """Tensors that differ in their first dimension are padded with zeros; `<name>_lengths` tells how long each was."""
    first = samples[0]
    for sample in samples:
        if not isinstance(sample, Mapping):
            raise ValueError(
                f"a sample is a {type(sample).__name__}, and a batch is made of dicts: "
                "return dicts, name the entries with ds_fields, or pass your own collate"
            )
        if sample.keys() != first.keys():
            raise ValueError(
                f"samples of one batch have different entries, {sorted(first)} and {sorted(sample)}: "
                "every sample needs the same ones"
            )
    batch: Batch = {}
    for name in first:
        batch |= _column(name, [sample[name] for sample in samples])
    return batch


def _column(name: str, values: list[Any]) -> Batch:
    values = [torch.from_numpy(value) if isinstance(value, np.ndarray) else value for value in values]
    if all(isinstance(value, Tensor) for value in values):
        return _tensors(name, values)
    if all(isinstance(value, (bool, np.bool_)) for value in values):
        return {name: torch.tensor([bool(value) for value in values])}
    if all(isinstance(value, (int, np.integer)) for value in values):
        return {name: torch.tensor([int(value) for value in values])}
    if all(isinstance(value, (int, float, np.integer, np.floating)) for value in values):
        return {name: torch.tensor([float(value) for value in values], dtype=torch.float32)}
    return {name: values}


def _tensors(name: str, values: list[Tensor]) -> Batch:
    shapes = {tuple(value.shape) for value in values}
    if len(shapes) == 1:
        return {name: torch.stack(values)}
    if len({shape[1:] for shape in shapes}) > 1 or () in shapes:
        raise ValueError(
            f"{name} has the shapes {sorted(shapes)} in one batch: only the first dimension may differ (it is padded); "
            "crop or resize the samples, or pass your own collate"
        )
    lengths = torch.tensor([len(value) for value in values])
    return {name: pad_sequence(values, batch_first=True), f"{name}_lengths": lengths}
