"""What the demos have in common: a list of steps, and the pieces of a page that shows what came of them."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Self

from helicon.cli import page
from helicon.cli.generate import MANIFEST
from helicon.cli.steps import Step, Work
from helicon.cli.train import RECIPE_FILE

PAGE = "index.html"


@dataclass(frozen=True)
class Demo:
    steps: Sequence[Step]
    show: Callable[[Work], None]  # writes the page into the folder


@dataclass(frozen=True)
class Captioned:
    """The files of each caption, in a folder that was made from captions."""

    files: Mapping[str, Sequence[Path]]

    @classmethod
    def read(cls, folder: Path) -> Self:
        files: dict[str, list[Path]] = {}
        for line in map(json.loads, (folder / MANIFEST).read_text(encoding="utf-8").splitlines()):
            files.setdefault(line["text"], []).append(folder / line["path"])
        return cls(files)


class CaptionedSounds(Captioned):
    """The sounds of each caption."""

    def gallery(self, captions: Sequence[str]) -> str:
        from helicon.data.sound import spectrogram_beside

        sound = lambda path, text: page.sound(path, spectrogram_beside(path), text)
        return page.gallery(
            ((text, [sound(path, text) for path in self.files[text]]) for text in captions), is_wide=True
        )


def varied(found: dict[tuple[str, str], str], most: int) -> list[str]:
    """Captions of different pairs (of a shape and a colour, say), the words of which repeat as little as possible."""
    used: list[str] = []
    captions: list[str] = []
    while found and len(captions) < most:
        pair = min(found, key=lambda pair: sum(used.count(word) for word in pair))
        captions.append(found.pop(pair))
        used += pair
    return captions


def files_of(work: Work, made: Mapping[str, str]) -> str:
    """The table of everything that is in the folder: the stages, and what was made, by the names of its folders and in words."""
    from helicon.engine.checkpoint import CHECKPOINTS_FOLDER
    from helicon.engine.tracking import METRICS_FILE

    at = work.folder / PAGE
    rows = []
    for name, recipe in work.recipes.items():
        home = work.home(name)
        links = [page.link(home / file, at) for file in (RECIPE_FILE, METRICS_FILE, CHECKPOINTS_FOLDER)]
        rows.append((name, escape(f"{recipe.summary} {steps_of(home):,} steps."), "<br>".join(links)))
    rows += [(name, escape(what), page.link(work.home(name), at)) for name, what in made.items()]
    return page.table(("", "what it is", "files"), rows)


def both(numbers: Mapping[str, page.Points], name: str) -> list[page.Curve]:
    """A number while training, and of what was held out."""
    training, held_out = numbers.get(name, []), numbers.get(f"valid_{name}", [])
    return [page.Curve("training", training), page.Curve("held out", held_out, is_measured=True)]


def steps_of(run: Path) -> int:
    """How many steps a run has taken."""
    return int(page.metrics(run)["loss"][-1][0])
