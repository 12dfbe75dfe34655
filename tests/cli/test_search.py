"""`helicon search`: from a network and a folder of sounds to a table and a manifest."""

import json
from pathlib import Path

import pytest
import soundfile
from typer.testing import CliRunner, Result

from helicon.cli import app
from helicon.cli import search as verb
from helicon.data.audio import audio_data
from helicon.models.musiclm.conditioning import MuLaNEmbedQuantizer
from models.musiclm.tiny import HZ, mulan, pairs
from models.soundstream.tiny import tiny as codec


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sounds of half a second, a file that is none, and a network; what is kept stays here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    mulan().save("mulan")
    Path("sounds/deep").mkdir(parents=True)
    for number, wave in enumerate(pairs(3)[0]):
        soundfile.write(f"sounds/deep/{number}.wav", wave.numpy(), HZ)
    Path("sounds/bad.wav").write_bytes(b"no sound")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["search", "mulan", "--data", "sounds", *arguments])


def test_texts_and_sounds_are_looked_for() -> None:
    result = call("--text", "a loud tone", "--text", "a chirp", "--like", "sounds/deep/1.wav", "-o", "found.jsonl")
    assert result.exit_code == 0, result.output
    said, first, second, third = result.stdout.split("\n\n")
    assert said == "3 recordings read, 0 known, 1 cannot be read; clips of 10 s, on cpu"
    title, *rows = first.splitlines()
    assert title == "a loud tone" and [row.split()[0] for row in rows] == ["1", "2", "3"]
    assert {row.split()[2] for row in rows} == {f"sounds/deep/{number}.wav" for number in range(3)}
    assert all(row.endswith("  from 0.0 s") for row in rows) and second.startswith("a chirp\n")
    assert third.startswith("like sounds/deep/1.wav\n") and third.endswith("\nwrote found.jsonl\n")
    lines = [json.loads(line) for line in Path("found.jsonl").read_text().splitlines()]
    assert [line.get("text", line.get("like")) for line in lines] == [
        *["a loud tone"] * 3,
        *["a chirp"] * 3,
        *["sounds/deep/1.wav"] * 2,
    ]
    assert [f"{line['similarity']:.3f}" for line in lines[:3]] == [row.split()[1] for row in rows]
    clips = audio_data("found.jsonl", HZ, max_length_seconds=0.5)
    assert len(clips) == 8 and clips[0]["audio_lengths"] == HZ // 2, "what was found is a manifest of clips"


def test_the_clips_of_short_parts_are_as_short() -> None:
    rows = [{"path": "sounds/deep/0.wav", "start": start, "duration": 0.4} for start in (0.0, 0.05)]
    Path("parts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for _ in range(2):  # heard, and known
        result = call("--data", "parts.jsonl", "--text", "a tone", "--seconds", "2", "-o", "found.jsonl")
        assert result.exit_code == 0, result.output
        assert [clip["audio_lengths"] for clip in audio_data("found.jsonl", HZ)] == [0.4 * HZ] * 2


def test_what_was_read_is_known_the_next_time() -> None:
    assert "3 recordings read, 0 known" in call("--text", "a tone").stdout
    again = call("--text", "a chirp", "--top", "1")
    assert "0 recordings read, 3 known" in again.stdout and len(again.stdout.splitlines()) == 4
    assert len(list(Path("cache/helicon/search").iterdir())) == 1
    assert "3 recordings read, 0 known" in call("--text", "a tone", "--index", "mine").stdout
    assert Path("mine/index.json").is_file()


def test_clips_of_each_length_are_known_by_turns() -> None:
    for known in (0, 3):
        for seconds in (["--seconds", "0.2"], ["--seconds", "0.3"], []):
            assert f"{3 - known} recordings read, {known} known" in call("--text", "a tone", *seconds).stdout
    assert "0 recordings read, 3 known" in call("--text", "a tone", "--seconds", "10").stdout, "as it is by default"
    assert len(list(Path("cache/helicon/search").iterdir())) == 3


def test_clips_are_as_long_as_those_the_mulan_learned_from() -> None:
    """Also of what stands on it, which learned from others."""
    network = mulan(clip_seconds=0.3)
    network.save("trained")
    MuLaNEmbedQuantizer(network, 4, 2, codebook_size=3).save("conditioner")
    for folder in ("trained", "conditioner"):
        result = CliRunner().invoke(app, ["search", folder, "--data", "sounds", "--text", "a tone"])
        assert "; clips of 0.3 s, on " in result.stdout, result.output


def test_made_up_sounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "NUM_MADE_UP", 20)
    result = CliRunner().invoke(
        app, ["search", "mulan", "--data", "synthetic", "--text", "a tone", "--seconds", "0.25"]
    )
    assert result.exit_code == 0, result.output
    assert "20 recordings read, 0 known; clips of 0.25 s" in result.stdout and " pitch (" in result.stdout
    assert not Path("cache").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "there is nothing to look for: say what with --text, or give a sound with --like"),
        (["--text", " "], "a --text is empty: write what to look for"),
        (["--text", "a", "--data", "gone"], "the data folder gone does not exist"),
        (["--text", "a", "--data", "mulan"], "mulan holds no flac, wav, mp3, ogg, opus file, nor do its subfolders"),
        (["--like", "gone.wav"], "--like gone.wav is not there: name a sound file"),
        (["--text", "a", "-o", "found.txt"], "-o found.txt: what was found goes into a file that ends in .jsonl"),
        (["--text", "a", "-o", "gone/found.jsonl"], "-o gone/found.jsonl: there is no folder gone"),
        (["--text", "a", "-o", "/proc/found.jsonl"], "/proc/found.jsonl cannot be written: No such file or directory; choose another place"),
        (["--text", "a", "--seconds", "-1"], "seconds=-1 must be more than 0: it is how long clips are"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence(arguments: list[str], sentence: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 1 and result.stderr.startswith(f"error: {sentence}"), result.output


def test_a_sound_that_cannot_be_read_is_told_before_the_collection_is_read() -> None:
    result = call("--text", "a tone", "--like", "sounds/deep/1.wav", "--like", "sounds/bad.wav")
    assert result.exit_code == 1 and "bad.wav: " in result.stderr, result.output
    assert "reading" not in result.output and not Path("cache").exists(), "nothing else was heard"


def test_a_network_without_a_mulan_is_refused() -> None:
    codec().save("codec")
    result = CliRunner().invoke(app, ["search", "codec", "--data", "sounds", "--text", "a tone"])
    assert result.exit_code == 1 and result.stderr.startswith("error: a SoundStream holds no MuLaN"), result.output
