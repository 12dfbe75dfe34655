"""Normalisation: RMSNorm (Zhang and Sennrich, 2019), norms of queries and keys, and the modulation of adaptive norms.

Statistics are computed in fp32 whatever the input's type is; the output has the input's type.

Letters: b batch, n positions, d features, c size of the condition, h heads, l layers, s residual blocks in a layer.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

EPSILON = 1e-6


class RMSNorm(nn.Module):
    """`x / rms(x) * weight`; without `learned` the scale is left to a `Modulation`."""

    def __init__(self, dim: int, learned: bool = True):
        super().__init__()
        self.dim = dim
        self.weight = nn.Parameter(torch.ones(dim)) if learned else None

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        # A weight of another type than the input would leave the fused kernel (and warn).
        weight = None if self.weight is None else self.weight.to(x.dtype)
        return F.rms_norm(x, (self.dim,), weight, EPSILON).to(x.dtype)


class HeadNorm(nn.Module):
    """Gives each head's vectors unit root mean square times a learned scale per head and feature.

    With the usual attention scale d^-1/2 the logits of such queries and keys start with a standard deviation of 1.
    (A further fixed factor, a scale of 8 or more, would make attention one-hot before it has learned anything.)
    """

    def __init__(self, heads: int, dim_head: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, 1, dim_head))

    def forward(self, x: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n d"]:
        # In the order in which a projection writes them, [b, n, h, d]: the norm's result is contiguous, and attention's is laid out
        # as its queries are. With heads first, both passes would copy it.
        normed = F.rms_norm(x.transpose(1, 2), x.shape[-1:], None, EPSILON).transpose(1, 2)
        return normed.to(x.dtype) * self.weight.to(x.dtype)


class Modulation(nn.Module):
    """Scale, shift, gate of every residual block from a condition: `x + gate * block(norm(x) * (1 + scale) + shift)`.

    Adaptive norms with zero gates as in DiT (Peebles and Xie, 2022), but one projection of the condition is shared by
    all layers and each layer adds a learned offset (PixArt-alpha, Chen et al., 2023). A projection per norm would hold
    more than half of the weights of a 24-layer network. All starts at zero: each block starts as the identity.
    """

    def __init__(self, dim_cond: int, dim: int, depth: int, blocks: int):
        super().__init__()
        self.shape = (blocks, 3, dim)
        self.shared = nn.Linear(dim_cond, blocks * 3 * dim, bias=False)
        self.offsets = nn.Parameter(torch.zeros(depth, *self.shape))
        nn.init.zeros_(self.shared.weight)

    def forward(self, cond: Float[Tensor, "b c"]) -> tuple[Float[Tensor, "s 3 b 1 d"], ...]:
        """One tensor for each layer."""
        shared = self.shared(F.silu(cond)).unflatten(-1, self.shape)
        every = shared + self.offsets[:, None].to(shared.dtype)  # [l, b, s, 3, d]
        return tuple(layer.permute(1, 2, 0, 3)[:, :, :, None] for layer in every.unbind(0))
