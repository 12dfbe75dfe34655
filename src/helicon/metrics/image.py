"""How good images and image tokens are, as pure functions of tensors; and a grid to look at.

Letters: b batch, c channels, h height, w width, n and m numbers of samples, d feature size.
"""

from collections.abc import Sequence

import torch
from einops import rearrange
from jaxtyping import Float
from PIL import Image
from torch import Tensor
from torch.nn import functional as F


def psnr(
    images: Float[Tensor, "b c h w"], targets: Float[Tensor, "b c h w"], value_range: float = 1.0
) -> Float[Tensor, "b"]:
    """Peak signal-to-noise ratio of each image in decibels: 10 log10(range^2 / mean squared error), at most 100."""
    error = (images.float() - targets.float()).square().mean(dim=(1, 2, 3))
    return 10 * torch.log10(value_range**2 / error.clamp(min=1e-10 * value_range**2))


def ssim(
    images: Float[Tensor, "b c h w"],
    targets: Float[Tensor, "b c h w"],
    value_range: float = 1.0,
    window_size: int = 11,
    sigma: float = 1.5,
) -> Float[Tensor, "b"]:
    """Structural similarity of each image (Wang et al. 2004): gaussian windows that lie wholly inside the image, averaged."""
    if min(images.shape[-2:]) < window_size:
        raise ValueError(f"ssim with windows of {window_size} needs images as large, got {tuple(images.shape[-2:])}")
    images, targets = images.double(), targets.double()
    offsets = torch.arange(window_size, device=images.device, dtype=images.dtype) - (window_size - 1) / 2
    taps = torch.softmax(-offsets.square() / (2 * sigma**2), dim=0)
    channels = images.shape[1]
    rows = taps.view(1, 1, -1, 1).expand(channels, -1, -1, -1)

    def local_mean(x: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(x, rows, groups=channels), rows.transpose(2, 3), groups=channels)

    mean_a, mean_b = local_mean(images), local_mean(targets)
    variance_a = local_mean(images * images) - mean_a**2
    variance_b = local_mean(targets * targets) - mean_b**2
    covariance = local_mean(images * targets) - mean_a * mean_b
    c1, c2 = (0.01 * value_range) ** 2, (0.03 * value_range) ** 2
    similarity = ((2 * mean_a * mean_b + c1) * (2 * covariance + c2)) / (
        (mean_a**2 + mean_b**2 + c1) * (variance_a + variance_b + c2)
    )
    return similarity.mean(dim=(1, 2, 3)).float()


def frechet_distance(features_a: Float[Tensor, "n d"], features_b: Float[Tensor, "m d"]) -> Float[Tensor, ""]:
    """The squared Wasserstein-2 distance between gaussians fitted to two sets of features (FID, Heusel et al. 2017):

        ||mu_a - mu_b||^2 + tr(A) + tr(B) - 2 tr((A^1/2 B A^1/2)^1/2)

    In float64. The root is taken of a symmetric matrix by its eigenvalues, which stays right where covariances are singular
    (fewer samples than features). But the fewer samples, the larger the distance, even between sets of one kind: compare only
    distances of equally many samples, and beside them the distance between two real sets of that size.
    """
    if min(len(features_a), len(features_b)) < 2:
        raise ValueError(f"a covariance needs two samples or more, got {len(features_a)} and {len(features_b)}")
    a, b = features_a.double(), features_b.double()
    covariance_a, covariance_b = (torch.cov(x.T).reshape(x.shape[1], x.shape[1]) for x in (a, b))
    values, vectors = torch.linalg.eigh(covariance_a)
    root_a = vectors * values.clamp(min=0).sqrt() @ vectors.T
    product = root_a @ covariance_b @ root_a
    cross = torch.linalg.eigvalsh((product + product.T) / 2).clamp(min=0).sqrt().sum()
    distance = (a.mean(0) - b.mean(0)).square().sum() + covariance_a.trace() + covariance_b.trace() - 2 * cross
    return distance.clamp(min=0)


def image_grid(rows: Sequence[Float[Tensor, "_ c _ _"]], gap: int = 2) -> Image.Image:
    """Batches of images with values in [0, 1] (clamped to it) as one picture: a batch a row, white gaps between."""
    if not rows or any(row.shape != rows[0].shape for row in rows):
        raise ValueError(f"a grid needs rows of one shape, got {[tuple(row.shape) for row in rows]}")
    if rows[0].shape[1] not in (1, 3, 4):
        raise ValueError(
            f"a grid shows images of 1 (grey), 3 (colour) or 4 (with transparency) channels, got {rows[0].shape[1]}"
        )
    images = torch.stack([row.detach().float().cpu().clamp(0, 1) for row in rows])
    padded = F.pad(images, (0, gap, 0, gap), value=1.0)
    pixels = rearrange(padded, "r b c h w -> (r h) (b w) c").mul(255).round().byte()
    pixels = pixels[: pixels.shape[0] - gap, : pixels.shape[1] - gap]
    return Image.fromarray((pixels[..., 0] if pixels.shape[-1] == 1 else pixels).numpy())
