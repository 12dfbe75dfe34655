"""`helicon generate` on tiny networks of the image family, and on a family made up here that writes something else."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

import helicon
from helicon import registry
from helicon.cli import app
from helicon.cli import generate as verb
from helicon.config import check, load_recipe, signature_without
from helicon.data.image import image_data
from helicon.metrics.contact_sheet import ACROSS
from helicon.models.audiolm.sounds import SoundMaker
from helicon.models.meshgpt.meshes import MeshMaker
from helicon.models.muse.maskgit import MaskGit
from helicon.models.muse.pipeline import Muse, pil_images
from helicon.models.muse.transformer import MaskGitTransformer
from helicon.models.muse.vqgan import VQGanVAE
from helicon.models.voicebox.speech import SpeechMaker
from helicon.nn.network import class_path, find_class
from toys import Line

BYTES = {"name": "bytes", "dim": 12, "depth": 1, "heads": 2, "dim_head": 6}
FAST = "timesteps=2"


def maskgit(image_size: int = 16, cond_image_size: int | None = None, channels: int = 3, **condition: Any) -> MaskGit:
    torch.manual_seed(image_size)
    vae = VQGanVAE(dim=8, layers=2, encdec_resnet_groups=4, codebook_size=16, channels=channels)
    condition = condition or {"t5_name": BYTES}
    transformer = MaskGitTransformer(
        num_tokens=16, dim=20, seq_len=(image_size // 4) ** 2, depth=1, heads=2, dim_head=6, **condition
    )
    return MaskGit(image_size, transformer, vae=vae, cond_image_size=cond_image_size)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved networks of every kind, and a run of two steps."""
    folder = tmp_path_factory.mktemp("networks")
    base, superres = maskgit(16), maskgit(32, 16)
    networks = {
        "words": base,
        "larger": superres,
        "both": Muse(base, superres),
        "classes": maskgit(num_classes=5),
        "named": maskgit(num_classes=2),
        "pairs": maskgit(num_classes=3, condition_on_text=True, t5_name=BYTES),
        "alone": maskgit(condition_on_text=False),
        "grey": maskgit(channels=1),
        "tokenizer": base.vae,
        "tokens": MaskGit(16, base.transformer),
        "embedded": maskgit(text_embed_dim=7),
    }
    networks["named"].name_classes(["owl", "red fox"])
    for name, network in networks.items():
        assert network is not None
        network.save_pretrained(folder / name)
    small = ["num_train_steps=2", "batch_size=2", "save_results_every=10", "lr=0.05", "data.num_samples=40"]
    recipe = load_recipe("muse/maskgit-debug", small, sections=lambda name: registry.entries[name].recipe_sections())
    registry.build_trainer(recipe, results_folder=folder / "run").train()
    return folder


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["generate", *map(str, arguments)])


def said(*arguments: str | Path) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def opened(path: str | Path) -> Image.Image:
    with Image.open(path) as image:
        image.load()
        return image


def pixels(path: str | Path) -> np.ndarray:
    return np.asarray(opened(path))


def expected(network: Any, *texts: str, **options: Any) -> list[np.ndarray]:
    return [np.asarray(picture) for picture in pil_images(network.generate(list(texts), **options))]


def test_one_picture_is_written_as_it_is(made: Path) -> None:
    assert said(made / "words", "--text", "a red circle", "--seed", "5", "-o", "out.png", FAST).endswith(
        "wrote out.png\n"
    )
    (picture,) = expected(helicon.load(made / "words"), "a red circle", seed=5, timesteps=2)
    assert (pixels("out.png") == picture).all()


