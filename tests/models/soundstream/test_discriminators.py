import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helicon.models.soundstream.discriminators import (
    BandDiscriminator,
    ComplexConv2d,
    ComplexSTFTDiscriminator,
    Discriminators,
    ModReLU,
    PeriodDiscriminator,
    WaveDiscriminator,
    complex_spectrum,
)


def complex_stft(**changes: Any) -> ComplexSTFTDiscriminator:
    small = {"channels": 3, "chan_mults": (1, 2), "strides": ((1, 2), (2, 2)), "n_fft": 32, "hop_length": 8}
    return ComplexSTFTDiscriminator(**{**small, "win_length": 24, **changes})


def all_kinds(input_channels: int = 1) -> Discriminators:
    torch.manual_seed(0)
    return Discriminators(
        {
            "period": PeriodDiscriminator(3, input_channels, channels=2),
            "window": BandDiscriminator(32, input_channels, channels=3),
            "scale": WaveDiscriminator(0.5, input_channels, channels=4, max_channels=16),
            "complex": complex_stft(input_channels=input_channels),
        }
    )


def sound(batch: int = 2, channels: int = 1, length: int = 203) -> Tensor:
    return torch.randn(batch, channels, length, generator=torch.Generator().manual_seed(1)) * 0.3


@pytest.mark.parametrize("length", [1, 2, 40, 203])
@pytest.mark.parametrize("channels", [1, 2])
def test_sounds_of_any_length_mono_and_stereo(channels: int, length: int):
    """42: in the reference discriminators take one channel. 43: short sounds crash."""
    judgements = all_kinds(channels)(sound(2, channels, length))
    assert list(judgements) == ["period", "window", "scale", "complex"]
    for logits, features in judgements.values():
        assert len(logits) == 2 and logits.dtype == torch.float32 and logits.isfinite().all()
        assert features and all(len(x) == 2 and x.isfinite().all() for x in features)


def test_both_channels_of_stereo_are_heard():
    network, audio = all_kinds(2), sound(channels=2)
    changed = audio.clone()
    changed[:, 1] *= -1
    for name, (logits, _) in network(changed).items():
        assert not torch.allclose(logits, network(audio)[name].logits), name


