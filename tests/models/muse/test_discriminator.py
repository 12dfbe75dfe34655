import pytest
import torch

from helicon.models.muse.discriminator import Discriminator
from helicon.models.muse.losses import gradient_penalty


def discriminator() -> Discriminator:
    torch.manual_seed(0)
    return Discriminator([8, 8, 16, 32, 64], groups=4)


@pytest.mark.parametrize(("height", "width"), [(16, 16), (17, 31), (64, 48), (37, 100)])
def test_images_of_any_size_from_16_pixels_on(height: int, width: int):
    logits = discriminator()(torch.rand(2, 3, height, width))
    assert logits.shape == (2, height // 16, width // 16)


def test_smaller_images_are_refused_in_one_sentence():
    with pytest.raises(ValueError, match="at least 16 pixels a side and got 15 x 64"):
        discriminator()(torch.rand(1, 3, 15, 64))


def test_logits_of_an_image_do_not_depend_on_the_batch():
    network, images = discriminator(), torch.rand(3, 3, 32, 32)
    torch.testing.assert_close(network(images)[1:2], network(images[1:2]))


def test_every_logit_sees_its_patch_and_not_the_far_corner():
    network = discriminator()
    images = torch.rand(1, 3, 192, 192)
    images.requires_grad_()
    # Group norm couples all positions weakly; the gradient without it shows what the convolutions reach.
    network.layers = torch.nn.Sequential(
        *(layer for layer in network.layers if not isinstance(layer, torch.nn.GroupNorm))
    )
    (gradient,) = torch.autograd.grad(network(images)[0, 0, 0], images)
    assert gradient[..., :16, :16].abs().sum() > 0
    assert gradient[..., -64:, -64:].abs().sum() == 0


def test_logits_are_float32_under_autocast_and_full_precision_leaves_autocast():
    network, images = discriminator(), torch.rand(1, 3, 32, 32)
    exact = network(images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough, precise = network(images), network(images, full_precision=True)
    assert rough.dtype == precise.dtype == torch.float32
    assert not torch.equal(rough, exact)
    assert torch.equal(precise, exact)


def test_gradient_penalty_equals_the_formula_image_by_image():
    network, images = discriminator(), torch.rand(2, 3, 32, 48)
    terms = []
    for image in images:
        leaf = image[None].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(network(leaf).mean(), leaf)
        terms.append(10 * (gradient.square().sum().sqrt() - 1) ** 2)
    torch.testing.assert_close(gradient_penalty(network, images), torch.stack(terms).mean())


def test_gradient_penalty_trains_the_discriminator_and_leaves_the_images_alone():
    """D-V5: the reference marks the caller's images as needing a gradient."""
    network, images = discriminator(), torch.rand(2, 3, 16, 16)
    gradient_penalty(network, images).backward()
    assert network.layers[0].weight.grad.abs().sum() > 0
    assert not images.requires_grad and images.grad is None


def test_gradient_penalty_where_gradients_are_switched_off():
    with torch.no_grad():
        penalty = gradient_penalty(discriminator(), torch.rand(1, 3, 16, 16))
    assert penalty.item() > 0
