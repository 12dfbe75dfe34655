"""Pictures with the words they were made from, as one picture to look at.

Letters: b pictures in a row, c channels, h height, w width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from jaxtyping import Float
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from helicon.metrics.image import image_grid

MIN_WIDTH = 128  # smaller pictures are enlarged to at least this, so that words fit under them
FONT_SIZE = 11
MAX_LINES = 5
GAP = 6
ACROSS = 8  # pictures in a row of a sheet of prompts, at most

Thing = TypeVar("Thing")
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def contact_sheet(rows: Sequence[Float[Tensor, "b c _ _"]], captions: Sequence[str]) -> Image.Image:
    """Rows of pictures with values in [0, 1] (clamped to it); column i has caption i under each of its pictures."""
    if not rows or any(len(row) != len(captions) for row in rows):
        raise ValueError(f"{len(captions)} captions for rows of {[len(row) for row in rows]} pictures")
    font = ImageFont.load_default(FONT_SIZE)
    width = max(max(MIN_WIDTH, row.shape[-1]) for row in rows)
    pictures = [[_enlarged(image_grid([picture[None]]), width) for picture in row] for row in rows]
    lines = [_wrapped(caption, font, width) for caption in captions]
    line_height = FONT_SIZE + 3
    below = GAP + max(map(len, lines), default=0) * line_height
    heights = [max(picture.height for picture in row) + below for row in pictures]
    # (The gap at the bottom stays: it is what the last line's letters hang into.)
    sheet = Image.new("RGB", (len(captions) * (width + GAP) - GAP, sum(heights)), "white")
    draw = ImageDraw.Draw(sheet)
    top = 0
    for row, height in zip(pictures, heights, strict=True):
        for column, picture in enumerate(row):
            left = column * (width + GAP)
            sheet.paste(picture, (left, top), picture)  # through its transparency, if it has some
            for number, line in enumerate(lines[column]):
                draw.text((left, top + picture.height + 2 + number * line_height), line, fill="black", font=font)
        top += height
    return sheet


@dataclass(frozen=True)
class Sheet:
    """Several things as one picture."""

    image: Image.Image

    def write(self, path: Path) -> None:
        self.image.save(path)


def sheet_of_prompts(
    things: Sequence[Thing],
    prompts: Sequence[str],
    draw: Callable[[list[Sequence[Thing]], Sequence[str]], Image.Image],
) -> Sheet:
    """One column for each prompt, one row for each time it was made; the things of a single prompt stand side by side.

    `draw` makes a picture of rows of things, of which column i has caption i; it gets as many columns as fit on a screen.
    """
    across = len(prompts) if len(prompts) > 1 else len(things)
    captions = (prompts if len(prompts) > 1 else [*prompts] * across)[: len(things)]
    rows = [things[start : start + across] for start in range(0, len(things), across)]
    parts = [slice(start, start + ACROSS) for start in range(0, len(captions), ACROSS)]
    return Sheet(below_each_other([draw([row[part] for row in rows], captions[part]) for part in parts]))


def below_each_other(parts: Sequence[Image.Image], gap: int = GAP) -> Image.Image:
    size = max(part.width for part in parts), sum(part.height + gap for part in parts) - gap
    whole, top = Image.new("RGB", size, "white"), 0
    for part in parts:
        whole.paste(part, (0, top))
        top += part.height + gap
    return whole


def _enlarged(picture: Image.Image, width: int) -> Image.Image:
    """By a whole number, so that every pixel stays a square, and at most to `width`."""
    factor = max(1, width // picture.width)
    return picture.convert("RGBA").resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)


def _wrapped(text: str, font: Font, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines if len(lines) <= MAX_LINES else [*lines[: MAX_LINES - 1], lines[MAX_LINES - 1] + " ..."]
