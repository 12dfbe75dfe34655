"""Vectors of the codes that tokenizers make. Letters: v codes, and one thing more; e features."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


def check_ids(ids: Int[Tensor, "*b"], count: int, name: str = "token") -> None:
    """Raises where ids are not 0 to `count` - 1; on a CPU alone, as looking at them elsewhere would make the host wait for the device."""
    if ids.device.type != "cpu" or torch.compiler.is_compiling() or not ids.numel():
        return
    low, high = (int(value) for value in ids.aminmax())
    if low < 0 or high >= count:
        raise ValueError(f"there is no {name} {low if low < 0 else high}: known are 0 to {count - 1}")


class CodeVectors(nn.Module):
    """A vector for each code, with which it enters a network and with which it is told from others where it leaves: its own, and that
    of its digits.

    Codes are mostly signs (lookup-free quantizers), levels, or numbers, so that the binary digits of a code say what it has in common
    with others: what is learned of a digit is learned of half of all codes, most of which are rare. And because a code has the same
    vector on both sides, to repeat one that stood before need not be learned for each.

    One thing that is no code (a mask, the end) comes behind the codes and has a vector, too.
    """

    digits: Tensor

    def __init__(self, num_codes: int, dim: int):
        super().__init__()
        self.num_codes = num_codes
        places = torch.arange(max(1, (num_codes - 1).bit_length()))
        digits = 2.0 * ((torch.arange(num_codes)[:, None] >> places) & 1) - 1
        digits = torch.cat((digits, torch.zeros(1, len(places))))
        self.register_buffer("digits", digits, persistent=False)
        self.own = nn.Embedding(num_codes + 1, dim)
        self.of_digits = nn.Linear(len(places), dim, bias=False)
        nn.init.normal_(self.own.weight, std=dim**-0.5)
        nn.init.normal_(self.of_digits.weight, std=(dim * len(places)) ** -0.5)
        self.scale = (dim / 2) ** 0.5  # to embeddings of unit variance

    def forward(self, codes: Int[Tensor, "*b"]) -> Float[Tensor, "*b e"]:
        """Embeddings."""
        return self.scale * (self.own(codes) + self._of(self.digits[codes]))

    def weight(self) -> Float[Tensor, "v e"]:
        """The vectors of all codes and of the one thing more: logits are products with them."""
        return self.own.weight + self._of(self.digits)

    def _of(self, digits: Tensor) -> Tensor:
        """(The weights may be in another type, for a while.)"""
        return self.of_digits(digits.to(self.of_digits.weight.dtype))
