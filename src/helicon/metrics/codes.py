"""How evenly the codes of a quantizer are used.

Counted first, so that counts of many batches can be added: a batch alone need not meet every code of a large codebook.

Letters: q quantizers (levels of a stack), k codes of a codebook.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def code_counts(codes: Int[Tensor, "... q"], codebook_size: int) -> Float[Tensor, "q k"]:
    """How often each code of each quantizer occurs; -1 (masked) does not count."""
    # Masked codes are counted in a place of their own, then dropped: no tensor whose size depends on the data.
    places = torch.where(codes < 0, codebook_size, codes).flatten(0, -2).T
    counts = torch.zeros(len(places), codebook_size + 1, device=codes.device)
    return counts.scatter_add_(1, places, torch.ones_like(places, dtype=counts.dtype))[:, :codebook_size]


def usage(counts: Float[Tensor, "q k"]) -> dict[str, Tensor]:
    """Means over quantizers: "codebook_use", the part of the codes that occur at all, and "perplexity", exp(entropy) of their
    frequencies (how many codes, used equally often, would be as varied)."""
    frequencies = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
    return {
        "codebook_use": (counts > 0).to(counts.dtype).mean(),
        "perplexity": torch.special.entr(frequencies).sum(dim=1).exp().mean(),
    }
