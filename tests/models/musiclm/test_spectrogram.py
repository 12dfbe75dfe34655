import math

import pytest
import torch
from torch import Tensor

from helicon.metrics.audio import mel_filterbank
from helicon.models.musiclm.spectrogram import SILENCE, Augmentation, LogMel, patched

HZ = 16000
MUSIC = LogMel(HZ, 128, 1024, 400, 160, 0.0, 8000.0, 2.0)


def tone(hz: float, samples: int, level: float = 1.0) -> Tensor:
    return level * torch.sin(2 * math.pi * hz * torch.arange(samples) / HZ)[None]


def marked(batch: int, frames: int, bands: int) -> Tensor:
    """Levels that tell where they come from: none is 0, and they rise with time."""
    return (1 + torch.arange(frames))[None, :, None].expand(batch, frames, bands).float()


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_ten_seconds_are_a_thousand_frames_and_504_patches():
    levels = MUSIC(torch.randn(2, 10 * HZ))
    assert levels.shape == (2, 1000, 128)
    assert patched(levels, 16, 16).shape == (2, 8, 63, 256)


def test_silence_is_the_lowest_level_and_finite():
    levels = MUSIC(torch.zeros(1, 1601))
    assert levels.shape[1] == 11
    torch.testing.assert_close(levels, torch.full_like(levels, SILENCE))
    assert math.isfinite(SILENCE)


@pytest.mark.parametrize(
    "change", [{}, {"power": 1.0}, {"n_fft": 2048, "win_length": 800}, {"n_mels": 64, "hop_length": 40}]
)
def test_levels_lie_about_zero_whatever_the_sizes(change):
    settings = LogMel(**{**vars(MUSIC), **change})
    loudest = settings(tone(1000, 8000)).max()
    assert 1.5 < loudest < 2.1
    quieter = settings(tone(1000, 8000, 0.1)).max()
    torch.testing.assert_close(loudest - quieter, torch.tensor(math.log(10) / 3), atol=1e-3, rtol=0)
    hiss = settings(torch.randn(1, 8000, generator=generator()) * 0.03)
    assert -0.5 < hiss.mean() < 0.5


@pytest.mark.parametrize("hz", [110, 440, 1760, 7000])
def test_a_tone_is_seen_in_its_band(hz):
    peaks = MUSIC(tone(hz, 8000))[0, 5:-5].mean(dim=0)
    centres = mel_filterbank(HZ, 1024, 128).argmax(dim=1) * HZ / 1024
    assert abs(centres[peaks.argmax()] - hz) < max(40, 0.04 * hz)


def test_a_click_is_seen_in_the_frame_it_lies_in():
    for sample in (0, 159, 160, 2000, 4799):
        click = torch.zeros(1, 4800)
        click[0, sample] = 1
        assert MUSIC(click)[0].mean(dim=-1).argmax() == sample // 160


