"""`helicon demo image|audio|mesh`: stage after stage, and a page that shows what came of it.

Adding a kind: its steps, and a function that writes its page.
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from helicon.cli import page
from helicon.cli.generate import MANIFEST, loaded
from helicon.cli.page import Page
from helicon.cli.pipeline import Bundle, seconds_of
from helicon.cli.steps import Clusters, Stage, Step, Tokens, Work, make, replaced
from helicon.cli.train import RECIPE_FILE

if TYPE_CHECKING:
    from helicon.data.mesh import Mesh
    from helicon.data.synthetic_meshes import SyntheticMeshes
    from helicon.nn.network import Network

PAGE = "index.html"
PICTURES, SOUNDS, MESHES, COMPLETED = "pictures", "sounds", "meshes", "completed"
SAMPLES = 4  # pictures made of each caption
SOUNDS_OF_EACH = 2
MESHES_OF_EACH = 2


@dataclass(frozen=True)
class Demo:
    steps: Sequence[Step]
    show: Callable[[Work], None]  # writes the page into the folder


class Kind(StrEnum):
    image = "image"
    audio = "audio"
    mesh = "mesh"


def demo(
    kind: Annotated[Kind, typer.Argument(help="What to make.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Changes to the recipes: of all stages, as in num_train_steps=100, or of one, as in maskgit.batch_size=8.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the demo; runs/demo-KIND by default.")] = None,
) -> None:
    """Train a small model on made-up data in a few minutes, and show what it makes on a page."""
    chosen, folder = DEMOS[kind], out or Path("runs") / f"demo-{kind}"
    work = Work.plan(f"helicon demo {kind}", folder, chosen.steps, overrides or ())
    work.carry_out()
    if not is_shown(work):
        chosen.show(work)
    typer.echo(f"Open {folder / PAGE} in a browser: what was made, the curves, and how to go on.")


def is_shown(work: Work) -> bool:
    """Whether there is a page, and nothing was trained after it was written."""
    from helicon.engine.checkpoint import checkpoints

    shown = work.folder / PAGE
    newest = max(found.stat().st_mtime_ns for name in work.recipes for found in checkpoints(work.home(name)))
    return shown.exists() and shown.stat().st_mtime_ns >= newest


def varied(found: dict[tuple[str, str], str], most: int) -> list[str]:
    """Captions of different pairs (of a shape and a colour, say), the words of which repeat as little as possible."""
    used: list[str] = []
    captions: list[str] = []
    while found and len(captions) < most:
        pair = min(found, key=lambda pair: sum(used.count(word) for word in pair))
        captions.append(found.pop(pair))
        used += pair
    return captions


def files_of(work: Work, made: str, what: str) -> str:
    """The table of everything that is in the folder."""
    from helicon.engine.checkpoint import CHECKPOINTS_FOLDER
    from helicon.engine.tracking import METRICS_FILE

    at = work.folder / PAGE
    rows = []
    for name, recipe in work.recipes.items():
        home = work.home(name)
        links = [page.link(home / file, at) for file in (RECIPE_FILE, METRICS_FILE, CHECKPOINTS_FOLDER)]
        rows.append((name, escape(f"{recipe.summary} {steps_of(home):,} steps."), "<br>".join(links)))
    rows.append((made, what, page.link(work.home(made), at)))
    return page.table(("", "what it is", "files"), rows)


def both(numbers: Mapping[str, page.Points], name: str) -> list[page.Curve]:
    """A number while training, and of what was held out."""
    training, held_out = numbers.get(name, []), numbers.get(f"valid_{name}", [])
    return [page.Curve("training", training), page.Curve("held out", held_out, is_measured=True)]


def steps_of(run: Path) -> int:
    """How many steps a run has taken."""
    return int(page.metrics(run)["loss"][-1][0])


# ---------------------------------------------------------------------- pictures from words

TOKENIZER = Stage("tokenizer", "muse/vqgan-demo")
MASKGIT = Stage("maskgit", "muse/maskgit-demo", {"model.vae": TOKENIZER.name})


def show_pictures(work: Work) -> None:
    """Makes pictures for captions, and the page."""
    from helicon.engine.checkpoint import resolve
    from helicon.models.muse.pictures import PictureMaker

    recipe = work.recipes[MASKGIT.name]
    seen, never_seen = captions_of(recipe.data)
    network = loaded(resolve(work.home(MASKGIT.name)))
    as_sampled = {"timesteps": "sample_timesteps", "cond_scale": "sample_cond_scale"}  # what the recipe was tuned with
    options = {name: recipe.trainer[key] for name, key in as_sampled.items() if key in recipe.trainer}
    maker = PictureMaker(network, texts=[*seen, *never_seen], **options)
    make(maker, SAMPLES, work.home(PICTURES))
    picture_page(work, seen, never_seen, options).write(work.folder / PAGE)


def captions_of(data: Mapping[str, Any], most: int = 6) -> tuple[list[str], list[str]]:
    """Captions of (shape, colour) pairs the model has learned from, and of pairs that were kept from it."""
    from helicon.data.synthetic import SyntheticShapes

    choices = dict(data.get("shapes") or {})
    kept = [(shape, colour) for shape, colour in choices.pop("held_out", ())]

    def drawn(**pairs: Any) -> list[str]:
        shapes = SyntheticShapes(1000, image_size=1, seed=data.get("seed", 0) + 1, **pairs, **choices)
        return varied({(a.shape, a.colour): a.caption for a in map(shapes.attributes, reversed(range(1000)))}, most)

    return drawn(held_out=kept), drawn(only=kept) if kept else []


def picture_page(work: Work, seen: Sequence[str], never_seen: Sequence[str], options: Mapping[str, float]) -> Page:
    tokenizer, maskgit = (page.metrics(work.home(stage.name)) for stage in (TOKENIZER, MASKGIT))
    shown = Page(
        "Pictures from words",
        "Two networks, trained one after the other on made-up pictures of simple shapes: the first learned to write a picture as a "
        "grid of codes, the second to fill in such a grid from a caption.",
    )
    drawn = Drawn.read(work.home(PICTURES))
    remark = f"{SAMPLES} pictures for each caption, drawn with seed 0 and not chosen. {drawn.verdict(seen)}"
    shown.section("What it makes", page.paragraph(remark), drawn.gallery(seen))
    if never_seen:
        remark = (
            "No picture of these shapes in these colours was among those it learned from: it puts together what it knows "
            f"of each. {drawn.verdict(never_seen)}"
        )
        shown.section("What it has never seen", page.paragraph(remark), drawn.gallery(never_seen))
    shown.section(
        "How far it came", page.tiles(_picture_numbers(tokenizer, maskgit)), _picture_curves(tokenizer, maskgit)
    )
    samples = sorted((work.home(TOKENIZER.name) / "samples").glob("*.png"))
    if samples:
        remark = "Top: pictures the tokenizer has not learned from. Below: what its codes keep of them (online, then averaged weights)."
        piece = page.media(samples[-1], "originals and reconstructions")
        shown.section("What the codes keep", page.wide(piece, remark))
    further = _picture_commands(work.home(MASKGIT.name), [*never_seen, *seen][0], options)
    shown.section(
        "Go on from here", page.commands(further), files_of(work, PICTURES, "The pictures above, and their captions.")
    )
    return shown


@dataclass(frozen=True)
class Drawn:
    """The pictures of each caption."""

    files: Mapping[str, Sequence[Path]]

    @classmethod
    def read(cls, folder: Path) -> Self:
        files: dict[str, list[Path]] = {}
        for line in map(json.loads, (folder / MANIFEST).read_text(encoding="utf-8").splitlines()):
            files.setdefault(line["text"], []).append(folder / line["path"])
        return cls(files)

    def gallery(self, captions: Sequence[str]) -> str:
        return page.gallery((text, [page.media(path, text) for path in self.files[text]]) for text in captions)

    def verdict(self, captions: Sequence[str]) -> str:
        """How many of the pictures show what their captions say, in words."""
        right = [is_right(path, text) for text in captions for path in self.files[text]]
        return (
            f"{sum(right)} of {len(right)} show the shape and the colour asked for, as far as a simple rule can tell."
        )


def is_right(path: Path, caption: str) -> bool:
    """Whether a picture seems to show the shape and the colour of its caption."""
    from PIL import Image

    from helicon.data.image import to_tensor
    from helicon.data.synthetic import recognise

    with Image.open(path) as image:
        found = recognise(to_tensor(image))
    return f" {found.colour} {found.shape} on " in caption


def _picture_numbers(tokenizer: Mapping[str, page.Points], maskgit: Mapping[str, page.Points]) -> list[tuple[str, str]]:
    return [
        (page.last(tokenizer, "valid_psnr", "{:.1f} dB"), "PSNR of held-out pictures, written as codes and read again"),
        (page.last(tokenizer, "valid_codebook_use", "{:.0f} %", 100), "of the codes are in use in one batch"),
        (
            page.last(maskgit, "valid_loss", "{:.2f}"),
            "nats for a hidden code: how much the true one surprises the second network",
        ),
        (page.last(maskgit, "valid_accuracy", "{:.0f} %", 100), "of hidden codes guessed right at once"),
    ]


def _picture_curves(tokenizer: Mapping[str, page.Points], maskgit: Mapping[str, page.Points]) -> str:
    psnr = page.Curve("held out", tokenizer.get("valid_psnr", []), is_measured=True)
    return page.charts(
        page.chart("Tokenizer: error of the pixels", both(tokenizer, "reconstruction"), is_logarithmic=True),
        page.chart("Tokenizer: PSNR in dB", [psnr], "{:.1f}"),
        page.chart("From words to codes: loss", both(maskgit, "cross_entropy")),
        page.chart("From words to codes: guessed right", both(maskgit, "accuracy"), "{:.0%}"),
    )


def _picture_commands(run: Path, caption: str, options: Mapping[str, float]) -> list[tuple[str, str]]:
    chosen = "".join(f" {name}={value:g}" for name, value in options.items())
    generate = f'helicon generate {shlex.quote(str(run))} --text "{caption}"'
    resume = f"helicon resume {shlex.quote(str(run))} num_train_steps={4 * steps_of(run)}"
    return [
        ("other words, more pictures of each", f"{generate} --samples 8{chosen}"),
        ("closer to the words, drawn another way", f"{generate} cond_scale=5 sampler=halton"),
        ("train on for longer; the demo's command then renews this page", resume),
        ("a tokenizer for your own pictures, on a GPU", "helicon train muse/vqgan data.source=my/pictures"),
        ("everything that can be trained", "helicon recipes"),
    ]


# ---------------------------------------------------------------------- sounds from words

CODEC = Stage("codec", "soundstream/demo")
KMEANS = Clusters("kmeans", "synthetic", {"hours": 0.1})
TOKENS = Tokens("tokens", "synthetic", CODEC.name, KMEANS.name)
SEMANTIC = Stage("semantic", "audiolm/semantic-demo", {"model.wav2vec": KMEANS.name, "data.source": TOKENS.name})
DELAYED = Stage("delayed", "audiolm/delayed-demo", {"model.codec": CODEC.name, **SEMANTIC.stands_on})
AUDIOLM = Bundle("audiolm", {"semantic_transformer": SEMANTIC.name, "coarse_transformer": DELAYED.name})
HOW_DRAWN: Mapping[str, float] = {
    "cond_scale": 2.0,
    "top_p": 0.7,
    "filter_thres": 0.0,
}  # what the recipes were tuned with


def show_sounds(work: Work) -> None:
    """Makes sounds for captions, and the page."""
    from helicon.models.audiolm.sounds import SoundMaker

    seen, never_seen = captions_of_sounds(work.recipes[SEMANTIC.name].data)
    options: dict[str, Any] = {"seconds": seconds_of(work), **HOW_DRAWN}
    maker = SoundMaker(loaded(work.home(AUDIOLM.name)), texts=[*seen, *never_seen], **options)
    make(maker, SOUNDS_OF_EACH, work.home(SOUNDS))
    sound_page(work, seen, never_seen, options).write(work.folder / PAGE)


def captions_of_sounds(data: Mapping[str, Any], most: int = 4) -> tuple[list[str], list[str]]:
    """Captions of different sounds that the model has learned from, and of sounds that were kept from it.

    (Of the latter not those of a whole kind at a pitch, which it has no way to know.)
    """
    from helicon.data.synthetic_sounds import KINDS, SyntheticSounds

    choices = dict(data.get("sounds") or {})
    kept = [(kind, pitch) for kind, pitch in choices.pop("held_out", ())]
    asked = [pair for pair in kept if pair[0] not in KINDS]

    def drawn(**pairs: Any) -> list[str]:
        sounds = SyntheticSounds(1000, seed=data.get("seed", 0) + 1, **pairs, **choices)
        found = map(sounds.attributes, reversed(range(1000)))
        return varied({(f"{a.direction} {a.kind}", a.pitch): a.caption for a in found}, most)

    return drawn(held_out=kept), drawn(only=asked) if asked else []


def sound_page(work: Work, seen: Sequence[str], never_seen: Sequence[str], options: Mapping[str, float]) -> Page:
    codec, semantic, delayed = (page.metrics(work.home(stage.name)) for stage in (CODEC, SEMANTIC, DELAYED))
    shown = Page(
        "Sounds from words",
        "Three networks, trained one after the other on made-up sounds: the first learned to write a sound as a few codes for each "
        "moment, the second to tell from a caption what happens in a sound, the third to write the codes for that.",
    )
    heard = Heard.read(work.home(SOUNDS))
    remark = f"{SOUNDS_OF_EACH} sounds for each caption, drawn with seed 0 and not chosen. {heard.verdict(seen)}"
    shown.section("What it makes", page.paragraph(remark), heard.gallery(seen))
    if never_seen:
        remark = (
            "These captions were kept from it while it learned, though every word of them, and the same sound in other lengths, was "
            f"not. {heard.verdict(never_seen)}"
        )
        shown.section("What it never heard", page.paragraph(remark), heard.gallery(never_seen))
    shown.section(
        "How far it came",
        page.tiles(_sound_numbers(codec, semantic, delayed)),
        _sound_curves(codec, semantic, delayed),
    )
    samples = sorted((work.home(CODEC.name) / "samples").glob("*-spectrograms.png"))
    if samples:
        remark = "Sounds the codec has not learned from, and what its codes keep of them (online and averaged weights)."
        shown.section("What the codes keep", page.wide(page.media(samples[-1], "spectrograms"), remark))
    further = _sound_commands(work, seen[0], options)
    shown.section(
        "Go on from here",
        page.commands(further),
        files_of(work, SOUNDS, "The sounds above, their spectrograms and captions."),
    )
    return shown


class Heard(Drawn):
    """The sounds of each caption."""

    def gallery(self, captions: Sequence[str]) -> str:
        from helicon.models.audiolm.sounds import spectrogram_beside

        sound = lambda path, text: page.sound(path, spectrogram_beside(path), text)
        return page.gallery(
            ((text, [sound(path, text) for path in self.files[text]]) for text in captions), is_wide=True
        )

    def verdict(self, captions: Sequence[str]) -> str:
        """How many of the sounds are what their captions say, in words."""
        right = [sounds_right(path, text) for text in captions for path in self.files[text]]
        return f"{sum(right)} of {len(right)} have the pitch and the direction asked for, as far as a simple rule can tell."


def sounds_right(path: Path, caption: str) -> bool:
    """Whether a sound seems to have the pitch of its caption, and to rise or fall where that says so."""
    import soundfile
    import torch

    from helicon.data.synthetic_sounds import DIRECTIONS
    from helicon.metrics.audio import describe_sound

    wave, hz = soundfile.read(path, dtype="float32", always_2d=True)
    found = describe_sound(torch.from_numpy(wave).mean(dim=1), hz)
    direction = next((word for word in DIRECTIONS if f" {word} " in caption), "steady")
    return caption.endswith(f", {found.pitch} pitch") and found.direction == direction


def _sound_numbers(*stages: Mapping[str, page.Points]) -> list[tuple[str, str]]:
    codec, semantic, delayed = stages
    return [
        (page.last(codec, "valid_si_sdr", "{:.1f} dB"), "SI-SDR of held-out sounds, written as codes and read again"),
        (page.last(codec, "valid_codebook_use", "{:.0f} %", 100), "of the codes are in use in one batch"),
        (
            page.last(semantic, "valid_loss", "{:.2f}"),
            "nats for a semantic token: how much the true one surprises the second network",
        ),
        (page.last(delayed, "valid_loss", "{:.2f}"), "nats for a code, which is what the third makes"),
    ]


def _sound_curves(*stages: Mapping[str, page.Points]) -> str:
    codec, semantic, delayed = stages
    si_sdr = page.Curve("held out", codec.get("valid_si_sdr", []), is_measured=True)
    return page.charts(
        page.chart("Codec: error of the mel spectra", both(codec, "mel"), is_logarithmic=True),
        page.chart("Codec: SI-SDR in dB", [si_sdr], "{:.1f}"),
        page.chart("From words to semantic tokens: loss", both(semantic, "loss")),
        page.chart("From those to codes: loss", both(delayed, "loss")),
    )


def _sound_commands(work: Work, caption: str, options: Mapping[str, float]) -> list[tuple[str, str]]:
    chosen = "".join(f" {name}={value:g}" for name, value in options.items())
    model, delayed = (shlex.quote(str(work.home(name))) for name in (AUDIOLM.name, DELAYED.name))
    resume = f"helicon resume {delayed} num_train_steps={4 * steps_of(work.home(DELAYED.name))}"
    beginning = shlex.quote(str(work.home(SOUNDS) / "00000.wav"))
    return [
        ("other words, more sounds of each", f'helicon generate {model} --text "{caption}" --samples 8{chosen}'),
        ("go on from a sound", f"helicon generate {model} --prompt {beginning} seconds={2 * options['seconds']:g}"),
        ("train on for longer; the demo's command then renews this page", resume),
        ("your own sounds, on a GPU", "helicon pipeline audiolm --data my/sounds -o runs/mine"),
        ("everything that can be trained", "helicon recipes"),
    ]


# ---------------------------------------------------------------------- meshes from words

TRANSFORMER = Stage("transformer", "meshgpt/compact-demo")
HOW_MODELLED: Mapping[str, Any] = {"temperature": 0.7, "filter_thres": 0.0}  # what the recipes were tuned with
KEPT = 0.5  # of a mesh that is to be completed


def show_meshes(work: Work) -> None:
    """Makes meshes for captions, completes others, and writes the page."""
    from helicon.engine.checkpoint import resolve
    from helicon.models.meshgpt.meshes import MeshMaker

    data = work.recipes[TRANSFORMER.name].data
    seen, never_seen = captions_of_meshes(data)
    network = loaded(resolve(work.home(TRANSFORMER.name)))
    make(MeshMaker(network, texts=[*seen, *never_seen], **HOW_MODELLED), MESHES_OF_EACH, work.home(MESHES))
    complete(network, data, work.home(COMPLETED))
    mesh_page(work, seen, never_seen).write(work.folder / PAGE)


def captions_of_meshes(data: Mapping[str, Any], most: int = 9) -> tuple[list[str], list[str]]:
    """Captions of different meshes that the model has learned from, and of meshes that were kept from it."""

    def drawn(**chosen: bool) -> list[str]:
        found = map(meshes_anew(data, 1000, **chosen).attributes, reversed(range(1000)))
        return varied({(f"{a.footprint} {a.kind}", a.height): a.caption for a in found}, most)

    has_kept = bool((data.get("meshes") or {}).get("held_out"))
    return drawn(), drawn(is_held_out=True) if has_kept else []


def meshes_anew(data: Mapping[str, Any], count: int, is_held_out: bool = False) -> "SyntheticMeshes":
    """Meshes like those of a recipe's data section but none of them; or such as were kept from it altogether."""
    from helicon.data.synthetic_meshes import SyntheticMeshes

    choices = dict(data.get("meshes") or {})
    kept = [(kind, height) for kind, height in choices.pop("held_out", ())]
    pairs: dict[str, Any] = {"only" if is_held_out else "held_out": kept}
    return SyntheticMeshes(count, seed=data.get("seed", 0) + 1, edges=False, **pairs, **choices)


