from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helicon.models.soundstream.layers import DenoiseFilm, LocalAttention, Snake, SqueezeExcite


def test_snake_is_its_formula():
    snake, x = Snake(3), torch.randn(2, 5, 3) * 4
    torch.nn.init.normal_(snake.log_frequency)
    a = snake.log_frequency.exp()
    torch.testing.assert_close(snake(x), x + torch.sin(a * x) ** 2 / a)


def test_snake_keeps_its_phase_in_half_precision():
    """At 100 bfloat16 has steps of 1/2: a phase computed in it would be anything."""
    snake, x = Snake(1), torch.linspace(90, 110, 41)[None, :, None].bfloat16()
    torch.nn.init.constant_(snake.log_frequency, 0.3)
    out = snake(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), snake(x.float()), atol=0.3, rtol=0)  # half a step


def test_snake_stays_finite_when_its_frequency_dies():
    snake = Snake(1)
    torch.nn.init.constant_(snake.log_frequency, -200.0)
    x = torch.tensor([[[-3.0], [2.0]]], requires_grad=True)
    snake(x).sum().backward()
    torch.testing.assert_close(snake(x), x)
    assert x.grad.isfinite().all() and snake.log_frequency.grad.isfinite().all()


@torch.no_grad()
def test_squeeze_excite_gates_by_means_over_the_past():
    layer, x = SqueezeExcite(3), torch.randn(2, 6, 3)
    for t in range(6):
        expected = x[:, t] * layer.gate(x[:, : t + 1].mean(dim=1))
        torch.testing.assert_close(layer(x)[:, t], expected)


@torch.no_grad()
def test_squeeze_excite_in_chunks():
    layer, x, state = SqueezeExcite(3), torch.randn(2, 11, 3) + 5, {}
    parts = [layer(part, state) for part in x.split((1, 4, 1, 5), dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), layer(x))


@torch.no_grad()
def test_squeeze_excite_counts_beyond_what_float32_can():
    """A mean over 2^25 samples still moves by the right share of the next one."""
    layer, x = SqueezeExcite(1), torch.full((1, 4, 1), 3.0)
    state = {layer: (torch.ones(1, 1, 1), 2**25)}
    layer(x, state)
    mean, count = state[layer]
    assert count == 2**25 + 4 and mean.item() == pytest.approx(1.0 + 8 / (2**25 + 4), abs=1e-7)


def test_film_starts_as_the_identity_and_learns():
    film, x = DenoiseFilm(4), torch.randn(3, 5, 4)
    flags = torch.tensor([True, False, True])
    assert film(x, flags).equal(x)
    torch.nn.init.normal_(film.scale_shift.weight)
    scale, shift = film.scale_shift.weight[:, None].chunk(2, dim=-1)
    expected = torch.stack([x[i] * (1 + scale[int(flag)]) + shift[int(flag)] for i, flag in enumerate(flags)])
    torch.testing.assert_close(film(x, flags), expected)


@torch.no_grad()
def test_local_attention_leaves_loud_frames_loud_and_soft_ones_soft():
    layer = LocalAttention(12, window_size=4, depth=1, heads=2, dim_head=6)
    x = torch.randn(2, 9, 12) * torch.tensor([0.05, 1.0, 20.0]).repeat(3)[:, None]
    assert (layer(x) - x).norm(dim=-1).max() < 0.1 < x.norm(dim=-1).min()
    layer.scale.fill_(1.0)
    torch.testing.assert_close(layer(x) - x, layer.transformer(x))


@pytest.mark.parametrize("window_size", [1, 4])
@torch.no_grad()
def test_local_attention_in_chunks(window_size):
    torch.manual_seed(0)
    layer = LocalAttention(12, window_size=window_size, depth=2, heads=2, dim_head=6)
    layer.scale.fill_(1.0)
    x, state = torch.randn(2, 30, 12), {}
    parts = [layer(part, state) for part in x.split((1, 1, 3, 20, 4, 1), dim=1)]  # one greater than the cache
    torch.testing.assert_close(torch.cat(parts, dim=1), layer(x), atol=1e-5, rtol=1e-5)


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor holds that is made inside."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        tensors = [x for x in (out if isinstance(out, tuple | list) else (out,)) if isinstance(x, torch.Tensor)]
        self.count = max(self.count, *(x.numel() for x in tensors), 0)
        return out


def test_local_attention_takes_memory_in_proportion_to_the_length():
    """Half an hour of sound is 90,000 frames, whose square no machine holds; forward and backward, as with a mask."""
    layer, largest = LocalAttention(8, window_size=4, depth=1, heads=2, dim_head=4), {}
    for length in (401, 801):
        x = torch.randn(1, length, 8, requires_grad=True)
        with Largest() as made:
            layer(x).square().sum().backward()
        largest[length] = made.count
    assert largest[801] < 2.1 * largest[401]
    with_mask = x.detach().clone().requires_grad_()
    out = with_mask + layer.scale * layer.transformer(with_mask, bias=torch.zeros(1, 1, 801, 801))
    out.square().sum().backward()
    torch.testing.assert_close(layer(x), out)
    torch.testing.assert_close(x.grad, with_mask.grad, atol=1e-4, rtol=1e-4)
