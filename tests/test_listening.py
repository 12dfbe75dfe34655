"""`benchmarks/listening.py`: what is made of what packages hear. The packages themselves are not needed here."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import soundfile

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "listening.py"


@pytest.fixture(scope="module")
def listening() -> ModuleType:
    spec = importlib.util.spec_from_file_location("listening", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_words_are_counted_as_they_are_spoken(listening: ModuleType) -> None:
    assert listening.words("Press 1, or 25... the Twenty-first's!") == (
        ["press", "one", "or", "two", "five", "the", "twenty", "first's"]
    )
    assert listening.words("...") == []


@pytest.mark.parametrize(
    ("true", "heard", "count"),
    [
        ("a b c", "a b c", 0), ("a b c", "a x c", 1), ("a b c", "b c", 1), ("a b", "x a b y", 2), ("a b c", "", 3),
        ("", "a", 1), ("a b c d", "b a c", 3), ("kitten", "sitting", 1),
    ],
)  # fmt: skip
def test_edits_are_the_fewest(listening: ModuleType, true: str, heard: str, count: int) -> None:
    assert listening.edits(true.split(), heard.split()) == count
    assert listening.edits("kitten", "sitting") == 3  # of letters


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two voices, one of which speaks English. A sound is a constant, by which it is known."""
    rows = [("00", "one two", "tom-en", 0.5), ("01", "three four", "tom-en", 0.5), ("02", "otto", "eva", 0.25)]
    for name, _, _, level in rows:
        for kind, factor in {"recording": 1.0, "prompt": 1.0, "spoken": 0.5}.items():
            soundfile.write(tmp_path / f"{name}-{kind}.flac", np.full(160, factor * level), 16000)
    said = [{"name": name, "text": text, "voice": voice} for name, text, voice, _ in rows]
    (tmp_path / "sounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in said))
    return tmp_path


def test_each_kind_of_sound_is_judged(listening: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hearer who understands whatever is loud as "one two", and to whom voices differ as loudness does."""
    monkeypatch.setattr(listening, "transcriber", lambda: lambda wave: "One, 2." if wave[0] > 0.4 else "")
    angle = lambda wave: np.pi * float(wave[0])
    monkeypatch.setattr(
        listening, "speaker_encoder", lambda: lambda wave: np.array([np.cos(angle(wave)), np.sin(angle(wave))])
    )
    rows = {row["case"]: row for row in listening.judged(folder)}
    recording, prompt, spoken = (rows[kind] for kind in ("recording", "prompt", "spoken"))
    assert [row["sounds"] for row in rows.values()] == [3, 3, 3] and recording["words"] == 4 == spoken["words"]
    assert recording["word error rate"] == 0.5 and spoken["word error rate"] == 1 and prompt["words"] is None
    half, quarter, eighth = np.cos(np.pi / 4 * np.array([1, 1 / 2, 0]))
    assert recording["similarity, own voice"] == pytest.approx(1, abs=1e-3) == prompt["similarity, own voice"]
    assert recording["similarity, other voices"] == pytest.approx(half, abs=1e-3)
    assert spoken["similarity, own voice"] == pytest.approx((2 * half + quarter) / 3, abs=1e-3)
    # Two of them are as the other voice is, and one is three eighths of a half turn from both of the others.
    assert spoken["similarity, other voices"] == pytest.approx((2 * eighth + 2 * np.cos(3 * np.pi / 8)) / 4, abs=1e-3)


def test_it_says_what_is_missing(listening: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("moonshine_voice", "resemblyzer"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit, match=r"pip install moonshine-voice==0\.0\.64"):
        listening.judged(folder)
    with pytest.raises(SystemExit, match="pip install resemblyzer"):
        listening.speaker_encoder()
    soundfile.write(folder / "00-spoken.flac", np.zeros(80), 8000)
    with pytest.raises(SystemExit, match="has 8000 samples a second, and these packages hear 16000"):
        listening.written(folder)
    with pytest.raises(SystemExit, match="holds no sounds"):
        listening.written(folder / "nowhere")
