"""`helicon pipeline musiclm` at its smallest, on sound files with texts: every step done, interrupted, continued, and heard."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import soundfile
import transformers
from typer.testing import CliRunner, Result

import helicon
from cli.pipelines import at_step, gone_through, losses, steps_taken
from cli.sounds import write_sounds
from helicon.cli import app, steps
from helicon.cli.pipelines.musiclm import musiclm
from helicon.cli.pipelines.outline import Request
from helicon.config import ConfigError, load_recipe
from helicon.data.tokens import TokenCache
from helicon.engine.checkpoint import folder_name
from helicon.engine.trainer import Trainer
from helicon.models.soundstream.codecs import EncodecWrapper
from helicon.nn.network import same_network
from models.musiclm.tiny import mulan
from models.soundstream.tiny import tiny as tiny_codec

COMMAND = ["pipeline", "musiclm", "--data", "sounds", "-o", "out", "--size", "debug", "--seconds", "0.25"]
QUICK = [
    *("num_train_steps=2", "batch_size=2", "log_every=1", "save_model_every=1", "save_results_every=2"),
    *("valid_frac=0.4", "kmeans.clusters=8", "conditioner.quantizers=2", "tokens.workers=0"),
]
TINY = [
    *QUICK,
    *("codec.model.use_local_attn=false", "codec.model.discr_windows=[]"),
    *("codec.model.strides=[8, 20]", "codec.data.data_max_length_seconds=0.25"),
]
STAGES = ("mulan", "codec", "semantic", "coarse", "fine")
STEPS = ["mulan", "codec", "kmeans", "conditioner", "tokens", "semantic", "coarse", "fine", "musiclm", "samples"]


def sounds() -> None:
    write_sounds(6)


def pipeline(*more: str) -> Result:
    return CliRunner().invoke(app, [*COMMAND, *TINY, *more])


def captioned() -> Result:
    return pipeline("--captions", "beside")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A pipeline that went through, and what it said."""
    return gone_through(tmp_path_factory.mktemp("whole"), sounds, captioned)


