from pathlib import Path

import pytest
import torch
from torch import nn

from helicon.models.muse.perceptual import PerceptualLoss


class Backbone(nn.Module):
    """Two feature maps, with dropout between them, as a classifier has."""

    def __init__(self, channels: int = 3):
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, 4, 3), nn.Conv2d(4, 6, 3, stride=2)
        self.dropout = nn.Dropout(0.5)

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        first = self.first(images).relu()
        return [first, self.second(self.dropout(first)).relu()]


def backbone() -> Backbone:
    torch.manual_seed(0)
    return Backbone()


def test_the_distance_is_that_of_unit_length_features():
    network = backbone()
    loss = PerceptualLoss(network, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    images, targets = torch.rand(2, 3, 9, 11), torch.rand(2, 3, 9, 11)
    mean, std = torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1), torch.tensor([0.5, 0.6, 0.7]).view(3, 1, 1)
    expected = 0.0
    for a, b in zip(network((images - mean) / std), network((targets - mean) / std), strict=True):
        a, b = (
            a / (a.square().sum(1, keepdim=True).sqrt() + 1e-12),
            b / (b.square().sum(1, keepdim=True).sqrt() + 1e-12),
        )
        expected += (a - b).square().sum(1).mean().item() / 2
    assert loss(images, targets).item() == pytest.approx(expected, rel=1e-5)


def test_an_image_is_at_distance_zero_from_itself_in_training_too():
    """D-V2: in the reference train() turns the backbone's dropout on."""
    loss, images = PerceptualLoss(backbone()).train(), torch.rand(2, 3, 9, 9)
    assert not any(module.training for module in loss.modules())
    assert loss(images, images).item() == 0
    holder = nn.ModuleDict({"loss": loss}).train()
    assert holder.training and loss(images, images).item() == 0


def test_the_gradient_reaches_the_images_and_nothing_else():
    network = backbone()
    loss = PerceptualLoss(network)
    images, targets = torch.rand(1, 3, 9, 9, requires_grad=True), torch.rand(1, 3, 9, 9, requires_grad=True)
    loss(images, targets).backward()
    assert images.grad is not None and images.grad.abs().sum() > 0
    assert targets.grad is None
    assert all(not p.requires_grad and p.grad is None for p in network.parameters())


def test_pooled_and_token_features_are_normalised_over_their_last_axis():
    class Tokens(nn.Module):
        def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            tokens = images.flatten(2).transpose(1, 2)
            return tokens, tokens.mean(1)

    loss = PerceptualLoss(Tokens(), mean=(0.0,) * 3, std=(1.0,) * 3)
    images = torch.rand(2, 3, 4, 4) + 0.1
    assert loss(images * 3, images).item() == pytest.approx(0.0, abs=1e-10)  # same direction of every token
    assert loss(images.flip(1), images).item() > 1e-3


def test_grey_images_are_seen_as_colour_and_other_channels_refused():
    loss, grey = PerceptualLoss(backbone()), torch.rand(2, 1, 9, 9)
    assert loss(grey, grey.flip(-1)).item() == pytest.approx(
        loss(grey.expand(-1, 3, -1, -1), grey.flip(-1).expand(-1, 3, -1, -1)).item()
    )
    with pytest.raises(ValueError, match="3 channels and got 4"):
        loss(torch.rand(1, 4, 9, 9), torch.rand(1, 4, 9, 9))


@pytest.mark.parametrize("kind", ["resnet", "vit"])
def test_a_transformers_model_from_its_folder(tmp_path: Path, kind: str):
    from transformers import ResNetConfig, ResNetModel, ViTConfig, ViTModel

    torch.manual_seed(0)
    if kind == "resnet":
        model = ResNetModel(ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic"))
    else:
        model = ViTModel(
            ViTConfig(
                hidden_size=8,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=16,
                image_size=32,
                patch_size=8,
            )
        )
    model.save_pretrained(tmp_path)
    loss = PerceptualLoss(tmp_path)
    images, targets = torch.rand(2, 3, 32, 32, requires_grad=True), torch.rand(2, 3, 32, 32)
    assert len(loss.features(targets)) == 3
    loss(images, targets).backward()
    assert images.grad is not None and images.grad.abs().sum() > 0
    assert loss(targets, targets).item() == 0
    expected = model.eval()((targets - loss.mean) / loss.std, output_hidden_states=True).hidden_states
    torch.testing.assert_close(loss.features(targets), list(expected))
