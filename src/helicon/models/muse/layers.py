"""The parts of which the image networks are built: normalisation, residual blocks, attention over positions.

Letters: b batch, c channels, h height, w width, n = h * w positions.
"""

from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from helicon.nn.norms import RMSNorm


class GroupNorm(nn.GroupNorm):
    """Group normalisation with float32 statistics whose result keeps the input's precision.

    (Autocast would hand on float32 activations: twice the memory between convolutions.)
    """

    def __init__(self, groups: int, channels: int):
        if channels % groups:
            raise ValueError(
                f"{channels} channels cannot be normalised in {groups} groups: choose a number that divides them"
            )
        super().__init__(groups, channels)

    def forward(self, input: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        return super().forward(input.to(self.weight.dtype)).to(input.dtype)


class ChannelNorm(RMSNorm):
    """Every position's channels scaled to unit root mean square, and nothing subtracted.

    For paths that no residual connection bypasses: group norm would take the mean colour of a plain image away for good
    (entirely so with one channel a group).
    """

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        return rearrange(super().forward(rearrange(x, "b c h w -> b h w c")), "b h w c -> b c h w")


class ImageConv(nn.Conv2d):
    """A convolution over images, padded on a GPU to eight channels, where matrix units take it."""

    def forward(self, input: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d h w"]:
        missing = -self.in_channels % 8
        if not input.is_cuda or not missing:
            return super().forward(input)
        padding = (0, 0, 0, 0, 0, missing)
        return self._conv_forward(F.pad(input, padding), F.pad(self.weight, padding), self.bias)


class ResidualBlock(nn.Module):
    """x + conv(act(norm(conv(act(norm(x))))))."""

    def __init__(self, channels: int, groups: int):
        super().__init__()
        self.layers = nn.Sequential(
            GroupNorm(groups, channels),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            GroupNorm(groups, channels),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        return x + self.layers(x)


class GatedResidualBlock(nn.Module):
    """The residual block with gated linear units in place of the activations: each convolution also computes its gate."""

    def __init__(self, channels: int, groups: int):
        super().__init__()
        self.layers = nn.Sequential(
            GroupNorm(groups, channels),
            nn.Conv2d(channels, channels * 2, 3, padding=1),
            nn.GLU(dim=1),
            GroupNorm(groups, channels),
            nn.Conv2d(channels, channels * 2, 3, padding=1),
            nn.GLU(dim=1),
        )

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        return x + self.layers(x)


class PositionAttention(nn.Module):
    """Every position of a feature map attends to every other; residual, pre-normalised."""

    def __init__(self, channels: int, groups: int, head_size: int = 64):
        super().__init__()
        self.heads = max(1, channels // head_size)
        if channels % self.heads:
            raise ValueError(
                f"attention over {channels} channels needs a multiple of {head_size}, or fewer than {2 * head_size}"
            )
        self.norm = GroupNorm(groups, channels)
        self.to_qkv = nn.Linear(channels, channels * 3, bias=False)
        self.to_out = nn.Linear(channels, channels)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        height = x.shape[2]
        tokens = rearrange(self.norm(x), "b c h w -> b (h w) c")
        queries, keys, values = rearrange(self.to_qkv(tokens), "b n (s m d) -> s b m n d", s=3, m=self.heads)
        attended = F.scaled_dot_product_attention(queries, keys, values)
        out = self.to_out(rearrange(attended, "b m n d -> b n (m d)"))
        return x + rearrange(out, "b (h w) c -> b c h w", h=height)
