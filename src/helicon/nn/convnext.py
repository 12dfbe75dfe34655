"""The block of ConvNeXt (Liu et al., 2022) along one axis: it refines a text's embedding, and a vocoder is a stack of it.

A depthwise convolution mixes neighbours, a network of two layers mixes features. It keeps the number of frames, so that a
frame of the result still is the frame of the input.

Letters: b batch, n frames, d features.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn


class ConvNeXtBlock(nn.Module):
    """`x + scale * contract(gelu(expand(norm(depthwise(x)))))`, features last.

    `layer_scale` is what the learned scale of each feature starts with. A deep stack starts calm with one over its depth
    (as Vocos does); a few blocks can start with 1.
    """

    def __init__(self, dim: int, kernel_size: int = 7, mult: float = 4, layer_scale: float = 1.0):
        super().__init__()
        if kernel_size % 2 == 0:
            raise ValueError(
                f"kernel_size={kernel_size} has no middle: a block that keeps the frames in place needs an odd one."
            )
        hidden = int(dim * mult)
        self.depthwise = nn.Conv1d(dim, dim, kernel_size, padding=kernel_size // 2, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.expand = nn.Linear(dim, hidden)
        self.contract = nn.Linear(hidden, dim)
        self.scale = nn.Parameter(torch.full((dim,), layer_scale))

    def forward(self, x: Float[Tensor, "b n d"], mask: Bool[Tensor, "b n"] | None = None) -> Float[Tensor, "b n d"]:
        """Where `mask` is False a frame is padding: real frames hear silence there, as past the end, and the result is 0 there."""
        if mask is not None:
            # Not a product: whatever stands in the padding, NaN too, must not reach a real frame.
            x = x.masked_fill(~mask[..., None], 0.0)
        mixed = rearrange(self.depthwise(rearrange(x, "b n d -> b d n")), "b d n -> b n d")
        update = self.contract(F.gelu(self.expand(self.norm(mixed))))
        out = x + (update * self.scale.to(update.dtype)).to(x.dtype)
        return out if mask is None else out.masked_fill(~mask[..., None], 0.0)
