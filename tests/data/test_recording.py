import io
import os
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from data.sounds import KINDS, encoded, noise, opened, seeded, write
from helicon.data.audio import AudioTransform
from helicon.data.dataset import BadFile
from helicon.data.recording import SoundFile


def test_values(tmp_path: Path):
    steps = np.array([-32768, -1, 0, 1, 32767], dtype=np.int16)
    whole = AudioTransform(16000)
    sixteen = whole(opened(write(tmp_path / "a.wav", steps)))["audio"]
    assert torch.equal(sixteen * 2**15, torch.from_numpy(steps).float())
    loud = np.array([-2.5, 0.1, 1.75])
    assert whole(opened(write(tmp_path / "b.wav", loud, subtype="FLOAT")))["audio"].tolist() == pytest.approx(loud)
    for value in (np.nan, np.inf):
        path = write(tmp_path / "c.wav", np.array([0.1, value]), subtype="FLOAT")
        with pytest.raises(BadFile, match=r"c.wav: holds values that are infinite or not numbers"):
            whole(opened(path))


@pytest.mark.parametrize(("extension", "subtype"), KINDS)
def test_a_file_that_was_cut_off_gives_what_is_left(tmp_path: Path, extension: str, subtype: str):
    content = encoded(noise(6, 16000), 16000, extension, subtype)
    whole, _ = soundfile.read(io.BytesIO(content), dtype="float32")
    path = tmp_path / f"x.{extension}"
    path.write_bytes(content[: int(0.7 * len(content))])
    sample = AudioTransform(16000)(opened(path))
    length = sample["audio_lengths"]
    assert 0.5 * len(whole) < length < 0.75 * len(whole)
    torch.testing.assert_close(sample["audio"][:-2000], torch.from_numpy(whole[: length - 2000]), atol=2e-6, rtol=0)
    promises = extension in ("flac", "mp3")  # the others are taken to end where their data ends
    assert sample["is_end"] != promises
    crops = AudioTransform(16000, max_length=8000, end_prob=0.3)
    for seed in range(9):
        crop = crops(opened(path), True, seeded(seed))
        assert crop["audio_lengths"] == 8000 and crop["audio"].abs().max() > 0.1
        assert not (crop["is_end"] and promises)
        assert torch.equal(crop["audio"], crops(opened(path), True, seeded(seed))["audio"])  # nothing is remembered