def test_a_clip_in_a_padded_batch_has_the_levels_of_the_clip_alone():
    clips = torch.randn(3, 4000)
    lengths = torch.tensor([4000, 1601, 0])
    padded = torch.where(torch.arange(4000) < lengths[:, None], clips, torch.nan)
    levels = MUSIC(padded, lengths)
    for row, length in enumerate(lengths.tolist()):
        frames = -(-length // 160)
        torch.testing.assert_close(levels[row, :frames], MUSIC(clips[row : row + 1, :length])[0][:frames])
        assert (levels[row, frames:] == SILENCE).all()


def test_patches_are_what_lies_beside_each_other():
    levels = torch.randn(1, 5, 6)
    patches = patched(levels, 3, 2)
    assert patches.shape == (1, 2, 3, 6)
    assert patches[0, 1, 1].unflatten(0, (3, 2)).equal(levels[0, 2:4, 3:].T)
    assert patches[0, 0, 2].unflatten(0, (3, 2))[:, 1].eq(SILENCE).all()


def test_augmentation_leaves_a_quarter_of_every_spectrum_and_hides_something():
    """(In the package that it replaces a mask of 80 bands on 65 hid whole batches.)"""
    strongest = Augmentation(1.0, 16, 10_000, n_mels=32)
    levels = marked(200, 21, 32)
    kept = (strongest(levels, generator=generator()) != 0).float()
    part = kept.mean(dim=(1, 2))
    assert part.min() >= 0.25
    assert part.min() < 0.35 and part.max() > 0.9
    frames_left, bands_left = kept.amax(dim=2).sum(dim=1), kept.amax(dim=1).sum(dim=1)
    assert set(range(11, 22)) == set(frames_left.int().tolist())
    assert set(range(16, 33)) == set(bands_left.int().tolist())
    assert (kept.amax(dim=2).mean(dim=0) < 1).all() and (kept.amax(dim=1).mean(dim=0) < 1).all()  # anywhere


def test_masks_keep_within_a_clip_s_own_frames():
    levels, lengths = marked(100, 40, 8), torch.tensor([40, 7, 1, 12] * 25)
    out = Augmentation(1.0, 0, 10_000, n_mels=8)(levels, lengths, generator())
    for row, length in zip(out[..., 0], lengths.tolist(), strict=True):
        assert (row[:length] != 0).sum() >= math.ceil(length / 2)
        assert (row[length:] == SILENCE).all()
    assert any((row[:7] == 0).sum() == 3 for row in out[1::4, :, 0])


def test_stretching_changes_the_speed_of_each_clip_and_not_its_length():
    """(In the package that it replaces it did nothing.)"""
    lengths = torch.tensor([50, 30] * 50)
    out = Augmentation(0.8, 0, 0, n_mels=4)(marked(100, 50, 4), lengths, generator())
    speeds = out[:, 20, 0] - out[:, 19, 0]
    assert speeds.min() >= 0.8 - 1e-4 and speeds.max() <= 1 + 1e-4
    assert speeds.min() < 0.82 and speeds.max() > 0.98
    last = out[torch.arange(100), lengths - 1, 0]
    assert (last <= lengths + 1e-4).all()
    assert out[:, 0, 0].min() < 1.5 and out[:, 0, 0].max() > 5  # from different moments
    assert (out[1::2, 30:] == SILENCE).all()


def test_augmentation_differs_in_each_clip_and_is_its_generator_s():
    augment = Augmentation(0.8, 8, 8, n_mels=16)
    levels = marked(4, 30, 16)
    out = augment(levels, generator=generator(1))
    assert all((out[i] != out[j]).any() for i in range(4) for j in range(i))
    assert out.equal(augment(levels, generator=generator(1)))
    assert not out.equal(augment(levels, generator=generator(2)))


def test_augmentation_can_be_left_out():
    levels, waves = marked(3, 9, 4), torch.randn(2, 50)
    assert Augmentation(1.0, 0, 0, n_mels=4)(levels).equal(levels)
    assert Augmentation(1.0, 0, 0, n_mels=4).noisy(waves) is waves


def test_noise_is_white_and_up_to_a_part_of_each_clip_s_own_level():
    augment = Augmentation(1.0, 0, 0, n_mels=4, noise=0.4)
    waves, lengths = tone(500, 4000).expand(200, 4000) * torch.tensor([0.1, 1.0] * 100)[:, None], None
    noise = augment.noisy(waves, lengths, generator()) - waves
    parts = noise.std(dim=1) / waves.std(dim=1)
    assert parts.min() < 0.02 and 0.38 < parts.max() < 0.42 and (parts[::2].mean() - parts[1::2].mean()).abs() < 0.05
    spectrum = torch.fft.rfft(noise[1::2]).abs().square().mean(dim=0)
    assert spectrum[:1000].mean() == pytest.approx(spectrum[1000:].mean().item(), rel=0.05)
    assert augment.noisy(waves, None, generator()).equal(waves + noise)
    assert not augment.noisy(waves, None, generator(1)).equal(waves + noise)


def test_noise_is_that_of_the_clip_and_not_of_what_stands_after_it():
    augment, lengths = Augmentation(1.0, 0, 0, n_mels=4, noise=0.5), torch.tensor([4000, 1000, 0])
    waves = tone(500, 4000).expand(3, 4000)
    padded = torch.where(torch.arange(4000) < lengths[:, None], waves, torch.nan)
    noise = (augment.noisy(padded, lengths, generator()) - waves)[:2, :1000]
    torch.testing.assert_close(noise, (augment.noisy(waves, None, generator()) - waves)[:2, :1000], atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((0.8, 80, 80, 65), "spec_aug_freq_mask=80 may hide at most half of n_mels=65"),
        ((1.2, 8, 8, 65), "spec_aug_stretch_factor=1.2"),
        ((0.8, 8, -1, 65), "spec_aug_time_mask=-1"),
        ((0.8, 8, 8, 65, 1.5), "spec_aug_noise=1.5 is the loudest noise"),
    ],
)
def test_augmentation_that_cannot_be_is_refused(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        Augmentation(*arguments)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"n_fft": 128, "win_length": 24, "hop_length": 12}, "n_mels=128.*use fewer bands or spec_n_fft more than 128"),
        ({"hop_length": 500}, "spec_hop_length=500"),
        ({"power": 0.0}, "spec_power=0.0"),
        ({"f_max": 9000.0}, "f_max=9000"),
    ],
)
def test_spectra_that_cannot_be_are_refused(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        LogMel(**{**vars(MUSIC), **change})
