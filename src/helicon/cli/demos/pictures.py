"""Pictures from words."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from helicon.cli import page
from helicon.cli.demos.outline import PAGE, Captioned, Demo, both, files_of, steps_of, varied
from helicon.cli.generate import loaded
from helicon.cli.page import Page
from helicon.cli.steps import Stage, Work, make

PICTURES = "pictures"
SAMPLES = 4  # made of each caption
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
        "Go on from here", page.commands(further), files_of(work, {PICTURES: "The pictures above, and their captions."})
    )
    return shown


class Drawn(Captioned):
    """The pictures of each caption."""

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
        (page.last(tokenizer, "valid_codebook_use", "{:.0f} %", 100), "of the codes are in use in the held-out data"),
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


DEMO = Demo((TOKENIZER, MASKGIT), show_pictures)
