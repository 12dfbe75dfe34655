import random

import numpy as np
import torch

from helicon.data.seeds import global_seed, mix, seeded_generator


def test_mix_is_the_same_on_every_machine():
    assert mix(3, "order", 7) == 0x7D2AE0AF55CD673E
    assert mix("caf\u00e9", -1) == 0x2A959F9A5E000CFA


def test_mix_keeps_what_is_different_apart():
    parts = [(1, 2), (2, 1), (12,), ("1", 2), (1, "2"), ("12",), (1, 1), (0, 2), (3,), ("1, 2",), ()]
    parts += [(seed, epoch) for seed in range(3, 40) for epoch in range(40)]
    assert len({mix(*part) for part in parts}) == len(parts)
    assert all(0 <= mix(*part) < 2**64 for part in parts)


def test_mix_bits_are_balanced():
    values = [mix(0, "sample", 0, index) for index in range(2000)]
    for bit in (0, 1, 31, 32, 63):
        assert 850 < sum(value >> bit & 1 for value in values) < 1150


def test_generator_depends_on_the_parts_alone():
    first = torch.rand(3, generator=seeded_generator(1, "a"))
    torch.manual_seed(123)
    assert torch.equal(first, torch.rand(3, generator=seeded_generator(1, "a")))
    assert not torch.equal(first, torch.rand(3, generator=seeded_generator(1, "b")))


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), float(np.random.rand()), random.random()


def test_global_seed_seeds_all_three_and_puts_them_back():
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    expected = draw()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    with global_seed(2**64 - 1):
        inside = draw()
        with global_seed(8):
            other = draw()
    assert draw() == expected
    with global_seed(2**64 - 1):
        assert draw() == inside
    assert all(a != b for a, b in zip(inside, other, strict=True))


def test_global_seed_puts_back_after_an_error():
    state = torch.get_rng_state()
    try:
        with global_seed(1):
            torch.rand(1)
            raise KeyError
    except KeyError:
        pass
    assert torch.equal(state, torch.get_rng_state())
