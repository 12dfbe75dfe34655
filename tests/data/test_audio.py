import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
import torch
from torch.utils.data import Dataset

from data.sounds import KINDS, encoded, noise, opened, ramp, seeded, write
from helicon.data import audio as audio_module
from helicon.data.audio import (
    AudioDataset,
    AudioTransform,
    SoundDataset,
    audio_data,
    get_dataloader,
)
from helicon.data.dataset import BadFile, unaugmented
from helicon.data.loader import Loader
from helicon.data.recording import Wave
from helicon.data.split import split
from helicon.data.synthetic_sounds import SyntheticSounds


@pytest.mark.parametrize(("extension", "subtype"), KINDS)
def test_a_crop_is_the_crop_of_the_whole_resampled_file(tmp_path: Path, extension: str, subtype: str):
    hz = 48000 if extension == "opus" else 44100
    path = write(tmp_path / f"x.{extension}", noise(2.1, hz), hz, subtype)
    whole, _ = soundfile.read(path, dtype="float32")
    transform = AudioTransform({"audio": 16000, "same": hz, "audio_for_codec": 24000}, max_length_seconds=0.31)
    for seed in range(12):
        sample = transform(opened(path), True, seeded(seed))
        place = int(torch.randint(len(whole) * transform.grid // hz - transform.units + 1, (), generator=seeded(seed)))
        for name, rate in transform.rates.items():
            reference = whole if rate == hz else soxr.resample(whole, hz, rate)
            first, length = place * rate // transform.grid, transform.units * rate // transform.grid
            assert sample[name].shape == (length,) and sample[f"{name}_lengths"] == length
            expected = torch.from_numpy(reference[first : first + length])
            torch.testing.assert_close(sample[name], expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize(("source", "target"), [(8000, 16000), (44100, 16000), (22050, 24000), (16001, 16000)])
def test_the_whole_and_its_ends_are_those_of_soxr(tmp_path: Path, source: int, target: int):
    path = write(tmp_path / "x.wav", noise(1.3, source), source, "FLOAT")
    whole, _ = soundfile.read(path, dtype="float32")
    reference = torch.from_numpy(soxr.resample(whole, source, target))
    sample = AudioTransform(target)(opened(path))
    assert torch.equal(sample["audio"], reference) and sample["audio_lengths"] == len(reference) and sample["is_end"]
    segments = AudioTransform(target, max_length=5000)
    last = segments.num_segments(opened(path)) - 1
    for segment in (0, last):
        part = segments(opened(path), segment=segment)
        expected = reference[segment * 5000 : (segment + 1) * 5000]
        assert part["audio_lengths"] == len(expected) and part["is_end"] == (segment == last)
        torch.testing.assert_close(part["audio"][: len(expected)], expected, atol=2e-6, rtol=0)


def test_only_the_crop_is_read_and_once_for_all_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write(tmp_path / "x.flac", noise(20, 16000))
    reads: list[int] = []
    plain = soundfile.SoundFile.read

    def counted(file: Any, frames: int, **options: Any) -> np.ndarray:
        reads.append(frames)
        return plain(file, frames, **options)

    monkeypatch.setattr(soundfile.SoundFile, "read", counted)
    AudioTransform(16000, max_length=4000)(opened(path), True, seeded(0))
    assert reads == [4000]
    AudioTransform({"a": 16000, "b": 24000, "c": 8000}, max_length_seconds=0.25)(opened(path), True, seeded(0))
    assert len(reads) == 2 and 4000 < reads[1] < 4000 + 2 * 300


def test_rates_mean_the_same_moment():
    hz = 48000
    wave = np.zeros(hz)
    wave[20000:20100] = np.hanning(100)
    transform = AudioTransform({"audio": 16000, "audio_for_codec": 24000}, max_length_seconds=0.5)
    for seed in range(9):
        sample = transform(Wave(wave, hz, "x"), True, seeded(seed))
        if sample["audio"].max() > 0.9:
            low, high = sample["audio"].argmax() / 16000, sample["audio_for_codec"].argmax() / 24000
            assert abs(low - high) < 1.5e-4
    equal = AudioTransform({"a": 16000, "b": 16000}, max_length=99)(Wave(wave, hz, "x"), True, seeded(0))
    assert torch.equal(equal["a"], equal["b"])


def test_the_place_is_random_only_while_augmented():
    wave, transform = Wave(ramp(1), 8000, "x"), AudioTransform(8000, max_length=1000)
    begins = [transform(wave, True, seeded(seed))["audio"][0].item() for seed in range(200)]
    assert min(begins) < 0.12 and max(begins) > 0.86 and len(set(begins)) > 180
    assert transform(wave, True, seeded(7))["audio"][0] == begins[7]
    middle = transform(wave)["audio"]
    assert torch.equal(middle, torch.from_numpy(ramp(1)).float()[3500:4500])
    assert torch.equal(transform(wave, False, seeded(3))["audio"], middle)


def test_lengths_and_padding():
    wave = Wave(ramp(0.1), 8000, "x")  # 800 samples
    padded = AudioTransform(8000, max_length=1000)(wave)
    assert padded["audio"].shape == (1000,) and padded["audio_lengths"] == 800 and padded["is_end"]
    assert padded["audio"][800:].eq(0).all() and padded["audio"][799] > 0.9
    assert AudioTransform(8000, max_length=1000, pad=False)(wave)["audio"].shape == (800,)
    up = AudioTransform(8000, max_length=1000, pad=False, seq_len_multiple_of=320)(wave)
    assert up["audio"].shape == (960,) and up["audio_lengths"] == 800 and up["audio"][799] > 0.9
    cropped = AudioTransform(8000, max_length=500, seq_len_multiple_of=320)(wave)
    assert cropped["audio"].shape == (640,) and cropped["audio_lengths"] == 500
    each = AudioTransform({"a": 8000, "b": 4000}, seq_len_multiple_of={"b": 300})(wave)
    assert each["a"].shape == (800,) and each["b"].shape == (600,) and each["b_lengths"] == 400
    exact = AudioTransform(8000, max_length=800)(wave)
    assert exact["audio_lengths"] == 800 and exact["is_end"]


@pytest.mark.parametrize("seconds", [0.05, 0.0500001])
def test_lengths_in_seconds_may_be_fractions(seconds: float):
    wave = Wave(ramp(1), 8000, "x")
    assert AudioTransform(8000, max_length_seconds=seconds)(wave)["audio"].shape == (400,)
    assert AudioTransform(8000, max_length=400.0)(wave)["audio"].shape == (400,)
    both = AudioTransform({"a": 16000, "b": 24000}, max_length=10001)  # of the highest rate; 10000 at both
    sample = both(wave, True, seeded(0))
    assert sample["a"].shape == (6666,) and sample["b"].shape == (9999,)


def test_the_end_is_known_and_can_be_asked_for():
    wave, plain = Wave(ramp(1), 8000, "x"), AudioTransform(8000, max_length=1000)
    assert not any(plain(wave, True, seeded(seed))["is_end"] for seed in range(30))
    often = AudioTransform(8000, max_length=1000, end_prob=0.5)
    samples = [often(wave, True, seeded(seed)) for seed in range(60)]
    assert 18 < sum(sample["is_end"] for sample in samples) < 42
    last = torch.from_numpy(ramp(1)).float()[-1000:]
    assert all(torch.equal(sample["audio"], last) == sample["is_end"] for sample in samples)
    assert not AudioTransform(8000, max_length=1000, end_prob=1.0)(wave)["is_end"]  # the middle, without augmentation


def test_silent_places_are_drawn_again():
    wave = np.zeros(80000)
    wave[60000:] = ramp(2.5)
    transform = AudioTransform(8000, max_length=1000)
    loud = sum(transform(Wave(wave, 8000, "x"), True, seeded(s))["audio"].abs().max() > 0 for s in range(100))
    assert 65 < loud < 90  # 1 - 0.75^5 of them; a quarter without
    assert transform(Wave(wave, 8000, "x"))["audio"].eq(0).all()
    silent = transform(Wave(np.zeros(5000), 8000, "x"), True, seeded(0))
    assert silent["audio"].eq(0).all() and silent["audio_lengths"] == 1000
    dither = np.random.default_rng(0).integers(-2, 3, 80000) / 2**15
    dither[60000:] += ramp(2.5)
    loud = sum(transform(Wave(dither, 8000, "x"), True, seeded(s))["audio"].abs().max() > 0.1 for s in range(100))
    assert 65 < loud < 90


def test_channels(tmp_path: Path):
    for count in (1, 2, 8):
        wave = noise(0.2, 16000, count)
        path = write(tmp_path / f"{count}.wav", wave, subtype="FLOAT")
        frames = torch.from_numpy(wave.reshape(-1, count)).float()
        mono, stereo = (AudioTransform(16000, channels=channels)(opened(path))["audio"] for channels in (1, 2))
        torch.testing.assert_close(mono, frames.mean(dim=1))
        expected = frames.expand(-1, 2) if count == 1 else frames[:, :2]
        assert torch.equal(stereo, expected.T) and stereo.is_contiguous()
    resampled = AudioTransform(24000, max_length=1000, channels=2)(opened(tmp_path / "2.wav"), True, seeded(0))
    assert resampled["audio"].shape == (2, 1000) and resampled["audio_lengths"] == 1000
    assert not torch.equal(resampled["audio"][0], resampled["audio"][1])


def folder_of(tmp_path: Path, count: int = 5, seconds: float = 0.5) -> Path:
    folder = tmp_path / "data"
    for number in range(count):
        hz = (16000, 22050, 8000)[number % 3]  # rates may change from file to file
        write(folder / f"{number}.{('WAV', 'flac', 'ogg')[number % 3]}".lower(), noise(seconds, hz, seed=number), hz)
    return folder


def test_a_folder_with_bad_files_trains_and_lists_them(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = folder_of(tmp_path)
    (folder / "sub").mkdir()
    (folder / "sub" / "2.mp3").write_bytes(b"junk")
    data = audio_data(folder, 16000, max_length=4000)
    loader = Loader(data, batch_size=3, bad_files=tmp_path / "bad_files.txt")
    with caplog.at_level(logging.WARNING):
        batches = [next(loader.steps())[0], *loader.validation(None)]
    assert all(batch["audio"].shape == (3, 4000) for batch in batches) and len(batches) == 3
    assert all(batch["audio_lengths"].tolist() == [4000] * 3 for batch in batches)
    assert loader.bad == [str(folder / "sub" / "2.mp3")]
    assert (tmp_path / "bad_files.txt").read_text().startswith(f"{folder}/sub/2.mp3\tnot a readable sound file")


def test_batches_do_not_depend_on_workers_and_carry_lengths(tmp_path: Path):
    folder = folder_of(tmp_path)
    write(folder / "short.wav", noise(0.1, 16000))
    data = audio_data(folder, {"audio": 16000, "audio_for_codec": 24000}, max_length_seconds=0.3, pad=False)
    alone, helped = (
        [step[0] for step, _ in zip(Loader(data, batch_size=6, num_workers=n).steps(), range(2), strict=False)]
        for n in (0, 2)
    )
    for one, other in zip(alone, helped, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert sorted(one["audio_lengths"].tolist()) == [1600, *[4800] * 5] and one["is_end"].sum() == 1
        assert torch.equal(one["audio_for_codec_lengths"] * 2, one["audio_lengths"] * 3)
    assert not torch.equal(alone[0]["audio"].sum(), alone[1]["audio"].sum())  # another epoch, other crops


def test_a_split_crops_the_training_part_at_random_and_the_other_in_the_middle(tmp_path: Path):
    train, valid = split(audio_data(folder_of(tmp_path), 16000, max_length=1000), 0.4, 42)
    assert valid is not None and len(valid) == 2
    assert len({valid.fetch(0, seeded(s))["audio"].sum().item() for s in range(5)}) == 1
    assert len({train.fetch(0, seeded(s))["audio"].sum().item() for s in range(5)}) == 5


def test_folders_are_checked(tmp_path: Path):
    with pytest.raises(ValueError, match="holds no flac, wav, mp3, ogg, opus file"):
        audio_data(tmp_path, 16000)
    with pytest.raises(ValueError, match="does not exist"):
        audio_data(tmp_path / "none", 16000)
    (tmp_path / "x.webm").write_bytes(b"video")
    (tmp_path / "y.M4A").write_bytes(b"music")
    for make in (lambda: audio_data(tmp_path, 16000), lambda: audio_data(tmp_path, 16000, exts=["webm", "m4a"])):
        with pytest.raises(ValueError, match=r"holds only m4a, webm files, which cannot be read: convert .*ffmpeg"):
            make()
    with pytest.raises(ValueError, match="holds only webm files"):
        SoundDataset(tmp_path, 16000)
    write(tmp_path / "z.wav", noise(0.1, 16000))
    assert len(audio_data(tmp_path, 16000)) == 1
    assert len(SoundDataset(tmp_path, 16000)) == 2  # the webm is noted down as bad when it is read


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"sample_hz": 0}, "sample_hz=0: it must be at least 1"),
        ({"sample_hz": {}}, "sample_hz="),
        ({"channels": 3}, r"channels=3: it must be 1 \(mono\) or 2"),
        ({"max_length": 0}, "a crop of 0 samples is too short"),
        ({"max_length_seconds": 1e-9}, "a crop of 1e-09 s is too short"),
        ({"sample_hz": {"a": 16000, "b": 22050}, "max_length": 400}, "a crop of 400 samples is too short"),
        ({"max_length": 5, "max_length_seconds": 1.0}, "not both"),
        ({"seq_len_multiple_of": 0}, "seq_len_multiple_of=0"),
        ({"seq_len_multiple_of": {"codec": 320}}, r"for entries of \['audio'\]"),
        ({"end_prob": 1.5}, "end_prob=1.5"),
    ],
)
def test_what_cannot_be_made_is_refused(options: dict[str, Any], problem: str):
    with pytest.raises(ValueError, match=problem):
        AudioTransform(**{"sample_hz": 16000, **options})


def captioned_folder(tmp_path: Path) -> Path:
    for name in ("a_b/1", "c/2"):
        write(tmp_path / f"{name}.wav", ramp(1.0), 8000, "FLOAT")
        (tmp_path / f"{name}.txt").write_text(f"sound {name}\n")
    return tmp_path


def test_captions_beside_files_and_in_folder_names(tmp_path: Path):
    folder = captioned_folder(tmp_path)
    assert [s["texts"] for s in audio_data(str(folder), 8000, captions="beside")] == ["sound a_b/1", "sound c/2"]
    data = audio_data(folder, 8000, captions="folder", max_length=500)
    assert [sample["texts"] for sample in data] == ["a b", "c"] and list(data.keys) == ["a_b/1.wav", "c/2.wav"]
    assert set(audio_data(folder, 8000)[0]) == {"audio", "audio_lengths", "is_end"}
    with pytest.raises(ValueError, match="a folder has no columns"):
        audio_data(folder, 8000, captions="column")


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_manifest_of_parts(tmp_path: Path, kind: str):
    captioned_folder(tmp_path)
    rows = [
        {"path": "c/2.wav", "text": "two", "start": 0.25, "duration": 0.5},
        {"path": "a_b/1.wav", "text": "one", "start": None, "duration": None},
        {"path": "c/2.wav", "text": "rest", "start": 0.75, "duration": None},
    ]
    path = tmp_path / f"list.{kind}"
    if kind == "csv":
        lines = [",".join("" if value is None else str(value) for value in row.values()) for row in rows]
        path.write_text("\n".join(["path,text,start,duration", *lines]))
    elif kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(rows), path)
    data = audio_data(path, 8000, captions="column")
    assert [sample["texts"] for sample in data] == ["two", "one", "rest"]
    whole = torch.from_numpy(ramp(1.0)).float()
    assert torch.equal(data[0]["audio"], whole[2000:6000]) and data[0]["is_end"]
    assert torch.equal(data[1]["audio"], whole) and torch.equal(data[2]["audio"], whole[6000:])
    up = audio_data(path, 16000)[0]["audio"]  # resampled with what is around the part, not as if there were nothing
    torch.testing.assert_close(
        up, torch.from_numpy(soxr.resample(whole.numpy(), 8000, 16000))[4000:12000], atol=1e-5, rtol=0
    )


