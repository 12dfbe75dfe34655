"""The demo at its smallest: both stages really trained, interrupted, continued, and shown."""

import json
import os
import re
import shlex
import signal
from dataclasses import replace
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch
from typer.testing import CliRunner, Result

import helicon
from helicon.cli import app
from helicon.cli import page as pages
from helicon.cli.demo import DEMOS, Kind
from helicon.cli.demos.meshes import MESHES_OF_EACH, Modelled, captions_of_meshes
from helicon.cli.demos.outline import Demo
from helicon.cli.demos.pictures import MASKGIT, SAMPLES, TOKENIZER, Drawn, captions_of
from helicon.cli.demos.sounds import SOUNDS_OF_EACH, Heard, captions_of_sounds
from helicon.cli.steps import Stage, read_recipes
from helicon.config import load_recipe
from helicon.data.mesh import Mesh
from helicon.data.sound import Sound
from helicon.data.synthetic import SyntheticShapes
from helicon.data.synthetic_meshes import SyntheticMeshes
from helicon.data.synthetic_sounds import SyntheticSounds
from helicon.engine.trainer import Trainer
from helicon.models.meshgpt.compact import CompactMeshTokenizer
from helicon.models.meshgpt.meshes import MadeMesh
from helicon.models.muse.pictures import Picture

TINY = [
    *("data.image_size=16", "data.num_samples=40", "batch_size=2", "num_train_steps=4", "log_every=1"),
    *("save_results_every=2", "save_model_every=2", "valid_frac=0.1"),
    *("tokenizer.model.dim=8", "tokenizer.model.encdec_resnet_groups=4", "tokenizer.model.codebook_size=16"),
    "tokenizer.model.layers=2",
    "tokenizer.model.vq_kwargs.codebook_dim=4",
    *("maskgit.model.image_size=16", "maskgit.model.transformer.dim=24", "maskgit.model.transformer.depth=1"),
    "maskgit.model.transformer.t5_name={name: bytes, dim: 12, depth: 1, heads: 2, dim_head: 6, max_length: 96}",
    "maskgit.sample_timesteps=2",
]
LINE = "Open runs/demo-image/index.html in a browser: what was made, the curves, and how to go on.\n"


def demo(*more: str, tiny: list[str] = TINY) -> Result:
    return CliRunner().invoke(app, ["demo", "image", *tiny, *more])


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("key", ["data.source", "source", "maskgit.data.source"])
def test_a_demo_is_of_made_up_data(kind: Kind, key: str) -> None:
    """Its page would call anything else made-up, too."""
    refused = CliRunner().invoke(app, ["demo", kind, f"{key}=mine"])
    assert refused.exit_code == 1
    assert f"a demo learns from made-up data: leave {key} out" in refused.output
    assert not Path("runs").exists()


def stop_after(monkeypatch: pytest.MonkeyPatch, name: str, step: int) -> None:
    """Ctrl-C, as a terminal sends it, while a trainer takes this step."""
    take_step = Trainer.train_step

    def interrupted(trainer: Trainer) -> object:
        if (trainer.name, trainer.step) == (name, step):
            os.kill(os.getpid(), signal.SIGINT)
        return take_step(trainer)

    monkeypatch.setattr(Trainer, "train_step", interrupted)


def losses(stage: str) -> list[float]:
    return [value for _, value in pages.metrics(Path("runs/demo-image") / stage)["loss"]]


