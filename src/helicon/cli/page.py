"""One page that shows a run to a person: HTML in a single file, with nothing to fetch and nothing to execute.

    page = Page("Pictures from words", "What was done, in a sentence.")
    page.section("Curves", charts(chart("loss", [Curve("training", points), Curve("held out", others)])))
    page.write(folder / "index.html")

Pictures and sounds are embedded, curves are drawn as SVG, links are relative to the page: it can be sent as it is. The functions
below give pieces of HTML; all they are given as text is escaped.
"""

import base64
import itertools
import json
import math
import mimetypes
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from urllib.parse import quote

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 480, 230  # of a chart, in its own units
LEFT, RIGHT, TOP, BOTTOM = 44, 8, 8, 24  # its margins
LOGARITHMIC_FROM = (
    20.0  # the largest over the smallest value of what is drawn on a logarithmic scale, if that is wanted
)
MOST_DOTS = 40

STYLE = """
:root { color-scheme: light dark; --paper: #fcfcfa; --ink: #22262b; --soft: #69707a; --line: #dfe1e0; --card: #ffffff;
  --first: #9aa3ae; --second: #b3401f; --third: #2b6a8f; --code: #f1f1ed; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181b; --ink: #e4e6e8; --soft: #979fa9; --line: #32373d;
  --card: #1d2024; --first: #6c7681; --second: #ee8a5f; --third: #74b6dc; --code: #23272c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 17px/1.55 ui-serif, Georgia, "Times New Roman", serif; }
main { max-width: 62rem; margin: 0 auto; padding: 3rem 1.5rem 4rem; }
h1 { font-size: 2.3rem; line-height: 1.15; font-weight: 600; margin: 0 0 .6rem; letter-spacing: -.01em; }
h2 { font-size: 1.35rem; font-weight: 600; margin: 3rem 0 .4rem; padding-top: 1rem; border-top: 1px solid var(--line); }
p { max-width: 44rem; margin: .5rem 0 1rem; } p.lead { font-size: 1.15rem; } footer p { color: var(--soft); font-size: .9rem; }
a { color: var(--third); }
figure, figcaption, .tiles, table, svg, .legend { font-family: ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
figure { margin: 0; } figcaption { font-size: .85rem; color: var(--soft); line-height: 1.35; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: .8rem; margin: 1.5rem 0; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .8rem 1rem; }
.tile b { display: block; font-size: 1.5rem; font-weight: 600; line-height: 1.25; }
.tile span { font-size: .85rem; line-height: 1.35; display: block; color: var(--soft); }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(19rem, 1fr)); gap: 1.4rem 1.6rem; margin: 1rem 0 1.6rem; }
.gallery figcaption { color: var(--ink); margin-bottom: .4rem; min-height: 2.3em; display: flex; align-items: flex-end; }
.row { display: flex; gap: 4px; } .row > * { flex: 1 1 0; min-width: 0; }
img { display: block; width: 100%; height: auto; image-rendering: pixelated; border-radius: 3px; } audio { width: 100%; }
.gallery.broad { grid-template-columns: 1fr; } .broad .row { gap: 1rem; flex-wrap: wrap; } .broad .row > * { flex: 1 1 18rem; }
.sound img, .mesh img { image-rendering: auto; }
.mesh span, .sound span { display: block; font: .75rem/1.35 ui-sans-serif, system-ui, sans-serif; color: var(--soft); }
figure.wide { margin: 1rem 0 1.6rem; } figure.wide figcaption { margin-top: .5rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 1.6rem; margin: 1rem 0; }
.chart { max-width: 38rem; } .chart figcaption { color: var(--ink); font-weight: 600; font-size: .95rem; }
.legend { font-size: .82rem; color: var(--soft); margin: .1rem 0 .3rem; display: flex; flex-wrap: wrap; gap: 0 1.2rem; }
.legend i { display: inline-block; width: 1.1rem; height: 3px; border-radius: 2px; vertical-align: middle; margin-right: .4rem; }
.legend b { color: var(--ink); font-weight: 600; font-variant-numeric: tabular-nums; }
svg { display: block; width: 100%; height: auto; } svg text { font-size: 11px; fill: var(--soft); }
svg .grid { stroke: var(--line); stroke-width: 1; } svg polyline { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
table { border-collapse: collapse; font-size: .9rem; margin: 1rem 0; width: 100%; }
th, td { text-align: left; padding: .4rem 1.2rem .4rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; color: var(--soft); }
pre { background: var(--code); border-radius: 8px; padding: .9rem 1.1rem; white-space: pre-wrap; overflow-wrap: anywhere;
  font-size: .8rem; line-height: 1.65; }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; } pre .remark { color: var(--soft); }
""".strip()

