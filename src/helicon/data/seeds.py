"""Where all randomness of the data comes from: a hash of what it is for, the same on every machine and process.

A seed is mixed, not added: `seed + epoch` would give run 0's second epoch to run 1 as its first.
"""

import hashlib
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def mix(*parts: int | str) -> int:
    """64 well-mixed bits of the parts. (json is unambiguous and ASCII, so odd file names hash the same everywhere.)"""
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def seeded_generator(*parts: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(mix(*parts))


@contextmanager
def global_seed(seed: int) -> Iterator[None]:
    """Seeds the global generators of torch (CPU), numpy and random, and puts them back as they were.

    Not `torch.manual_seed`, which would also reseed the GPUs, where the training's own randomness lives.
    """
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
