"""The perceptual loss: how far apart two images are to a network that has learned to see.

The distance is LPIPS (Zhang et al. 2018) with every channel weighted alike: features are scaled to unit length over their
channels, and the squared distance is averaged over positions and layers. The backbone is any module that maps images to one
feature tensor or a list of them, or a `transformers` vision model by name or folder. It is frozen and always in
evaluation mode: no gradient of its own weights, no dropout, so an image is at distance 0 from itself.

Letters: b batch, c image channels, h height, w width.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class PerceptualLoss(nn.Module):
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        backbone: nn.Module | str | Path,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
    ):
        """Images in [0, 1] reach the backbone as (image - mean) / std."""
        super().__init__()
        self.backbone = backbone if isinstance(backbone, nn.Module) else _HiddenStates(backbone)
        self.requires_grad_(False)
        self.register_buffer("mean", torch.tensor(mean)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(std)[:, None, None], persistent=False)
        self.eval()

    def train(self, mode: bool = True) -> "PerceptualLoss":
        """Stays in evaluation mode, whatever the module it stands in does."""
        return super().train(False)

    def forward(self, images: Float[Tensor, "b c h w"], targets: Float[Tensor, "b c h w"]) -> Float[Tensor, ""]:
        """The distance of `images` from `targets`, which get no gradient."""
        with torch.no_grad():
            wanted = self.features(targets)
        distances = [_distance(a, b) for a, b in zip(self.features(images), wanted, strict=True)]
        return torch.stack(distances).mean()

    def features(self, images: Float[Tensor, "b c h w"]) -> list[Tensor]:
        channels = len(self.mean)
        if images.shape[1] not in (1, channels):
            raise ValueError(
                f"the perceptual backbone sees images of {channels} channels and got {images.shape[1]}: "
                f"give mean and std for these channels and a backbone that takes them, or leave vgg out"
            )
        images = images.expand(-1, channels, -1, -1)  # grey images as colour ones
        features = self.backbone((images - self.mean) / self.std)
        return [features] if isinstance(features, Tensor) else list(features)


def _distance(features: Tensor, targets: Tensor) -> Tensor:
    # Channels stand second in feature maps [b, c, h, w] and last in token or pooled features [b, n, c], [b, c].
    axis = 1 if features.ndim == 4 else -1
    difference = F.normalize(features.float(), dim=axis) - F.normalize(targets.float(), dim=axis)
    return difference.square().sum(dim=axis).mean()


class _HiddenStates(nn.Module):
    """A `transformers` vision model as a function from images to all its hidden states."""

    def __init__(self, name: str | Path):
        super().__init__()
        from transformers import AutoModel

        self.model = AutoModel.from_pretrained(str(name), use_safetensors=True)

    def forward(self, images: Tensor) -> list[Tensor]:
        return list(self.model(pixel_values=images, output_hidden_states=True).hidden_states)
