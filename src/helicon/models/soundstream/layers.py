"""The parts of which the codec's networks are built: activations, residual units, conditioning, local attention.

Letters: b batch, n samples or frames, c channels, d features of a frame.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from helicon.nn.conv import CausalConv1d, CausalUpsample1d, PadMode, StreamState
from helicon.nn.transformer import Transformer

Activation = Literal["elu", "snake"]

# What the weights after an activation start with, and those that make the audio on top: about 0.7 of what would keep the
# variance. A network that starts quiet learns sooner than one that must first be turned down.
GAINS: Mapping[Activation, float] = {"elu": 0.85, "snake": 0.6}
AUDIO_GAIN = 0.1
ATTENTION_SCALE = 0.01  # of what attention adds, at first


class Snake(nn.Module):
    """`x + sin^2(a x) / a` with a learned frequency a for each channel (Ziyin et al., 2020): waves come easily to it.

    The frequencies are learned as logarithms, so that they stay positive, and the phase is computed in float32:
    bfloat16 has steps of 1/16 between 8 and 16.
    """

    def __init__(self, channels: int):
        super().__init__()
        self.log_frequency = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b n c"]:
        frequency = self.log_frequency.float().exp()
        wide = x.float()
        return (wide + (wide * frequency).sin().square() / (frequency + 1e-9)).to(x.dtype)


def activation_layer(kind: Activation, channels: int) -> nn.Module:
    return nn.ELU() if kind == "elu" else Snake(channels)


class SqueezeExcite(nn.Module):
    """Every channel scaled by a gate that is computed from the mean of all channels over the past.

    (Hu et al., 2017, with the mean up to each moment in place of the mean over all time: causal, and its state is one mean.)
    """

    def __init__(self, channels: int):
        super().__init__()
        inner = max(8, channels // 4)
        self.gate = nn.Sequential(nn.Linear(channels, inner), nn.SiLU(), nn.Linear(inner, channels), nn.Sigmoid())

    def forward(self, x: Float[Tensor, "b n c"], state: StreamState | None = None) -> Float[Tensor, "b n c"]:
        wide, n = x.float(), x.shape[1]
        mean, count = (state or {}).get(self, (wide.new_zeros(()), 0))
        counts = torch.arange(count + 1, count + n + 1, device=x.device)[:, None]
        means = mean + (wide - mean).cumsum(dim=1) / counts
        if state is not None:
            state[self] = means[:, -1:].clone(), count + n
        return x * self.gate(means.to(x.dtype)).to(x.dtype)


@dataclass(frozen=True)
class ConvOptions:
    """What encoder and decoder have in common."""

    widths: Sequence[int]  # channels at each rate, the audio's own first
    strides: Sequence[int]
    activation: Activation
    squeeze_excite: bool
    pad_mode: PadMode


class ResidualUnit(nn.Module):
    """`x + mix(act(conv(act(x))))` with a dilated convolution of 7 taps, and a mix of channels.

    num_units: how many such units add up; each starts the smaller.
    """

    def __init__(self, channels: int, dilation: int, num_units: int, options: ConvOptions):
        super().__init__()
        gain = GAINS[options.activation]
        self.first_activation = activation_layer(options.activation, channels)
        self.conv = CausalConv1d(channels, channels, 7, dilation=dilation, pad_mode=options.pad_mode, gain=gain)
        self.second_activation = activation_layer(options.activation, channels)
        self.mix = nn.Linear(channels, channels)
        nn.init.normal_(self.mix.weight, std=gain * (num_units * channels) ** -0.5)
        nn.init.zeros_(self.mix.bias)
        self.squeeze_excite = SqueezeExcite(channels) if options.squeeze_excite else None

    def forward(self, x: Float[Tensor, "b n c"], state: StreamState | None = None) -> Float[Tensor, "b n c"]:
        hidden = self.conv(self.first_activation(x), state)
        hidden = self.mix(self.second_activation(hidden))
        if self.squeeze_excite is not None:
            hidden = self.squeeze_excite(hidden, state)
        return x + hidden


class Stack(nn.Module):
    """Layers one after another; those that remember get the state."""

    def __init__(self, layers: Sequence[nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Float[Tensor, "b n c"], state: StreamState | None = None) -> Float[Tensor, "b m e"]:
        for layer in self.layers:
            x = layer(x, state) if isinstance(layer, CausalConv1d | ResidualUnit) else layer(x)
        return x


class Encoder(Stack):
    """Audio to latents: at each rate residual units, then a strided convolution to the next."""

    def __init__(self, input_channels: int, codebook_dim: int, dilations: Sequence[int], options: ConvOptions):
        widths, kind = options.widths, options.activation
        conv = partial(CausalConv1d, pad_mode=options.pad_mode)
        num_units, gain = len(options.strides) * len(dilations), GAINS[kind]
        layers: list[nn.Module] = [conv(input_channels, widths[0], 7)]
        for width, next_width, stride in zip(widths[:-1], widths[1:], options.strides, strict=True):
            layers += [ResidualUnit(width, dilation, num_units, options) for dilation in dilations]
            layers += [activation_layer(kind, width)]
            layers += [conv(width, next_width, 2 * stride, stride=stride, gain=gain)]
        layers += [activation_layer(kind, widths[-1]), conv(widths[-1], codebook_dim, 3, gain=gain)]
        super().__init__(layers)


class Decoder(Stack):
    """Latents to audio: the encoder's mirror image."""

    def __init__(self, input_channels: int, codebook_dim: int, dilations: Sequence[int], options: ConvOptions):
        widths, kind = options.widths, options.activation
        conv = partial(CausalConv1d, pad_mode=options.pad_mode)
        num_units, gain = len(options.strides) * len(dilations), GAINS[kind]
        layers: list[nn.Module] = [conv(codebook_dim, widths[-1], 7)]
        for next_width, width, stride in reversed(list(zip(widths[:-1], widths[1:], options.strides, strict=True))):
            layers += [activation_layer(kind, width)]
            layers += [CausalUpsample1d(width, next_width, stride, pad_mode=options.pad_mode, gain=gain)]
            layers += [ResidualUnit(next_width, dilation, num_units, options) for dilation in dilations]
        layers += [activation_layer(kind, widths[0]), conv(widths[0], input_channels, 7, gain=gain * AUDIO_GAIN)]
        super().__init__(layers)


