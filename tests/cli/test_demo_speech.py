"""The demo of speech at its smallest: really trained, filled in, spoken and shown."""

import json
import re
import shlex
from base64 import b64encode
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest
import soundfile
import torch
from typer.testing import CliRunner, Result

from helicon.cli import app
from helicon.cli.demo import DEMOS, Kind
from helicon.cli.demos import speech as kind
from helicon.cli.demos.speech import (
    VOICEBOX,
    Clip,
    Filled,
    Said,
    clips_of,
    hidden_in,
    in_voices,
    num_right,
    vowels_between,
)
from helicon.cli.steps import Work
from helicon.data.sound import Sound
from helicon.data.synthetic_speech import VOICES, SyntheticSpeech, Utterance
from helicon.metrics.speech import Contour, vowels_of

HZ, FRAME = 8000, 128
MADE, SHOWN = 3, 2
SIZES = {"dim": 24, "depth": 2, "heads": 2, "dim_head": 12, "dim_cond_emb": 8, "num_register_tokens": 2}
TINY = [
    *("data.num_samples=24", "batch_size=2", "num_train_steps=4", "log_every=1", "val_every=2", "valid_frac=0.1"),
    *("save_results_every=4", "save_model_every=2", "sample_steps=2", "data.speech={syllables: [2, 3]}"),
    *(f"model.voicebox.{name}={value}" for name, value in SIZES.items()),
]


def demo_of_speech(out: Path) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "NUM_CLIPS", MADE)
        patch.setattr(kind, "NUM_SHOWN", SHOWN)
        return CliRunner().invoke(app, ["demo", "speech", "--out", str(out), *TINY])


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "a demo"
    result = demo_of_speech(folder)
    assert result.exit_code == 0, result.output
    assert f"[1/1] voicebox: {VOICEBOX.recipe}" in result.stdout
    return folder


def clips(*overrides: str, most: int = MADE) -> list[Clip]:
    return clips_of(Work.plan("helicon demo speech", Path("x"), DEMOS[Kind.speech].steps, overrides), HZ, most)


def test_the_page_plays_what_was_filled_in_and_what_was_said(spoken: Path) -> None:
    html = (spoken / "index.html").read_text(encoding="utf-8")
    texts = [clip.text for clip in clips(*TINY)]
    assert all(html.count(f"<figcaption>{text}</figcaption>") == 2 for text in texts[:SHOWN])
    assert html.count("<audio ") == html.count("<img ") == SHOWN * 5
    for name, each in (("infilled", 3), ("spoken", 2)):
        assert len(list((spoken / name).glob("*.wav"))) == each * len(texts)
        assert len(list((spoken / name).glob("*-spectrogram.png"))) == each * len(texts)
    assert re.search(r"hears \d+ of the \d+ hidden vowels right, where guessing gives \d+", html)
    assert re.search(r"hears \d+ of \d+ vowels right, where guessing gives \d+, and \d+ of 3 have the pitch", html)
    assert len(re.findall(r"<svg.*?</svg>", html, re.DOTALL)) == 2 and html.count("<polyline ") == 4
    assert "no numbers yet" not in html and "?</b>" not in html
    links = re.findall(r'href="([^"]*)"', html)
    assert len(links) >= 5 and all((spoken / unquote(link)).exists() for link in links)
    assert "<script" not in html and "http" not in html


def test_the_manifest_says_what_is_said_in_each_file(spoken: Path) -> None:
    lines = [json.loads(line) for line in (spoken / "spoken/manifest.jsonl").read_text().splitlines()]
    pairs = in_voices(clips(*TINY))
    assert [line["text"] for line in lines] == [text for clip, voice in pairs for text in (voice.text, clip.text)]
    assert [line["path"] for line in lines[:2]] == ["00000-voice.wav", "00000-spoken.wav"]
    html = (spoken / "index.html").read_text(encoding="utf-8")
    gallery = html[html.index("What it says") :]
    heard = [b64encode((spoken / "spoken" / line["path"]).read_bytes()).decode() for line in lines[: 2 * SHOWN]]
    found = re.findall(r'<audio [^>]*src="data:[^;"]*;base64,([^"]*)"', gallery)
    assert found == heard, "each text with its voice and what was said"


def test_what_was_not_hidden_stays_as_it_was(spoken: Path) -> None:
    clip = clips(*TINY)[0]
    waves = [soundfile.read(spoken / f"infilled/00000-{name}.wav")[0] for name in ("original", "masked", "infilled")]
    original, masked, infilled = (torch.from_numpy(wave) for wave in waves)
    assert len(original) == len(masked) == len(infilled)
    first, last = (round(second * HZ) for second in clip.span)
    assert masked[first:last].abs().max() == 0 and original[first:last].abs().max() > 0.01
    assert (infilled - original)[: first - FRAME].abs().max() < 1e-4
    assert (infilled - original)[last + FRAME :].abs().max() < 1e-4
    assert infilled[first:last].abs().max() > 1e-4


def test_the_commands_of_the_page_of_speech_run(spoken: Path) -> None:
    html = unescape((spoken / "index.html").read_text(encoding="utf-8"))
    commands = re.findall(r"helicon (generate .*)", html)
    assert len(commands) == 2 and "--prompt-text" in commands[0] and "--span" in commands[1]
    for number, command in enumerate(commands):
        words = shlex.split(command.partition("</code>")[0])
        result = CliRunner().invoke(app, [*words, "-o", f"{number}.wav"])
        assert result.exit_code == 0, result.output
        kept = ["spoken/00000-spoken.wav", "infilled/00000-infilled.wav"][number]
        same = soundfile.read(spoken / kept)[0]
        found = soundfile.read(f"{number}.wav")[0]
        assert len(found) == len(same)
        if number == 0:
            assert abs(found - same).max() < 1e-4, "the same seed, the same speech"