TRACE, *MEASURED = "var(--first)", "var(--second)", "var(--third)"


@dataclass
class Page:
    """Sections under a title."""

    title: str
    lead: str
    sections: list[str] = field(default_factory=list)

    def section(self, title: str, *pieces: str) -> None:
        self.sections.append("\n".join([f"<h2>{escape(title)}</h2>", *pieces]))

    def html(self) -> str:
        body = "\n".join(f"<section>\n{section}\n</section>" for section in self.sections)
        return (
            f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(self.title)}</title>\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>\n{STYLE}\n</style>\n</head>\n'
            f'<body>\n<main>\n<h1>{escape(self.title)}</h1>\n<p class="lead">{escape(self.lead)}</p>\n{body}\n'
            "</main>\n</body>\n</html>\n"
        )

    def write(self, path: Path) -> None:
        """Whole or not at all."""
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(self.html(), encoding="utf-8")
        partial.replace(path)


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def tiles(numbers: Iterable[tuple[str, str]]) -> str:
    """Numbers that matter, each with what it is."""
    found = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(what)}</span></div>' for value, what in numbers
    )
    return f'<div class="tiles">{found}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The cells of `rows` are HTML (links, say); the head is text."""
    first = "".join(f"<th>{escape(name)}</th>" for name in head)
    others = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f"<table>\n<tr>{first}</tr>\n{others}</table>"


def commands(lines: Iterable[tuple[str, str]]) -> str:
    """Commands to copy, each under a remark."""
    found = [f'<span class="remark"># {escape(remark)}</span>\n{escape(command)}' for remark, command in lines]
    return "<pre><code>" + "\n\n".join(found) + "</code></pre>"


def link(path: Path, page: Path, text: str | None = None) -> str:
    """To a file or folder, by its way from the page."""
    return _link(path, page, escape(text or _way(path, page)))


def _way(path: Path, page: Path) -> str:
    return Path(os.path.relpath(path, page.parent)).as_posix()


def _link(path: Path, page: Path, piece: str) -> str:
    return f'<a href="{quote(_way(path, page))}">{piece}</a>'


def media(path: Path, description: str) -> str:
    """A picture, or a sound to play, as the name of the file says; embedded."""
    kind = mimetypes.guess_type(path.name)[0] or ""
    content = f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
    if kind.startswith("image/"):
        return f'<img src="{content}" alt="{escape(description)}">'
    if kind.startswith("audio/"):
        return f'<audio controls src="{content}" title="{escape(description)}"></audio>'
    raise ValueError(f"{path} is neither a picture nor a sound: a page cannot show it")


def sound(path: Path, picture: Path, description: str, remark: str = "") -> str:
    """A sound to play, under a picture of it where there is one, and what there is to say of it."""
    shown = media(picture, description) if picture.exists() else ""
    said = f"<span>{escape(remark)}</span>" if remark else ""
    return f'<div class="sound">{shown}{media(path, description)}{said}</div>'


def mesh(path: Path, picture: Path, page: Path, description: str) -> str:
    """The picture of a mesh, which leads to its file, and what there is to say of it."""
    shown = _link(path, page, media(picture, description))
    return f'<div class="mesh">{shown}<span>{escape(description)}</span></div>'


def gallery(groups: Iterable[tuple[str, Sequence[str]]], is_wide: bool = False) -> str:
    """Captions, and below each what was made of it (pieces of `media`); those that are wide have the page to themselves."""
    found = [
        f'<figure><figcaption>{escape(caption)}</figcaption><div class="row">{"".join(pieces)}</div></figure>'
        for caption, pieces in groups
    ]
    return f'<div class="gallery{" broad" if is_wide else ""}">\n' + "\n".join(found) + "\n</div>"


def wide(piece: str, caption: str) -> str:
    return f'<figure class="wide">{piece}<figcaption>{escape(caption)}</figcaption></figure>'


# ---------------------------------------------------------------------- curves


@dataclass(frozen=True)
class Curve:
    """A named line; `points` are (step, value)."""

    name: str
    points: Points
    is_measured: bool = False  # now and then, and so drawn with dots and in colour; not the trace of every few steps


def metrics(run: Path) -> Mapping[str, Points]:
    """The numbers of a run by name, as (step, value); what is not finite is left out."""
    from helicon.engine.tracking import METRICS_FILE

    found: dict[str, list[tuple[float, float]]] = {}
    path = run / METRICS_FILE
    for line in path.read_text().splitlines() if path.exists() else []:
        values = json.loads(line)
        for name, value in values.items():
            if name != "step" and isinstance(value, (int, float)):
                found.setdefault(name, []).append((values["step"], value))
    return found


