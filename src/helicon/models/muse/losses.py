"""The losses of adversarial image training (VQGAN, Esser et al. 2020, section 3.2).

The generator descends reconstruction + w * lambda * adversarial, where

    lambda = ||d reconstruction / d L|| / ||d adversarial / d L||,    L the weight of the decoder's last layer,

keeps the two at the same strength. Asking autograd for both gradients and then for their sum would go back through the
discriminator and the perceptual network twice. Here each is differentiated once, with respect to the image; the two gradients of L
follow from those image gradients and the last layer's input, and their weighted sum is handed to the decoder.

Letters: b batch, c image channels, h height, w width, d channels that enter the last layer.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

MAX_ADAPTIVE_WEIGHT = 1e4


def hinge_discriminator_loss(real: Tensor, fake: Tensor) -> Tensor:
    return F.relu(1 - real).mean() + F.relu(1 + fake).mean()


def hinge_generator_loss(fake: Tensor) -> Tensor:
    return -fake.mean()


def bce_discriminator_loss(real: Tensor, fake: Tensor) -> Tensor:
    return F.softplus(-real).mean() + F.softplus(fake).mean()


def bce_generator_loss(fake: Tensor) -> Tensor:
    return F.softplus(-fake).mean()


def gradient_penalty(
    logits_of: Callable[[Tensor], Tensor], images: Float[Tensor, "b c h w"], weight: float = 10.0
) -> Float[Tensor, ""]:
    """weight * (||d logit / d image|| - 1)^2, averaged over images; the images given are not marked as needing a gradient.

    An image's logit is the mean over its patches. (With their sum, the bound on its slope would leave a logit of one patch
    among hundreds no room to tell real from fake.)
    """
    images = images.detach().float().requires_grad_()
    with torch.enable_grad():
        logits = logits_of(images).flatten(1).mean(1)
        (gradients,) = torch.autograd.grad(logits.sum(), images, create_graph=True)
    return weight * (gradients.flatten(1).norm(dim=1) - 1).square().mean()


class _KnownGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *scale: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return scale[0] * gradient, None, None


def with_known_gradient(
    images: Float[Tensor, "b c h w"], value: Float[Tensor, ""], gradient: Float[Tensor, "b c h w"]
) -> Float[Tensor, ""]:
    """`value`, as a loss whose gradient with respect to `images` is already known to be `gradient`."""
    return _KnownGradient.apply(images, value.detach(), gradient)


def adaptive_weight(
    last_input: Float[Tensor, "b d h w"],
    last_layer: nn.Conv2d,
    reconstruction_gradient: Float[Tensor, "b c image_h image_w"],
    adversarial_gradient: Float[Tensor, "b c image_h image_w"],
) -> Float[Tensor, ""]:
    """lambda, from the two gradients of the image that `last_layer` made of `last_input` (and that may have been cropped)."""
    reconstruction, adversarial = (
        _weight_gradient(last_input, last_layer, gradient).norm()
        for gradient in (reconstruction_gradient, adversarial_gradient)
    )
    return (reconstruction / (adversarial + 1e-8)).clamp(max=MAX_ADAPTIVE_WEIGHT)


def average_over_ranks(value: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """The mean over all processes, so that they descend one and the same loss; the value itself on a single one."""
    if not (dist.is_available() and dist.is_initialized()):
        return value
    value = value.clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def _weight_gradient(last_input: Tensor, layer: nn.Conv2d, gradient: Tensor) -> Tensor:
    assert (
        layer.stride == (1, 1) and layer.dilation == (1, 1) and layer.groups == 1 and not isinstance(layer.padding, str)
    )
    height, width = (a - b for a, b in zip(last_input.shape[-2:], gradient.shape[-2:], strict=True))
    gradient = F.pad(gradient, (0, width, 0, height))  # rows and columns that were cropped from the image have none
    # Of a mean over an image each gradient is tiny, and float16 would lose it: it is scaled up, and the result down again.
    scale = gradient.abs().amax().clamp(min=1e-30) if last_input.dtype == torch.float16 else 1.0
    gradient = gradient / scale
    weight_gradient = conv2d_weight(
        last_input.detach(), list(layer.weight.shape), gradient.to(last_input.dtype), padding=layer.padding
    )
    return weight_gradient.float() * scale
