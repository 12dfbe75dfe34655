"""What the codec is trained against: networks that tell real sound from reconstructed, each by another look at the wave.

Today's best codecs use two looks (Descript Audio Codec, Kumar et al. 2023, arXiv:2306.06546): the wave folded at several
periods (HiFi-GAN, Kong et al. 2020, arXiv:2010.05646) and its spectrum at several resolutions, cut into bands. SoundStream's own
(Zeghidour et al. 2021, arXiv:2107.03312, section 3.4) are the wave at several rates and one complex spectrum. All of them
are parts of one module, which judges real and fake sound in one batch.

Letters: b batch, c audio channels, n samples, t frames, f frequencies, p period, d features; (r c) the real parts of c channels
and then the imaginary ones.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

SLOPE = 0.1  # of the leaky rectifiers
BANDS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)  # as parts of the spectrum


class Judgement(NamedTuple):
    """What one discriminator says of sounds `[b, c, n]`."""

    logits: Tensor  # [b, ...] float32, positive for real
    features: list[Tensor]  # [b, d, ...] each: what its layers saw, for feature matching


class Discriminators(nn.Module):
    """Several discriminators as one network: one call, and one backward, for all of them."""

    def __init__(self, members: Mapping[str, nn.Module]):
        super().__init__()
        self.members = nn.ModuleDict(members)

    def forward(self, audio: Float[Tensor, "b c n"], full_precision: bool = False) -> dict[str, Judgement]:
        """`full_precision` computes everything in float32 (for the gradient penalty)."""
        with torch.autocast(audio.device.type, enabled=False) if full_precision else nullcontext():
            judgements = {name: member(audio.float()) for name, member in self.members.items()}
        return {name: Judgement(logits.float(), features) for name, (logits, features) in judgements.items()}


class NormedConv2d(nn.Conv2d):
    """A convolution with weight normalization (Salimans and Kingma 2016, arXiv:1602.07868), which torch's own would not let be
    pickled: a codec in a user's dataset is sent to the processes that read data."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        weight_norm(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # (The hook is a local function of torch's, and a new module has its own.)
        return _empty_conv, (), {k: v for k, v in self.__dict__.items() if k != "_load_state_dict_pre_hooks"}


def _empty_conv() -> NormedConv2d:
    """What a pickle fills in. (On no device, so that no random number is drawn.)"""
    return NormedConv2d(1, 1, 1, device="meta")


class PeriodDiscriminator(nn.Module):
    """The wave folded into columns of `period` samples: each column of the fold holds every `period`-th sample."""

    def __init__(self, period: int, input_channels: int = 1, channels: int = 32):
        super().__init__()
        self.period = period
        widths = [input_channels, *(channels * 2**level for level in range(5))]
        strides = (3, 3, 3, 3, 1)
        self.layers = nn.ModuleList(
            NormedConv2d(width_in, width_out, (5, 1), (stride, 1), padding=(2, 0))
            for width_in, width_out, stride in zip(widths[:-1], widths[1:], strides, strict=True)
        )
        self.to_logits = NormedConv2d(widths[-1], 1, (3, 1), padding=(1, 0))

    def forward(self, audio: Float[Tensor, "b c n"]) -> Judgement:
        padded = F.pad(audio, (0, -audio.shape[-1] % self.period))
        return _judge(rearrange(padded, "b c (n p) -> b c n p", p=self.period), self.layers, self.to_logits)


class BandDiscriminator(nn.Module):
    """The spectrum, real and imaginary parts as channels, each of its bands through layers of its own."""

    def __init__(self, window: int, input_channels: int = 1, channels: int = 32):
        super().__init__()
        self.window = window
        num_bins = window // 2 + 1
        self.edges = [round(edge * num_bins) for edge in BANDS]
        if len(set(self.edges)) < len(BANDS):
            raise ValueError(f"a window of {window} samples has too few frequencies for {len(BANDS) - 1} bands")
        self.bands = nn.ModuleList(_band_layers(2 * input_channels, channels) for _ in BANDS[1:])
        self.to_logits = NormedConv2d(channels, 1, 3, padding=1)

    def forward(self, audio: Float[Tensor, "b c n"]) -> Judgement:
        spectrum = complex_spectrum(audio, self.window)
        features, lasts = [], []
        for layers, low, high in zip(self.bands, self.edges[:-1], self.edges[1:], strict=True):
            band = spectrum[..., low:high]
            for layer in layers:  # type: ignore[attr-defined]
                band = F.leaky_relu(layer(band), SLOPE)
                features.append(band)
            lasts.append(band)
        return Judgement(self.to_logits(torch.cat(lasts, dim=-1)), features)