def complete(network: "Network", data: Mapping[str, Any], folder: Path, most: int = 4) -> None:
    """Meshes of different kinds that it has not learned from, the first half of each, and what becomes of that without a caption."""
    from helicon.data.mesh import Mesh
    from helicon.models.meshgpt.meshes import MadeMesh, MeshMaker

    meshes, lines = meshes_anew(data, 1000), []
    kinds = {meshes.attributes(index).kind: index for index in reversed(range(1000))}
    with replaced(folder) as partial:
        partial.mkdir()
        for number, sample in enumerate(map(meshes.fetch, [*kinds.values()][:most])):
            paths = {name: partial / f"{number:05d}-{name}.glb" for name in ("whole", "half", "completed")}
            MadeMesh.of(Mesh(sample["vertices"], sample["faces"])).write(paths["whole"])
            maker = MeshMaker(network, prompt=paths["whole"], keep=KEPT, **HOW_MODELLED)
            maker.beginning().write(paths["half"])
            maker.make([0], seed=0)[0].write(paths["completed"])
            lines += [{"path": path.name, "text": sample["texts"]} for path in paths.values()]
        (partial / MANIFEST).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def mesh_page(work: Work, seen: Sequence[str], never_seen: Sequence[str]) -> Page:
    at = work.folder / PAGE
    shown = Page(
        "Meshes from words",
        "One network, trained on made-up furniture: a mesh is written as two or three tokens a face, and the network learned to write "
        "such tokens, one after the other, for a caption.",
    )
    modelled, completed = (Modelled.read(work.home(name)) for name in (MESHES, COMPLETED))
    remark = f"{MESHES_OF_EACH} meshes for each caption, drawn with seed 0 and not chosen; each picture leads to its glb file."
    shown.section("What it makes", page.paragraph(f"{remark} {modelled.verdict(seen)}"), modelled.shown(seen, at))
    if never_seen:
        remark = (
            "No mesh with these captions was among those it learned from: it puts together what it knows of each word. "
            + modelled.verdict(never_seen)
        )
        shown.section("What it has never seen", page.paragraph(remark), modelled.shown(never_seen, at))
    right = sum(is_mesh_of(made, text) for text, (*_, made) in completed.files.items())
    remark = (
        "A mesh it has not learned from, the half of it that it was given (without the caption), and what it made of that: "
        f"{right} of {len(completed.files)} became what they were."
    )
    shown.section("Half a mesh, completed", page.paragraph(remark), completed.shown([*completed.files], at))
    numbers = page.metrics(work.home(TRANSFORMER.name))
    curves = page.charts(page.chart("From words to tokens: loss", both(numbers, "loss")))
    shown.section("How far it came", page.tiles(_mesh_numbers(numbers, modelled)), curves)
    files = files_of(work, MESHES, "The meshes above, their pictures and captions, and all of them as sheet.png.")
    shown.section("Go on from here", page.commands(_mesh_commands(work, [*never_seen, *seen][0])), files)
    return shown


