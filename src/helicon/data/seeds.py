"""Where all randomness of the data comes from: a hash of what it is for, the same on every machine and process.

A seed is mixed, not added: `seed + epoch` would give run 0's second epoch to run 1 as its first.
"""

import hashlib
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch


def mix(*parts: int | str) -> int:
    """64 well-mixed bits of the parts. (json is unambiguous and ASCII, so odd file names hash the same everywhere.)"""
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def seeded_generator(*parts: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(mix(*parts))


_preserving: list[list[Any]] = []  # the blocks of `preserved` that are open, each with what it must put back


@contextmanager
def preserved() -> Iterator[None]:
    """After this block the global generators are as they were before it; saved once, however often it seeds them."""
    saved: list[Any] = []
    _preserving.append(saved)
    try:
        yield
    finally:
        _preserving.pop()
        if saved:
            torch.set_rng_state(saved[0])
            np.random.set_state(saved[1])
            random.setstate(saved[2])


@contextmanager
def global_seed(seed: int) -> Iterator[None]:
    """Seeds the global generators of torch (CPU), numpy and random, and puts them back as they were, at the latest
    at the end of the `preserved` block around it. (To save and restore them costs 0.2 ms, to seed them a tenth of that.)

    Not `torch.manual_seed`, which would also reseed the GPUs, where the training's own randomness lives.
    """
    with nullcontext() if _preserving else preserved():
        saved = _preserving[-1]
        if not saved:
            saved.extend([torch.get_rng_state(), np.random.get_state(), random.getstate()])
        torch.default_generator.manual_seed(seed)
        np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
        random.seed(seed)
        yield
