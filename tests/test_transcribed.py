"""`benchmarks/data/transcribed.py`: utterances with their texts, and the decoder of G.722 it needs."""

import gzip
import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import soundfile

from helicon.models.voicebox.data import training_speech
from helicon.models.voicebox.features import MelVoco
from helicon.models.voicebox.text import PhonemeInventory

FOLDER = Path(__file__).parents[1] / "benchmarks" / "data"
READER = "usr/share/festival/voices/russian/msu_ru_nsh_clunits"


@pytest.fixture(scope="module")
def g722() -> ModuleType:
    spec = importlib.util.spec_from_file_location("g722", FOLDER / "g722.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def digest(samples: np.ndarray) -> str:
    return hashlib.sha256(samples.astype("<i2").tobytes()).hexdigest()[:16]


def test_g722_is_decoded_bit_for_bit(g722: ModuleType) -> None:
    """The hashes are those of what libavcodec (of ffmpeg 8) makes of the same bytes."""
    noise = hashlib.shake_256(b"g722").digest(3000)
    loud, quiet, nothing = g722.decode([noise, bytes([0xFA]) * 500 + noise[:1500], b""])
    assert (digest(loud), digest(quiet)) == ("c88d7373fc6a94ea", "9479b60aa261bf0f")
    assert len(loud) == 6000 and len(nothing) == 0


def test_recordings_that_are_decoded_together_are_as_if_alone(
    g722: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    recordings = [hashlib.shake_256(bytes([number])).digest(50 + 70 * number % 160) for number in range(7)]
    alone = [g722.decode([one])[0] for one in recordings]
    for most in (2**25, 300):  # all at a time, and two at most
        monkeypatch.setattr(g722, "MOST_BYTES", most)
        assert all(map(np.array_equal, g722.decode(recordings), alone))


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """What is left of two packages: three sentences of a reader, and five prompts."""
    root, rng = tmp_path / "unpacked", np.random.default_rng(0)
    reader = root / READER
    for folder in ("wav", "lab", "etc"):
        (reader / folder).mkdir(parents=True)
    for number, seconds in enumerate((1.0, 21.0, 0.8)):
        wave = rng.integers(-3000, 3000, round(seconds * 16000)).astype(np.int16)
        soundfile.write(reader / "wav" / f"ru_{number}.wav", wave, 16000)
        labels = "#\n0.20000 125 pau\n0.50000 125 dd\n0.75000 125 a\n"
        (reader / "lab" / f"ru_{number}.lab").write_text("header\n" + labels)
    lines = [f'( ru_{number} "Д+а, {number}." )' for number in range(3)]
    (reader / "etc" / "txt.done.data").write_text("\n".join(lines), encoding="utf-8")
    texts = root / "usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz"
    texts.parent.mkdir(parents=True)
    listed = "; Sounds\nyes: Yes.\nbeep: [a tone]\nshort: No.\ndigits/1: one\ngone: Gone.\nyes: Yes again.\n"
    texts.write_bytes(gzip.compress(listed.encode()))
    sounds = root / "usr/share/asterisk/sounds/en_US_f_Allison"
    (sounds / "digits").mkdir(parents=True)
    for name, seconds in {"yes": 0.7, "beep": 0.7, "short": 0.3, "digits/1": 0.6}.items():
        (sounds / f"{name}.g722").write_bytes(rng.bytes(round(8000 * seconds)))
    return root


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / "transcribed.py"), *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def test_packages_become_a_manifest_to_learn_from(packages: Path, tmp_path: Path) -> None:
    done = run(packages, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "1 are no speech" in done.stdout and "2 are shorter than 0.5 s or longer than 20 s" in done.stdout
    space = MelVoco(n_mels=20, sampling_rate=16000, n_fft=512, hop_length=160)
    source = training_speech(tmp_path / "out" / "manifest.jsonl", captions="column")
    data = source.at(space)
    assert list(data.keys) == ["en-digits-1.flac", "en-yes.flac", "ru-reader-ru_0.flac", "ru-reader-ru_2.flac"]
    assert [data[index]["texts"] for index in range(4)] == ["one", "Yes.", "Да, 0.", "Да, 2."]
    assert [data[index]["audio_lengths"] for index in range(4)] == [9600, 11200, 16000, 12800]
    inventory = PhonemeInventory.fitted(source.phonemes())
    assert inventory.arguments["symbols"] == ["a", "dd", "pau"]
    timed = source.at(space, inventory, names=("phonemes", "durations"))
    assert len(timed) == 2 and timed[0]["phonemes"].tolist() == [2, 1, 0]
    assert timed[0]["durations"].tolist() == pytest.approx([0.2, 0.3, 0.25])


def test_what_cannot_be_read_is_counted_once(packages: Path, tmp_path: Path) -> None:
    (packages / READER / "wav" / "ru_2.wav").write_bytes(b"no sound")
    done = run(packages, tmp_path / "out", "--voices", "ru-reader")
    assert done.returncode == 0, done.stderr
    assert "1 cannot be read, 1 are shorter than 0.5 s or longer than 20 s" in done.stdout


def test_what_is_taken_can_be_limited(packages: Path, tmp_path: Path) -> None:
    done = run(packages, tmp_path / "out", "--voices", "ru-reader", "--max-mb", "0.035")
    assert done.returncode == 0 and "1 found no room" in done.stdout and "asterisk" not in done.stdout
    assert len(list((tmp_path / "out").glob("*.flac"))) == 1
    done = run(packages, tmp_path / "small", "--voices", "asterisk-en", "--opus")
    assert done.returncode == 0, done.stderr
    sample = training_speech(tmp_path / "small" / "manifest.jsonl", captions="column").at(MelVoco(sampling_rate=16000))[
        0
    ]
    assert sample["texts"] == "one" and sample["audio_lengths"] == 9600
    assert len(list((tmp_path / "small").glob("*.opus"))) == 2
    done = run(packages, tmp_path / "out", "--voices", "robot")
    assert done.returncode == 1 and "--voices robot: there are asterisk-en, ru-reader" in done.stderr
    done = run(tmp_path / "out", tmp_path / "none")
    assert done.returncode == 1 and "holds none of the packages" in done.stderr