def test_a_batch_is_judged_sound_by_sound():
    """So that real and fake can be judged in one call."""
    network, audio = all_kinds(), sound(3)
    together = network(audio)
    for index in range(3):
        for name, (logits, features) in network(audio[index : index + 1]).items():
            torch.testing.assert_close(logits[0], together[name].logits[index], rtol=1e-4, atol=1e-5)
            for one, all_of_them in zip(features, together[name].features, strict=True):
                torch.testing.assert_close(one[0], all_of_them[index], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", [(3, 3), (1, 4)])
@pytest.mark.parametrize("stride", [(1, 1), (2, 1)])
def test_complex_convolutions_are_those_of_torch(kernel: tuple[int, int], stride: tuple[int, int]):
    torch.manual_seed(0)
    layer = ComplexConv2d(3, 5, kernel, stride)
    nn.init.normal_(layer.bias)
    z = torch.randn(2, 3, 9, 7, dtype=torch.complex64)
    weight, bias = torch.complex(layer.real, layer.imaginary), torch.complex(*layer.bias.chunk(2))
    expected = F.conv2d(z, weight, bias, stride, layer.padding)
    real, imaginary = layer(torch.cat([z.real, z.imag], dim=1)).chunk(2, dim=1)
    torch.testing.assert_close(torch.complex(real, imaginary), expected, rtol=1e-4, atol=1e-5)


def test_modrelu_changes_the_modulus_and_leaves_the_phase():
    layer = ModReLU(3)
    layer.bias.data = torch.tensor([0.5, 0.0, -0.7])[:, None, None]
    z = torch.randn(2, 3, 4, 5, dtype=torch.complex64)
    real, imaginary = layer(torch.cat([z.real, z.imag], dim=1)).chunk(2, dim=1)
    expected = F.relu(z.abs() + layer.bias) * torch.exp(1j * z.angle())
    torch.testing.assert_close(torch.complex(real, imaginary), expected, rtol=1e-4, atol=1e-5)
    nothing = torch.zeros(1, 6, 1, 1, requires_grad=True)
    layer(nothing).sum().backward()
    assert nothing.grad.isfinite().all()


def test_complex_logits_can_refuse_a_fake():
    """The reference takes the modulus, which cannot be negative: its loss on fakes never falls below 1."""
    torch.manual_seed(0)
    network, real, fake = complex_stft(), sound(4), torch.zeros(4, 1, 203)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loss = F.relu(1 - network(real).logits).mean() + F.relu(1 + network(fake).logits).mean()
        loss.backward()
        optimizer.step()
    assert F.relu(1 + network(fake).logits).mean() < 0.5


def test_the_spectrum_is_that_of_torch_real_parts_first():
    audio = sound(2, 2, 100)
    spectrum = complex_spectrum(audio, 32, 8, 24)
    one = torch.stft(
        audio[1, 0], 32, 8, 24, torch.hann_window(24), center=True, pad_mode="constant", return_complex=True
    )
    torch.testing.assert_close(spectrum[1, 0], one.real.T)
    torch.testing.assert_close(spectrum[1, 2], one.imag.T)
    normalised = complex_spectrum(audio, 32, 8, 24, normalized=True)
    torch.testing.assert_close(normalised * math.sqrt(32), spectrum)


def test_every_frequency_is_in_one_band():
    network = BandDiscriminator(64, channels=2)
    assert network.edges[0] == 0 and network.edges[-1] == 33 and network.edges == sorted(network.edges)
    time = torch.arange(640) / 64
    quiet = network(torch.zeros(1, 1, 640)).features
    heard = []
    for cycles in (1, 5, 12, 20, 28):  # of 32
        features = network(torch.sin(2 * math.pi * cycles * time)[None, None]).features
        change = [(a - b).abs().mean().item() for a, b in zip(features[::5], quiet[::5], strict=True)]
        heard.append(change.index(max(change)))
    assert heard == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="a window of 8 samples has too few frequencies for 5 bands"):
        BandDiscriminator(8)


def test_a_period_is_a_column():
    """Whatever has the period looks the same in every row: its features do not change along the fold, but at the ends."""
    network = PeriodDiscriminator(7, channels=2)
    same = network(torch.randn(1, 1, 7).repeat(1, 1, 100)).features[0]
    assert same.shape[-1] == 7
    torch.testing.assert_close(same[:, :, 2:-2], same[:, :, 2:3].expand_as(same[:, :, 2:-2]))


@pytest.mark.parametrize("scale", [0.3, 0.0, 2.0, -1.0])
def test_scales_are_parts_of_the_rate(scale: float):
    with pytest.raises(ValueError, match="must be 1 divided by a whole number"):
        WaveDiscriminator(scale)


def test_a_lower_scale_hears_slower():
    lengths = [WaveDiscriminator(scale, channels=4)(sound(length=512)).features[0].shape[-1] for scale in (1.0, 0.25)]
    assert lengths == [512, 129]


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(ValueError, match="2 strides need as many chan_mults, not 3"):
        complex_stft(chan_mults=(1, 2, 3))


def test_under_autocast_spectra_and_logits_are_float32_and_layers_are_not():
    """44: the reference leaves its complex discriminator to whatever autocast does."""
    network, audio = all_kinds(), sound()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        spectrum = complex_spectrum(audio.bfloat16(), 32)
        half = network(audio)
        full = network(audio, full_precision=True)
    assert spectrum.dtype == torch.float32
    for name, (logits, features) in network(audio).items():
        assert half[name].logits.dtype == torch.float32
        assert half[name].features[-1].dtype == torch.bfloat16
        assert torch.equal(full[name].logits, logits)
        assert all(torch.equal(a, b) for a, b in zip(full[name].features, features, strict=True))
