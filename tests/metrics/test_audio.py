import math
import subprocess
import sys

import numpy as np
import pytest
import scipy.signal
import torch
from transformers.audio_utils import mel_filter_bank

from helicon.data.synthetic_sounds import SyntheticSounds
from helicon.metrics.audio import (
    describe_sound,
    is_silent,
    log_mel_distance,
    mel_filterbank,
    mel_spectrogram,
    si_sdr,
    spectrogram,
    spectrogram_image,
    stft_distance,
)


def sounds(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.3


@pytest.mark.parametrize(("n_fft", "hop", "win_length"), [(64, 16, 64), (128, 20, 100), (100, 7, 50)])
def test_the_spectrogram_is_that_of_scipy(n_fft: int, hop: int, win_length: int):
    audio = sounds(0, 2, 3, 1001)
    found = spectrogram(audio, n_fft, hop, win_length)
    window = np.pad(scipy.signal.get_window("hann", win_length), (n_fft - win_length) // 2)
    transform = scipy.signal.ShortTimeFFT(window, hop, fs=1.0, mfft=n_fft)
    expected = np.abs(transform.stft(audio.double().numpy(), p0=0, p1=1 + 1001 // hop))
    assert found.shape == (2, 3, 1 + n_fft // 2, 1 + 1001 // hop)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)
    torch.testing.assert_close(spectrogram(audio, n_fft, hop, win_length, power=2.0), found**2)


@pytest.mark.parametrize(
    ("sample_hz", "n_fft", "n_mels", "f_min", "f_max"), [(16000, 1024, 80, 0.0, None), (24000, 512, 20, 55.0, 9000.0)]
)
def test_the_filterbank_is_slaney_s(sample_hz: int, n_fft: int, n_mels: int, f_min: float, f_max: float | None):
    expected = mel_filter_bank(
        1 + n_fft // 2, n_mels, f_min, f_max or sample_hz / 2, sample_hz, norm="slaney", mel_scale="slaney"
    )
    found = mel_filterbank(sample_hz, n_fft, n_mels, f_min, f_max)
    np.testing.assert_allclose(found.numpy(), expected.T, atol=1e-7, rtol=1e-5)
    areas = found.sum(dim=1) * sample_hz / n_fft
    assert areas[n_mels // 2 :].tolist() == pytest.approx([1.0] * (n_mels - n_mels // 2), rel=0.15)


def test_filterbanks_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"n_mels=128: the lowest bands are narrower than the 62.5 Hz"):
        mel_filterbank(16000, 256, 128)
    for options in ({"f_max": 9000.0}, {"f_min": 5000.0, "f_max": 4000.0}, {"f_min": -1.0}):
        with pytest.raises(ValueError, match="they must rise, from 0 to half of sample_hz=16000"):
            mel_filterbank(16000, 512, 20, **options)


def test_mel_spectrograms_are_spectrograms_in_bands():
    audio = sounds(0, 2, 900)
    expected = mel_filterbank(8000, 256, 20, 100.0, 3000.0) @ spectrogram(audio, 256, 64, 200, power=2.0)
    found = mel_spectrogram(audio, 8000, 256, 64, 20, win_length=200, f_min=100.0, f_max=3000.0, power=2.0)
    torch.testing.assert_close(found, expected)
    assert mel_spectrogram(audio[0, :1], 8000, 256, 64, 20).shape == (20, 1)  # as short as a sound can be


def test_spectra_are_float32_whatever_the_precision_around_them():
    audio = sounds(0, 2, 900)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = mel_spectrogram(audio, 8000, 256, 64, 20)
    assert found.dtype == torch.float32
    assert torch.equal(found, mel_spectrogram(audio, 8000, 256, 64, 20))
    assert mel_spectrogram(audio.bfloat16(), 8000, 256, 64, 20).dtype == torch.float32


def test_gradients_are_those_of_finite_differences():
    audio = sounds(0, 1, 300).requires_grad_()
    direction = sounds(1, 1, 300)
    for distance in (
        lambda x: log_mel_distance(x, sounds(2, 1, 300), 8000),
        lambda x: stft_distance(x, sounds(2, 1, 300), resolutions=[(64, 16, 50)]),
        lambda x: si_sdr(x, sounds(2, 1, 300)),
    ):
        (gradient,) = torch.autograd.grad(distance(audio).sum(), audio)
        with torch.no_grad():
            step = 1e-3
            slope = (distance(audio + step * direction) - distance(audio - step * direction)) / (2 * step)
        assert (gradient * direction).sum().item() == pytest.approx(slope.item(), rel=0.03, abs=1e-3)


def test_gradients_of_silence_and_of_equal_sounds_are_finite():
    for audio in (torch.zeros(1, 600), sounds(0, 1, 600)):
        audio = audio.clone().requires_grad_()
        for target in (torch.zeros(1, 600), audio.detach().clone()):
            total = log_mel_distance(audio, target, 8000) + stft_distance(audio, target) + si_sdr(audio, target)
            (gradient,) = torch.autograd.grad(total.sum(), audio)
            assert gradient.isfinite().all()


def test_what_was_made_in_inference_mode_can_be_trained_with():
    with torch.inference_mode():
        mel_spectrogram(torch.zeros(1, 500), 7999, 250, 63, 19)
    audio = sounds(0, 1, 500).requires_grad_()
    mel_spectrogram(audio, 7999, 250, 63, 19).sum().backward()
    assert audio.grad is not None and audio.grad.abs().max() > 0


COMPILED = """
import torch
from helicon.metrics.audio import mel_spectrogram

def loss(x):
    return sum(mel_spectrogram(x, 8000, n, 64, 12).clamp(min=1e-5).log().mean() for n in (128, 256))

audio = torch.randn(2, 1500, generator=torch.Generator().manual_seed(0), requires_grad=True)
(expected,) = torch.autograd.grad(loss(audio), audio)
(found,) = torch.autograd.grad(torch.compile(loss, fullgraph=True)(audio), audio)
torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-3)
"""


@pytest.mark.slow
def test_compiles_to_one_graph():
    subprocess.run([sys.executable, "-c", COMPILED], check=True, timeout=600)


def test_the_log_mel_distance_is_its_definition():
    audio, targets = sounds(0, 2, 4000), sounds(1, 2, 4000)
    filters = mel_filter_bank(513, 80, 0.0, 8000.0, 16000, norm="slaney", mel_scale="slaney").T
    transform = scipy.signal.ShortTimeFFT(scipy.signal.get_window("hann", 1024), 256, fs=1.0)
    logs = [
        np.log(np.maximum(filters @ np.abs(transform.stft(x.double().numpy(), p0=0, p1=16)), 1e-5))
        for x in (audio, targets)
    ]
    expected = np.abs(logs[0] - logs[1]).mean(axis=(1, 2))
    assert log_mel_distance(audio, targets, 16000).tolist() == pytest.approx(expected.tolist(), rel=1e-4)
    assert log_mel_distance(audio, audio, 16000).tolist() == [0.0, 0.0]
    # Ten times as loud is ln 10 further, wherever both are above the floor.
    assert log_mel_distance(10 * audio, audio, 16000).tolist() == pytest.approx([math.log(10)] * 2, rel=1e-4)


def test_the_stft_distance_is_its_definition():
    audio, targets = sounds(0, 1, 900), sounds(1, 1, 900)
    expected = []
    for n_fft, hop, win_length in ((128, 20, 100), (64, 16, 64)):
        window = np.pad(scipy.signal.get_window("hann", win_length), (n_fft - win_length) // 2)
        transform = scipy.signal.ShortTimeFFT(window, hop, fs=1.0, mfft=n_fft)
        a, b = (np.abs(transform.stft(x[0].double().numpy(), p0=0, p1=1 + 900 // hop)) for x in (audio, targets))
        expected.append(np.linalg.norm(a - b) / np.linalg.norm(b) + np.abs(np.log(a) - np.log(b)).mean())
    found = stft_distance(audio, targets, resolutions=[(128, 20, 100), (64, 16, 64)])
    assert found.item() == pytest.approx(np.mean(expected), rel=1e-4)
    assert stft_distance(audio, audio).item() == pytest.approx(0, abs=1e-5)
    assert (
        1.8 < stft_distance(audio, 0.1 * audio).item() - 9 < 2.8
    )  # ||A - B|| / ||B|| is 9, the logarithms differ by ln 10


def test_si_sdr_is_the_formula_and_knows_no_scale():
    audio, targets = sounds(0, 3, 500) + 0.2, sounds(1, 3, 500) - 0.1
    expected = []
    for a, b in zip(audio.double().numpy(), targets.double().numpy(), strict=True):
        a, b = a - a.mean(), b - b.mean()
        signal = b * (a @ b) / (b @ b)
        expected.append(10 * math.log10((signal @ signal) / ((a - signal) @ (a - signal))))
    assert si_sdr(audio, targets).tolist() == pytest.approx(expected, rel=1e-4)
    noisy = targets + 0.01 * sounds(2, 3, 500)
    torch.testing.assert_close(si_sdr(7 * noisy + 3, targets), si_sdr(noisy, targets), atol=1e-3, rtol=0)
    assert si_sdr(noisy, targets).tolist() == pytest.approx([40] * 3, abs=1)
    assert si_sdr(targets, targets).tolist() == [100.0] * 3
    assert si_sdr(torch.zeros(1, 9), sounds(0, 1, 9)).isfinite().all()
    assert si_sdr(sounds(0, 1, 9), torch.zeros(1, 9)).item() == -100


def test_silence_is_what_sixteen_bits_hold_as_one_number():
    wave = sounds(3, 4, 60).reshape(2, 2, 60)
    step = 2**-15
    assert is_silent(0 * wave).all() and is_silent(0 * wave + 0.3).all() and not is_silent(wave).any()
    assert is_silent(0.4 * step * wave.clamp(-1, 1) - 0.1).all()
    click = torch.zeros(2, 2, 60)
    click[1, 1, 40] = step
    assert is_silent(click).tolist() == [True, False]
    click[1, 1, 41:] = torch.nan
    for length, expected in ((41, False), (40, True)):  # padding may hold anything
        assert is_silent(click, torch.tensor([60, length])).tolist() == [True, expected]


@pytest.mark.parametrize("channels", [(), (2,)])
def test_padding_does_not_count(channels: tuple[int, ...]):
    audio, targets = sounds(0, 2, *channels, 3000), sounds(1, 2, *channels, 3000)
    lengths = torch.tensor([3000, 1700])
    for measure in (lambda a, b, n: log_mel_distance(a, b, 8000, n), stft_distance, si_sdr):
        found = measure(audio, targets, lengths)  # beyond the lengths is noise here, not even zeros
        alone = [
            measure(audio[i : i + 1, ..., :n], targets[i : i + 1, ..., :n], None) for i, n in enumerate([3000, 1700])
        ]
        torch.testing.assert_close(found, torch.cat(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("sample_hz", "seconds"), [(16000, 1.0), (8000, 0.5), (24000, 1.5)])
@pytest.mark.parametrize("decibels", [math.inf, 20.0])
def test_the_words_of_synthetic_sounds_are_heard(sample_hz: int, seconds: float, decibels: float):
    data = SyntheticSounds(100, sample_hz, seconds, seed=11)
    right = {"kind": 0, "pitch": 0, "direction": 0, "loudness": 0}
    for index in range(100):
        truth, audio = data.attributes(index), data[index]["audio"]
        noise = sounds(index, len(audio)) / 0.3 * audio.square().mean().sqrt() * 10 ** (-decibels / 20)
        heard = describe_sound(audio + noise, sample_hz)
        for word in right:
            right[word] += getattr(heard, word) == getattr(truth, word)
        if truth.kind in ("tone", "pluck"):
            assert heard.hz == pytest.approx(truth.hz, rel=0.03) and abs(heard.octaves) < 0.1
    assert all(count >= 99 for count in right.values()), right


def test_other_sounds_are_described_too():
    time = torch.arange(16000) / 16000
    assert describe_sound(torch.zeros(16000), 16000).kind == "silence"
    assert describe_sound(torch.zeros(3), 16000).kind == "silence"
    click = describe_sound(torch.tensor([0.9, -0.9]), 16000)
    assert click.loudness == "soft" and click.kind in ("noise burst", "pluck", "tone")
    with pytest.raises(ValueError, match="not numbers"):
        describe_sound(torch.full((16000,), math.nan), 16000)
    square = describe_sound(0.3 * torch.sin(2 * math.pi * 220 * time).sign(), 16000)
    assert (square.kind, square.pitch, square.direction, square.loudness) == ("tone", "low", "steady", "loud")
    assert square.hz == pytest.approx(220, abs=4) and square.level == pytest.approx(0.3, abs=0.01)
    hiss = describe_sound(sounds(0, 16000) * 0.1, 16000)
    assert (hiss.kind, hiss.pitch, hiss.loudness) == ("noise burst", "high", "soft")
    glide = describe_sound(0.5 * torch.sin(2 * math.pi * (500 * time + 250 * time**2)), 16000)
    assert (glide.kind, glide.direction) == ("chirp", "rising") and glide.octaves == pytest.approx(1, abs=0.15)


def test_a_spectrogram_shows_time_frequency_and_level():
    time = torch.arange(8000) / 16000
    wave = torch.cat([torch.sin(2 * math.pi * 1000 * time), torch.zeros(8000)])
    picture = spectrogram_image(wave, 16000)
    pixels = np.asarray(picture).astype(int).sum(axis=2)
    plot = pixels[34:334, 52:812]
    assert picture.size == (882, 378) and plot[:, 500:].max() < 60 and plot[:, 100:300].max() > 600
    height = plot[:, 100:300].sum(axis=1).argmax()
    mel = 15 / (15 + 27 * math.log(8) / math.log(6.4))  # of 1 kHz, of 8
    assert height == pytest.approx(299 * (1 - mel), abs=3)
    assert pixels[:34].sum() > np.asarray(spectrogram_image(wave, 16000, "a tone")).astype(int).sum(axis=2)[:34].sum()
    loud, soft = (np.asarray(spectrogram_image(level * wave, 16000)).astype(int).sum() for level in (1.0, 0.01))
    assert loud > soft


@pytest.mark.parametrize(("length", "sample_hz"), [(1, 16000), (7, 100), (30 * 8000, 8000), (48000, 48000)])
def test_every_sound_has_a_picture(length: int, sample_hz: int):
    assert spectrogram_image(sounds(0, length), sample_hz).size == (882, 378)


def test_no_sound_has_none():
    with pytest.raises(ValueError, match="no samples"):
        spectrogram_image(torch.zeros(0), 16000)
