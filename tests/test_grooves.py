"""`benchmarks/data/grooves.py`: captioned music, here by an accompanist and a synthesizer that only pretend."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

import children

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "data" / "grooves.py"
BAR, REST = "1 192t 90", " z "


def groove(name: str, description: str, **tracks: tuple[str, str]) -> dict[str, object]:
    listed = [{"track": track, "voice": [voice] * 2, "sequence": [REST, bar]} for track, (voice, bar) in tracks.items()]
    return {"groove": name, "description": description, "tracks": listed}


PIANO = {"CHORD": ("Piano1", BAR)}
LIBRARY = {
    "std/waltz": [
        groove("SlowWaltz1Sus", "Adds  strings to ``Waltz''.", BASS=("AcousticBass", REST), DRUM_1=("Snare", BAR), **PIANO),
        groove("50sEnd", "A 2 bar ending.", **PIANO),
        groove("Silent", "Nothing is heard.", **PIANO),
    ],
    "std/again": [groove("50sEnd", "A 2 bar ending.", **PIANO)],
    "zoom/ROCK": [groove("ROCK26", "Time = 4/4, SeqLen = 2; Kick, Snare.", **PIANO)],
}  # fmt: skip

# Lists the grooves of a file, and "plays" a score by copying it.
MMA = """import json, os, shutil, sys
assert os.environ["MMA_HOME"].endswith("usr/share/mma")
if "-Djs" in sys.argv:
    print("Warning\\nJSON\\n" + open(sys.argv[-1]).read())
else:
    shutil.copy(sys.argv[-1], sys.argv[-2])
"""
# Bars of two seconds of noise, but for one that is silent.
FLUIDSYNTH = """#!{python} -IS
import random, sys, wave
score = open(sys.argv[-1]).read()
samples = b"" if "Silent" in score else random.Random(0).randbytes(4 * 8000)  # two channels of half a second
with wave.open(sys.argv[sys.argv.index("-F") + 1], "wb") as file:
    file.setparams((2, 2, int(sys.argv[sys.argv.index("-r") + 1]), 0, "NONE", ""))
    file.writeframes((samples or bytes(32000)) * 4 * (score.count("\\n") - 3))
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "unpacked"
    font = root / "usr/share/sounds/sf2/TimGM6mb.sf2"
    for folder in (root / "usr/bin", font.parent, tmp_path / "bin"):
        folder.mkdir(parents=True)
    font.touch()
    (root / "usr/bin/mma").write_text(MMA)
    for name, grooves in LIBRARY.items():
        path = root / "usr/share/mma/lib" / f"{name}.mma"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(grooves))
    (root / "usr/share/mma/lib/broken.mma").write_text("no groove")
    program = tmp_path / "bin" / "fluidsynth"
    program.write_text(FLUIDSYNTH.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return root


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return children.run_script(SCRIPT, *arguments)


def test_grooves_become_captioned_music(packages: Path, tmp_path: Path) -> None:
    out = tmp_path / "music"
    done = run(packages, out)
    assert done.returncode == 0, done.stderr
    rows = {row["text"]: row for row in map(json.loads, (out / "manifest.jsonl").read_text().splitlines())}
    assert {text: (row["instruments"], row["style"]) for text, row in rows.items()} == {
        "slow waltz 1 sus: adds strings to waltz": (["piano", "drums"], "std/waltz"),
        "50s end: a 2 bar ending": (["piano"], "std/again"),
        "rock 26: kick, snare": (["piano"], "zoom/ROCK"),
    }
    for said in ("1 files cannot be read", "1 read as another does", "1 cannot be played, or are silent"):
        assert said in done.stdout
    assert "3 grooves of 3 styles" in done.stdout
    for row in rows.values():
        samples, hz = soundfile.read(out / row["path"])
        assert hz == 16000 and samples.shape == (8 * hz,) and 0.2 < np.abs(samples).max() < 1


def test_grooves_of_some_styles_in_the_room_there_is(packages: Path, tmp_path: Path) -> None:
    done = run(packages, tmp_path / "some", "--styles", "zoom/ROCK", "std/waltz", "--max-mb", "0.03")
    assert done.returncode == 0 and "found no room" in done.stdout, done.stderr
    assert len(list((tmp_path / "some").glob("*.opus"))) == 1
    done = run(packages, tmp_path / "none", "--max-mb", "0.001")
    assert done.returncode == 1 and "nothing is left of 4 grooves: " in done.stderr


def test_what_grooves_need_must_be_there(packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(tmp_path / "bin", tmp_path / "out")
    assert done.returncode == 1 and "has no usr/bin/mma: unpack the packages there" in done.stderr
    done = run(packages, tmp_path / "out", "--styles", "std/polka")
    assert "--styles std/polka: there are broken, std/again, std/waltz, zoom/ROCK" in done.stderr
    monkeypatch.setenv("PATH", "/nowhere")
    done = run(packages, tmp_path / "out")
    assert done.returncode == 1 and "install it (apt-get install fluidsynth)" in done.stderr
    assert not (tmp_path / "out").exists()
