"""`helicon demo image`: stage after stage, and a page that shows what came of it.

Adding a kind: its stages, and a function that writes its page.
"""

import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from helicon.cli import page
from helicon.cli.generate import MANIFEST, loaded, produce, progress, write_folder
from helicon.cli.page import Page
from helicon.cli.train import RECIPE_FILE, run, sections
from helicon.config import ConfigError, Recipe, load_recipe

if TYPE_CHECKING:
    from helicon.data.synthetic import SyntheticShapes

PAGE = "index.html"
PICTURES = "pictures"
SAMPLES = 4  # things made of each caption


@dataclass(frozen=True)
class Stage:
    """One run of the demo; it lies in a folder of its name."""

    name: str
    recipe: str
    stands_on: Mapping[str, str] = field(
        default_factory=dict
    )  # keys of the recipe, which name the run of an earlier stage


@dataclass(frozen=True)
class Demo:
    stages: Sequence[Stage]
    show: Callable[[Path, Mapping[str, Recipe]], None]  # writes the page into the folder


class Kind(StrEnum):
    image = "image"


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
    recipes = read_recipes(chosen.stages, overrides or (), folder)
    missing = [stage for stage in chosen.stages if not is_done(folder / stage.name, recipes[stage.name])]
    check_order(chosen.stages, missing, folder)
    train_stages(chosen.stages, missing, recipes, folder, f"helicon demo {kind}")
    if not is_shown(folder, chosen.stages):
        chosen.show(folder, recipes)
    typer.echo(f"Open {folder / PAGE} in a browser: what was made, the curves, and how to go on.")


def read_recipes(stages: Sequence[Stage], overrides: Iterable[str], folder: Path) -> dict[str, Recipe]:
    """The recipe of each stage, with the overrides that are meant for it."""
    names = [stage.name for stage in stages]
    found = {}
    for stage in stages:
        meant = [
            override.removeprefix(f"{stage.name}.")
            for override in overrides
            if override.startswith(f"{stage.name}.") or override.partition(".")[0] not in names
        ]
        below = [f"{key}={json.dumps(str(folder / earlier))}" for key, earlier in stage.stands_on.items()]
        try:
            found[stage.name] = load_recipe(stage.recipe, [*below, *meant], sections=sections)
        except ConfigError as error:
            raise ConfigError(f"stage {stage.name}: {error} (for one stage alone: {stage.name}.KEY=VALUE)") from error
    return found


def is_done(run: Path, recipe: Recipe) -> bool:
    """Whether a run with these settings has come to its end (or was continued beyond it)."""
    from helicon.engine.checkpoint import checkpoints, folder_name

    def settings(recipe: Recipe) -> list[Any]:
        return [recipe.trains, recipe.model, recipe.data, {**recipe.trainer, "num_train_steps": None}]

    steps = recipe.trainer["num_train_steps"]
    if not any(found.name >= folder_name(steps) for found in checkpoints(run)):
        return False
    return settings(load_recipe(run / RECIPE_FILE)) == settings(recipe)


def is_shown(folder: Path, stages: Sequence[Stage]) -> bool:
    """Whether there is a page, and nothing was trained after it was written."""
    from helicon.engine.checkpoint import checkpoints

    shown = folder / PAGE
    newest = max(found.stat().st_mtime_ns for stage in stages for found in checkpoints(folder / stage.name))
    return shown.exists() and shown.stat().st_mtime_ns >= newest


def check_order(stages: Sequence[Stage], missing: Sequence[Stage], folder: Path) -> None:
    """A stage that others were trained on already must not be changed under them."""
    from helicon.engine.checkpoint import checkpoints

    begun = [stage for stage in stages if checkpoints(folder / stage.name)]
    for stage in missing:
        on_it = [later for later in begun if stage.name in later.stands_on.values()]
        if on_it:
            raise ConfigError(
                f"the {on_it[0].name} in {folder} was trained on a {stage.name} with other settings: give those again, "
                "or a new folder with --out"
            )


