import pytest
import torch
from torch.nn import functional as F

from helicon.models.muse.layers import ChannelNorm, GatedResidualBlock, GroupNorm, PositionAttention, ResidualBlock


def test_group_norm_has_exact_statistics_and_keeps_the_precision():
    norm, x = GroupNorm(2, 6), 100 + torch.randn(2, 6, 3, 5)
    torch.testing.assert_close(norm(x), F.group_norm(x, 2))
    rough = x.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert norm(rough).dtype == torch.bfloat16
        torch.testing.assert_close(norm(rough), F.group_norm(rough.float(), 2).bfloat16())


def test_channel_norm_scales_every_position_by_itself_and_keeps_the_colour_of_a_plain_image():
    x = torch.randn(2, 6, 3, 5)
    norm = ChannelNorm(6)
    torch.testing.assert_close(norm(x), x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt())
    red, green = torch.eye(3)[:2, :, None, None].expand(2, 3, 4, 4)
    distance = lambda norm: (norm(red[None]) - norm(green[None])).abs().max().item()
    assert distance(ChannelNorm(3)) > 1
    assert distance(GroupNorm(3, 3)) == 0
    assert norm(x.bfloat16()).dtype == torch.bfloat16
    rows = norm(x.contiguous(memory_format=torch.channels_last))
    assert rows.is_contiguous(memory_format=torch.channels_last)


def test_groups_must_divide_the_channels():
    with pytest.raises(ValueError, match="6 channels cannot be normalised in 4 groups"):
        GroupNorm(4, 6)


@pytest.mark.parametrize(
    "block", [ResidualBlock(8, 2), GatedResidualBlock(8, 2), PositionAttention(8, 2), PositionAttention(128, 2)]
)
def test_blocks_are_residual_and_keep_the_shape(block: torch.nn.Module):
    channels = next(block.parameters()).shape[0]
    x = torch.randn(2, channels, 3, 5)
    assert block(x).shape == x.shape
    last = list(block.parameters())[-2:]
    for parameter in last:
        torch.nn.init.zeros_(parameter)
    torch.testing.assert_close(block(x), x)


def test_attention_lets_every_position_see_every_other():
    torch.manual_seed(0)
    block, x = PositionAttention(8, 2), torch.randn(1, 8, 3, 5, requires_grad=True)
    block.norm = torch.nn.Identity()  # which would let them see each other by itself
    (gradient,) = torch.autograd.grad(block(x)[0, :, 0, 0].sum(), x)
    assert (gradient.abs().sum(dim=(0, 1)) > 0).all()


def test_attention_names_the_channels_it_cannot_split():
    with pytest.raises(ValueError, match="attention over 200 channels"):
        PositionAttention(200, 2, head_size=64)