class Modelled(Drawn):
    """The meshes of each caption."""

    def shown(self, captions: Sequence[str], at: Path) -> str:
        """Pictures that lead from the page at `at` to their files."""
        from helicon.models.meshgpt.meshes import MadeMesh, picture_beside

        def piece(path: Path) -> str:
            return page.mesh(path, picture_beside(path), at, str(MadeMesh.of(mesh_in(path)).report))

        return page.gallery((text, [piece(path) for path in self.files.get(text, ())]) for text in captions)

    def verdict(self, captions: Sequence[str]) -> str:
        """How many of the meshes are what their captions say, in words; one that has no faces, and no file, is not."""
        right = sum(is_mesh_of(path, text) for text in captions for path in self.files.get(text, ()))
        return (
            f"{right} of {MESHES_OF_EACH * len(captions)} are of the kind, the height and the outline asked for, as far as a simple "
            "rule can tell."
        )

    @property
    def num_watertight(self) -> int:
        from helicon.models.meshgpt.meshes import MadeMesh

        return sum(MadeMesh.of(mesh_in(path)).report.watertight for paths in self.files.values() for path in paths)


def mesh_in(path: Path) -> "Mesh":
    from helicon.data.mesh import read_mesh

    return read_mesh(path, path.suffix.removeprefix("."), str(path))