def train_stages(
    stages: Sequence[Stage], missing: Sequence[Stage], recipes: Mapping[str, Recipe], folder: Path, command: str
) -> None:
    for number, stage in enumerate(stages, 1):
        if stage not in missing:
            continue
        recipe = recipes[stage.name]
        typer.echo(f"[{number}/{len(stages)}] {stage.name}: {stage.recipe}, {recipe.note('time')}")
        try:
            run(recipe, results_folder=folder / stage.name, resume=True)  # an interrupted demo goes on where it was
        except (KeyboardInterrupt, SystemExit):
            typer.echo(f"The same command ({command} ...) goes on with the demo from here.")
            raise


# ---------------------------------------------------------------------- pictures from words

TOKENIZER = Stage("tokenizer", "muse/vqgan-demo")
MASKGIT = Stage("maskgit", "muse/maskgit-demo", {"model.vae": TOKENIZER.name})


def show_pictures(folder: Path, recipes: Mapping[str, Recipe]) -> None:
    """Makes pictures for captions, and the page."""
    from helicon.engine.checkpoint import resolve
    from helicon.models.muse.pictures import PictureMaker

    recipe = recipes[MASKGIT.name]
    seen, never_seen = captions_of(recipe.data)
    network = loaded(resolve(folder / MASKGIT.name))
    as_sampled = {"timesteps": "sample_timesteps", "cond_scale": "sample_cond_scale"}  # what the recipe was tuned with
    options = {name: recipe.trainer[key] for name, key in as_sampled.items() if key in recipe.trainer}
    maker = PictureMaker(network, texts=[*seen, *never_seen], **options)
    (folder / PICTURES).mkdir(exist_ok=True)
    things = progress(produce(maker, SAMPLES, seed=0, batch_size=8), SAMPLES * len(maker.prompts))
    write_folder(things, maker, folder / PICTURES, seed=0)
    picture_page(folder, recipes, seen, never_seen, options).write(folder / PAGE)


def captions_of(data: Mapping[str, Any], most: int = 6) -> tuple[list[str], list[str]]:
    """Captions of (shape, colour) pairs the model has learned from, and of pairs that were kept from it."""
    from helicon.data.synthetic import SyntheticShapes

    choices = dict(data.get("shapes") or {})
    kept = [(shape, colour) for shape, colour in choices.pop("held_out", ())]
    make = lambda **pairs: SyntheticShapes(1000, image_size=1, seed=data.get("seed", 0) + 1, **pairs, **choices)
    return _varied(make(held_out=kept), most), _varied(make(only=kept), most) if kept else []


def _varied(shapes: "SyntheticShapes", most: int) -> list[str]:
    """Captions of different pairs, whose shapes and colours repeat as little as possible."""
    found = {(a.shape, a.colour): a.caption for a in map(shapes.attributes, reversed(range(len(shapes))))}
    used: list[str] = []
    captions: list[str] = []
    while found and len(captions) < most:
        pair = min(found, key=lambda pair: sum(used.count(word) for word in pair))
        captions.append(found.pop(pair))
        used += pair
    return captions


def picture_page(
    folder: Path,
    recipes: Mapping[str, Recipe],
    seen: Sequence[str],
    never_seen: Sequence[str],
    options: Mapping[str, float],
) -> Page:
    tokenizer, maskgit = (page.metrics(folder / stage.name) for stage in (TOKENIZER, MASKGIT))
    shown = Page(
        "Pictures from words",
        "Two networks, trained one after the other on made-up pictures of simple shapes: the first learned to write a picture as a "
        "grid of codes, the second to fill in such a grid from a caption.",
    )
    drawn = Drawn.read(folder / PICTURES)
    remark = f"{SAMPLES} pictures for each caption, drawn with seed 0 and not chosen. {drawn.verdict(seen)}"
    shown.section("What it makes", page.paragraph(remark), drawn.gallery(seen))
    if never_seen:
        remark = (
            "No picture of these shapes in these colours was among those it learned from: it puts together what it knows "
            f"of each. {drawn.verdict(never_seen)}"
        )
        shown.section("What it has never seen", page.paragraph(remark), drawn.gallery(never_seen))
    shown.section("How far it came", page.tiles(_numbers(tokenizer, maskgit)), _curves(tokenizer, maskgit))
    samples = sorted((folder / TOKENIZER.name / "samples").glob("*.png"))
    if samples:
        remark = "Top: pictures the tokenizer has not learned from. Below: what its codes keep of them (online, then averaged weights)."
        piece = page.media(samples[-1], "originals and reconstructions")
        shown.section("What the codes keep", page.wide(piece, remark))
    further = _next_commands(folder / MASKGIT.name, [*never_seen, *seen][0], options)
    shown.section("Go on from here", page.commands(further), _files(folder, recipes))
    return shown


