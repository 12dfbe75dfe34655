import logging
import resource
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

import children
from data.sounds import noise, write
from helicon.data.sound import SUFFIXES, Sound, read_prompt, spectrogram_beside

HZ = 8000


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_kind_of_file_holds_the_sound_and_has_its_picture(suffix: str) -> None:
    time = torch.arange(4000) / HZ
    wave = torch.stack([torch.sin(2000 * time), 2 * torch.sin(3000 * time)])
    Sound(wave, HZ, "two tones").write(Path(f"out{suffix}"))
    found, hz = soundfile.read(f"out{suffix}", dtype="float32")
    assert hz == HZ and found.shape == (4000, 2)
    heard = torch.from_numpy(found.T)
    assert torch.corrcoef(torch.stack([heard[0], wave[0]]))[0, 1] > 0.99
    assert heard.abs().max() <= 1 + 0.1 * (suffix == ".ogg"), "what is too loud is clipped"
    with Image.open(spectrogram_beside(Path(f"out{suffix}"))) as picture:
        assert picture.size > (500, 200)


def test_minutes_can_be_written_as_ogg() -> None:
    """In a child, which a crash of the encoder would take with it; the small stack stands for longer sounds."""

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_STACK, (2**20, 2**20))
        Sound(torch.zeros(1, 100 * HZ), HZ).write(Path("long.ogg"))

    assert children.run(work) == 0
    assert soundfile.info("long.ogg").frames == 100 * HZ


def test_a_sound_without_samples_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Sound(torch.zeros(1, 0), HZ).write(Path("out.wav"))
    assert "out.wav is empty" in caplog.text and not spectrogram_beside(Path("out.wav")).exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_sound_of_no_finite_numbers_is_not_written(value: float) -> None:
    with pytest.raises(ValueError, match=r"out\.wav has samples that are no finite numbers, and is not written"):
        Sound(torch.tensor([[0.1, value]]), HZ).write(Path("out.wav"))
    assert not Path("out.wav").exists()


def test_a_file_that_cannot_be_written_is_named() -> None:
    with pytest.raises(OSError, match=r"nowhere/out\.wav could not be written"):
        Sound(torch.zeros(1, 5), HZ).write(Path("nowhere/out.wav"))


def test_a_sound_for_which_the_disk_has_no_room_leaves_no_part_of_it() -> None:
    """In a child, whose files cannot grow beyond a size."""

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        with pytest.raises(
            OSError, match=r"out\.wav could not be written \(.*\): free some space, or choose another place"
        ):
            Sound(torch.zeros(1, 10 * HZ), HZ).write(Path("out.wav"))

    assert children.run(work) == 0
    assert not Path("out.wav").exists()


def test_prompts_have_the_channels_that_are_asked_for() -> None:
    stereo = noise(0.1, HZ, 2)
    write(Path("two.wav"), stereo, HZ, "FLOAT")
    mono, hz = read_prompt(Path("two.wav"), 1)
    assert hz == HZ and np.allclose(mono.numpy(), stereo.mean(axis=1), atol=1e-6)
    both, _ = read_prompt(Path("two.wav"), 2)
    assert np.allclose(both.numpy(), stereo.T, atol=1e-6)


def test_a_prompt_that_is_no_sound_is_named() -> None:
    Path("words.wav").write_text("no sound")
    with pytest.raises(FileNotFoundError, match=r"--prompt absent\.wav is not there: name a sound file"):
        read_prompt(Path("absent.wav"), 1)
    with pytest.raises(FileNotFoundError, match=r"--prompt sounds is a folder: name a sound file"):
        Path("sounds").mkdir()
        read_prompt(Path("sounds"), 1)
    with pytest.raises(ValueError, match=r"words\.wav: not a readable sound"):
        read_prompt(Path("words.wav"), 1)