def test_a_cut_off_file_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    content = encoded(noise(3, 16000), 16000, "flac")
    path = tmp_path / "cut.flac"
    path.write_bytes(content[: len(content) // 2])
    for _ in range(3):
        AudioTransform(16000)(opened(path))
    assert caplog.text.count("cut.flac ends after 1.") == 1 and "of the 3.00 s it promises" in caplog.text


def test_a_part_that_lies_before_the_cut_is_whole():
    content = encoded(noise(3, 16000), 16000, "flac")
    cut = content[: len(content) // 2]
    length = AudioTransform(16000)(SoundFile(cut, "x"))["audio_lengths"]
    part = AudioTransform(24000)(SoundFile(cut, "x", 0.5, (length - 8010) / 16000))  # its margin is in what is missing
    whole = AudioTransform(24000)(SoundFile(content, "x", 0.5, (length - 8010) / 16000))
    assert part["is_end"] and part["audio"].shape == whole["audio"].shape
    torch.testing.assert_close(part["audio"][:-300], whole["audio"][:-300], atol=2e-6, rtol=0)


def test_lengths_that_a_header_does_not_know(tmp_path: Path):
    for length in (24000, 100, 4096):
        wave = noise(length / 16000, 16000)
        flac = bytearray(encoded(wave, 16000, "flac"))
        flac[21] &= 0xF0
        flac[22:26] = bytes(4)  # the number of samples: 0 is unknown
        sample = AudioTransform(16000)(SoundFile(bytes(flac), "stream.flac"))
        assert sample["audio_lengths"] in (length - 1, length) and sample["is_end"]  # the very last may be lost
        last = AudioTransform(16000, max_length=90, end_prob=1.0)(SoundFile(bytes(flac), "x"), True, seeded(0))
        assert torch.equal(last["audio"], sample["audio"][-90:])
    wave = noise(1.5, 16000)
    wav = bytearray(encoded(wave, 16000, "wav"))
    place = wav.find(b"data")
    wav[place + 4 : place + 8] = struct.pack("<I", 0xFFFFFFFF)  # what is written into a pipe
    assert AudioTransform(16000)(SoundFile(bytes(wav), "stream.wav"))["audio_lengths"] == len(wave)


def test_a_break_in_the_middle_spoils_the_crops_over_it_alone():
    content = bytearray(encoded(noise(4, 16000), 16000, "flac"))
    middle = len(content) // 2
    content[middle : middle + 60] = bytes(60)
    transform = AudioTransform(16000, max_length=3200)
    outcomes = []
    for segment in range(20):
        try:
            transform(SoundFile(bytes(content), "x.flac"), segment=segment)
            outcomes.append("good")
        except BadFile as error:
            assert "cannot be read from" in str(error) or "holds no sound from" in str(error)
            outcomes.append("bad")
    assert outcomes[:8] == ["good"] * 8 and 1 <= outcomes.count("bad") <= 12


@pytest.mark.parametrize(("hz", "channels"), [(16000, 1), (44100, 2)])
def test_any_stretch_of_an_ogg_is_that_of_the_whole_also_in_its_last_page_and_after_other_reads(
    tmp_path: Path, hz: int, channels: int
):
    path = write(tmp_path / "x.ogg", noise(5, hz, channels), hz)
    whole, _ = soundfile.read(path, dtype="float32", always_2d=True)
    content, total = path.read_bytes(), len(whole)
    used = opened(path)
    for start in [*range(0, total - 2000, 3001), *range(total - 20000, total, 997), total - 1, 5, 0]:
        stop = min(start + 2000, total)
        for file in (opened(path), SoundFile(content, "x"), used):
            assert np.abs(file.read(start, stop) - whole[start:stop]).max() < 1e-6, start


def test_mp3_files_are_read_in_silence(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    path = tmp_path / "x.mp3"
    path.write_bytes(encoded(noise(5, 24000), 24000, "mp3"))
    for place in range(10000, 60000, 1777):
        with soundfile.SoundFile(path) as file:
            file.seek(place)
            file.read(100)
    assert "libmpg123" in capfd.readouterr().err  # what is kept quiet
    for seed in range(9):
        AudioTransform(24000, max_length=2400)(opened(path), True, seeded(seed))
        AudioTransform(24000, max_length=2400)(SoundFile(path.read_bytes(), "x"), True, seeded(seed))
    os.write(2, b"still open")
    assert capfd.readouterr().err == "still open"


def test_unreadable_files_say_why(tmp_path: Path):
    wav = encoded(noise(0.1, 16000), 16000, "wav")
    silent_rate, header = bytearray(wav), wav[:44]
    silent_rate[24:28] = bytes(4)
    for content, problem in [
        (b"", "is empty"),
        (b"no sound at all" * 9, r"not a readable sound file \(Format not recognised\)"),
        (wav[:20], "not a readable sound file"),
        (header, "holds no sound"),
        (bytes(silent_rate), "not a readable sound file"),
        (encoded(np.zeros(0), 16000, "ogg"), "holds no sound"),
    ]:
        path = tmp_path / "x.wav"
        path.write_bytes(content)
        for source in (path, content):
            with pytest.raises(BadFile, match=problem):
                SoundFile(source, "x.wav")
    with pytest.raises(BadFile, match=r"gone.wav: cannot be opened \(No such file"):
        SoundFile(tmp_path / "gone.wav", "gone.wav")
    with pytest.raises(BadFile, match=r"cannot be opened \(Is a directory"):
        SoundFile(tmp_path, "folder.wav")
    (tmp_path / "x.webm").write_bytes(b"\x1a\x45\xdf\xa3 more")
    with pytest.raises(BadFile, match=r"webm cannot be read: convert it, for example with ffmpeg -i x.webm x.flac"):
        SoundFile(tmp_path / "x.webm", "x.webm")


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_a_file_without_permission_is_bad(tmp_path: Path):
    path = write(tmp_path / "x.wav", noise(0.1, 16000))
    path.chmod(0)
    with pytest.raises(BadFile, match="Permission denied"):
        opened(path)


@pytest.mark.parametrize("extension", ["wav", "flac", "ogg", "mp3"])
def test_flipped_bytes_are_sound_or_a_bad_file_never_a_crash(extension: str):
    whole, choose = encoded(noise(3, 16000), 16000, extension), random.Random(0)
    transform, good = AudioTransform(8000, max_length=1600), 0
    for number in range(60):
        content = bytearray(whole)
        for _ in range(choose.choice((1, 3, 30))):
            place = choose.randrange(min(len(content), choose.choice((60, 400, 10**6))))
            content[place] = choose.randrange(256)
        try:
            sample = transform(SoundFile(bytes(content), "x"), True, seeded(number))
            assert sample["audio"].shape == (1600,) and sample["audio"].isfinite().all()
            good += 1
        except BadFile:
            pass
    assert 5 < good < 60
