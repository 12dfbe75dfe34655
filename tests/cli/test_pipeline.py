"""`helicon pipeline audiolm` at its smallest, on sound files: every stage trained, killed, continued, and heard."""

import json
import os
import signal
from pathlib import Path

import pytest
import soundfile
from typer.testing import CliRunner, Result

import helicon
from children import run as in_a_child
from children import wait_for
from cli.pipelines import at_step, gone_through, losses, steps_taken
from cli.sounds import write_sounds
from helicon.cli import app, steps
from helicon.cli.pipelines.audiolm import audiolm
from helicon.cli.pipelines.outline import Request
from helicon.config import load_recipe
from helicon.data.synthetic_sounds import SyntheticSounds
from helicon.data.tokens import TokenCache
from helicon.engine.trainer import Trainer

pytestmark = pytest.mark.slow

TINY = [
    *("num_train_steps=4", "batch_size=2", "log_every=1", "save_model_every=2", "save_results_every=4"),
    *("valid_frac=0.1", "codec.model.use_local_attn=false", "codec.model.discr_windows=[]"),
    "codec.model.strides=[8, 20]",
    *("kmeans.clusters=8", "tokens.batch_size=16", "tokens.workers=0"),
]
READS = [
    f"{name}.model.transformer.t5_name={{name: bytes, dim: 12, depth: 1, heads: 2, dim_head: 6, max_length: 48}}"
    for name in ("semantic", "coarse", "fine")
]
STAGES = ("codec", "semantic", "coarse", "fine")


def sounds(count: int = 6) -> None:
    """Files of 0.7 s with a manifest that has their captions."""
    Path("sounds").mkdir(exist_ok=True)
    made_up = SyntheticSounds(count, 8000, 0.7)
    lines = []
    for number in range(count):
        soundfile.write(f"sounds/{number}.wav", made_up[number]["audio"].numpy(), 8000)
        lines.append(json.dumps({"path": f"sounds/{number}.wav", "text": made_up[number]["texts"]}) + "\n")
    Path("sounds.jsonl").write_text("".join(lines))


def pipeline(*more: str, data: str = "sounds.jsonl", out: str = "out") -> Result:
    arguments = ["pipeline", "audiolm", "--data", data, "-o", out, "--size", "debug", *TINY, *more]
    return CliRunner().invoke(app, arguments)