def is_mesh_of(path: Path, caption: str) -> bool:
    """Whether a mesh seems to be what its caption says."""
    from helicon.data.synthetic_meshes import describe_mesh

    mesh = mesh_in(path)
    found = describe_mesh(mesh.vertices, mesh.faces)
    return found is not None and found.caption == caption


def _mesh_numbers(numbers: Mapping[str, page.Points], modelled: Modelled) -> list[tuple[str, str]]:
    made = sum(map(len, modelled.files.values()))
    return [
        (page.last(numbers, "valid_loss", "{:.2f}"), "nats for a token: how much the true one surprises the network"),
        (
            f"{modelled.num_watertight} of {made}",
            "of the meshes above are watertight, with every edge between two faces",
        ),
    ]


def _mesh_commands(work: Work, caption: str) -> list[tuple[str, str]]:
    chosen = "".join(f" {name}={value:g}" for name, value in HOW_MODELLED.items())
    run = shlex.quote(str(work.home(TRANSFORMER.name)))
    whole = shlex.quote(str(work.home(COMPLETED) / "00000-whole.glb"))
    resume = f"helicon resume {run} num_train_steps={4 * steps_of(work.home(TRANSFORMER.name))}"
    return [
        ("other words, more meshes of each", f'helicon generate {run} --text "{caption}" --samples 8{chosen}'),
        ("complete a mesh", f"helicon generate {run} --prompt {whole} keep={KEPT:g}{chosen}"),
        ("train on for longer; the demo's command then renews this page", resume),
        ("your own meshes, a text beside each, on a GPU", "helicon train meshgpt/compact data.source=my/meshes"),
        ("everything that can be trained", "helicon recipes"),
    ]


DEMOS = {
    Kind.image: Demo((TOKENIZER, MASKGIT), show_pictures),
    Kind.audio: Demo((CODEC, KMEANS, TOKENS, SEMANTIC, DELAYED, AUDIOLM), show_sounds),
    Kind.mesh: Demo((TRANSFORMER,), show_meshes),
}