class DenoiseFilm(nn.Module):
    """Features scaled and shifted by whether noise is to be taken out (FiLM; SoundStream, section III-F).

    `x (1 + scale) + shift`, both zero at first.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.scale_shift = nn.Embedding(2, 2 * dim)
        nn.init.zeros_(self.scale_shift.weight)

    def forward(self, x: Float[Tensor, "b n d"], is_denoising: Bool[Tensor, " b"]) -> Float[Tensor, "b n d"]:
        scale, shift = self.scale_shift(is_denoising.long())[:, None].to(x.dtype).chunk(2, dim=-1)
        return x * (1 + scale) + shift


class LocalAttention(nn.Module):
    """A transformer in which every frame sees itself and the `window_size` - 1 frames before it.

    An exact sliding window, where attention in blocks would let a frame see more or less of the past by its place in the
    block. Keys and values of the last frames are all that a stream has to remember.

    What it finds is added to the frames, by a learned scale for each feature that starts small. In the place of the frames it
    would take their size from them, which says how loud they are, and hide them: a new encoder speaks low, and the
    transformer, whose output is normalised, does not. A small codec then learned next to nothing (docs/log.md).
    """

    def __init__(self, dim: int, *, window_size: int, depth: int, heads: int, dim_head: int):
        super().__init__()
        self.scale = nn.Parameter(torch.full((dim,), ATTENTION_SCALE))
        self.window_size = window_size
        self.transformer = Transformer(
            dim, depth, heads=heads, dim_head=dim_head, causal=True, qk_norm=True, window_size=window_size
        )

    def forward(self, x: Float[Tensor, "b n d"], state: StreamState | None = None) -> Float[Tensor, "b n d"]:
        found = self._attend(x, state)
        return x + (found * self.scale.to(found.dtype)).to(x.dtype)

    def _attend(self, x: Float[Tensor, "b n d"], state: StreamState | None) -> Float[Tensor, "b n d"]:
        if state is None:
            return self.transformer(x)
        if self not in state:
            state[self] = self.transformer.new_cache(len(x), 2 * self.window_size - 1), 0
        cache, filled = state[self]
        parts = []
        for part in x.split(self.window_size, dim=1):
            parts.append(self.transformer(part, cache=cache))
            filled = min(filled + part.shape[1], self.window_size - 1)
            cache.keep_last(filled)
        state[self] = cache, filled
        return torch.cat(parts, dim=1)