def test_a_demo_of_speech_that_is_shown_is_not_made_again(spoken: Path) -> None:
    before = (spoken / "index.html").stat().st_mtime_ns
    again = demo_of_speech(spoken)
    assert again.exit_code == 0 and again.stdout.startswith("Open ")
    assert (spoken / "index.html").stat().st_mtime_ns == before


def test_clips_are_of_texts_that_were_not_learned_and_of_all_voices() -> None:
    narrow = ["data.speech={syllables: [1, 2]}", "data.num_samples=150"]
    found = clips(*narrow, most=14)
    learned = {said.text for said in map(SyntheticSpeech(150, HZ, syllables=[1, 2]).utterance, range(150))}
    texts = [clip.text for clip in found]
    assert len(texts) == len(set(texts)) == 14 and not learned & set(texts)
    assert [clip.said.voice for clip in found[:5]] == list(VOICES)
    assert {clip.said.voice for clip in clips("data.speech={voices: [alto]}")} == {"alto"}
    pairs = in_voices(found)
    assert all(clip.text != voice.text for clip, voice in pairs) and len(pairs) == len(found)


def test_speech_of_which_all_was_learned_is_refused_before_the_training() -> None:
    narrow = ["data.num_samples=2000", "data.speech={syllables: [1, 1]}"]
    result = CliRunner().invoke(app, ["demo", "speech", "--out", "x", *TINY, *narrow])
    assert result.exit_code == 1 and not Path("x").exists()
    sentence = "texts of 1 to 1 syllables were learned from, all or nearly all: allow for more syllables in data.speech"
    assert sentence in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["model.voicebox.condition_on_text=false"], "the demo speaks texts: leave out condition_on_text=false"),
    ],
)
def test_what_the_demo_cannot_show_is_refused_before_the_training(options: list[str], sentence: str) -> None:
    result = CliRunner().invoke(app, ["demo", "speech", "--out", "x", *TINY, *options])
    assert result.exit_code == 1 and not Path("x").exists()
    assert sentence in result.stderr and result.stderr.count("\n") == 1


def test_the_middle_syllables_are_hidden() -> None:
    phonemes = tuple("_sake_fokusi_")
    said = Utterance("alto", "sake fokusi", phonemes, tuple(range(10, 140, 10)), 200.0, 0.5)
    span, vowels = hidden_in(said)
    assert vowels == "eo" and span == (0.06, 0.36), "from the k to the end of the o"
    one = Utterance("alto", "sa", ("_", "s", "a", "_"), (10, 20, 30, 40), 200.0, 0.5)
    assert hidden_in(one) == ((0.01, 0.06), "a")
    assert Clip(said, torch.zeros(3), span, vowels).span_words == "0.060:0.360"


def test_vowels_are_counted() -> None:
    contour = Contour("aei", 200.0, (0.0, 0.5, 1.0), (0.3, 0.8, 1.4))
    assert vowels_between(contour, (0.4, 0.9)) == "e" and vowels_between(contour, (0.1, 1.3)) == "aei"
    assert [num_right("ae", heard) for heard in ("ae", "e", "aeo", "uuuuu", "")] == [2, 1, 1, 0, 0]


def test_clips_themselves_are_all_right_and_others_are_not() -> None:
    """As a perfect network would fill them in and say them; and one that puts silence there, or says another text."""
    few = clips("data.speech={}", most=5)
    for clip in few:
        Sound(clip.audio[None], HZ).write(Path(f"{clip.text}.wav"))
        masked = clip.audio.clone()
        masked[round(clip.span[0] * HZ) : round(clip.span[1] * HZ)] = 0
        Sound(masked[None], HZ).write(Path(f"{clip.text}-masked.wav"))
    whole, masked_file = ({clip.text: Path(f"{clip.text}{ending}.wav") for clip in few} for ending in ("", "-masked"))
    hidden, said = sum(len(clip.hidden) for clip in few), sum(len(vowels_of(clip.text)) for clip in few)
    perfect = Filled({text: [path] * 3 for text, path in whole.items()}).verdict(few)
    assert f"{hidden} of the {hidden} hidden vowels" in perfect and perfect.endswith(f"it hears {hidden}.")
    silent = Filled({text: [path, path, masked_file[text]] for text, path in whole.items()}).verdict(few)
    assert f" 0 of the {hidden} hidden vowels" in silent and silent.endswith(f"it hears {hidden}.")
    own = [(clip, clip) for clip in few]
    spoken = Said({text: [path] * 2 for text, path in whole.items()})
    assert f"{said} of {said} vowels right" in spoken.verdict(own) and "5 of 5 have the pitch" in spoken.verdict(own)
    assert "0 of 5 have the pitch" in spoken.verdict(in_voices(few))
    other = {clip.text: [whole[voice.text]] * 2 for clip, voice in in_voices(few)}
    assert f"{said} of {said} vowels right" not in Said(other).verdict(in_voices(few))
    assert "5 of 5 have the pitch" in Said(other).verdict(in_voices(few))
    alone = Said({text: [path] * 2 for text, path in whole.items()}).verdict(own[:1])
    assert alone.endswith("where guessing gives 1."), "of one voice there is nothing to say"
