"""How much faster is the factorised entropy of lookup-free quantization than its definition, and is it the same?

Times forward and backward of the quantizer with its entropy loss against a softmax over all 2^bits codes for each token,
compares values and gradients (at inverse temperatures 1 and 100) with that softmax in float64, prints a table and writes
a json.

    python benchmarks/lfq_entropy.py --bits 10 12 14 --tokens 2048
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from helicon.quantize import LookupFreeQuantizer
from report import seconds_of, show

LossFunction = Callable[[Tensor], Tensor]


def by_definition(bits: int, inv_temperature: float, gamma: float, device: str) -> LossFunction:
    codes = torch.arange(2**bits, device=device)
    codebook = ((codes[:, None] >> torch.arange(bits - 1, -1, -1, device=device)) & 1).float() * 2 - 1

    def entropy(p: Tensor) -> Tensor:
        return -(p * p.clamp(min=torch.finfo(p.dtype).tiny).log()).sum(-1)

    def loss(features: Tensor) -> Tensor:
        probabilities = (2 * inv_temperature * features[0] @ codebook.to(features.dtype).T).softmax(-1)
        return entropy(probabilities).mean() - gamma * entropy(probabilities.mean(0))

    return loss


def factorised(bits: int, inv_temperature: float, gamma: float, device: str) -> LossFunction:
    quantizer = LookupFreeQuantizer(
        bits, inv_temperature=inv_temperature, diversity_gamma=gamma, entropy_loss_weight=1.0
    ).to(device)
    return lambda features: quantizer(features).loss


def value_and_gradient(loss: LossFunction, features: Tensor) -> tuple[Tensor, Tensor]:
    features = features.clone().requires_grad_()
    value = loss(features)
    (gradient,) = torch.autograd.grad(value, features)
    return value.detach(), gradient


def measure(bits: int, tokens: int, repeats: int, device: str) -> dict[str, float | str]:
    features = torch.randn(1, tokens, bits, generator=torch.Generator().manual_seed(0)).to(device)
    row: dict[str, float | str] = {"bits": bits, "tokens": tokens, "device": device}
    for inv_temperature in (1.0, 100.0):
        options = (bits, inv_temperature, 1.0, device)
        value, gradient = value_and_gradient(factorised(*options), features)
        expected, expected_gradient = value_and_gradient(by_definition(*options), features.double())
        row[f"value_error_at_{inv_temperature:g}"] = (value - expected).abs().item()
        row[f"gradient_error_at_{inv_temperature:g}"] = (
            (gradient - expected_gradient).norm() / expected_gradient.norm()
        ).item()
    slow, fast = by_definition(*options), factorised(*options)
    fast_seconds = seconds_of(lambda: value_and_gradient(fast, features), repeats=10 * repeats)
    slow_seconds = seconds_of(lambda: value_and_gradient(slow, features), repeats, warm_up=1)
    times = {"factorised_seconds": fast_seconds, "definition_seconds": slow_seconds}
    return {**row, **times, "times_faster": slow_seconds / fast_seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, nargs="+", default=[10, 12, 14])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "lfq_entropy.json")
    arguments = parser.parse_args()
    rows = [measure(bits, arguments.tokens, arguments.repeats, arguments.device) for bits in arguments.bits]
    show("lfq_entropy", rows, arguments.out)


if __name__ == "__main__":
    main()