def last(numbers: Mapping[str, Points], name: str, form: str, scale: float = 1.0) -> str:
    """The newest value of a number, as text."""
    return form.format(numbers[name][-1][1] * scale) if numbers.get(name) else "?"


def charts(*found: str) -> str:
    return '<div class="charts">\n' + "\n".join(found) + "\n</div>"


def chart(title: str, curves: Sequence[Curve], form: str = "{:.3g}", is_logarithmic: bool = False) -> str:
    """Curves over steps, with the newest value of each beside its name. Logarithmic if wanted, where the values are far apart."""
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return f'<figure class="chart"><figcaption>{escape(title)}</figcaption><p>no numbers yet</p></figure>'
    down = Axis.of([value for curve in curves for _, value in curve.points], HEIGHT - BOTTOM, TOP, is_logarithmic)
    across = Axis(0, max(1, *(step for curve in curves for step, _ in curve.points)), LEFT, WIDTH - RIGHT)
    measured = itertools.cycle(MEASURED)
    coloured = [(curve, next(measured) if curve.is_measured else TRACE) for curve in curves]
    named = "".join(
        f'<span><i style="background:{colour}"></i>{escape(curve.name)} <b>{form.format(curve.points[-1][1])}</b></span>'
        for curve, colour in coloured
    )
    drawn = [*_grid(down, across, form), *(_line(curve, colour, across, down) for curve, colour in coloured)]
    return (
        f'<figure class="chart"><figcaption>{escape(title)}</figcaption><div class="legend">{named}</div>\n'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}, over steps">\n'
        + "\n".join(drawn)
        + "\n</svg></figure>"
    )


@dataclass(frozen=True)
class Axis:
    """From values to places."""

    low: float
    high: float
    start: float  # the place of `low`
    end: float
    is_logarithmic: bool = False

    @classmethod
    def of(cls, values: Sequence[float], start: float, end: float, is_logarithmic: bool) -> "Axis":
        low, high = min(values), max(values)
        if is_logarithmic and low > 0 and high / low > LOGARITHMIC_FROM:
            return cls(low, high, start, end, is_logarithmic=True)
        margin = 0.05 * (high - low) or abs(high) / 2 or 1.0
        return cls(low if low == 0 < high else low - margin, high + margin, start, end)

    def place(self, value: float) -> float:
        change = math.log if self.is_logarithmic else float
        part = (change(value) - change(self.low)) / (change(self.high) - change(self.low))
        return round(self.start + part * (self.end - self.start), 1)

    def ticks(self, most: int = 6) -> list[float]:
        if self.is_logarithmic:
            return self._logarithmic_ticks(most)
        rough = (self.high - self.low) / most
        size = 10.0 ** math.floor(math.log10(rough))
        step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def _logarithmic_ticks(self, most: int) -> list[float]:
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for factors in ((1, 2, 5), (1, 3), (1,)):
            found = [factor * 10.0**decade for decade in decades for factor in factors]
            found = [value for value in found if self.low <= value <= self.high]
            if len(found) <= most:
                break
        return found


def _grid(down: Axis, across: Axis, form: str) -> list[str]:
    rows = [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down.place(value)}" y2="{down.place(value)}"/>'
        f'<text x="{LEFT - 6}" y="{down.place(value) + 3.5}" text-anchor="end">{form.format(value)}</text>'
        for value in down.ticks()
    ]
    *some, end = across.ticks()
    columns = [
        f'<text x="{across.place(value)}" y="{HEIGHT - 6}" text-anchor="middle">{value:,g}</text>' for value in some
    ]
    last_one = (
        f'<text x="{min(across.place(end) + 24, WIDTH)}" y="{HEIGHT - 6}" text-anchor="end">{end:,g} steps</text>'
    )
    return [*rows, *columns, last_one]


def _line(curve: Curve, colour: str, across: Axis, down: Axis) -> str:
    places = [(across.place(step), down.place(value)) for step, value in curve.points]
    drawn = f'<polyline stroke="{colour}" points="' + " ".join(f"{x},{y}" for x, y in places) + '"/>'
    if not curve.is_measured or len(places) > MOST_DOTS:
        return drawn
    dots = "".join(
        f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"><title>step {step:g}: {value:.4g}</title></circle>'
        for (x, y), (step, value) in zip(places, curve.points, strict=True)
    )
    return drawn + dots
