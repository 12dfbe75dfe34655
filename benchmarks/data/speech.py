"""Transcribed speech from Debian packages: one Russian reader (99 min), and prompts of a telephone system in five languages (119 min).

    apt-get download festvox-ru asterisk-core-sounds-en asterisk-core-sounds-en-g722
    for package in *.deb; do dpkg -x $package unpacked; done
    python benchmarks/data/speech.py unpacked speech               # writes speech/manifest.jsonl and speech/*.flac, 16 kHz
    helicon train soundstream/soundstream data.source=speech/manifest.jsonl

The packages may be unpacked and used one by one, and there are asterisk-core-sounds-{fr,es,it,ru} (the texts) with -g722 (the sounds), too.
G.722 is decoded by the program ffmpeg. `--minutes` takes a part of the recordings, chosen by a hash of their names. What cannot be read, has
no text or is shorter than half a second is left out and counted.

festvox-ru is under a BSD-like licence, the prompts under CC-BY-SA-3.0 or CC-BY-3.0 (see the packages' `usr/share/doc/*/copyright`).
"""

import argparse
import gzip
import hashlib
import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import soundfile

READER = "usr/share/festival/voices/russian/msu_ru_nsh_clunits"
PROMPTS, TEXTS = "usr/share/asterisk/sounds", "usr/share/doc"
HZ, SHORTEST = 16000, 0.5

Recording = tuple[Path, str, str, str]  # the file, its name, its text, its speaker


def reader(root: Path) -> Iterator[Recording]:
    """The sentences of festvox-ru."""
    folder = root / READER
    listed = folder / "etc/txt.done.data"
    if not listed.is_file():
        return
    for line in listed.read_text(encoding="utf-8").splitlines():
        if found := re.match(r'\(\s*(\S+)\s+"(.*)"\s*\)', line):
            yield folder / "wav" / f"{found[1]}.wav", f"ru-reader-{found[1]}", found[2], "ru-reader"


def prompts(root: Path) -> Iterator[Recording]:
    """The sounds of every asterisk-core-sounds package whose texts are there."""
    for listed in sorted((root / TEXTS).glob("asterisk-core-sounds-*/core-sounds-*.txt.gz")):
        language = listed.name.removeprefix("core-sounds-").removesuffix(".txt.gz")
        for line in gzip.decompress(listed.read_bytes()).decode("utf-8", "replace").splitlines():
            name, colon, text = line.partition(":")
            if line.startswith(";") or not colon:
                continue
            for folder in sorted((root / PROMPTS).glob(f"{language}*")):
                path = folder / f"{name.strip()}.g722"
                if path.is_file():
                    yield path, f"{language}-{name.strip().replace('/', '-')}", text.strip(), f"asterisk-{language}"
                    break


def samples_of(path: Path) -> np.ndarray:
    """The sound at 16 kHz, one channel."""
    if path.suffix != ".g722":
        samples, hz = soundfile.read(path, dtype="int16")
        if hz != HZ or samples.ndim != 1:
            raise ValueError(f"{path} has {hz} samples a second in {samples.ndim} dimensions")
        return samples
    command = ["ffmpeg", "-v", "error", "-f", "g722", "-i", str(path), "-ar", str(HZ), "-ac", "1", "-f", "s16le", "-"]
    return np.frombuffer(subprocess.run(command, check=True, capture_output=True).stdout, dtype="<i2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("unpacked", type=Path, help="the folder the packages were unpacked into")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="at most so much")
    arguments = parser.parse_args()
    found = [*reader(arguments.unpacked), *prompts(arguments.unpacked)]
    if not found:
        raise SystemExit(f"{arguments.unpacked} holds none of the packages: unpack them there with dpkg -x")
    if any(path.suffix == ".g722" for path, *_ in found) and shutil.which("ffmpeg") is None:
        raise SystemExit(
            "the prompts are G.722 files, which the program ffmpeg decodes: install it (apt-get install ffmpeg)"
        )
    arguments.out.mkdir(parents=True, exist_ok=True)
    counts: Counter[str] = Counter()
    seconds = 0.0
    found.sort(key=lambda recording: hashlib.sha256(recording[1].encode()).digest())
    with (arguments.out / "manifest.jsonl").open("w", encoding="utf-8") as manifest:
        for path, name, text, speaker in found:
            if seconds >= 60 * arguments.minutes:
                break
            try:
                samples = samples_of(path)
            except (OSError, ValueError, subprocess.CalledProcessError, soundfile.SoundFileError):
                counts["could not be read"] += 1
                continue
            if not text or len(samples) < SHORTEST * HZ:
                counts["had no text or were too short"] += 1
                continue
            soundfile.write(arguments.out / f"{name}.flac", samples, HZ)
            row = {"path": f"{name}.flac", "text": text, "speaker": speaker}
            manifest.write(json.dumps(row, ensure_ascii=False) + "\n")
            seconds += len(samples) / HZ
            counts[speaker] += 1
    print(
        f"{arguments.out / 'manifest.jsonl'}: {seconds / 60:.1f} minutes; "
        + ", ".join(f"{n} {w}" for w, n in counts.items())
    )


if __name__ == "__main__":
    main()