@pytest.mark.slow
def test_interrupted_continued_shown_and_shown_again(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = demo("--out", "whole")
    assert whole.exit_code == 0, whole.output

    for trainer, step, stage in (("vqgan", 1, "tokenizer"), ("maskgit", 2, "maskgit")):
        with monkeypatch.context() as patch:
            stop_after(patch, trainer, step)
            stopped = demo()
        assert stopped.exit_code == 130
        assert f"stopped by SIGINT at step {step + 1}, saved" in stopped.stdout
        assert "The same command (helicon demo image ...) goes on from here." in stopped.stdout
        assert not Path("runs/demo-image/index.html").exists()
        assert (Path("runs/demo-image") / stage / "checkpoints").is_dir()

    done = demo()
    assert done.exit_code == 0, done.output
    assert "[1/2]" not in done.stdout and "[2/2] maskgit: muse/maskgit-demo" in done.stdout
    assert "maskgit: resuming from step 3" in done.stdout and done.stdout.endswith(LINE)
    for name in ("tokenizer", "maskgit"):
        assert losses(name) == [value for _, value in pages.metrics(Path("whole") / name)["loss"]]
    assert _pictures("runs/demo-image") == _pictures("whole") and len(_pictures("whole")) > 2 * SAMPLES

    page = Path("runs/demo-image/index.html")
    before = page.read_bytes(), page.stat().st_mtime_ns
    again = demo()
    assert (again.exit_code, again.stdout) == (0, LINE)
    assert (page.read_bytes(), page.stat().st_mtime_ns) == before

    page.unlink()
    assert demo().stdout == LINE and page.read_bytes() == before[0], "the page alone is missing: it is made again"

    refused = demo("tokenizer.num_train_steps=5")
    sentence = (
        "the maskgit in runs/demo-image was trained on a tokenizer that would be trained from step 4 to 5: "
        "give tokenizer.num_train_steps=4, or a new folder with --out; "
        "or delete runs/demo-image/maskgit: what is missing, and all that stands on it, is made anew"
    )
    assert refused.exit_code == 1 and refused.stderr == f"error: {sentence}\n"

    assert CliRunner().invoke(app, ["resume", "runs/demo-image/maskgit", "num_train_steps=5"]).exit_code == 0
    renewed = demo()
    assert renewed.stdout == LINE and page.read_bytes() != before[0], "what was trained further is shown anew"


def _pictures(folder: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((Path(folder) / "pictures").glob("0*.png"))]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "a demo"
    result = demo("--out", str(folder))
    assert result.exit_code == 0, result.output
    return folder


def test_the_page_shows_pictures_curves_numbers_and_commands(finished: Path) -> None:
    html = (finished / "index.html").read_text(encoding="utf-8")
    seen, never_seen = captions_of(load_recipe(MASKGIT.recipe).data)
    assert (
        seen
        and never_seen
        and all(html.count(f"<figcaption>{caption}</figcaption>") == 1 for caption in [*seen, *never_seen])
    )
    assert html.count("<img ") == SAMPLES * len([*seen, *never_seen]) + 1, "and the reconstructions"
    charts = re.findall(r'<svg.*?aria-label="([^"]*)".*?</svg>', html, re.DOTALL)
    assert len(charts) == 4 and any("PSNR" in chart for chart in charts)
    assert html.count("<polyline ") == 7 and "no numbers yet" not in html
    assert html.count("show the shape and the colour asked for") == 2
    assert " dB</b>" in html and "?</b>" not in html
    for verb_used in ("helicon generate ", "helicon resume ", "helicon train ", "helicon recipes"):
        assert verb_used in html
    assert "<script" not in html and "http" not in html


def test_every_file_the_page_refers_to_is_there(finished: Path) -> None:
    html = (finished / "index.html").read_text(encoding="utf-8")
    links = re.findall(r'href="([^"]*)"', html)
    assert len(links) >= 5
    for link in links:
        assert (finished / unquote(link)).exists(), link
    assert all(source.startswith("data:image/png;base64,") for source in re.findall(r'src="([^"]*)"', html))


def test_the_stages_stand_on_each_other(finished: Path) -> None:
    maskgit, tokenizer = helicon.load(finished / "maskgit"), helicon.load(finished / "tokenizer")
    vae = maskgit.stages()["vae"].own_state()
    assert vae.keys() and all(torch.equal(value, tokenizer.own_state()[name]) for name, value in vae.items())
    assert load_recipe(finished / "maskgit" / "recipe.yaml").model["vae"] == str(finished / "tokenizer")


def test_a_command_of_the_page_runs(finished: Path) -> None:
    html = (finished / "index.html").read_text(encoding="utf-8")
    (text,) = set(re.findall(r"helicon generate .*? --text &quot;(.*?)&quot; cond_scale=5 sampler=halton", html))
    arguments = ["generate", str(finished / "maskgit"), "--text", text, "cond_scale=5", "sampler=halton", "timesteps=2"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0 and "wrote a-" in result.stdout


def test_overrides_are_of_all_stages_or_of_one() -> None:
    recipes = read_recipes(
        DEMOS[Kind.image].steps,
        ["num_train_steps=3", "maskgit.batch_size=5", "tokenizer.trainer.batch_size=6", "data.image_size=24"],
        Path("x: y"),
    )
    tokenizer, maskgit = recipes[TOKENIZER.name], recipes[MASKGIT.name]
    assert [recipe.trainer["num_train_steps"] for recipe in (tokenizer, maskgit)] == [3, 3]
    assert [recipe.data["image_size"] for recipe in (tokenizer, maskgit)] == [24, 24]
    assert (tokenizer.trainer["batch_size"], maskgit.trainer["batch_size"]) == (6, 5)
    assert maskgit.model["vae"] == "x: y/tokenizer"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("codebook_size=4", "stage maskgit: model, data, trainer have no argument 'codebook_size': "),
        ("tokenizer.batch_sise=4", "stage tokenizer: model, data, trainer have no argument 'batch_sise': did you mean trainer.batch_size?"),
        ("maskgit.batch_size=x", "stage maskgit: trainer.batch_size wants int, not 'x'"),
    ],
)  # fmt: skip
def test_a_wrong_override_names_the_stage(override: str, sentence: str) -> None:
    result = demo(override, tiny=[])
    assert result.exit_code == 1 and result.stderr.startswith(f"error: {sentence}")
    assert (
        f"(for one stage alone: {override.partition('.')[0] if '.' in override else 'maskgit'}.KEY=VALUE)"
        in result.stderr
    )
    assert not Path("runs").exists()