@dataclass(frozen=True)
class Drawn:
    """The pictures of each caption."""

    files: Mapping[str, Sequence[Path]]

    @classmethod
    def read(cls, folder: Path) -> "Drawn":
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


def _numbers(tokenizer: Mapping[str, page.Points], maskgit: Mapping[str, page.Points]) -> list[tuple[str, str]]:
    return [
        (page.last(tokenizer, "valid_psnr", "{:.1f} dB"), "PSNR of held-out pictures, written as codes and read again"),
        (page.last(tokenizer, "valid_codebook_use", "{:.0f} %", 100), "of the codes are in use in one batch"),
        (
            page.last(maskgit, "valid_loss", "{:.2f}"),
            "nats for a hidden code: how much the true one surprises the second network",
        ),
        (page.last(maskgit, "valid_accuracy", "{:.0f} %", 100), "of hidden codes guessed right at once"),
    ]


def _curves(tokenizer: Mapping[str, page.Points], maskgit: Mapping[str, page.Points]) -> str:
    def pair(numbers: Mapping[str, page.Points], name: str) -> list[page.Curve]:
        training, held_out = numbers.get(name, []), numbers.get(f"valid_{name}", [])
        return [page.Curve("training", training), page.Curve("held out", held_out, is_measured=True)]

    psnr = page.Curve("held out", tokenizer.get("valid_psnr", []), is_measured=True)
    return page.charts(
        page.chart("Tokenizer: error of the pixels", pair(tokenizer, "reconstruction"), is_logarithmic=True),
        page.chart("Tokenizer: PSNR in dB", [psnr], "{:.1f}"),
        page.chart("From words to codes: loss", pair(maskgit, "cross_entropy")),
        page.chart("From words to codes: guessed right", pair(maskgit, "accuracy"), "{:.0%}"),
    )


def _next_commands(run: Path, caption: str, options: Mapping[str, float]) -> list[tuple[str, str]]:
    chosen = "".join(f" {name}={value:g}" for name, value in options.items())
    generate = f'helicon generate {shlex.quote(str(run))} --text "{caption}"'
    resume = f"helicon resume {shlex.quote(str(run))} num_train_steps={4 * _steps(run)}"
    return [
        ("other words, more pictures of each", f"{generate} --samples 8{chosen}"),
        ("closer to the words, drawn another way", f"{generate} cond_scale=5 sampler=halton"),
        ("train on for longer; the demo's command then renews this page", resume),
        ("a tokenizer for your own pictures, on a GPU", "helicon train muse/vqgan data.source=my/pictures"),
        ("everything that can be trained", "helicon recipes"),
    ]


def _steps(run: Path) -> int:
    """How many steps a run has taken."""
    return int(page.metrics(run)["loss"][-1][0])


def _files(folder: Path, recipes: Mapping[str, Recipe]) -> str:
    from helicon.engine.checkpoint import CHECKPOINTS_FOLDER
    from helicon.engine.tracking import METRICS_FILE

    at = folder / PAGE
    rows = []
    for name, recipe in recipes.items():
        home = folder / name
        links = [page.link(home / file, at) for file in (RECIPE_FILE, METRICS_FILE, CHECKPOINTS_FOLDER)]
        rows.append((name, escape(f"{recipe.summary} {_steps(home):,} steps."), "<br>".join(links)))
    rows.append((PICTURES, "The pictures above, and their captions.", page.link(folder / PICTURES, at)))
    return page.table(("", "what it is", "files"), rows)


DEMOS = {Kind.image: Demo((TOKENIZER, MASKGIT), show_pictures)}