@pytest.mark.slow
def test_every_step_stands_on_those_before_it(whole: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(whole[0])
    assert steps_taken(whole[1]) == STEPS
    cache = TokenCache("out/tokens")
    assert len(cache) == 12 and cache[0]["condition_ids"].shape == (2,), "two pieces of 0.25 s a sound"
    assert cache[0]["texts"] == Path("sounds/0.txt").read_text()
    for name in ("semantic", "coarse", "fine"):
        recipe = load_recipe(f"out/{name}/recipe.yaml")
        assert recipe.model["audio_conditioner"] == "out/conditioner" and recipe.data["source"] == "out/tokens"
    heard = load_recipe("out/mulan/recipe.yaml").data
    assert (heard["source"], heard["captions"], heard["data_max_length_seconds"]) == ("sounds", "beside", 0.25)
    conditioner = json.loads(Path("out/pipeline.json").read_text())["conditioner"]
    assert (conditioner["seconds"], conditioner["model"]) == (0.25, "mulan"), "of clips as the stages hear them"
    assert helicon.load("out/conditioner").codebook_size == 2, "as many as 12 pieces are enough for"


@pytest.mark.slow
def test_the_model_needs_no_other_folder_and_makes_sounds_of_texts(whole: tuple[Path, str]) -> None:
    shutil.copytree(whole[0] / "out/musiclm", "alone")
    model = helicon.load("alone")
    assert isinstance(model, helicon.MusicLM) and model.quantizer.is_fitted
    wave = model("a loud tone", num_samples=2, seconds=0.2, seed=0)
    assert wave.ndim == 1 and len(wave) <= 0.2 * model.sample_hz
    lines = [json.loads(line) for line in (whole[0] / "out/samples/manifest.jsonl").read_text().splitlines()]
    texts = {path.read_text() for path in (whole[0] / "sounds").glob("*.txt")}
    assert len(lines) == 4 == len({line["text"] for line in lines}) and {line["text"] for line in lines} <= texts
    assert all(soundfile.info(whole[0] / "out/samples" / line["path"]).duration <= 0.25 for line in lines)
    command = whole[1].splitlines()[-1].split("helicon generate ")[1]
    assert command.startswith("out/musiclm --text '") and command.endswith("--samples 8 seconds=0.25")
    found = CliRunner().invoke(
        app, ["search", "alone", "--data", str(whole[0] / "sounds"), "--text", "a tone", "--index", "index"]
    )
    assert found.exit_code == 0 and "6 recordings read, 0 known; clips of 0.25 s" in found.stdout, found.output


@pytest.mark.slow
def test_interrupted_it_goes_on_as_if_nothing_had_been(
    whole: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sounds()
    interrupt = lambda: os.kill(os.getpid(), signal.SIGINT)
    taken = []
    for name in ("mulan", "coarse"):
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "train_step", at_step(name, 0, interrupt))
            stopped = captioned()
        assert stopped.exit_code == 130 and stopped.stdout.endswith(
            "(helicon pipeline musiclm ...) goes on from here.\n"
        )
        taken.append(steps_taken(stopped.stdout))
    done = captioned()
    assert done.exit_code == 0, done.output
    assert [*taken, steps_taken(done.stdout)] == [STEPS[:1], STEPS[:7], ["tokens", *STEPS[6:]]]
    assert "0 items encoded, 12 kept" in done.stdout and "resuming from step 1" in done.stdout
    for name in STAGES:
        assert losses(f"out/{name}") == losses(f"{whole[0]}/out/{name}"), name
    for sample in Path("out/samples").glob("*.wav"):
        assert sample.read_bytes() == (whole[0] / sample).read_bytes()
    again = captioned()
    assert again.exit_code == 0 and steps_taken(again.stdout) == [], again.output


@pytest.mark.slow
def test_a_mulan_that_stages_were_trained_on_is_not_trained_on(whole: tuple[Path, str]) -> None:
    """In the pipeline, or in its folder alone: they know what its codes mean, and those of another mean something else."""
    shutil.copytree(whole[0], ".", dirs_exist_ok=True)
    refused = pipeline("--captions", "beside", "mulan.num_train_steps=3")
    sentence = (
        "the semantic in out was trained on a mulan that would be trained from step 2 to 3: give mulan.num_train_steps=2, or a new "
        "folder with --out"
    )
    assert refused.exit_code == 1 and refused.stderr.startswith(f"error: {sentence}; or delete out/semantic and ")
    (newest,) = [folder for folder in Path("out/mulan/checkpoints").iterdir() if folder.name == folder_name(2)]
    shutil.copytree(newest, newest.with_name(folder_name(4)))
    refused = captioned()
    assert refused.exit_code == 1, refused.output
    assert f"on a conditioner with other settings (checkpoint of mulan was {folder_name(2)} " in refused.stderr
    assert f", and is {folder_name(4)} " in refused.stderr


@pytest.mark.slow
def test_it_begins_with_a_codec_and_a_mulan_that_are_there() -> None:
    sounds()
    sizes = {"sampling_rate": 8000, "upsampling_ratios": [8, 20], "target_bandwidths": [0.8], "codebook_size": 16}
    small = {"hidden_size": 12, "num_filters": 4, "num_lstm_layers": 1}
    transformers.EncodecModel(transformers.EncodecConfig(**sizes, **small)).save_pretrained("encodec")
    EncodecWrapper(model="encodec", bandwidth=0.8).save("codec")
    mulan().save("joint")
    there = ["--codec", "codec", "--mulan", "joint"]
    result = CliRunner().invoke(app, [*COMMAND, "--captions", "beside", *there, *QUICK])
    assert result.exit_code == 0, result.output
    assert steps_taken(result.stdout) == STEPS and "codec: copied from codec" in result.stdout
    model = helicon.load("out/musiclm")
    assert isinstance(model.audio_lm.codec, EncodecWrapper) and same_network(model.quantizer.mulan, mulan())
    assert model.audio_lm.fine.transformer.num_fine_quantizers == 2, "what the coarse stage leaves of its 4"
    again = CliRunner().invoke(app, [*COMMAND, "--captions", "beside", *there, *QUICK])
    assert again.exit_code == 0 and steps_taken(again.stdout) == [], again.output
    tiny_codec().save("other")
    refused = CliRunner().invoke(app, [*COMMAND, "--captions", "beside", *there, "--codec", "other", *QUICK])
    sentence = (
        f"the coarse in out was trained on a codec copied from {Path('codec').absolute()}, and --codec other is another"
    )
    assert refused.exit_code == 1 and refused.stderr.startswith(f"error: {sentence}: "), refused.output


def test_sounds_that_are_too_few_for_the_codes_asked_for() -> None:
    sounds()
    mulan().save_pretrained("out/mulan")
    steps_of = musiclm(Request("sounds", "beside", 0.25, "debug", False))
    work = steps.Work.plan("", Path("out"), steps_of, ["conditioner.clusters=8"])
    (codes,) = [step for step in work.steps if step.name == "conditioner"]
    with pytest.raises(
        ConfigError, match=r"12 sounds .* \(here conditioner.clusters=... and conditioner.quantizers=...\)"
    ):
        codes.run(work)


def test_sounds_without_texts_are_refused() -> None:
    sounds()
    result = pipeline()
    sentence = (
        "MusicLM learns from sounds with texts: say where those of sounds are, with --captions column, beside or folder"
    )
    assert (result.exit_code, result.stderr, Path("out").exists()) == (1, f"error: {sentence}\n", False)


def test_the_real_recipes_are_planned() -> None:
    for delayed in (False, True):
        work = steps.Work.plan("", Path("out"), musiclm(Request("synthetic", None, 3.0, None, delayed)), [])
        last = ["delayed"] if delayed else ["coarse", "fine"]
        assert list(work.recipes) == ["mulan", "codec", "semantic", *last]
        assert {work.recipes[name].data["data_max_length_seconds"] for name in ("mulan", "semantic", *last)} == {3.0}
        transformer = work.recipes["semantic"].model["transformer"]
        assert transformer["has_condition"] is True and transformer["t5_name"] is None, "codes stand for texts"
        assert {recipe.name.partition("/")[0] for recipe in work.recipes.values()} == {"musiclm"}
        assert work.recipes["codec"].model["target_sample_hz"] == 24000, "music, not speech"


def test_every_stage_must_be_told_how_long_sounds_are() -> None:
    steps_of = musiclm(Request("synthetic", None, None, "debug", False))
    with pytest.raises(ConfigError, match="how long sounds are must be told in seconds"):
        steps.Work.plan("", Path("out"), steps_of, ["data.data_max_length_seconds=null"])
