"""Sound files of tiny AudioLMs, whole and in stages, as `helicon generate` makes them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from typer.testing import CliRunner, Result

import helicon
from data.sounds import noise, write
from helicon import registry
from helicon.cli import app
from helicon.data.audio import audio_data
from helicon.data.sound import spectrogram_beside
from helicon.models.audiolm.pipeline import AudioLM
from helicon.models.audiolm.sounds import SoundMaker
from models.audiolm.tiny import CONDITIONS, codec, stage_with_codec
from models.soundstream.tiny import HZ

SHORT = ["seconds=0.1"]
A = ["--text", "a bell"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stages that read texts, the same as one model, and stages that fit none of them."""
    folder = tmp_path_factory.mktemp("networks")
    one, other = codec(), codec()
    with torch.no_grad():
        next(other.parameters()).add_(0.1)
    one.save_pretrained(folder / "codec")
    other.save_pretrained(folder / "other-codec")
    one, other = helicon.load(folder / "codec"), helicon.load(folder / "other-codec")  # type: ignore[assignment]
    text = CONDITIONS["text"]
    networks = {name: stage_with_codec(name, one, text) for name in ("semantic", "coarse", "fine", "delayed")}
    networks |= {f"mute-{name}": stage_with_codec(name, one) for name in ("semantic", "delayed")}
    networks["embedded"] = stage_with_codec("semantic", one, {"has_condition": True, "cond_dim": 9})
    networks["other-fine"] = stage_with_codec("fine", other, text)
    networks["deaf"] = stage_with_codec("semantic", one, text, wav2vec=None)
    networks["deaf-delayed"] = stage_with_codec("delayed", one, text, wav2vec=None)
    networks["whole"] = AudioLM(
        semantic_transformer=networks["semantic"],
        coarse_transformer=networks["coarse"],
        fine_transformer=networks["fine"],
    )
    networks["short"] = AudioLM(
        semantic_transformer=networks["mute-semantic"], coarse_transformer=networks["mute-delayed"]
    )
    for name, network in networks.items():
        network.save_pretrained(folder / name)
    return folder


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["generate", *map(str, arguments)])


def said(*arguments: str | Path) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def samples(path: str | Path) -> np.ndarray:
    wave, hz = soundfile.read(path, dtype="int16")
    assert hz == HZ
    return wave


def expected(network: Any, *texts: str, **options: Any) -> list[np.ndarray]:
    made = network.generate(text=list(texts) or None, **options)
    return [(wave.clamp(-1, 1).numpy() * 2**15).round().clip(-(2**15), 2**15 - 1).astype(np.int16) for wave in made]


def same(path: str | Path, wave: np.ndarray) -> bool:
    found = samples(path)
    return len(found) == len(wave) and bool((np.abs(found.astype(int) - wave) <= 1).all())


def test_one_sound_has_its_spectrogram_beside_it(made: Path) -> None:
    assert said(made / "whole", *A, "--seed", "5", "-o", "new/bell.wav", *SHORT).endswith("wrote new/bell.wav\n")
    (wave,) = expected(helicon.load(made / "whole"), "a bell", seconds=0.1, seed=5)
    assert same("new/bell.wav", wave) and 0 < len(wave) <= 0.1 * HZ
    with Image.open(spectrogram_beside(Path("new/bell.wav"))) as picture:
        assert picture.size > (500, 200)
    assert sorted(path.name for path in Path("new").iterdir()) == ["bell-spectrogram.png", "bell.wav"]


def test_stages_and_the_whole_make_the_same(made: Path) -> None:
    stages = ["--coarse", made / "coarse", "--fine", made / "fine"]
    words = said(made / "semantic", *stages, *A, "-o", "stages.wav", *SHORT)
    assert all(f"of {made / name}, its only weights" in words for name in ("semantic", "coarse", "fine"))
    said(made / "whole", *A, "-o", "whole.wav", *SHORT)
    assert (samples("stages.wav") == samples("whole.wav")).all()


def test_a_delayed_stage_stands_for_two(made: Path) -> None:
    said(made / "mute-semantic", "--coarse", made / "mute-delayed", "-o", "out.wav", *SHORT)
    (wave,) = expected(helicon.load(made / "short"), seconds=0.1, seed=0)
    assert same("out.wav", wave)


def test_several_sounds_are_a_folder_that_is_a_dataset(made: Path) -> None:
    words = said(made / "whole", *A, "--text", "rain", "--samples", "2", "--batch-size", "4", "-o", "out", *SHORT)
    assert "wrote out: 4 files, manifest.jsonl\n" in words
    lines = [json.loads(line) for line in Path("out/manifest.jsonl").read_text().splitlines()]
    assert [line["text"] for line in lines] == ["a bell", "rain"] * 2
    waves = expected(helicon.load(made / "whole"), *["a bell", "rain"] * 2, seconds=0.1, seed=0)
    for line, wave in zip(lines, waves, strict=True):
        assert same(Path("out", line["path"]), wave) and spectrogram_beside(Path("out", line["path"])).exists()
    assert audio_data("out/manifest.jsonl", HZ, captions="column")[1]["texts"] == "rain"
    refused = call(made / "whole", *A, "--samples", "2", "-o", "two.wav")
    assert refused.stderr == "error: 2 things do not fit into two.wav: give a folder, two\n"


