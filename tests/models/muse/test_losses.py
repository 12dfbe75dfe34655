import pytest
import torch
from torch import nn

from helicon.models.muse import losses


def test_hinge_and_cross_entropy_by_hand():
    real, fake = torch.tensor([2.0, 0.0]), torch.tensor([-3.0, 1.0])
    assert losses.hinge_discriminator_loss(real, fake).item() == pytest.approx((0 + 1) / 2 + (0 + 2) / 2)
    assert losses.hinge_generator_loss(fake).item() == pytest.approx(1.0)
    probability = lambda x: torch.sigmoid(x.double())
    expected = -probability(real).log().mean() - (1 - probability(fake)).log().mean()
    assert losses.bce_discriminator_loss(real, fake).item() == pytest.approx(expected.item(), rel=1e-6)
    assert losses.bce_generator_loss(fake).item() == pytest.approx(-probability(fake).log().mean().item(), rel=1e-6)


def test_a_loss_with_known_gradient_has_the_value_and_the_scaled_gradient():
    images, gradient = torch.rand(1, 3, 2, 2, requires_grad=True), torch.rand(1, 3, 2, 2)
    loss = losses.with_known_gradient(images, torch.tensor(0.1), gradient)
    assert loss.item() == torch.tensor(0.1).item()
    (loss * 3).backward()
    torch.testing.assert_close(images.grad, gradient * 3)


@pytest.mark.parametrize("cropped", [0, 2])
def test_adaptive_weight_is_the_ratio_of_the_last_layers_gradients(cropped: int):
    torch.manual_seed(0)
    layer, features = nn.Conv2d(4, 3, 3, padding=1), torch.randn(2, 4, 6, 7)
    images = layer(features)[..., : 6 - cropped, : 7 - cropped]
    first, second = torch.randn_like(images), torch.randn_like(images)
    norms = [torch.autograd.grad(images, layer.weight, g, retain_graph=True)[0].norm() for g in (first, second)]
    torch.testing.assert_close(losses.adaptive_weight(features, layer, first, second), norms[0] / norms[1])


def test_adaptive_weight_is_bounded():
    layer, features = nn.Conv2d(4, 3, 3, padding=1), torch.randn(1, 4, 5, 5)
    nothing, something = torch.zeros(1, 3, 5, 5), torch.ones(1, 3, 5, 5)
    assert losses.adaptive_weight(features, layer, something, nothing).item() == 1e4
    assert losses.adaptive_weight(features, layer, nothing, nothing).item() == 0
