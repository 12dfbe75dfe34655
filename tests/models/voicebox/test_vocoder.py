import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import helicon
from helicon.data.synthetic_sounds import SyntheticSounds
from helicon.metrics.audio import log_mel_distance, mel_filterbank
from helicon.models.voicebox.vocoder import MelSettings, Vocoder
from helicon.nn.stft import istft

SIZES: dict[str, Any] = {
    "n_mels": 12,
    "sampling_rate": 8000,
    "n_fft": 128,
    "hop_length": 32,
    "dim": 10,
    "depth": 2,
    "discr_periods": (2,),
    "discr_windows": (32,),
    "discr_channels": 2,
    "multi_spectral_window_powers_of_two": (5, 7),
    "multi_spectral_n_mels": (4, 8),
}


def tiny(**changes: Any) -> Vocoder:
    torch.manual_seed(0)
    return Vocoder(**{**SIZES, **changes})


def frames(batch: int = 2, count: int = 7) -> Tensor:
    return torch.randn(batch, count, 12, generator=torch.Generator().manual_seed(1)) - 4


@pytest.mark.parametrize("count", [1, 2, 7])
def test_every_frame_is_a_hop_of_sound(count: int):
    audio = tiny()(frames(3, count))
    assert audio.shape == (3, 32 * count) and audio.dtype == torch.float32
    assert audio.std() > 1e-4


def test_a_padded_clip_sounds_as_it_does_alone():
    vocoder, given, lengths = tiny(), frames(3, 7), torch.tensor([7, 3, 1])
    for row, length in enumerate(lengths.tolist()):
        given[row, length:] = torch.nan
    together = vocoder(given, lengths)
    for row, length in enumerate(lengths.tolist()):
        alone = vocoder(given[row : row + 1, :length])
        torch.testing.assert_close(together[row : row + 1, : 32 * length], alone, rtol=1e-4, atol=1e-5)
        assert not together[row, 32 * length :].any()


def test_magnitudes_are_bounded_whatever_the_network_says():
    vocoder = tiny()
    with torch.no_grad():
        vocoder.generator.to_spectrum.bias.fill_(1000.0)
    audio = vocoder(frames())
    # As loud as a spectrum of nothing but the sum of the window can be: 65 frequencies of 64, under the window.
    assert audio.isfinite().all() and audio.abs().max() < 1.5 * 65 * 64 * 2 / 128


def test_magnitude_and_phase_are_what_the_network_says():
    """The magnitude times what the bands say: of a flat spectrum of 0.02 the same at every frequency within them."""
    vocoder = tiny()
    filters = mel_filterbank(8000, 128, 12)
    flat = (0.02 * filters.sum(dim=1)).log().expand(1, 9, 12)
    with torch.no_grad():
        vocoder.generator.to_spectrum.weight.zero_()
        level, phase = vocoder.generator.to_spectrum.bias.chunk(2)
        level.fill_(-30.0)
        level[5], phase[5] = math.log(25.0), 0.7  # the fifth frequency alone
    expected = torch.zeros(1, 65, 9, dtype=torch.complex64)
    expected[0, 5] = torch.polar(torch.tensor(0.5 / (1 + 0.5 / 64)), torch.tensor(0.7))
    torch.testing.assert_close(vocoder(flat), istft(expected, 32, 128), rtol=1e-4, atol=1e-6)


def test_before_it_has_learned_anything_the_spectrum_is_nearly_right():
    """The magnitudes come from the bands; what is wrong yet is the phases."""
    sounds = SyntheticSounds(8, 16000, 0.5)
    audio = torch.stack([torch.as_tensor(sounds[index]["audio"]).float() for index in range(8)])
    torch.manual_seed(0)
    vocoder = Vocoder(sampling_rate=16000, dim=16, depth=1, discr_periods=(), discr_windows=())
    made = vocoder(vocoder.mel.log_mel(audio))[:, : audio.shape[1]]
    silent = log_mel_distance(torch.zeros_like(audio), audio, 16000).mean()
    assert log_mel_distance(made, audio, 16000).mean() < 0.5 * silent


def test_the_mel_loss_is_steepest_in_silence():
    """Which is why its gradient is not scaled by its own length."""
    loss = tiny().loss
    assert loss.balancer is None
    generator = torch.Generator().manual_seed(0)
    wave = torch.randn(1, 1, 2000, generator=generator) * (torch.arange(2000) < 1000)
    made = (wave + 1e-4 * torch.randn(1, 1, 2000, generator=generator)).requires_grad_()
    loss.mel(made, wave).backward()
    sound, silence = made.grad[..., :900].norm(), made.grad[..., 1100:].norm()
    assert silence > 100 * sound


def test_half_precision_ends_before_the_inverse_transform():
    vocoder, given = tiny(), frames()
    with torch.autocast("cpu", torch.bfloat16):
        audio = vocoder(given)
    assert audio.dtype == torch.float32
    torch.testing.assert_close(audio, vocoder(given), rtol=0.3, atol=0.02)


def test_saved_and_loaded_it_gives_the_same_sound():
    vocoder, given = tiny(), frames()
    vocoder.save("vocoder")
    again = helicon.load("vocoder")
    assert isinstance(again, Vocoder) and again.mel == vocoder.mel
    assert torch.equal(again(given), vocoder(given))


def test_the_settings_are_recorded_in_full():
    assert tiny().mel == MelSettings(8000, 12, 128, 128, 32, 4000.0)
    assert tiny(win_length=100, f_max=3000).mel == MelSettings(8000, 12, 128, 100, 32, 3000.0)


def test_frames_of_sound_know_nothing_of_its_padding():
    mel = tiny().mel
    audio = torch.randn(1, 100)
    torch.testing.assert_close(mel.log_mel(audio), mel.log_mel(torch.nn.functional.pad(audio, (0, 60)))[:, :4])
    assert mel.frame_lengths(torch.tensor([0, 1, 32, 100])).tolist() == [0, 1, 1, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hop_length": 100}, "use at most 64"),
        ({"win_length": 256}, "n_fft=128 must be even, and at least the window's length, 256"),
        ({"n_mels": 90}, "n_mels=90"),
        ({"f_max": 5000}, "f_max=5000"),
        ({"kernel_size": 4}, "kernel_size=4"),
        (
            {"multi_spectral_n_mels": (4,)},
            r"multi_spectral_n_mels=\[4\] must have one number for each of the 2 windows",
        ),
        ({"multi_spectral_recon_loss_weight": 0.0}, "must be positive"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        tiny(**options)


def test_frames_of_another_number_of_bands_are_refused():
    with pytest.raises(ValueError, match="hears 12 bands a frame, not 13"):
        tiny()(torch.zeros(1, 3, 13))


@pytest.mark.slow
def test_compiled_it_gives_the_same_sound():
    """In a process of its own: the type checks of the tests stand in the compiler's way."""
    code = (
        "import torch, helicon\n"
        "from helicon.models.voicebox.vocoder import Vocoder\n"
        "torch.manual_seed(0)\n"
        "vocoder = Vocoder(n_mels=12, sampling_rate=8000, n_fft=128, hop_length=32, dim=10, depth=2, discr_periods=(), discr_windows=())\n"
        "frames = torch.randn(2, 7, 12)\n"
        "plain = vocoder(frames)\n"
        "vocoder.generator.backbone.compile(backend='aot_eager')\n"
        "torch.testing.assert_close(vocoder(frames), plain)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