def test_a_manifest_is_checked(tmp_path: Path):
    captioned_folder(tmp_path)
    path = tmp_path / "list.csv"
    for start, duration, problem in [
        ("soon", "1", "row 1 of the manifest has start='soon': it must be a number of seconds"),
        ("-1", "1", "start='-1'"),
        ("0", "0", "duration='0'"),
        ("0", "inf", "duration='inf'"),
    ]:
        path.write_text(f"path,start,duration\nc/2.wav,{start},{duration}\n")
        with pytest.raises(ValueError, match=problem):
            audio_data(path, 8000)
    path.write_text("path,start,duration\nc/2.wav,1.5,1\nc/2.wav,0.5,9\n")
    data = audio_data(path, 8000)
    with pytest.raises(BadFile, match=r"2.wav: holds no sound from 1.50 s on"):
        data[0]
    assert data[1]["audio_lengths"] == 4000  # no more than there is
    with pytest.raises(ValueError, match="has no column file"):
        audio_data(path, 8000, audio_column="file")


def test_segments_cover_every_file_end_to_end(tmp_path: Path):
    folder = folder_of(tmp_path, 3, seconds=0.5)
    (folder / "bad.wav").write_bytes(b"junk")
    data = audio_data(folder, {"audio": 16000, "codec": 24000}, max_length_seconds=0.2, segments=True)
    whole = audio_data(folder, {"audio": 16000, "codec": 24000})
    assert list(data.keys) == ["0.wav"] * 3 + ["1.flac"] * 3 + ["2.ogg"] * 3 + ["bad.wav"]
    for number in range(3):
        parts = [data.fetch(3 * number + part, seeded(0)) for part in range(3)]
        assert [part["is_end"] for part in parts] == [False, False, True]
        for name, full in (("audio", 3200), ("codec", 4800)):
            assert [part[f"{name}_lengths"] for part in parts] == [full, full, full // 2]
            joined = torch.cat([part[name] for part in parts])[: 5 * full // 2]
            torch.testing.assert_close(joined, whole[number][name], atol=2e-6, rtol=0)
    with pytest.raises(BadFile, match=r"bad.wav: not a readable"):
        data[9]
    assert torch.equal(unaugmented(data)[4]["audio"], data[4]["audio"])
    with pytest.raises(ValueError, match="segments need a length"):
        audio_data(folder, 16000, segments=True)
    train, valid = split(data, 0.3, 1)
    assert valid is not None and len(set(train.keys) & set(valid.keys)) <= 1
    captioned = audio_data(captioned_folder(tmp_path / "c"), 8000, max_length=3000, captions="folder", segments=True)
    assert [sample["texts"] for sample in captioned] == ["a b"] * 3 + ["c"] * 3


def test_hugging_face_datasets(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    good = encoded(noise(0.5, 22050), 22050, "flac")
    path = write(tmp_path / "x.wav", noise(0.3, 16000))
    values = [{"bytes": good, "path": "0.flac"}, {"bytes": None, "path": str(path)}, {"bytes": b"junk", "path": None}]
    rows = {"audio": [*values, None], "text": ["a", None, "c", "d"]}
    source = datasets.Dataset.from_dict(rows).cast_column("audio", datasets.Audio())
    data = audio_data(source, 16000, captions="column")
    assert data[0]["texts"] == "a" and data[0]["audio_lengths"] == 8000 and len(data) == 4
    assert audio_data(source, 16000)[1]["audio_lengths"] == 4800
    for index, problem in [(1, "row 1: its column text"), (2, "row 2: not a readable"), (3, "row 3: its column audio")]:
        with pytest.raises(BadFile, match=problem):
            data[index]
    assert len(audio_data(source.select([0, 1]), 16000, max_length=3000, segments=True)) == 3 + 2
    arrays = datasets.Dataset.from_dict({"sound": [{"array": [0.0, 0.5, 1.0, 0.5], "sampling_rate": 8000}]})
    assert audio_data(arrays, 8000, audio_column="sound")[0]["audio"].tolist() == [0.0, 0.5, 1.0, 0.5]
    paths = datasets.Dataset.from_dict({"audio": [str(path)]})
    assert audio_data(paths, 16000)[0]["audio_lengths"] == 4800
    with pytest.raises(ValueError, match="no column 'audio': its columns are sound"):
        audio_data(arrays, 8000)
    with pytest.raises(ValueError, match="captions='beside' is for files"):
        audio_data(source, 8000, captions="beside")
    with pytest.raises(ValueError, match="choose a split"):
        audio_data(datasets.DatasetDict({"train": source}), 8000)
    with pytest.raises(ValueError, match="streaming"):
        audio_data(source.to_iterable_dataset(), 8000)


class Own(Dataset):
    def __init__(self, *samples: object):
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> object:
        return self.samples[index]


def test_a_users_own_dataset():
    wave = torch.from_numpy(noise(0.1, 16000)).float()
    frozen = wave.numpy().copy()
    frozen.flags.writeable = False
    sounds = Own(wave, (wave, "a"), ("b", wave[None]), {"audio": (wave * 2**15).short()}, (frozen, 8000, "c"))
    data = audio_data(sounds, 16000)
    assert torch.equal(data[0]["audio"], wave) and data[0]["is_end"] and data[0]["audio_lengths"] == 1600
    assert data[1]["texts"] == "a" and data[2]["texts"] == "b" and torch.equal(data[2]["audio"], wave)
    assert (data[3]["audio"] - wave).abs().max() < 2**-15
    assert data[4]["texts"] == "c" and data[4]["audio_lengths"] == 3200  # its rate was said to be another
    crops = audio_data(sounds, 16000, max_length=100)
    assert len({crops.fetch(0, seeded(s))["audio"][0].item() for s in range(5)}) == 5
    assert len({unaugmented(crops).fetch(0, seeded(s))["audio"][0].item() for s in range(5)}) == 1
    assert not audio_data(Own({"audio": wave, "is_end": False}), 16000)[0]["is_end"]
    libri = (wave[None], 16000, "text", 1, 2, 3)
    named = audio_data(Own(libri), 16000, ds_fields=("audio", "sample_hz", "text", "_", "_", "_"))
    assert named[0]["texts"] == "text" and torch.equal(named[0]["audio"], wave)


def test_a_users_own_waves_at_two_rates():
    low, high = torch.from_numpy(ramp(1)).float(), torch.from_numpy(ramp(1, 12000)).float()
    rates = {"audio": 8000, "audio_for_codec": 12000}
    fields = ("raw_wave", "raw_wave_for_codec", "text")
    data = audio_data(Own((low, high, "a")), rates, max_length_seconds=0.1, ds_fields=fields)
    for seed in range(5):
        sample = data.fetch(0, seeded(seed))
        assert sample["audio"].shape == (800,) and sample["audio_for_codec"].shape == (1200,)
        assert abs(sample["audio"][0] - sample["audio_for_codec"][0]) < 1e-3 and sample["texts"] == "a"
    lone = audio_data(Own((low, "a")), rates)[0]
    assert lone["audio_for_codec_lengths"] == 12000 and lone["texts"] == "a"
    with pytest.raises(ValueError, match="fit the fields in more than one way"):
        audio_data(Own((low, high)), rates)[0]
    with pytest.raises(BadFile, match=r"item 0: holds no sound from 0.45 s on"):
        audio_data(Own({"audio": low, "audio_for_codec": high[:4000]}), rates, max_length_seconds=0.1, augment=False)[0]


def test_what_is_no_sound_is_refused():
    wave = torch.zeros(9)
    for sample, problem in [
        (torch.zeros(4, 5, 6), "fit no fields: found float32"),
        (torch.zeros(9, dtype=torch.int64), "fit no fields"),
        ((wave, 7, 8), "ds_fields"),
        ({"audio": torch.zeros(3, 9)}, r"item 0 is no sound, but float32 \[3, 9\] at 16000 Hz"),
        ({"audio": wave, "sample_hz": 0}, "at 0 Hz"),
        ({"wave": wave}, "an entry 'wave'"),
    ]:
        with pytest.raises(ValueError, match=problem):
            audio_data(Own(sample), 16000)[0]
    with pytest.raises(ValueError, match="int is no source of sound"):
        audio_data(3, 16000)
    for options in ({"captions": "beside"}, {"segments": True}):
        with pytest.raises(ValueError, match="is for files and columns"):
            audio_data(Own(wave), 16000, max_length=4, **options)


def test_synthetic_sounds_are_a_source():
    sample = audio_data(SyntheticSounds(3), {"audio": 16000, "audio_for_codec": 24000}, max_length_seconds=0.5)[1]
    assert (
        sample["audio"].shape == (8000,) and sample["audio_for_codec"].shape == (12000,) and "pitch" in sample["texts"]
    )


def test_sound_dataset_gives_waves(tmp_path: Path):
    folder = folder_of(tmp_path)
    one = SoundDataset(folder, 16000, ["wav", "flac", "ogg"], 4000, 320)
    assert one[0].shape == (4160,) and len(one) == 5 and one.keys[0] == "0.wav"
    assert one[0][4000:].eq(0).all() and one[0][:4000].abs().min() > 0
    two = SoundDataset(folder, (16000, 24000), ["wav", "flac", "ogg"], max_length=6000, seq_len_multiple_of=(320, 480))
    low, high = two.fetch(1, seeded(0))
    assert low.shape == (4160,) and high.shape == (6240,)
    single = SoundDataset(folder, (16000,), ["wav"])[0]
    assert isinstance(single, tuple) and len(single) == 1
    assert not torch.equal(one.fetch(0, seeded(0)), one.fetch(0, seeded(1)))
    plain = unaugmented(one)
    assert torch.equal(plain.fetch(0, seeded(0)), plain.fetch(0, seeded(1))) and one.samples.augment
    short = SoundDataset(folder, 16000, ["wav"], max_length=99999)
    assert short[0].shape == (99999,)
    assert SoundDataset(folder, 16000, ["wav"], max_length=99999, pad=False)[0].shape == (8000,)
    assert SoundDataset(folder, 16000, ["wav"], channels=2)[0].shape == (2, 8000)
    assert SoundDataset(folder, 16000, [".wav"], 100, augment=False)[0].shape == (100,)


def test_a_sound_dataset_given_to_a_trainer_keeps_what_it_knows(tmp_path: Path):
    folder = folder_of(tmp_path, 3)
    dataset = SoundDataset(folder, (16000, 24000), ["wav", "flac", "ogg"], max_length=6000, augment=False)
    data = audio_data(dataset, {"audio": 16000, "audio_for_codec": 24000})
    assert torch.equal(data.fetch(0, seeded(0))["audio"], dataset[0][0]) and data[0]["audio_lengths"] == 4000
    assert torch.equal(data[0]["audio_for_codec"], dataset[0][1]) and not data[0]["is_end"]
    assert audio_data(dataset, 8000)[0]["audio"].shape == (2000,)  # read again at the rate asked for
    assert audio_data(dataset, 8000, max_length=100)[0]["audio"].shape == (100,)
    assert len(audio_data(dataset, 8000, segments=True)) == 6


def test_audio_dataset_has_one_rate(tmp_path: Path):
    folder = tmp_path / "data"
    (folder).mkdir()
    (folder / "0.flac").write_bytes(b"junk")
    write(folder / "1.flac", noise(0.2, 22050, 2), 22050)
    write(folder / "2.flac", noise(0.2, 44100), 44100)
    data = AudioDataset(folder)
    assert data.target_sample_hz == 22050 and data[1].shape == (4410,) and data[2].shape == (4410,)
    assert AudioDataset(folder, ".flac", sample_hz=16000)[2].shape == (3200,)
    assert audio_data(data, 16000)[2]["audio_lengths"] == 3200
    with pytest.raises(ValueError, match="holds no wav file"):
        AudioDataset(folder, "wav")
    (folder / "x.wav").write_bytes(b"")
    with pytest.raises(ValueError, match=r"none of the 1 files can be read, for example .*x.wav: is empty"):
        AudioDataset(folder, ".wav")


@pytest.mark.parametrize("workers", [0, 1])
def test_get_dataloader_pads_or_curtails(workers: int):
    waves = Own(torch.ones(5), torch.ones(3), torch.ones(4))
    (padded,) = next(iter(get_dataloader(waves, batch_size=3, num_workers=workers)))
    assert padded.sum(dim=1).tolist() == [5, 3, 4] and padded.shape == (3, 5)
    (cut,) = next(iter(get_dataloader(waves, pad_to_longest=False, batch_size=3, num_workers=workers)))
    assert cut.eq(1).all() and cut.shape == (3, 3)
    (alone,) = next(iter(get_dataloader(waves, pad_to_longest=False, batch_size=1)))
    assert alone.shape == (1, 5)
    padded, lengths = next(iter(get_dataloader(waves, with_lengths=True, batch_size=3, num_workers=workers)))
    assert lengths.tolist() == [5, 3, 4]
    cut, lengths = next(iter(get_dataloader(waves, pad_to_longest=False, with_lengths=True, batch_size=3)))
    assert lengths.tolist() == [3, 3, 3]


@pytest.mark.parametrize("peak", [0.3 * 32768, 1e30])
def test_a_sound_in_other_units_is_a_bad_file(tmp_path: Path, peak: float):
    wave = np.full(1000, peak, np.float32)
    for recording in (opened(write(tmp_path / "x.wav", wave, 8000, "FLOAT")), Wave(wave, 8000, "x")):
        with pytest.raises(BadFile, match=r"x.*: reaches .*, and sound is from -1 to 1: divide it by its full scale"):
            AudioTransform(8000)(recording)
    assert AudioTransform(8000)(Wave(wave / peak * 7.9, 8000, "x"))["audio"].max() > 7


def test_get_dataloader_of_tuples():
    pairs = Own((torch.ones(5), torch.ones(2, 8), "a"), (torch.ones(3), torch.ones(2, 6), "b"))
    low, high, texts, low_lengths, high_lengths = next(iter(get_dataloader(pairs, batch_size=2, with_lengths=True)))
    assert low.shape == (2, 5) and high.shape == (2, 2, 8) and texts == ["a", "b"]
    assert low_lengths.tolist() == [5, 3] and high_lengths.tolist() == [8, 6]


def test_no_more_than_the_margin_is_needed():
    """`MARGIN` is a fact about soxr's filter: with it a crop is right to 1e-6, with half of it it is not."""
    wave = np.random.default_rng(0).standard_normal(60000).astype(np.float32)
    for source, target in [(44100, 16000), (16000, 24000), (8000, 44100)]:
        whole = torch.from_numpy(soxr.resample(wave, source, target))
        errors = []
        for margin in (audio_module.MARGIN, audio_module.MARGIN // 2):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(audio_module, "MARGIN", margin)
                crop = AudioTransform(target, max_length=3000)(Wave(wave, source, "x"), segment=3)["audio"]
            errors.append((crop - whole[9000:12000]).abs().max().item())
        assert errors[0] < 3e-6 < 2e-5 < errors[1]


def test_a_part_of_a_sound_dataset_is_read_at_the_rate_that_is_asked_for(tmp_path: Path):
    for number in range(3):
        soundfile.write(tmp_path / f"{number}.wav", np.full(1600, 0.1 * (number + 1)), 16000)
    whole = SoundDataset(tmp_path, 16000)
    found = audio_data(torch.utils.data.Subset(whole, [2, 0]), 8000)
    assert [len(found[index]["audio"]) for index in range(len(found))] == [800, 800]
    assert found[0]["audio"][400].item() == pytest.approx(0.3, abs=1e-3)
