"""Resampling, against soxr, scipy and the sounds themselves."""

import math

import jaxtyping
import numpy as np
import pytest
import soxr
import torch
from scipy.signal import resample_poly
from torch import Tensor

from helicon.nn.resample import _weights, resample, resampled_length

RATES = [(44100, 16000), (16000, 24000), (48000, 44100), (24000, 16000), (8000, 16000), (11025, 16000), (16000, 11025)]


def chord(rate: int, other: int, count: int, at: int | None = None) -> np.ndarray:
    """Tones below either rate's limit, swelling and fading over `count` samples of `rate`; sampled at the rate `at`."""
    draw = np.random.default_rng(0)
    limit = 0.85 * min(rate, other) / 2
    seconds = np.arange(resampled_length(count, rate, at or rate)) / (at or rate)
    tones = [
        np.sin(2 * np.pi * hz * seconds + phase) for hz, phase in draw.uniform((0.01 * limit, 0), (limit, 6), (9, 2))
    ]
    return np.sum(tones, axis=0) / 9 * np.sin(np.pi * seconds * rate / count) ** 2


@pytest.mark.parametrize(("rate", "other"), [*RATES, (7, 5), (9973, 10007)])
def test_it_is_the_same_sound(rate: int, other: int) -> None:
    count = 3001
    found = resample(torch.from_numpy(chord(rate, other, count)).float(), rate, other)
    expected = chord(rate, other, count, at=other)
    assert len(found) == math.ceil(count * other / rate)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize(("rate", "other"), RATES)
def test_it_agrees_with_soxr_and_scipy(rate: int, other: int) -> None:
    sound = chord(rate, other, 4000)
    found = resample(torch.from_numpy(sound).float(), rate, other).numpy()
    theirs = soxr.resample(sound, rate, other, quality="VHQ")
    assert abs(len(theirs) - len(found)) <= 1
    size = min(len(theirs), len(found))
    np.testing.assert_allclose(found[:size], theirs[:size], atol=2e-4)
    plain = resample_poly(sound, other // math.gcd(rate, other), rate // math.gcd(rate, other), window=("kaiser", 9.0))
    np.testing.assert_allclose(found, plain, atol=5e-3)  # whose filter has a sixth of the length


def level(hz: float, rate: int, other: int) -> float:
    """How much of a tone comes through, away from the ends."""
    tone = torch.from_numpy(np.sin(2 * np.pi * hz * np.arange(rate // 4) / rate)).float()
    return float(resample(tone, rate, other)[200:-200].abs().max())


def test_what_the_lower_rate_cannot_hold_is_gone() -> None:
    assert level(7200, 44100, 16000) == pytest.approx(1, abs=1e-3)
    assert max(level(hz, 44100, 16000) for hz in (8100, 9000, 12345, 20000)) < 1e-4
    assert level(7200, 16000, 44100) == pytest.approx(1, abs=1e-3)  # and no images appear in what it can


def test_each_row_is_resampled_alone() -> None:
    audio = torch.randn(2, 3, 500, generator=torch.Generator().manual_seed(0))
    whole = resample(audio, 22050, 16000)
    assert whole.shape == (2, 3, 363)
    torch.testing.assert_close(whole[1, 2], resample(audio[1, 2], 22050, 16000))
    silent_end = torch.cat([audio, torch.zeros(2, 3, 99)], dim=-1)
    torch.testing.assert_close(resample(silent_end, 22050, 16000)[..., :363], whole)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 50])
def test_any_length(length: int) -> None:
    for rate, other in ((44100, 16000), (16000, 44100), (3, 2)):
        assert resample(torch.ones(2, length), rate, other).shape == (2, resampled_length(length, rate, other))


def test_gradients() -> None:
    """A linear map: its gradient is its transpose, which a product of numbers shows."""
    audio = torch.randn(1, 90, generator=torch.Generator().manual_seed(1), requires_grad=True)
    other = torch.randn(1, 135, generator=torch.Generator().manual_seed(2))
    output = resample(audio, 16000, 24000)
    output.backward(other)
    assert audio.grad is not None
    torch.testing.assert_close((audio.grad * audio).sum(), (output * other).sum())
    direction = torch.zeros(1, 90)
    direction[0, 40] = 1
    torch.testing.assert_close(audio.grad[0, 40], (resample(direction, 16000, 24000) * other).sum())


def test_precision_and_modes() -> None:
    audio = torch.randn(1, 300, generator=torch.Generator().manual_seed(3))
    _weights.cache_clear()
    with torch.inference_mode():
        expected = resample(audio, 16000, 24000)
    resample(audio.requires_grad_(), 16000, 24000).sum().backward()  # what is remembered may take part in training
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(resample(audio, 16000, 24000), expected)
    assert resample(audio.half(), 16000, 24000).dtype == torch.float16
    assert resample(audio, 16000, 16000) is audio


def test_a_whole_rate_may_be_written_as_a_fraction(monkeypatch: pytest.MonkeyPatch) -> None:
    audio = torch.randn(100)
    expected = resample(audio, 44100, 16000)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # a user's run has no type checker
    assert torch.equal(resample(audio, 44100.0, 16000), expected)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a positive whole number of Hz, not 44100\.5"):
        resample(audio, 44100.5, 16000)  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", [0, -8000])
def test_impossible_rates(rate: int) -> None:
    for rates in ((rate, 16000), (16000, rate)):
        with pytest.raises(ValueError, match=f"a sample rate is a positive whole number of Hz, not {rate}"):
            resample(torch.ones(3), *rates)


def test_padding_is_silence() -> None:
    def impulse(place: int) -> Tensor:
        return torch.eye(400)[place]

    found = resample(impulse(0), 16000, 48000)
    assert found[0] == found.max() and found[0] == pytest.approx(0.95, abs=1e-3)
    torch.testing.assert_close(resample(impulse(200), 16000, 48000)[600:1199], found[:599], atol=1e-6, rtol=0)