@pytest.mark.parametrize(("hz", "channels"), [(HZ, 1), (16000, 2)])
def test_a_sound_goes_on_from_a_prompt(made: Path, hz: int, channels: int) -> None:
    write(Path("voice.wav"), noise(0.06, hz, channels), hz)
    arguments = [made / "whole", *A, "--prompt", "voice.wav", "--samples", "2", "seconds=0.15"]
    said(*arguments, "-o", "out")
    heard, _ = soundfile.read("voice.wav", dtype="float32", always_2d=True)
    prime = torch.from_numpy(heard).mean(dim=1)[None]
    options = {"prime_wave": prime, "prime_wave_input_sample_hz": hz, "seconds": 0.15, "seed": 0}
    waves = expected(helicon.load(made / "whole"), "a bell", "a bell", **options)
    assert all(same(f"out/{number:05d}.wav", wave) for number, wave in enumerate(waves))
    assert min(map(len, waves)) >= 0.06 * HZ
    said(made / "whole", *A, "--samples", "2", "seconds=0.15", "-o", "other")
    assert samples("other/00000.wav")[:400].tolist() != samples("out/00000.wav")[:400].tolist()


def test_options_reach_the_network(made: Path) -> None:
    options = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "filter_thres": 0.2, "cond_scale": 1.5}
    chosen = [f"{name}={value}" for name, value in options.items()]
    said(made / "whole", *A, "-o", "out.wav", *SHORT, *chosen)
    (wave,) = expected(helicon.load(made / "whole"), "a bell", seconds=0.1, seed=0, **options)
    assert same("out.wav", wave)
    listed = said(made / "whole", "--options")
    assert "seconds: float or null = null\n    " in listed and "prompt:" not in listed


def test_the_fine_stage_may_go_piece_by_piece(made: Path) -> None:
    stages = {"coarse": made / "coarse", "fine": made / "fine"}
    networks: Any = {name: helicon.load(path) for name, path in stages.items()}
    maker = SoundMaker(helicon.load(made / "semantic"), texts=["a bell"], fine_max_frames=7, **networks)
    assert maker.network.fine_max_frames == 7
    maker = SoundMaker(helicon.load(made / "semantic"), learned_seconds=0.05, **networks)
    assert maker.network.fine_max_frames is None and maker.network.learned_seconds == 0.05


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("codec", A, "a codec reads no texts: leave --text out"),
        ("coarse", A, "{} holds a CoarseTransformerWrapper, which makes nothing by itself: give a run of one that does"),
        ("semantic", A, "a semantic stage makes no sound by itself: name the others with --coarse RUN and --fine RUN, or a delayed one "),
        ("semantic", [*A, "--coarse", "@coarse"], "--coarse holds a stage that makes the first codes: name the one that makes the others, --fine"),
        ("semantic", [*A, "--coarse", "@delayed", "--fine", "@fine"], "--coarse holds a delayed stage, which makes all codes: leave --fine "),
        ("semantic", [*A, "--coarse", "@fine"], "--coarse holds a FineTransformerWrapper: give the run of a coarse or of a delayed stage"),
        ("semantic", [*A, "--coarse", "@coarse", "--fine", "@coarse"], "--fine holds a CoarseTransformerWrapper: give the run of a fine stage"),
        ("whole", [*A, "--fine", "@fine"], "an AudioLM has all its stages: leave --fine out"),
        ("whole", [*A, "fine_max_frames=3"], "an AudioLM has all its stages: leave fine_max_frames out"),
        ("whole", [*A, "learned_seconds=3"], "an AudioLM has all its stages: leave learned_seconds out"),
        ("short", A, "this AudioLM was trained without texts: leave --text out"),
        ("embedded", [*A, "--coarse", "@delayed"], "this AudioLM reads embedded texts, or codes: call its generate with those, in Python"),
        ("short", ["seconds=0"], "seconds=0 must be at least a frame of the codec, 0.005"),
        ("short", ["seconds=.inf"], "seconds=inf must be at least a frame of the codec, 0.005"),
        ("short", ["second=1"], "generate has no argument 'second': did you mean seconds?"),
        ("short", ["temperature=-1"], "temperature=-1.0 must not be negative (0 takes the likeliest token)"),
        ("short", ["--prompt", "nowhere.wav"], "--prompt nowhere.wav is not there: name a sound file"),
        ("short", ["--prompt", "words.wav"], "words.wav: not a readable sound"),
        ("short", ["--prompt", "click.wav"], "click.wav lasts 0.010 s, and the model needs 0.020 s to hear anything"),
        ("short", ["--prompt", "voice.wav", "seconds=0.2"], "voice.wav lasts 0.30 s, and the sound that begins with it 0.20 s: give more"),
        ("deaf", ["--coarse", "@deaf-delayed", "--prompt", "voice.wav"], "the stages were trained without their semantic tokenizer, "),
        ("short", ["--image", "voice.wav"], "--image is nothing for the network in {}: leave it out"),
        ("short", ["-o", "out.png"], "out.png would be a .png file, and what is made here is .wav or .flac or .ogg; "),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence(made: Path, name: str, arguments: list[str], sentence: str) -> None:
    write(Path("voice.wav"), noise(0.3, HZ), HZ)
    write(Path("click.wav"), noise(0.01, HZ), HZ)
    Path("words.wav").write_text("no sound")
    before = sorted(Path.cwd().rglob("*"))
    result = call(made / name, *(str(made / word[1:]) if word.startswith("@") else word for word in arguments))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: {sentence.format(made / name)}") and result.stderr.count("\n") == 1
    assert sorted(Path.cwd().rglob("*")) == before


def test_stages_of_different_codecs_are_refused_with_both_names(made: Path) -> None:
    stages = ["--coarse", made / "coarse", "--fine", made / "other-fine"]
    result = call(made / "semantic", *stages, *A)
    assert result.exit_code == 1 and "was trained on another codec" in result.stderr
    assert all(
        f"stages/{name}" in result.stderr or str(made / place) in result.stderr
        for name, place in [("codec", "other-codec")]
    )


def test_the_registry_knows_who_makes_sounds(made: Path) -> None:
    for name in ("whole", "semantic"):
        assert registry.maker_of(made / name) is SoundMaker