def captioned(*more: str, out: str = "out") -> Result:
    return pipeline("--captions", "column", *READS, *more, out=out)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A pipeline that went through, and what it said."""
    return gone_through(tmp_path_factory.mktemp("whole"), sounds, captioned)


def test_every_stage_is_trained_on_those_before_it(whole: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(whole[0])
    assert steps_taken(whole[1]) == ["codec", "kmeans", "tokens", "semantic", "coarse", "fine", "audiolm", "samples"]
    model = helicon.load("out/audiolm")
    assert model.semantic.wav2vec.codebook_size == 8 and model.fine_max_frames == 25 and model.learned_seconds == 0.5  # type: ignore[union-attr]
    assert model.codec.own_state().keys() <= helicon.load("out/codec").own_state().keys()  # type: ignore[union-attr]
    cache = TokenCache("out/tokens")
    assert len(cache) == 12 and cache[0]["texts"] in Path("sounds.jsonl").read_text(), "two pieces of 0.5 s a sound"
    recipe = load_recipe("out/coarse/recipe.yaml")
    assert recipe.model["codec"] == "out/codec" and recipe.model["wav2vec"] == "out/kmeans"
    assert recipe.data["source"] == "out/tokens" and recipe.model["transformer"]["has_condition"] is True


def test_the_samples_are_of_texts_of_the_data(whole: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(whole[0])
    lines = [json.loads(line) for line in Path("out/samples/manifest.jsonl").read_text().splitlines()]
    texts = [json.loads(line)["text"] for line in Path("sounds.jsonl").read_text().splitlines()]
    assert len(lines) == 4 == len({line["text"] for line in lines}) and {line["text"] for line in lines} <= set(texts)
    for line in lines:
        assert soundfile.info(Path("out/samples", line["path"])).duration <= 0.5
    command = whole[1].splitlines()[-1].split("helicon generate ")[1]
    assert command.startswith("out/audiolm --text '") and command.endswith("--samples 8 seconds=0.5")


def test_what_is_done_is_not_done_again(whole: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(whole[0])
    dates = lambda: {path: path.stat().st_mtime_ns for path in Path("out").rglob("*") if path.is_file()}
    before = dates()
    again = captioned(
        "save_results_every=2", "coarse.save_model_every=1", "tensorboard=true"
    )  # nothing is learned otherwise
    assert again.exit_code == 0 and steps_taken(again.stdout) == [], again.output
    assert before == dates()


@pytest.mark.slow
def test_killed_and_interrupted_it_goes_on_as_if_nothing_had_been(
    whole: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sounds()

    def once_it_is_written() -> None:
        wait_for(Path("out/codec/checkpoints/step-00000002").is_dir)  # (a thread of its own writes it)
        os.kill(os.getpid(), signal.SIGKILL)

    def killed() -> None:
        monkeypatch.setattr(Trainer, "train_step", at_step("codec", 3, once_it_is_written))
        captioned()

    assert in_a_child(killed) == -signal.SIGKILL
    assert not Path("out/kmeans").exists()

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", at_step("coarse", 1, lambda: os.kill(os.getpid(), signal.SIGINT)))
        stopped = captioned()
    assert stopped.exit_code == 130 and "soundstream: resuming from step 2" in stopped.stdout, stopped.output
    assert stopped.stdout.endswith("The same command (helicon pipeline audiolm ...) goes on from here.\n")
    assert steps_taken(stopped.stdout) == ["codec", "kmeans", "tokens", "semantic", "coarse"]

    done = captioned()
    assert done.exit_code == 0, done.output
    assert steps_taken(done.stdout) == ["tokens", "coarse", "fine", "audiolm", "samples"]
    assert "0 items encoded, 12 kept" in done.stdout and "resuming from step 2" in done.stdout
    for name in STAGES:
        assert losses(f"out/{name}") == losses(f"{whole[0]}/out/{name}"), name
    for sample in Path("out/samples").glob("*.wav"):
        assert sample.read_bytes() == (whole[0] / sample).read_bytes()


def test_an_unfinished_tokenizer_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """(It is the only step that cannot go on in the middle.)"""
    sounds()
    fit = steps.fit_kmeans

    def interrupted(**options: object) -> None:
        fit(**options)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(steps, "fit_kmeans", interrupted)
        patch.setattr(steps, "_fitting", lambda: steps.options_of(fit, "data", "out"))
        stopped = pipeline()
    assert stopped.exit_code == 130 and "goes on from here" in stopped.stdout and Path("out/kmeans").is_dir()
    assert steps_taken(stopped.stdout) == ["codec", "kmeans"]
    work = steps.Work.plan("", Path("out"), audiolm(Request("sounds.jsonl", None, None, "debug", False)), TINY)
    fitting = work.steps[1]
    assert not fitting.is_done(work)
    fitting.run(work)
    assert fitting.is_done(work)


def test_one_transformer_in_the_place_of_two_and_no_texts() -> None:
    sounds()
    result = pipeline("--delayed", "--seconds", "0.4", data="sounds")
    assert result.exit_code == 0, result.output
    assert steps_taken(result.stdout) == ["codec", "kmeans", "tokens", "semantic", "delayed", "audiolm", "samples"]
    assert result.stdout.endswith("helicon generate out/audiolm --samples 8 seconds=0.4\n")
    model = helicon.load("out/audiolm")
    assert model.fine is None and not model.reads_texts  # type: ignore[union-attr]
    lines = [json.loads(line) for line in Path("out/samples/manifest.jsonl").read_text().splitlines()]
    assert [line["text"] for line in lines] == [""] * 4
    arguments = ["generate", "out/audiolm", "--samples", "2", "seconds=0.4", "-o", "more"]
    assert CliRunner().invoke(app, arguments).exit_code == 0 and len(list(Path("more").glob("*.wav"))) == 2


def test_a_stage_that_was_trained_on_is_bundled_anew(whole: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(whole[0])
    assert CliRunner().invoke(app, ["resume", "out/fine", "num_train_steps=5"]).exit_code == 0
    renewed = captioned()
    assert renewed.exit_code == 0 and steps_taken(renewed.stdout) == ["audiolm", "samples"], renewed.output
    assert json.loads(Path("out/pipeline.json").read_text())["audiolm"]["fine"].startswith("step-00000005 ")
    longer = captioned("fine.num_train_steps=6")
    assert longer.exit_code == 0 and steps_taken(longer.stdout) == ["tokens", "fine", "audiolm", "samples"]
    assert "resuming from step 5" in longer.stdout


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["coarse.lr=1"], "the coarse in out was begun with another trainer.lr: give that again, or a new folder with --out; or delete out/coarse"),
        (["codec.num_train_steps=5"], "the coarse in out was trained on a codec that would be trained from step 4 to 5: "
            "give codec.num_train_steps=4, or a new folder with --out; or delete out/coarse and out/fine"),
        (["kmeans.clusters=9"], "the semantic in out was trained on a kmeans with other settings (clusters was 8, and is 9): "
            "give those again, or a new folder with --out; or delete out/semantic and out/coarse"),
    ],
)  # fmt: skip
def test_what_was_begun_is_not_changed(
    whole: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, more: list[str], sentence: str
) -> None:
    monkeypatch.chdir(whole[0])
    refused = captioned(*more)
    remedy = "what is missing, and all that stands on it, is made anew"
    assert (refused.exit_code, refused.stderr, refused.stdout) == (1, f"error: {sentence}: {remedy}\n", "")


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["coarse.batch_sise=4"], "stage coarse: model, data, trainer have no argument 'batch_sise': did you mean trainer.batch_size?"),
        (["corse.lr=1e-4"], "no stage is called 'corse': did you mean coarse.lr=1e-4?"),
        (["kmeans.cluster=4"], "kmeans has no argument 'cluster': did you mean clusters?"),
        (["samples.seed=4"], "samples has no argument 'seed': it knows nothing"),
        (["kmeans.clusters"], "'kmeans.clusters' is no override: write kmeans.KEY=VALUE"),
        (["tokens.batch_size=x"], "tokens.batch_size wants int, not 'x'"),
        (["data.text_column=a", "coarse.data.text_column=b"], "the stages learn from one token cache, and semantic has data.text_column=a where"),
        (["--seconds", "0"], "--seconds 0 must be more than 0"),
        (["--seconds", "0.001"], "sounds of 0.001 s are 0.05 frames of the codec, too few to learn from: give --seconds 0.2 or more"),
        (["--captions", "beside"], "no sound of sounds.jsonl has a caption, going by --captions beside (for example "),
        (["--size", "huge"], "--size huge is none of debug, demo: give one of these, or leave it out for the full size"),
        (["-o", "sounds"], "sounds already holds something: choose another folder with -o"),
        (["-o", "sounds.jsonl/new"], "sounds.jsonl/new cannot be written: Not a directory; choose another place with -o"),
        (["-o", "sounds.jsonl"], "sounds.jsonl is a file, not a folder: choose another place with -o"),
    ],
)  # fmt: skip
def test_mistakes_are_told_before_anything_is_made(more: list[str], sentence: str) -> None:
    sounds(1)
    result = pipeline(*more)
    assert result.exit_code == 1 and result.stderr.startswith(f"error: {sentence}"), result.output
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["sounds", "sounds.jsonl"]


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = pipeline()
    assert result.exit_code == 1 and result.stderr.startswith("error: a pipeline is one process: for several, ")


def test_the_real_recipes_are_planned() -> None:
    """With and without texts, as far as recipes can tell."""
    write_sounds(1)
    for captions in (None, "beside"):
        for delayed in (False, True):
            work = steps.Work.plan("", Path("out"), audiolm(Request("sounds", captions, 3.0, None, delayed)), [])
            transformer = work.recipes["semantic"].model["transformer"]
            assert transformer["has_condition"] is (captions is not None)
            assert (transformer["t5_name"] is None) == (captions is None)
            assert work.recipes["semantic"].data["data_max_length_seconds"] == 3.0
