"""Positions on a grid: rotary on two axes, and a bias from a table of offsets."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helicon.nn.attention import OffsetBias, additive, attend, attend_by_offset
from helicon.nn.positions import Rotation
from helicon.nn.transformer import Transformer

ROWS, COLUMNS = 3, 4


def grid() -> Tensor:
    place = torch.arange(ROWS * COLUMNS)
    return torch.stack((place // COLUMNS, place % COLUMNS), dim=-1)[None]


def offset_bias(heads: int, places: Tensor) -> OffsetBias:
    """Of some patches of the grid, by their numbers."""
    table = torch.randn(heads, (2 * ROWS - 1) * (2 * COLUMNS - 1), requires_grad=True)
    return OffsetBias(table, places // COLUMNS * (2 * COLUMNS - 1) + places % COLUMNS)


def test_each_axis_turns_its_share_of_the_pairs():
    positions = torch.tensor([[[0, 5], [3, 1], [-2, 70]]])
    x = torch.randn(1, 2, 3, 8)
    pairs = torch.complex(x[..., :4].double(), x[..., 4:].double())
    frequencies = torch.tensor([1.0, 0.01]).double()  # of a head of four features
    angles = (positions[:, None, :, :, None].double() * frequencies).flatten(-2)
    turned = pairs * torch.exp(1j * angles)
    expected = torch.cat((turned.real, turned.imag), dim=-1).float()
    torch.testing.assert_close(Rotation(positions, 8)(x), expected, atol=1e-5, rtol=1e-5)


def test_one_axis_is_a_plain_position():
    positions, x = torch.tensor([[4, 0, 9]]), torch.randn(1, 2, 3, 6)
    assert Rotation(positions, 6)(x).equal(Rotation(positions[..., None], 6)(x))


def test_products_depend_on_the_offset_on_both_axes():
    query, key = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)

    def product(at: tuple[int, int], other: tuple[int, int]) -> Tensor:
        turned = (Rotation(torch.tensor([[list(place)]]), 8)(x) for place, x in ((at, query), (other, key)))
        first, second = turned
        return (first * second).sum()

    torch.testing.assert_close(product((3, 1), (1, 5)), product((12, 21), (10, 25)), atol=1e-4, rtol=1e-4)
    assert (product((3, 1), (1, 5)) - product((3, 1), (2, 5))).abs() > 1e-3
    assert (product((3, 1), (1, 5)) - product((3, 1), (1, 4))).abs() > 1e-3


def test_a_head_that_axes_cannot_share_is_refused():
    with pytest.raises(ValueError, match="dim_head=6 must be a multiple of 4"):
        Rotation(grid(), 6)
    learned = Transformer(8, 1, heads=2, dim_head=4, positions="learned", max_seq_len=20)
    with pytest.raises(ValueError, match="several axes"):
        learned(torch.randn(1, ROWS * COLUMNS, 8), positions=grid())


def test_an_offset_bias_is_a_function_of_rows_and_columns_between():
    places = torch.arange(ROWS * COLUMNS)[None]
    bias = offset_bias(2, places)
    table = bias.table.unflatten(1, (2 * ROWS - 1, 2 * COLUMNS - 1))
    written = bias.gathered()
    for query in range(ROWS * COLUMNS):
        for key in range(ROWS * COLUMNS):
            down, right = query // COLUMNS - key // COLUMNS, query % COLUMNS - key % COLUMNS
            assert written[0, :, query, key].equal(table[:, down + ROWS - 1, right + COLUMNS - 1])


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("rows", [1, 2])  # one for the whole batch, or each its own
def test_bias_that_is_looked_up_equals_bias_that_is_written_out(rows, kv_heads):
    queries = torch.randn(2, 4, 5, 8)
    keys, values = torch.randn(2, kv_heads, 5, 8), torch.randn(2, kv_heads, 5, 8)
    places = torch.stack([torch.randperm(ROWS * COLUMNS)[:5] for _ in range(rows)])
    keep = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
    bias = offset_bias(4, places)
    for mask in (None, keep):
        written = bias.gathered() if mask is None else bias.gathered() + additive(mask[:, None, None], torch.float32)
        with torch.no_grad():  # it has no backward pass on a CPU
            looked_up = attend_by_offset(queries, keys, values, bias, mask)
        torch.testing.assert_close(looked_up, attend(queries, keys, values, written), atol=1e-5, rtol=1e-5)


def test_a_transformer_takes_an_offset_bias_as_the_bias_it_stands_for():
    transformer = Transformer(8, 2, heads=2, dim_head=4, positions="none")
    x, mask = torch.randn(2, 5, 8), torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]).bool()
    bias = offset_bias(2, torch.stack([torch.randperm(12)[:5] for _ in range(2)]))
    out = transformer(x, mask, bias=bias)
    torch.testing.assert_close(out, transformer(x, mask, bias=bias.gathered()), atol=0, rtol=0)
    assert (out - transformer(x, mask)).abs().max() > 1e-3
    out.square().sum().backward()
    assert bias.table.grad.abs().max() > 0


@pytest.mark.gpu
def test_on_a_gpu_it_is_looked_up_with_the_same_gradients():
    """In a Python of its own: what is compiled must not see the type checker."""
    script = Path(__file__).with_name("offsets_on_gpu.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
