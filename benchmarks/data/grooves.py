"""Captioned music from Debian packages: the grooves of MMA, an accompanist, played by the synthesizer FluidSynth.

    apt-get install fluidsynth
    apt-get download mma timgm6mb-soundfont
    for package in *.deb; do dpkg -x $package unpacked; done
    python benchmarks/data/grooves.py unpacked music          # writes music/manifest.jsonl and music/*.opus, 16 kHz, in half an hour

There are 1,900 grooves: a style (waltz, samba, gospel, ...) in some arrangement, each with a sentence by its author. Each plays eight
seconds of one of a few progressions of chords, in a key and at a speed drawn by a hash of its name; slowly or fast where its words say
so. A row of the manifest has `path`, `text` (the groove's name and the sentence), `instruments` (those that are not silent) and `style`
(the file the groove is from). Left out and counted is what MMA cannot play, what is silent, and what reads as another does. `--styles`
chooses styles; of more than `--max-mb` a part is taken, by the hash.

MMA and its grooves are under the GPL-2, the sounds under the GPL-2, too (see the packages' `usr/share/doc/*/copyright`).
"""

import argparse
import hashlib
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

HZ, SECONDS, SHORTEST = 16000, 8.0, 4.0
PEAK, SILENT = 0.5, 1e-3
OPUS = {"format": "OGG", "subtype": "OPUS", "compression_level": 0.96}  # 16 kbit/s
MMA, LIBRARY, FONT = "usr/bin/mma", "usr/share/mma/lib", "usr/share/sounds/sf2/TimGM6mb.sf2"
PROGRESSIONS = ("C Am F G7", "C F C G7", "Am F C G", "Dm G7 C A7", "C E7 Am F", "Cm Ab Fm G7")
SLOW, FAST, USUAL = (70, 90), (150, 180), (100, 140)  # beats a minute


@dataclass(frozen=True)
class Groove:
    file: str  # below the library, without its ending
    name: str
    text: str
    instruments: tuple[str, ...]

    @property
    def key(self) -> str:
        return re.sub(r"[^A-Za-z0-9]+", "-", f"{self.file}-{self.name}").lower()

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.key.encode()).digest()

    def row(self) -> dict[str, Any]:
        return {
            "path": f"{self.key}.opus",
            "text": self.text,
            "instruments": list(self.instruments),
            "style": self.file,
        }

    def score(self) -> str:
        """What MMA plays."""
        draw = random.Random(self.digest)
        words = set(re.findall(r"\w+", self.text))
        speeds = SLOW if words & {"slow", "slower", "ballad"} else FAST if words & {"fast", "faster"} else USUAL
        chords = draw.choice(PROGRESSIONS).split()
        tempo = draw.randint(*speeds)
        lines = [f"Tempo {tempo}", f"Transpose {draw.randint(-5, 6)}", f"Groove {self.file}:{self.name}"]
        bars = math.ceil(SECONDS * tempo / 120)  # enough even of two beats each
        return "\n".join([*lines, *(f"{bar + 1} {chords[bar % len(chords)]}" for bar in range(bars)), ""])


