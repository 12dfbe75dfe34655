"""What all quantizers return and promise.

Letters: b batch, n positions (any number of position dimensions), d feature size, q quantizers (codebooks) in a stack.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True)
class Quantized:
    """The outcome of quantizing features `[b, n, d]`."""

    values: Tensor  # [b, n, d], gradients pass straight through to the input; masked rows are zero
    codes: Tensor  # int64 [b, n] for one quantizer, [b, n, q] for a stack; -1 where masked (or dropped in a stack)
    loss: Tensor  # 0-d, already weighted: add it to the training loss as it is
    parts: dict[str, Tensor]  # detached 0-d tensors worth logging: commitment, entropies, perplexity


@runtime_checkable
class Quantizer(Protocol):
    """Features to codes and back. Statistics, losses and codes ignore rows where `mask` is False."""

    codebook_size: int

    def __call__(self, features: Tensor, mask: Tensor | None = None) -> Quantized: ...

    def encode(self, features: Tensor) -> Tensor:
        """Codes alone, with no loss and no change of state."""
        ...

    def decode(self, codes: Tensor) -> Tensor:
        """Codes to features `[b, n, d]`; the inverse of `encode` up to quantization; -1 contributes zero."""
        ...
