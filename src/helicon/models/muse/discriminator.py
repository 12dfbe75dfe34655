"""The patch discriminator (Isola et al. 2017, as in VQGAN): one real-or-fake logit per patch of the image.

Letters: b batch, c image channels, h height, w width of the image.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn

from helicon.models.muse.layers import GroupNorm, ImageConv


class Discriminator(nn.Module):
    """Strided convolutions that halve the image `len(widths) - 1` times, then a logit for each remaining position."""

    def __init__(self, widths: Sequence[int], channels: int = 3, groups: int = 16, first_kernel_size: int = 5):
        super().__init__()
        self.channels = channels
        self.smallest_size = 2 ** (len(widths) - 1)
        first = ImageConv(channels, widths[0], first_kernel_size, padding=first_kernel_size // 2)
        layers: list[nn.Module] = [first, nn.LeakyReLU(0.1)]
        for width_in, width_out in pairwise(widths):
            layers += [
                nn.Conv2d(width_in, width_out, 4, stride=2, padding=1),
                GroupNorm(groups, width_out),
                nn.LeakyReLU(0.1),
            ]
        self.layers = nn.Sequential(*layers)
        # Padded, so that an image of the smallest size still gets its one logit.
        self.to_logits = nn.Conv2d(widths[-1], 1, 3, padding=1)

    def check_size(self, images: Float[Tensor, "b c h w"]) -> None:
        if min(images.shape[-2:]) < self.smallest_size:
            raise ValueError(
                f"the discriminator halves images {self.smallest_size.bit_length() - 1} times, so it needs at least "
                f"{self.smallest_size} pixels a side and got {images.shape[-2]} x {images.shape[-1]}: "
                f"use larger images or fewer discr_layers"
            )

    def forward(
        self, images: Float[Tensor, "b c h w"], full_precision: bool = False
    ) -> Float[Tensor, "b patches_high patches_wide"]:
        """Logits in float32; `full_precision` also computes all that leads to them in float32 (for the gradient penalty)."""
        self.check_size(images)
        with torch.autocast(images.device.type, enabled=False) if full_precision else nullcontext():
            features = self.layers(images.float() if full_precision else images)
        with torch.autocast(images.device.type, enabled=False):
            return self.to_logits(features.float())[:, 0]