def spelled(name: str) -> str:
    """SlowWaltz1Sus becomes "slow waltz 1 sus", and 50sRock "50s rock"."""
    parts = re.findall(r"\d+s(?![a-z])|\d+|[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return " ".join(parts).lower()


def words_of(name: str, description: str) -> str:
    """In the words of the author, without those on how long the groove is."""
    said = re.sub(r"Time = \S+, SeqLen = \d+;", "", description).replace("``", "").replace("''", "")
    said = re.sub(r"\s+", " ", said).strip().rstrip(".").lower()
    return f"{spelled(name)}: {said}" if said else spelled(name)


def instruments_of(tracks: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Of the tracks that have something to play; drums are one instrument."""
    found = []
    for track in tracks:
        is_drum = track["track"].upper().startswith("DRUM")
        for voice, bar in zip(track["voice"], track["sequence"], strict=False):
            if bar.strip() not in ("", "z"):
                found.append("drums" if is_drum else re.sub(r" \d+$", "", spelled(voice)))
    return tuple(sorted(dict.fromkeys(found), key=lambda name: name == "drums"))


class Accompanist:
    """The program MMA, as it was unpacked."""

    def __init__(self, root: Path):
        self.root = root

    def run(self, *arguments: str | Path) -> str:
        environment = os.environ | {"MMA_HOME": str((self.root / MMA).parents[1] / "share" / "mma")}
        command = [sys.executable, str(self.root / MMA), "-w", *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    def grooves(self, file: Path) -> Iterator[Groove]:
        listed = json.loads(self.run("-Djs", file).partition("JSON")[2])
        name = str(file.relative_to(self.root / LIBRARY).with_suffix(""))
        for one in listed:
            text = words_of(one["groove"], one["description"])
            yield Groove(name, one["groove"], text, instruments_of(one["tracks"]))


def found_in(accompanist: Accompanist, styles: Sequence[str] | None, counts: Counter[str]) -> list[Groove]:
    """All grooves, or those of some styles, in the order of their hashes; each that reads the same once."""
    library = accompanist.root / LIBRARY
    files = {str(path.relative_to(library).with_suffix("")): path for path in sorted(library.rglob("*.mma"))}
    unknown = [style for style in styles or () if style not in files]
    if unknown:
        raise SystemExit(f"--styles {unknown[0]}: there are {', '.join(files)}")
    found: dict[str, Groove] = {}
    known: set[tuple[str, tuple[str, ...]]] = set()
    for name in styles or files:
        try:
            listed = list(accompanist.grooves(files[name]))
        except (subprocess.CalledProcessError, ValueError):
            counts["files cannot be read"] += 1
            continue
        for groove in listed:
            reads = (groove.text, groove.instruments)
            if reads in known or groove.key in found:
                counts["read as another does"] += 1
            else:
                found[groove.key] = groove
                known.add(reads)
    return sorted(found.values(), key=lambda groove: groove.digest)


def played(groove: Groove, accompanist: Accompanist, folder: Path) -> np.ndarray:
    """Eight seconds, one channel."""
    score, midi, wave = (folder / f"groove.{ending}" for ending in ("mma", "mid", "wav"))
    midi.unlink(missing_ok=True)
    score.write_text(groove.score())
    accompanist.run("-0", "-f", midi, score)
    command = ["fluidsynth", "-ni", "-q", "-r", str(HZ), "-F", str(wave), str(accompanist.root / FONT), str(midi)]
    subprocess.run(command, check=True, capture_output=True)
    samples, _ = soundfile.read(wave, dtype="float32", always_2d=True)
    mono = samples.mean(axis=1)[: int(SECONDS * HZ)]
    loudest = np.abs(mono).max(initial=0.0)
    if len(mono) < SHORTEST * HZ or loudest < SILENT:
        raise ValueError(f"{groove.key} is silent or short")
    return mono * (PEAK / loudest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("unpacked", type=Path, help="the folder the packages were unpacked into")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--styles", nargs="+", help="of these alone: stdlib/waltz, ...")
    parser.add_argument("--max-mb", type=float, default=float("inf"), help="at most so many megabytes of sound")
    arguments = parser.parse_args()
    for needed in (MMA, FONT):
        if not (arguments.unpacked / needed).is_file():
            raise SystemExit(f"{arguments.unpacked} has no {needed}: unpack the packages there with dpkg -x")
    if shutil.which("fluidsynth") is None:
        raise SystemExit("the program fluidsynth plays the music: install it (apt-get install fluidsynth)")
    counts: Counter[str] = Counter()
    accompanist = Accompanist(arguments.unpacked.resolve())
    write(found_in(accompanist, arguments.styles, counts), accompanist, arguments.out, arguments.max_mb, counts)


def write(grooves: Sequence[Groove], accompanist: Accompanist, out: Path, max_mb: float, counts: Counter[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    kept: list[Groove] = []
    size, seconds = 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        for number, groove in enumerate(grooves):
            path = out / groove.row()["path"]
            try:
                samples = played(groove, accompanist, Path(folder))
            except (OSError, ValueError, subprocess.CalledProcessError):
                counts["cannot be played, or are silent"] += 1
                continue
            soundfile.write(path, samples, HZ, **OPUS)
            if size + path.stat().st_size > max_mb * 1e6:
                path.unlink()
                counts["found no room"] = len(grooves) - number
                break
            size, seconds = size + path.stat().st_size, seconds + len(samples) / HZ
            kept.append(groove)
    left_out = ", ".join(f"{number} {why}" for why, number in counts.items() if number) or "none"
    if not kept:
        raise SystemExit(f"nothing is left of {len(grooves)} grooves: {left_out}")
    rows = [json.dumps(groove.row(), ensure_ascii=False) for groove in sorted(kept, key=lambda groove: groove.key)]
    (out / "manifest.jsonl").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    print(f"left out: {left_out}")
    styles = len({groove.file for groove in kept})
    print(
        f"{out / 'manifest.jsonl'}: {len(kept)} grooves of {styles} styles, {seconds / 60:.1f} min, {size / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main()
