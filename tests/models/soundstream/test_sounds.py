"""`helicon generate` with a codec: a sound file, coded and decoded."""

from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from typer.testing import CliRunner

from helicon.cli import app
from helicon.models.soundstream import sounds
from helicon.models.soundstream.sounds import CodedSoundMaker
from models.soundstream.tiny import HZ, sound, tiny


@pytest.fixture
def file(tmp_path: Path) -> Path:
    soundfile.write(tmp_path / "voice.wav", sound(1, 205)[0].numpy(), HZ, subtype="FLOAT")
    return tmp_path / "voice.wav"


@pytest.mark.parametrize("options", [{}, {"pad_mode": "reflect"}, {"rq_groups": 2}, {"input_channels": 2}])
def test_the_sound_is_that_of_its_codes_whatever_its_length(
    file: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
):
    codec = tiny(**options).eval()
    audio = sound(1, 205).expand(codec.channels, -1)[None]
    for chunk in (1, 500):
        monkeypatch.setattr(sounds, "CHUNK", chunk)
        for count in (None, 2):
            made = CodedSoundMaker(codec, prompt=file, num_quantizers=count).make([0, 0], seed=0)
            expected = codec.decode(codec.encode(audio)[..., :count])[0, :, :205]
            assert len(made) == 2 and made[0].sound.sample_hz == HZ
            torch.testing.assert_close(made[0].sound.wave, expected, atol=1e-5, rtol=1e-5)


def test_a_file_of_another_rate_is_resampled(file: Path):
    soundfile.write(file, sound(1, 410)[0].numpy(), 2 * HZ)
    (made,) = CodedSoundMaker(tiny(), prompt=file).make([0], seed=0)
    assert made.sound.wave.shape == (1, 205)


def test_a_codec_that_learned_it_takes_noise_out(file: Path):
    codec = tiny(denoise_conditioning=True).eval()
    with torch.no_grad():
        codec.autoencoder.encoder_film.scale_shift.weight[1].fill_(0.5)
    plain, denoised = (
        CodedSoundMaker(codec, prompt=file, denoise=denoise).make([0], 0)[0] for denoise in (False, True)
    )
    assert not torch.equal(plain.sound.wave, denoised.sound.wave)


def test_on_the_command_line(file: Path):
    tiny().save("codec")
    call = lambda *words: CliRunner().invoke(app, ["generate", "codec", *words])
    result = call("--prompt", str(file), "num_quantizers=2", "-o", "out.wav")
    assert result.exit_code == 0, result.output
    assert "out.wav: 2 codes a frame, 8.00 kbit/s; SI-SDR " in result.stdout
    assert soundfile.info("out.wav").frames == 205 and Path("out-spectrogram.png").exists()
    for words, sentence in (
        ((), "a codec makes a sound from another: name the sound file with --prompt"),
        (("--prompt", str(file), "--text", "a bell"), "a codec reads no texts: leave --text out"),
        (("--prompt", str(file), "num_quantizers=4"), "num_quantizers=4 must lie between 1 and 3"),
        (("--prompt", str(file), "denoise=true"), "denoise=true is for a codec that learned it"),
    ):
        result = call(*words)
        assert result.exit_code == 1 and result.stderr.startswith(f"error: {sentence}"), result.stderr
