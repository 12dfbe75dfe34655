"""Compiles every quantizer as one graph, forward and backward, and compares it with eager; prints the names that passed."""

import sys
import warnings
from copy import deepcopy
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from quantize.builders import BUILD, RANDOM


def main() -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(13).expand(3, 13) < 11
    for name, build in (BUILD | RANDOM).items():
        torch.compiler.reset()
        torch.manual_seed(0)
        eager = build()
        quantizer = deepcopy(eager)
        compiled = torch.compile(quantizer, fullgraph=True, backend="aot_eager")
        for step in range(2):
            features = torch.randn(3, 13, 6, generator=generator)
            outcomes = []
            for module in (compiled, eager):
                torch.manual_seed(step)
                leaf = features.clone().requires_grad_()
                result = module(leaf, mask)
                (result.values.square().sum() + result.loss).backward()
                outcomes.append((result.values, result.codes, result.loss, dict(result.parts), leaf.grad))
            torch.testing.assert_close(outcomes[0], outcomes[1])
            torch.testing.assert_close(dict(quantizer.state_dict()), dict(eager.state_dict()))
        sys.stdout.write(f"{name}\n")


if __name__ == "__main__":
    main()