def _band_layers(width_in: int, channels: int) -> nn.ModuleList:
    """Over time and frequency; frequencies are halved three times."""
    first = NormedConv2d(width_in, channels, (3, 9), padding=(1, 4))
    halving = [NormedConv2d(channels, channels, (3, 9), (1, 2), padding=(1, 4)) for _ in range(3)]
    return nn.ModuleList([first, *halving, NormedConv2d(channels, channels, 3, padding=1)])


class WaveDiscriminator(nn.Module):
    """The wave at a lower rate (`scale` of its own, by averaging), through long strided convolutions (MelGAN's)."""

    def __init__(self, scale: float = 1.0, input_channels: int = 1, channels: int = 16, max_channels: int = 1024):
        super().__init__()
        factor = round(1 / scale) if 0 < scale <= 1 else 0
        if factor < 1 or not math.isclose(factor * scale, 1):
            raise ValueError(f"a scale of {scale} must be 1 divided by a whole number, such as 0.5")
        self.pool = nn.AvgPool1d(2 * factor, factor, padding=factor) if factor > 1 else nn.Identity()
        layers: list[nn.Module] = [nn.Conv1d(input_channels, channels, 15, padding=7)]
        width = channels
        for _ in range(4):
            wider = min(4 * width, max_channels)
            layers.append(nn.Conv1d(width, wider, 41, stride=4, padding=20, groups=max(width // 4, 1)))
            width = wider
        layers.append(nn.Conv1d(width, width, 5, padding=2))
        self.layers = nn.ModuleList(layers)
        self.to_logits = nn.Conv1d(width, 1, 3, padding=1)

    def forward(self, audio: Float[Tensor, "b c n"]) -> Judgement:
        return _judge(self.pool(audio), self.layers, self.to_logits)


class ComplexSTFTDiscriminator(nn.Module):
    """The complex spectrum through complex convolutions, which are written as real ones. A position's real and its imaginary
    part are two logits. (The modulus of the two would be no logit: it cannot be negative, and a fake never be refused.)"""

    def __init__(
        self,
        *,
        input_channels: int = 1,
        channels: int = 32,
        strides: Sequence[Sequence[int]] = ((1, 2), (2, 2), (1, 2), (2, 2), (1, 2), (2, 2)),
        chan_mults: Sequence[int] = (1, 2, 4, 4, 8, 8),
        n_fft: int = 1024,
        hop_length: int | None = None,
        win_length: int | None = None,
        stft_normalized: bool = False,
    ):
        """
        Args:
            strides: over time and over frequency, of each residual unit.
            chan_mults: the width of each residual unit, times `channels`.
            win_length, hop_length: of the transform; n_fft and a quarter of it by default.
            stft_normalized: divide the spectrum by the root of n_fft.
        """
        super().__init__()
        if len(strides) != len(chan_mults):
            raise ValueError(f"{len(strides)} strides need as many chan_mults, not {len(chan_mults)}")
        self.n_fft, self.hop_length, self.win_length = n_fft, hop_length, win_length
        self.stft_normalized = stft_normalized
        widths = [channels, *(channels * mult for mult in chan_mults)]
        self.first = ComplexConv2d(input_channels, channels, (7, 7))
        self.units = nn.ModuleList(
            _ComplexUnit(width_in, width_out, (stride[0], stride[1]))
            for width_in, width_out, stride in zip(widths[:-1], widths[1:], strides, strict=True)
        )
        num_bins = n_fft // 2 + 1
        for _, stride in strides:
            num_bins = -(-num_bins // stride)
        self.to_logits = ComplexConv2d(widths[-1], 1, (1, num_bins), padding=(0, 0))

    def forward(self, audio: Float[Tensor, "b c n"]) -> Judgement:
        spectrum = complex_spectrum(audio, self.n_fft, self.hop_length, self.win_length, self.stft_normalized)
        features = [self.first(spectrum)]
        for unit in self.units:
            features.append(unit(features[-1]))
        return Judgement(self.to_logits(features[-1]), features)


class ComplexConv2d(nn.Module):
    """A convolution by complex numbers, as one of real numbers on (real parts, imaginary parts):

    (W + iV)(x + iy) = (W x - V y) + i (V x + W y).
    """

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        kernel_size: tuple[int, int],
        stride: tuple[int, int] = (1, 1),
        padding: tuple[int, int] | None = None,
    ):
        super().__init__()
        self.stride = stride
        self.padding = (kernel_size[0] // 2, kernel_size[1] // 2) if padding is None else padding
        bound = 1 / math.sqrt(2 * channels_in * math.prod(kernel_size))  # of a real convolution as wide
        self.real = nn.Parameter(torch.empty(channels_out, channels_in, *kernel_size).uniform_(-bound, bound))
        self.imaginary = nn.Parameter(torch.empty_like(self.real).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(2 * channels_out))

    def forward(self, x: Float[Tensor, "b rc t f"]) -> Float[Tensor, "b rd u g"]:
        rows = (torch.cat([self.real, -self.imaginary], dim=1), torch.cat([self.imaginary, self.real], dim=1))
        return F.conv2d(x, torch.cat(rows), self.bias, self.stride, self.padding)


class ModReLU(nn.Module):
    """relu(|z| + b) z / |z|: a rectifier of the modulus that leaves the phase alone (Arjovsky et al. 2015, arXiv:1511.06464)."""

    def __init__(self, channels: int):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, x: Float[Tensor, "b rc t f"]) -> Float[Tensor, "b rc t f"]:
        real, imaginary = x.float().chunk(2, dim=1)
        modulus = (real.square() + imaginary.square() + 1e-12).sqrt()
        scale = F.relu(modulus + self.bias) / modulus
        return torch.cat([real * scale, imaginary * scale], dim=1).to(x.dtype)


class _ComplexUnit(nn.Module):
    def __init__(self, width_in: int, width_out: int, stride: tuple[int, int]):
        super().__init__()
        self.residual = nn.Sequential(ComplexConv2d(width_in, width_in, (3, 3)), ModReLU(width_in))
        # Kernels of stride + 2, padded so that each dimension of n positions becomes one of n / stride, rounded up.
        kernel = (stride[0] + 2, stride[1] + 2)
        self.strided = ComplexConv2d(width_in, width_out, kernel, stride, padding=(1, 1))
        self.stride = stride

    def forward(self, x: Float[Tensor, "b rc t f"]) -> Float[Tensor, "b rd u g"]:
        x = x + self.residual(x)
        missing = [-size % stride for size, stride in zip(x.shape[-2:], self.stride, strict=True)]
        return self.strided(F.pad(x, (0, missing[1], 0, missing[0])))


def complex_spectrum(
    audio: Float[Tensor, "b c n"],
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    normalized: bool = False,
) -> Float[Tensor, "b rc t f"]:
    """The short-time Fourier transform, in float32 and for any number of samples: real parts, then imaginary ones."""
    win_length = n_fft if win_length is None else win_length
    with torch.autocast(audio.device.type, enabled=False):
        spectrum = torch.stft(
            rearrange(audio.float(), "b c n -> (b c) n"),
            n_fft,
            win_length // 4 if hop_length is None else hop_length,
            win_length,
            window=torch.hann_window(win_length, device=audio.device),
            pad_mode="constant",  # a reflection would need more than half a window of sound
            normalized=normalized,
            return_complex=True,
        )
        return rearrange(torch.view_as_real(spectrum), "(b c) f t r -> b (r c) t f", b=len(audio))


def _judge(x: Tensor, layers: nn.ModuleList, to_logits: nn.Module) -> Judgement:
    features = []
    for layer in layers:
        x = F.leaky_relu(layer(x), SLOPE)
        features.append(x)
    return Judgement(to_logits(x), features)