def test_several_are_a_grid_with_a_column_for_each_text(made: Path) -> None:
    assert "wrote new/deep/out.png, a sheet of 6" in said(
        made / "words", "--text", "a", "--text", "bb", "--samples", "3", "-o", "new/deep/out.png", FAST
    )
    sheet = pixels("new/deep/out.png")
    pictures = expected(helicon.load(made / "words"), *["a", "bb"] * 3, seed=0, timesteps=2)
    enlarged = [np.kron(picture, np.ones((8, 8, 1), dtype=np.uint8)) for picture in pictures]
    height = sheet.shape[0] // 3
    assert sheet.shape[1] == 2 * 128 + 6
    for number, picture in enumerate(enlarged):
        top, left = (number // 2) * height, (number % 2) * 134
        assert (sheet[top : top + 128, left : left + 128] == picture).all(), number


def test_the_samples_of_one_text_stand_side_by_side(made: Path) -> None:
    said(made / "words", "--text", "a", "--samples", "3", "-o", "few.png", "timesteps=1")
    said(made / "words", "--text", "a", "--samples", str(ACROSS + 1), "-o", "more.png", "timesteps=1")
    few, more = opened("few.png"), opened("more.png")
    assert few.width == 3 * 134 - 6 and more.width == ACROSS * 134 - 6
    assert more.height == 2 * few.height + 6


def test_the_same_seed_makes_the_same_bytes(made: Path) -> None:
    def bytes_of(name: str, *more: str) -> bytes:
        said(made / "words", "--text", "a", "--samples", "5", "--batch-size", "2", FAST, *more, "-o", name)
        return Path(name).read_bytes()

    first = bytes_of("a.png")
    assert first == bytes_of("b.png") != bytes_of("c.png", "--seed", "1")
    assert bytes_of("a.png", "--seed", "1") == Path("c.png").read_bytes(), "a file that is named is written anew"


def test_no_two_batches_are_alike(made: Path) -> None:
    said(made / "words", "--text", "a", "--samples", "6", "--batch-size", "1", "-o", "out", FAST)
    assert len({path.read_bytes() for path in Path("out").glob("0*.png")}) > 4


def test_a_folder_holds_numbered_files_a_manifest_and_the_sheet(made: Path) -> None:
    Path("texts.txt").write_text("\ufeffzwölf Kreise\n\n  a star \n", encoding="utf-8")
    words = said(made / "words", "--text", "a", "--texts-file", "texts.txt", "--samples", "2", "-o", "out/set", FAST)
    assert "wrote out/set: 6 files, manifest.jsonl, and sheet.png to look at" in words
    lines = [json.loads(line) for line in Path("out/set/manifest.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["text"] for line in lines] == ["a", "zwölf Kreise", "a star"] * 2
    assert [line["path"] for line in lines] == [f"{number:05d}.png" for number in range(6)]
    assert {line["seed"] for line in lines} == {0}
    assert sorted(path.name for path in Path("out/set").iterdir()) == [
        *(line["path"] for line in lines),
        "manifest.jsonl",
        "sheet.png",
    ]
    read = image_data("out/set/manifest.jsonl", 16, captions="column", augment=False)
    assert len(read) == 6 and read[1]["texts"] == "zwölf Kreise"
    (first, *_) = expected(helicon.load(made / "words"), *["a", "zwölf Kreise", "a star"] * 2, seed=0, timesteps=2)
    assert (pixels("out/set/00000.png") == first).all()


def test_a_pattern_says_what_the_files_of_a_folder_are(made: Path) -> None:
    words = said(made / "words", "--text", "a", "--samples", "2", "-o", "out/pic-*.jpg", "timesteps=1")
    assert "wrote out: 2 files" in words
    names = ["manifest.jsonl", "pic-00000.jpg", "pic-00001.jpg", "sheet.png"]
    assert sorted(path.name for path in Path("out").iterdir()) == names and opened("out/pic-00001.jpg").format == "JPEG"
    again = call(made / "words", "--text", "a", "-o", "out/*.jpg", "timesteps=1")
    assert again.stderr == "error: out already holds something: choose another folder with -o\n"


def test_a_large_folder_has_a_sheet_of_whole_rows(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "MOST_ON_A_SHEET", 5)
    arguments = [made / "words", "--text", "a", "--text", "b", "--samples", "3", "timesteps=1"]
    said(*arguments, "-o", "six")
    said(*arguments[:-2], "2", "timesteps=1", "-o", "four.png")
    assert opened("six/sheet.png").size == opened("four.png").size
    assert len(list(Path("six").glob("0*.png"))) == 6
    result = call(*arguments, "-o", "six.png")
    assert result.stderr == "error: 6 things do not fit into six.png: give a folder, six\n"


def test_the_default_name_is_a_free_one(made: Path) -> None:
    for name in ("a-red-circle.png", "a-red-circle-2.png", "a-red-circle-3.png"):
        assert said(made / "words", "--text", "A red, circle!", FAST).endswith(f"wrote {name}\n")
    assert len(list(Path.cwd().iterdir())) == 3
    assert said(made / "alone", FAST).endswith("wrote generated.png\n")


def test_options_reach_the_network(made: Path) -> None:
    options = ["timesteps=3", "cond_scale=1.5", "sampler=halton", "negative_texts=[b]", "temperature=0"]
    said(made / "words", "--text", "a", "-o", "out.webp", *options)
    said(made / "words", "--text", "a", "-o", "out.png", *options)
    chosen = {"timesteps": 3, "cond_scale": 1.5, "sampler": "halton", "negative_texts": ["b"], "temperature": 0.0}
    (picture,) = expected(helicon.load(made / "words"), "a", seed=0, **chosen)
    assert (pixels("out.png") == picture).all()
    assert opened("out.webp").format == "WEBP"
    listed = said(made / "words", "--options")
    assert 'sampler: confidence or reference or halton = "confidence"\n    which tokens are filled in first' in listed
    assert "negative_texts: Sequence[str] or null = null\n    what the pictures shall not be" in listed


def test_classes_and_nothing_at_all(made: Path) -> None:
    said(made / "classes", "classes=[0,3]", "--samples", "2", "-o", "out", FAST)
    lines = [json.loads(line) for line in Path("out/manifest.jsonl").read_text().splitlines()]
    assert [line["text"] for line in lines] == ["class 0", "class 3"] * 2
    network: Any = helicon.load(made / "classes")
    pictures = pil_images(network.generate(classes=[0, 3] * 2, seed=0, timesteps=2))
    assert all((pixels(f"out/{n:05d}.png") == np.asarray(picture)).all() for n, picture in enumerate(pictures))
    said(made / "named", "classes=[red fox,0]", "-o", "named", FAST)
    lines = [json.loads(line) for line in Path("named/manifest.jsonl").read_text().splitlines()]
    assert [line["text"] for line in lines] == ["red fox", "owl"]
    for alone in ("classes=1", "classes=red fox", "classes=red_fox"):
        said(made / "named", alone, "-o", "alone.jpg", FAST)
    assert "a sheet of 3" in said(made / "alone", "--samples", "3", "-o", "alone.png", FAST)
    said(made / "pairs", "--text", "a", "classes=[1,2]", "-o", "pairs", FAST)
    assert [json.loads(line)["text"] for line in Path("pairs/manifest.jsonl").read_text().splitlines()] == [
        "a, class 1",
        "a, class 2",
    ]
    said(made / "grey", "--text", "a", "-o", "grey.png", FAST)
    assert opened("grey.png").mode == "L"


def test_two_stages_and_a_saved_pair_make_the_same(made: Path) -> None:
    muse: Any = helicon.load(made / "both")
    pictures = muse(["a", "b"], timesteps=2, superres_timesteps=1, seed=3)
    texts = ["--text", "a", "--text", "b", "--seed", "3", FAST, "superres_timesteps=1"]
    words = said(made / "words", "--superres", made / "larger", *texts, "-o", "two")
    assert f"MaskGit of {made / 'words'}" in words and f"MaskGit of {made / 'larger'}" in words
    assert f"Muse of {made / 'both'}" in said(made / "both", *texts, "-o", "pair")
    for number, picture in enumerate(pictures):
        assert picture.size == (32, 32)
        for folder in ("two", "pair"):
            assert (pixels(f"{folder}/{number:05d}.png") == np.asarray(picture)).all()


def gradient(width: int, height: int) -> Image.Image:
    values = np.linspace(0, 255, width * height * 3).reshape(height, width, 3)
    return Image.fromarray(values.astype(np.uint8))


def test_a_picture_is_enlarged(made: Path) -> None:
    gradient(16, 16).save("low.png")
    said(made / "larger", "--text", "a", "--image", "low.png", "--samples", "2", "-o", "out", FAST)
    low = torch.from_numpy(pixels("low.png").copy()).permute(2, 0, 1)[None] / 255
    network: Any = helicon.load(made / "larger")
    pictures = expected(network, "a", "a", seed=0, timesteps=2, cond_images=low)
    assert pictures[0].shape == (32, 32, 3)
    assert all((pixels(f"out/{number:05d}.png") == picture).all() for number, picture in enumerate(pictures))


def test_a_region_is_painted_again_and_the_rest_stays_to_the_pixel(made: Path) -> None:
    gradient(16, 16).save("in.png")
    region = np.zeros((16, 16), dtype=np.uint8)
    region[4:12, 8:] = 255
    Image.fromarray(region).save("mask.png")
    said(made / "words", "--text", "a", "--image", "in.png", "--repaint", "mask.png", "-o", "out.png", FAST)
    changed = (pixels("out.png") != pixels("in.png")).any(axis=2)
    assert changed[region > 0].mean() > 0.9 and not changed[region == 0].any()


def test_a_picture_is_extended_over_its_edges(made: Path) -> None:
    """One of 24 x 16 pixels becomes the right bottom part of one of 32 x 32, at half its size."""
    gradient(24, 16).save("in.png")
    said(made / "words", "--text", "a", "--image", "in.png", "extend=[8,16,0,0]", "--samples", "2", "-o", "out", FAST)
    small = np.asarray(gradient(24, 16).resize((12, 8), Image.Resampling.BICUBIC))
    first, second = (pixels(f"out/{number:05d}.png") for number in range(2))
    assert first.shape == (16, 16, 3) and (first[8:, 4:] == small).all() and (second[8:, 4:] == small).all()
    assert (first != second)[:8].any() and (first != second)[:, :4].any()


def test_it_says_which_weights_are_used(made: Path) -> None:
    arguments = [made / "run", "--text", "a", FAST]
    assert "step-00000002, its averaged (EMA) weights, on c" in said(*arguments, "-o", "averaged.png")
    assert "step-00000002, its online weights, on c" in said(*arguments, "--online", "-o", "online.png")
    assert "its only weights" in said(made / "words", "--text", "a", FAST)
    assert Path("averaged.png").read_bytes() != Path("online.png").read_bytes()
    checkpoint = made / "run" / "checkpoints" / "step-00000002"
    said(checkpoint, "--text", "a", FAST, "-o", "checkpoint.png")
    assert Path("averaged.png").read_bytes() == Path("checkpoint.png").read_bytes()


A = ["--text", "a"]
MAKERS = "AudioLM, ConditionalFlowMatcherWrapper, MaskGit, MeshTransformer, Muse, MusicLM, SemanticTransformerWrapper, SoundStream"
OTHERS = " or .jpg or .jpeg or .webp; a name without an ending is a folder"
TOGETHER = (
    "give --image, the picture, together with --repaint, one that is white where it is to be painted again, or with "
    "extend=[left,top,right,bottom], the pixels to add to it"
)
IN = [*("--text", "a"), "--image", "in.png"]
UNREADABLE = "not a readable picture (UnidentifiedImageError: cannot identify image file 'empty')"
NOT_FOUR = " must be four numbers of pixels to add, as in extend=[64,64,64,64]: left, top, right, bottom"
FROM_WORDS = (
    "a pair of stages starts from words alone: paint with the base run, and enlarge the result with the second run"
)


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("tokenizer", A, f"{{}} holds a VQGanVAE, which makes nothing by itself: give a run of one that does ({MAKERS})"),
        ("absent", A, "there is no checkpoint or run folder at {}"),
        ("words", [], 'this MaskGit makes pictures from words: say which, as in --text "a red circle"'),
        ("alone", A, "this MaskGit was trained without texts: leave --text out"),
        ("classes", A, "this MaskGit was trained without texts: leave --text out, and name classes instead, as in classes=[0]"),
        ("classes", [], "this MaskGit makes pictures of classes: say which of 0 to 4, as in classes=[0]"),
        ("classes", ["classes=[5]"], "there is no class 5: this MaskGit knows 0 to 4"),
        ("named", [], "this MaskGit makes pictures of classes: say which of owl, red fox, as in classes=[owl]"),
        ("named", ["classes=[cat]"], "there is no class cat: this MaskGit knows owl, red fox (or 0 to 1)"),
        ("words", [*A, "classes=[1]"], "this MaskGit was trained without classes: leave classes out"),
        ("tokens", A, "this MaskGit learned from token ids, without a tokenizer: it makes no pictures"),
        ("embedded", A, "this MaskGit reads embedded texts: call its generate with text_embeds, in Python"),
        ("words", [*A, "cond_scal=3"], "generate has no argument 'cond_scal': did you mean cond_scale?"),
        ("words", [*A, "timesteps=few"], "generate.timesteps wants int, not 'few'"),
        ("words", [*A, "timesteps=0"], "timesteps=0 must be at least 1"),
        ("words", ["a red circle"], "'a red circle' is no key=value, as in cond_scale=5; a text goes behind --text"),
        ("words", [*A, *A, "negative_texts=[a,b,c]"], "there are 2 texts for 3 pictures: give one for all, or 3"),
        ("words", [*A, "superres_timesteps=3"], "superres_timesteps belongs to two stages: name the second with --superres"),
        ("words", ["--texts-file", "absent"], "absent cannot be read: No such file or directory"),
        ("words", ["--texts-file", "empty"], "empty is empty: write one text a line"),
        ("words", ["--texts-file", "in.png"], "in.png is not a text file in UTF-8"),
        ("words", [*A, "-o", "out.wav"], f"out.wav would be a .wav file, and what is made here is .png{OTHERS}"),
        ("words", [*A, "-o", "full"], "full already holds something: choose another folder with -o"),
        ("words", [*A, "-o", "empty"], "empty is a file, not a folder: choose another place with -o"),
        ("words", [*A, "-o", "empty/deeper/out.png"], "empty/deeper/out.png cannot be written: Not a directory"),
        ("words", [*A, "--image", "in.png"], TOGETHER),
        ("words", [*A, "--image", "in.png", "--repaint", "wide.png"], "in.png is 16 x 16 and wide.png is 20 x 16: they must be of one size"),
        ("words", [*A, "--image", "in.png", "--repaint", "black.png"], "nothing in black.png is white, and so nothing would be painted again"),
        ("larger", A, "this MaskGit enlarges pictures: give one with --image, or make it the --superres of a base run"),
        ("larger", [*A, "--repaint", "in.png"], "this MaskGit enlarges pictures: --repaint and extend are for one that makes them"),
        ("larger", [*IN, "extend=[1,1,1,1]"], "this MaskGit enlarges pictures: --repaint and extend are for one that makes them"),
        ("words", [*A, "extend=[4,4,4,4]"], TOGETHER),
        ("words", [*IN, "--repaint", "in.png", "extend=[4,4,4,4]"], "--repaint and extend both change a picture: give one of them"),
        ("words", [*IN, "extend=[4,4]"], f"extend=[4,4]{NOT_FOUR}"),
        ("words", [*IN, "extend=[0,0,0,0]"], f"extend=[0,0,0,0]{NOT_FOUR}"),
        ("words", [*IN, "extend=[8,-8,0,0]"], f"extend=[8,-8,0,0]{NOT_FOUR}"),
        ("words", [*IN, "extend=[0,2,8,0]"], "extend=[0,2,8,0] makes in.png 24 x 18, and it must be square: add 6 pixels more at the top or bottom"),
        ("words", [*IN, "extend=[900,0,0,900]"], "extend=[900,0,0,900] leaves nothing to paint, or nothing of in.png, in a picture of 16 x 16"),
        ("words", [*A, "--image", "empty", "extend=[4,4,4,4]"], f"empty: {UNREADABLE}"),
        ("both", [*A, "--image", "in.png"], FROM_WORDS),
        ("words", [*A, "--superres", "words"], "superres must be a MaskGit with cond_image_size, the size of the pictures base makes"),
        ("words", [*A, "--superres", "tokenizer"], "--superres holds a VQGanVAE, and two stages are two MaskGits"),
        ("both", [*A, "--superres", "larger"], "RUN holds a Muse, and two stages are two MaskGits"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence(made: Path, name: str, arguments: list[str], sentence: str) -> None:
    gradient(16, 16).save("in.png")
    gradient(20, 16).save("wide.png")
    Image.new("L", (16, 16)).save("black.png")
    Path("empty").touch()
    Path("full").mkdir()
    Path("full/something").touch()
    before = sorted(Path.cwd().rglob("*"))
    if "--superres" in arguments:
        arguments = [*arguments[:-1], str(made / arguments[-1])]
    result = call(made / name, *arguments)
    assert (result.exit_code, result.stderr, result.stdout) == (1, f"error: {sentence.format(made / name)}\n", "")
    assert sorted(Path.cwd().rglob("*")) == before


@pytest.mark.parametrize(
    ("kind", "name", "picture"),
    [
        (MeshMaker, "table.glb", "table.png"),
        (SoundMaker, "voice.wav", "voice-spectrogram.png"),
        (SpeechMaker, "voice.wav", "voice-spectrogram.png"),
    ],
)
def test_a_picture_of_something_else_is_not_overwritten(kind: type[Any], name: str, picture: str) -> None:
    maker = object.__new__(kind)  # of no network: what files are called does not depend on one
    Path(picture).write_text("mine")
    with pytest.raises(FileExistsError, match=f"{picture} is there already, and would be the picture of {name}"):
        verb.Target(Path(name)).claim(maker)
    assert str(verb._free(Path(name).stem, Path(name).suffix, maker)) == f"{Path(name).stem}-2{Path(name).suffix}"
    Path(name).touch()  # then it is the picture of that, and both are replaced
    verb.Target(Path(name)).claim(maker)


def test_a_place_where_nothing_can_be_written_is_told_before_the_work(made: Path) -> None:
    result = call(made / "words", *A, "-o", "/proc/out.png")
    sentence = "error: /proc/out.png cannot be written: No such file or directory; choose another place with -o\n"
    assert (result.exit_code, result.stderr, result.stdout) == (1, sentence, "")


def test_an_unreadable_picture_is_named(made: Path) -> None:
    Path("low.png").write_text("no picture")
    result = call(made / "larger", *A, "--image", "low.png")
    assert result.exit_code == 1 and result.stderr.startswith("error: low.png: not a readable picture")


@dataclass(frozen=True)
class Words:
    words: str

    def write(self, path: Path) -> None:
        path.write_text(self.words)


class WordMaker:
    """Makes text files, which no sheet can show together."""

    suffixes: ClassVar[tuple[str, ...]] = (".txt",)
    sheet = None
    beside = staticmethod(lambda path: None)

    def __init__(self, network: Line, *, texts: Sequence[str] = (), louder: bool = False):
        self.prompts, self.louder = list(texts) or ["silence"], louder

    def make(self, which: Sequence[int], seed: int) -> list[Words]:
        found = [f"{self.prompts[index]} {seed}" for index in which]
        return [Words(words.upper() if self.louder else words) for words in found]


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> str:
    """Another family, whose maker is found by the class of its network."""
    entry = replace(registry.entries["maskgit"], makers={class_path(Line): f"{__name__}:WordMaker"})
    monkeypatch.setattr(registry, "entries", {**registry.entries, "toy": entry})
    monkeypatch.setattr(registry, "_named", lambda path: WordMaker)
    Line().save_pretrained("line")
    return "line"


def test_another_family_makes_other_files(toy: str) -> None:
    assert said(toy, "--text", "hello", "louder=true").endswith("wrote hello.txt\n")
    assert Path("hello.txt").read_text() == "HELLO 0"
    words = said(toy, "--text", "hello", "--text", "you", "--samples", "2", "--batch-size", "3", "--seed", "7")
    assert words.endswith("wrote hello: 4 files, manifest.jsonl\n")
    seeds = [path.read_text().split() for path in sorted(Path("hello").glob("*.txt"))]
    assert [word for word, _ in seeds] == ["hello", "you"] * 2
    assert [seed for _, seed in seeds[:3]] == ["7"] * 3 and int(seeds[3][1]) > 2**32, "each batch has a seed of its own"
    shutil.rmtree("hello")
    assert "hello-2: 2 files" in (Path("hello").touch() or said(toy, "--text", "hello", "--samples", "2"))


def test_another_family_refuses_what_it_does_not_take(toy: str) -> None:
    assert (
        call(toy, *A, "--image", "x.png").stderr
        == f"error: --image is nothing for the network in {toy}: leave it out\n"
    )
    assert call(toy, *A, "--fine", toy).stderr == f"error: --fine is nothing for the network in {toy}: leave it out\n"
    for option in (["--prompt-text", "b"], ["--span", "0:1"]):
        refused = f"error: {option[0]} is nothing for the network in {toy}: leave it out\n"
        assert call(toy, *A, *option).stderr == refused
    assert call(toy, *A, "loud=true").stderr == "error: generate has no argument 'loud': did you mean louder?\n"
    several = call(toy, *A, "--samples", "2", "-o", "out.txt")
    assert several.stderr == "error: 2 things do not fit into out.txt: give a folder, out\n"


def test_too_much_at_once_is_said_to_be_too_much(toy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(self: WordMaker, which: Sequence[int], seed: int) -> list[Words]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(WordMaker, "make", too_much)
    result = call(toy, *A, "--samples", "9", "--batch-size", "7")
    assert result.stderr == "error: 7 at once do not fit into the GPU's memory: give a smaller --batch-size\n"


@pytest.mark.parametrize("name", registry.entries)
def test_every_registered_maker_is_there(name: str) -> None:
    for network, maker in registry.entries[name].makers.items():
        found = find_class(network)
        assert class_path(found) == network
        build: Any = registry._named(maker)
        assert build.suffixes and all(suffix.startswith(".") for suffix in build.suffixes)
        assert check(signature_without(build, "network"), {}, "generate") == {}, "every option has a default"