def test_a_place_that_cannot_be_written_is_told_with_the_remedy() -> None:
    Path("file").touch()
    result = demo("-o", "file/new", tiny=[])
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr == "error: file/new cannot be written: Not a directory; choose another place with -o\n"


def test_captions_vary_and_tell_what_was_never_seen() -> None:
    held_out = [["star", "red"], ["circle", "red"], ["ring", "blue"]]
    seen, never_seen = captions_of({"shapes": {"held_out": held_out, "sizes": ["large"]}, "seed": 3})
    pairs = {(words[3], words[2]) for words in (caption.split() for caption in never_seen)}
    assert pairs == {tuple(pair) for pair in held_out}
    assert len(seen) == 6 and len({caption.split()[3] for caption in seen}) == 6
    assert len({caption.split()[2] for caption in seen}) == 6
    assert not any(f" {colour} {shape} " in caption for caption in seen for shape, colour in held_out)
    assert all(caption.startswith("a large ") for caption in [*seen, *never_seen])
    assert captions_of({})[1] == []


def test_pictures_are_counted_that_show_what_they_should() -> None:
    shapes = SyntheticShapes(6, image_size=32, sizes=["large"], places=["in the centre"])
    Path("made").mkdir()
    texts = [sample["texts"] for sample in shapes]
    lines = []
    for number, sample in enumerate(shapes):
        Picture(sample["images"]).write(Path(f"made/{number}.png"))
        lines.append({"path": f"{number}.png", "text": texts[number] if number < 4 else texts[0], "seed": 0})
    Path("made/manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    drawn = Drawn.read(Path("made"))
    assert [len(drawn.files[text]) for text in texts[:4]] == [3, 1, 1, 1]
    assert drawn.verdict(texts[1:4]).startswith("3 of 3 show the shape and the colour")
    assert drawn.verdict(texts[:1]).startswith("1 of 3 ")
    assert drawn.gallery(texts[:4]).count("<img ") == 6


# ---------------------------------------------------------------------- sounds

DEBUG = {"codec": "soundstream/debug", "semantic": "audiolm/semantic-debug", "delayed": "audiolm/delayed-debug"}
BYTES = "{name: bytes, dim: 12, depth: 1, heads: 2, dim_head: 6, max_length: 48}"
TINY_SOUNDS = [
    *("data.num_samples=24", "batch_size=2", "num_train_steps=4", "log_every=1", "valid_frac=0.1"),
    *("save_results_every=4", "save_model_every=2", "codec.model.strides=[8, 20]", "codec.model.discr_windows=[]"),
    *("codec.model.use_local_attn=false", "kmeans.hours=0.005", "kmeans.clusters=8", "tokens.workers=0"),
    *(
        f"{name}.model.transformer.{key}"
        for name in ("semantic", "delayed")
        for key in ("has_condition=true", f"t5_name={BYTES}")
    ),
]


def demo_of_sounds(*more: str, out: str = "a demo") -> Result:
    """With the smallest recipes."""
    small = [
        replace(step, recipe=DEBUG[step.name]) if isinstance(step, Stage) else step for step in DEMOS[Kind.audio].steps
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DEMOS, Kind.audio, Demo(small, DEMOS[Kind.audio].show))
        return CliRunner().invoke(app, ["demo", "audio", "--out", out, *TINY_SOUNDS, *more])


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    result = demo_of_sounds(out=str(folder / "a demo"))
    assert result.exit_code == 0, result.output
    assert [line.split()[1] for line in result.stdout.splitlines() if line.startswith("[")] == [
        *("codec:", "kmeans:", "tokens:", "semantic:", "delayed:", "audiolm:"),
    ]
    return folder / "a demo"


def test_the_page_plays_sounds(heard: Path) -> None:
    html = (heard / "index.html").read_text(encoding="utf-8")
    captions, never_seen = captions_of_sounds({})
    assert (
        len(captions) == 4
        and not never_seen
        and all(html.count(f"<figcaption>{caption}</figcaption>") == 1 for caption in captions)
    )
    assert html.count("<audio ") == 4 * SOUNDS_OF_EACH == len(list((heard / "sounds").glob("*.wav")))
    assert html.count("<img ") == len(list((heard / "sounds").glob("*-spectrogram.png"))) + 1, "and the codec's own"
    assert len(re.findall(r"<svg.*?</svg>", html, re.DOTALL)) == 4 and "no numbers yet" not in html
    assert html.count("<polyline ") == 7 and "?</b>" not in html and " dB</b>" in html
    assert html.count("have the pitch and the direction asked for") == 1
    links = re.findall(r'href="([^"]*)"', html)
    assert len(links) >= 10 and all((heard / unquote(link)).exists() for link in links)
    assert "<script" not in html and "http" not in html


def test_the_commands_of_the_page_of_sounds_run(heard: Path) -> None:
    html = unescape((heard / "index.html").read_text(encoding="utf-8"))
    commands = re.findall(r"helicon (generate .*)", html)
    assert len(commands) == 2 and "--text" in commands[0] and "--prompt" in commands[1]
    for number, command in enumerate(commands):
        result = CliRunner().invoke(
            app, [*shlex.split(command.partition("</code>")[0]), "--samples", "1", "-o", f"{number}.wav"]
        )
        assert result.exit_code == 0, result.output
        assert Path(f"{number}.wav").stat().st_size > 100


def test_a_demo_that_is_shown_is_not_made_again(heard: Path) -> None:
    page = heard / "index.html"
    before = page.stat().st_mtime_ns
    again = demo_of_sounds(out=str(heard))
    assert again.exit_code == 0 and again.stdout.startswith("Open ") and page.stat().st_mtime_ns == before


def test_sounds_are_counted_that_are_what_they_should_be() -> None:
    sounds = SyntheticSounds(5, 16000)
    Path("made").mkdir()
    texts, lines = [sample["texts"] for sample in sounds], []
    for number, sample in enumerate(sounds):
        Sound(sample["audio"][None], 16000).write(Path(f"made/{number}.wav"))
        lines.append({"path": f"{number}.wav", "text": texts[number] if number < 4 else texts[0], "seed": 0})
    Path("made/manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    heard = Heard.read(Path("made"))
    assert heard.verdict(texts[1:4]).startswith("3 of 3 have the pitch and the direction")
    assert heard.verdict(texts[:1]).startswith("1 of 2 ")
    assert heard.gallery(texts[:4]).count("<audio ") == 5 == heard.gallery(texts[:4]).count("<img ")


# ---------------------------------------------------------------------- meshes

TINY_MESHES = [
    *("data.num_samples=24", "batch_size=2", "num_train_steps=4", "log_every=1", "val_every=2", "valid_frac=0.1"),
    *("save_results_every=4", "save_model_every=2", "model.transformer.dim=24", "model.transformer.attn_depth=1"),
    *("model.transformer.max_seq_len=100", "model.compact.num_discrete_coors=128"),
    "data.meshes={kinds: [box, bucket], held_out: [[bucket, tall]]}",
]


def demo_of_meshes(out: Path, *more: str) -> Result:
    return CliRunner().invoke(app, ["demo", "mesh", "--out", str(out), *TINY_MESHES, *more])


@pytest.fixture(scope="module")
def modelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "a demo"
    result = demo_of_meshes(folder)
    assert result.exit_code == 0, result.output
    assert "[1/1] transformer: meshgpt/compact-demo" in result.stdout
    return folder


def test_the_page_shows_meshes_and_leads_to_their_files(modelled: Path) -> None:
    html = (modelled / "index.html").read_text(encoding="utf-8")
    captions = [
        "a low square box",
        "a low wide box",
        "a tall square box",
        "a tall wide box",
        "a low bucket",
        "a tall bucket",
    ]
    assert all(f"<figcaption>{caption}</figcaption>" in html for caption in captions)
    assert html.index("a low bucket") < html.index("What it has never seen") < html.index("a tall bucket")
    files = [path.relative_to(modelled).as_posix() for path in sorted(modelled.glob("*/*.glb"))]
    made, completed = (sum(name.startswith(folder) for name in files) for folder in ("meshes/", "completed/"))
    assert 0 < made <= MESHES_OF_EACH * len(captions) and completed == 2 * 3, "of each kind: whole, half and completed"
    assert html.count("<img ") == made + completed == html.count(" watertight</span>")
    assert sorted(re.findall(r'href="([^"]*\.glb)"', html)) == files
    assert html.count("of the kind, the height and the outline asked for") == 2 and " became what they were" in html
    assert html.count("<polyline ") == 2 and "no numbers yet" not in html and "?</b>" not in html
    links = re.findall(r'href="([^"]*)"', html)
    assert all((modelled / unquote(link)).exists() for link in links) and (modelled / "meshes/sheet.png").exists()
    assert "<script" not in html and "http" not in html


def test_the_network_of_the_demo_has_its_tokenizer(modelled: Path) -> None:
    tokenizer = helicon.load(modelled / "transformer").stages()["autoencoder"]
    assert isinstance(tokenizer, CompactMeshTokenizer) and tokenizer.num_discrete_coors == 128


def test_the_commands_of_the_page_of_meshes_run(modelled: Path) -> None:
    html = unescape((modelled / "index.html").read_text(encoding="utf-8"))
    commands = re.findall(r"helicon (generate .*)", html)
    assert len(commands) == 2 and "--text" in commands[0] and "--prompt" in commands[1]
    for number, command in enumerate(commands):
        words = shlex.split(command.partition("</code>")[0])
        result = CliRunner().invoke(app, [*words, "--samples", "4", "-o", f"{number}"])
        assert result.exit_code == 0, result.output
        assert f"\n{number}/0000" in result.stdout and Path(f"{number}/sheet.png").exists()


def test_a_demo_of_meshes_that_is_shown_is_not_made_again(modelled: Path) -> None:
    before = (modelled / "index.html").stat().st_mtime_ns
    again = demo_of_meshes(modelled)
    assert again.exit_code == 0 and again.stdout.startswith("Open ")
    assert (modelled / "index.html").stat().st_mtime_ns == before


def test_captions_of_meshes_tell_what_was_never_seen() -> None:
    held_out = [["round table", "tall"], ["lamp", "low"]]
    seen, never_seen = captions_of_meshes({"meshes": {"held_out": held_out}, "seed": 3})
    assert sorted(never_seen) == ["a low lamp", "a tall round table"]
    assert len(seen) == 9 and not set(seen) & set(never_seen) and len({text.split()[-1] for text in seen}) > 5
    assert captions_of_meshes({})[1] == []


def test_meshes_are_counted_that_are_what_they_should_be() -> None:
    meshes = SyntheticMeshes(5, edges=False)
    Path("made").mkdir()
    texts, lines = [sample["texts"] for sample in meshes], []
    assert len(set(texts)) == 5
    for number, sample in enumerate(meshes):
        MadeMesh.of(Mesh(sample["vertices"], sample["faces"])).write(Path(f"made/{number}.glb"))
        lines.append({"path": f"{number}.glb", "text": texts[number] if number < 4 else texts[0], "seed": 0})
    Path("made/manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    modelled = Modelled.read(Path("made"))
    assert modelled.verdict(texts[1:4]).startswith(f"3 of {3 * MESHES_OF_EACH} are of the kind")
    assert modelled.verdict(texts[:1]).startswith("1 of 2 ")
    assert modelled.shown(texts, Path("index.html")).count("<img ") == 5, "the caption without a mesh has none"
    assert modelled.num_watertight == 5
