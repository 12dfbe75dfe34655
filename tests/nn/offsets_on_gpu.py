"""A transformer with an offset bias on a GPU (FlexAttention) and on a CPU (the bias written out): outputs and gradients agree."""

import copy

import torch
from torch import Tensor

from helicon.nn.attention import OffsetBias
from helicon.nn.transformer import Transformer

ROWS, COLUMNS, KEPT = 8, 20, 128


def run(transformer: Transformer, x: Tensor, mask: Tensor, table: Tensor, places: Tensor) -> list[Tensor]:
    table = table.detach().clone().requires_grad_()
    out = transformer(x, mask, bias=OffsetBias(table, places)) * mask[..., None]
    out.square().sum().backward()
    assert table.grad is not None
    gradients = [parameter.grad for parameter in transformer.parameters()]
    return [value.detach().cpu() for value in (out, table.grad, *gradients) if value is not None]


def main() -> None:
    torch.manual_seed(0)
    transformer = Transformer(64, 2, heads=2, dim_head=32, positions="none")
    x = torch.randn(3, KEPT, 64)
    mask = torch.arange(KEPT) < torch.tensor([[KEPT], [77], [5]])
    table = torch.randn(2, (2 * ROWS - 1) * (2 * COLUMNS - 1))
    kept = torch.stack([torch.randperm(ROWS * COLUMNS)[:KEPT] for _ in range(3)])
    inputs = (x, mask, table, kept // COLUMNS * (2 * COLUMNS - 1) + kept % COLUMNS)
    on_gpu = copy.deepcopy(transformer).cuda()
    expected, actual = run(transformer, *inputs), run(on_gpu, *(value.cuda() for value in inputs))
    torch.testing.assert_close(actual, expected, atol=1e-2, rtol=1e-2)


if __name__ == "__main__":
    main()
