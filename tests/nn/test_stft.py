import pytest
import torch
from torch import Tensor

from helicon.metrics.audio import mel_filterbank, spectrogram
from helicon.nn.stft import check_framing, griffin_lim, istft, nonnegative_inverse, stft

SIZES = [(64, 16, 64), (64, 16, 40), (60, 15, 31), (32, 16, 32)]  # n_fft, hop, win_length


def sound(batch: int = 2, length: int = 403) -> Tensor:
    """Chirps with noise on them."""
    generator = torch.Generator().manual_seed(0)
    time = torch.arange(length) / length
    rise = 1 + torch.rand(batch, 1, generator=generator)
    return 0.5 * torch.sin(200 * rise * time * (1 + time)) + 0.05 * torch.randn(batch, length, generator=generator)


@pytest.mark.parametrize(("n_fft", "hop", "win_length"), SIZES)
@pytest.mark.parametrize("length", [1, 15, 16, 403])
def test_the_inverse_gives_the_sound_back(n_fft: int, hop: int, win_length: int, length: int):
    audio = sound(2, length)
    spectrum = stft(audio, n_fft, hop, win_length)
    assert spectrum.shape == (2, n_fft // 2 + 1, -(-length // hop))
    again = istft(spectrum, hop, win_length)
    assert again.shape == (2, spectrum.shape[-1] * hop)
    torch.testing.assert_close(again[:, :length], audio, rtol=0, atol=1e-5)
    torch.testing.assert_close(again[:, length:], torch.zeros_like(again[:, length:]), rtol=0, atol=1e-5)


def test_a_frame_is_centred_on_its_own_samples():
    """Frame i is the window from i * hop - (n_fft - hop) / 2 on; as torch's, moved by half a hop."""
    n_fft, hop, win_length = 64, 16, 40
    audio = sound(1, 400)
    spectrum = stft(audio, n_fft, hop, win_length)
    window = torch.nn.functional.pad(torch.hann_window(win_length), (12, 12))
    start = 5 * hop - (n_fft - hop) // 2
    torch.testing.assert_close(spectrum[0, :, 5], torch.fft.rfft(audio[0, start : start + n_fft] * window))
    moved = torch.nn.functional.pad(audio, (hop // 2, 0))
    torch.testing.assert_close(spectrum.abs(), spectrogram(moved, n_fft, hop, win_length)[..., 1:])


def test_frames_that_no_sound_has_become_the_nearest_sound():
    """So a second round changes nothing: what came out of the first has those frames."""
    torch.manual_seed(0)
    spectrum = torch.randn(2, 33, 9, dtype=torch.complex64)
    audio = istft(spectrum, 16, 64)
    torch.testing.assert_close(istft(stft(audio, 64, 16, 64), 16, 64), audio)
    errors = [(stft(audio + change, 64, 16, 64) - spectrum).norm() for change in (0, 0.01 * torch.randn_like(audio))]
    assert errors[0] < errors[1]


def test_a_padded_clip_sounds_as_it_does_alone():
    torch.manual_seed(0)
    spectrum = torch.randn(3, 33, 9, dtype=torch.complex64)
    lengths = torch.tensor([9, 4, 0])
    spectrum[1, :, 4:] = torch.nan
    magnitude = torch.where(spectrum.abs().isnan(), 3.0, spectrum.abs())
    both = istft(spectrum, 16, 64, lengths), griffin_lim(magnitude, 16, 64, lengths, iterations=5)
    for row, length in enumerate(lengths.tolist()):
        assert not any(audio[row, length * 16 :].any() for audio in both)
        if length:
            alone = istft(spectrum[row : row + 1, :, :length], 16, 64)
            torch.testing.assert_close(both[0][row : row + 1, : length * 16], alone)
            alone = griffin_lim(magnitude[row : row + 1, :, :length], 16, 64, iterations=5)
            torch.testing.assert_close(both[1][row : row + 1, : length * 16], alone, rtol=1e-3, atol=1e-4)


def test_the_inverse_has_a_gradient_and_is_float32_under_autocast():
    angles = torch.randn(1, 33, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        audio = istft(torch.polar(torch.ones_like(angles), angles), 16, 64, torch.tensor([3]))
        assert audio.dtype == torch.float32
        audio.square().sum().backward()
    assert angles.grad[..., :3].abs().sum() > 0 and not angles.grad[..., 3:].any()


def convergence(audio: Tensor, magnitude: Tensor) -> float:
    """The spectral convergence ||A - B|| / ||B||."""
    return float((stft(audio, 256, 64, 256).abs() - magnitude).norm() / magnitude.norm())


def test_griffin_lim_comes_nearer_with_every_few_rounds():
    magnitude = stft(sound(2, 4000), 256, 64, 256).abs()
    found = [convergence(griffin_lim(magnitude, 64, 256, iterations=rounds), magnitude) for rounds in (0, 8, 32, 64)]
    random_phase = found[0]
    assert found == sorted(found, reverse=True) and found[-1] < 0.25 * random_phase
    slow = convergence(griffin_lim(magnitude, 64, 256, iterations=64, momentum=0.0), magnitude)
    assert found[-1] < slow < random_phase


def test_griffin_lim_is_the_same_each_time_and_another_with_another_seed():
    magnitude = stft(sound(1), 64, 16, 64).abs()
    first, again, other = (griffin_lim(magnitude, 16, 64, iterations=3, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.allclose(first, other)


def test_silence_stays_silence():
    assert not griffin_lim(torch.zeros(1, 33, 5), 16, 64).any()


def test_bands_become_magnitudes_that_have_these_bands():
    filters = mel_filterbank(8000, 256, 30)
    magnitude = stft(sound(2, 1000), 256, 64, 256).abs()
    bands, inverse = filters @ magnitude, torch.linalg.pinv(filters)
    found = {rounds: nonnegative_inverse(bands, filters, inverse, rounds) for rounds in (0, 32)}
    assert all((x >= 0).all() for x in found.values())
    errors = {rounds: (filters @ x - bands).norm() / bands.norm() for rounds, x in found.items()}
    assert errors[32] < 0.02 and errors[32] < 0.5 * errors[0]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((63, 16, 63), "must be even"), ((64, 16, 80), "at least the window"), ((64, 40, 64), "use at most 32")],
)
def test_frames_that_cannot_be_put_together_are_refused(sizes: tuple[int, int, int], message: str):
    with pytest.raises(ValueError, match=message):
        check_framing(*sizes)
