"""Transcribed utterances from Debian packages, to learn to speak from: one Russian reader whose phonemes have their times, and the
prompts of a telephone system in five languages.

    apt-get download festvox-ru asterisk-core-sounds-en asterisk-core-sounds-en-g722
    for package in *.deb; do dpkg -x $package unpacked; done
    python benchmarks/data/transcribed.py unpacked speech            # writes speech/manifest.jsonl and speech/*.flac, 16 kHz
    helicon train voicebox/voicebox data.source=speech/manifest.jsonl data.captions=column

The packages may be unpacked and used one by one, and there are asterisk-core-sounds-{fr,es,it,ru} (the texts) with -g722 (the sounds), too.
A row of the manifest has `path`, `text`, `voice`, and of the Russian reader `phonemes` and `durations`. Left out and counted is what cannot
be read, is shorter than half a second or longer than 20, and prompts that are no speech or of which the text is not what is said: those
with brackets in it. `--voices` chooses voices; of more than `--max-mb` an even part of each voice is taken, chosen by a hash of the names.
`--opus` makes files a quarter as large (35 kbit/s), which lose a little, for where they have to travel.

festvox-ru is under a BSD-like licence, the prompts under CC-BY-SA-3.0 or CC-BY-3.0 (see the packages' `usr/share/doc/*/copyright`).
"""

import argparse
import hashlib
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from g722 import decode

from speech import HZ, SHORTEST, prompts, reader, samples_of

LONGEST = 20.0  # seconds
FORMATS: dict[str, dict[str, Any]] = {
    "flac": {"compression_level": 1.0},
    "opus": {"format": "OGG", "subtype": "OPUS", "compression_level": 0.88},
}
PROBLEMS = (OSError, ValueError, soundfile.SoundFileError)


@dataclass
class Utterance:
    path: Path
    name: str
    text: str
    voice: str
    samples: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int16))

    def row(self, kind: str) -> dict[str, Any]:
        return {"path": f"{self.name}.{kind}", "text": self.text, "voice": self.voice, **phones(self.path)}


def phones(path: Path) -> dict[str, Any]:
    """What the reader's labels say: the phonemes, and the seconds that each lasts. They list where each ends, after a line "#"."""
    labels = path.parents[1] / "lab" / f"{path.stem}.lab"
    if path.suffix != ".wav" or not labels.is_file():
        return {}
    lines = [line.split() for line in labels.read_text(encoding="latin-1").partition("#")[2].splitlines()]
    ends = [float(line[0]) for line in lines if line]
    durations = np.diff(ends, prepend=0.0).round(5).tolist()
    return {"phonemes": [line[-1] for line in lines if line], "durations": durations}


def found_in(root: Path) -> list[Utterance]:
    """Each recording once, though a list may have it twice. (In the reader's texts a plus stands before a vowel to be stressed, here
    and there.)"""
    found: dict[str, Utterance] = {}
    for path, name, text, voice in (*reader(root), *prompts(root)):
        found.setdefault(name, Utterance(path, name, text.replace("+", "").strip(), voice))
    return list(found.values())


def is_spoken(text: str) -> bool:
    return bool(re.search(r"\w", text)) and not re.search(r"[\[\]()<>]", text)


def read(utterances: list[Utterance], counts: Counter[str]) -> list[Utterance]:
    """Those that can be used, with their samples. (G.722 is decoded for all at once.)"""
    spoken = [one for one in utterances if is_spoken(one.text)]
    counts["are no speech, or their texts not what is said"] += len(utterances) - len(spoken)
    encoded = [one for one in spoken if one.path.suffix == ".g722" and one.path.stat().st_size <= LONGEST * HZ / 2]
    for one, samples in zip(encoded, decode([one.path.read_bytes() for one in encoded]), strict=True):
        one.samples = samples
    heard = []
    for one in spoken:
        try:
            one.samples = one.samples if one.path.suffix == ".g722" else samples_of(one.path)
        except PROBLEMS:
            counts["cannot be read"] += 1
        else:
            heard.append(one)
    usable = [one for one in heard if SHORTEST * HZ <= len(one.samples) <= LONGEST * HZ]
    counts["are shorter than 0.5 s or longer than 20 s"] += len(heard) - len(usable)
    return usable


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("unpacked", type=Path, help="the folder the packages were unpacked into")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--voices", nargs="+", help="of these alone: ru-reader, asterisk-en, ...")
    parser.add_argument("--max-mb", type=float, default=float("inf"), help="at most so many megabytes of sound")
    parser.add_argument("--opus", action="store_true", help="in place of flac")
    arguments = parser.parse_args()
    found = found_in(arguments.unpacked)
    if not found:
        raise SystemExit(f"{arguments.unpacked} holds none of the packages: unpack them there with dpkg -x")
    voices = sorted({one.voice for one in found})
    unknown = [voice for voice in arguments.voices or () if voice not in voices]
    if unknown:
        raise SystemExit(f"--voices {unknown[0]}: there are {', '.join(voices)}")
    counts: Counter[str] = Counter()
    usable = read([one for one in found if one.voice in (arguments.voices or voices)], counts)
    if not usable:
        raise SystemExit("nothing is left of the recordings: " + ", ".join(f"{n} {why}" for why, n in counts.items()))
    write(usable, arguments.out, "opus" if arguments.opus else "flac", arguments.max_mb, counts)


def write(utterances: list[Utterance], out: Path, kind: str, max_mb: float, counts: Counter[str]) -> None:
    """The files, in the order of a hash of their names until there is no more room; then the manifest, by name."""
    out.mkdir(parents=True, exist_ok=True)
    utterances.sort(key=lambda one: hashlib.sha256(one.name.encode()).digest())
    seconds: Counter[str] = Counter()
    kept, size = [], 0
    for one in utterances:
        path = out / f"{one.name}.{kind}"
        soundfile.write(path, one.samples, HZ, **FORMATS[kind])
        if size + path.stat().st_size > max_mb * 1e6:
            path.unlink()
            counts["found no room"] = len(utterances) - len(kept)
            break
        size += path.stat().st_size
        kept.append(one)
        seconds[one.voice] += len(one.samples) / HZ
    rows = [json.dumps(one.row(kind), ensure_ascii=False) for one in sorted(kept, key=lambda one: one.name)]
    (out / "manifest.jsonl").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    for voice in sorted(seconds):
        number = sum(one.voice == voice for one in kept)
        print(f"{voice:<14}{number:>6} utterances {seconds[voice] / 60:>7.1f} min")
    print("left out: " + (", ".join(f"{number} {why}" for why, number in counts.items() if number) or "none"))
    print(
        f"{out / 'manifest.jsonl'}: {len(kept)} utterances, {sum(seconds.values()) / 60:.1f} min, {size / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main()
