"""The page: what it says, what it draws, and that nothing in it reaches out."""

import base64
import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import soundfile
from PIL import Image

from helicon.cli import page
from helicon.cli.page import Axis, Curve, Page

FALLING = [(float(step), 3.0 / (1 + step)) for step in range(0, 500, 5)]


def svg_of(html: str) -> ElementTree.Element:
    (found,) = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    return ElementTree.fromstring(found)


def places(line: ElementTree.Element) -> list[tuple[float, float]]:
    pairs = (pair.split(",") for pair in line.attrib["points"].split())
    return [(float(x), float(y)) for x, y in pairs]


def test_a_page_is_one_file_that_asks_for_nothing() -> None:
    Image.new("RGB", (3, 2), "red").save("a.png")
    shown = Page("Title", "A lead.")
    shown.section("Pictures", page.gallery([("a caption", [page.media(Path("a.png"), "red")])]))
    shown.section("Curves", page.charts(page.chart("loss", [Curve("training", FALLING)])))
    shown.write(Path("index.html"))
    html = Path("index.html").read_text(encoding="utf-8")
    assert html.startswith("<!doctype html>") and html.count("<h2>") == 2 and "A lead." in html
    assert "<script" not in html and "http" not in html and "@import" not in html and "url(" not in html
    assert "prefers-color-scheme: dark" in html
    assert list(Path.cwd().glob(".*")) == [], "nothing is left of the writing"
    ElementTree.fromstring(re.sub(r"<(meta|img)([^>]*)>", r"<\1\2/>", html.partition("\n")[2]))  # well-formed


def test_text_is_escaped_everywhere() -> None:
    nasty = '<b onclick="x()">&'
    Image.new("L", (1, 1)).save("a.png")
    shown = Page(nasty, nasty)
    shown.section(
        nasty,
        page.paragraph(nasty),
        page.tiles([(nasty, nasty)]),
        page.table([nasty], [[page.link(Path(nasty), Path("index.html"), nasty)]]),
        page.commands([(nasty, nasty)]),
        page.gallery([(nasty, [page.media(Path("a.png"), nasty)])]),
        page.wide("", nasty),
        page.chart(nasty, [Curve(nasty, FALLING)]),
        page.chart(nasty, []),
    )
    assert "<b onclick" not in shown.html() and 'onclick="x' not in shown.html()


def test_media_are_embedded_by_what_they_are() -> None:
    Image.new("RGB", (3, 2), "red").save("a.png")
    soundfile.write("a.wav", np.zeros(8), 8000)
    for name, tag in (("a.png", "<img "), ("a.wav", "<audio controls ")):
        html = page.media(Path(name), "words")
        (content,) = re.findall(r"base64,([^\"]*)", html)
        assert html.startswith(tag) and base64.b64decode(content) == Path(name).read_bytes()
    Path("a.txt").touch()
    with pytest.raises(ValueError, match=r"a\.txt is neither a picture nor a sound"):
        page.media(Path("a.txt"), "")


def test_links_lead_from_the_page_to_the_file() -> None:
    html = page.link(Path("runs/a demo/x#y/metrics.jsonl"), Path("runs/a demo/index.html"))
    assert html == '<a href="x%23y/metrics.jsonl">x#y/metrics.jsonl</a>'


def test_the_picture_of_a_mesh_leads_to_its_file() -> None:
    Image.new("RGB", (3, 2), "red").save("a.png")
    html = page.mesh(Path("runs/made/a b.glb"), Path("a.png"), Path("runs/index.html"), "4 faces <watertight>")
    assert re.findall(r'<a href="([^"]*)"><img [^>]*></a>', html) == ["made/a%20b.glb"]
    assert html.count("4 faces &lt;watertight&gt;") == 2 and "<watertight>" not in html


def test_metrics_are_read_by_name() -> None:
    Path("run").mkdir()
    lines = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": "nan", "valid_loss": 1}, {"step": 2, "loss": 1.5}]
    Path("run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    numbers = page.metrics(Path("run"))
    assert numbers == {"loss": [(1, 2.0), (2, 1.5)], "valid_loss": [(2, 1)]}
    assert page.last(numbers, "loss", "{:.0f} %", 100) == "150 %" and page.last(numbers, "absent", "{}") == "?"
    assert page.metrics(Path("absent")) == {}


def test_a_curve_is_drawn_where_its_values_are() -> None:
    html = page.chart(
        "loss", [Curve("training", [(0, 0.0), (50, 1.0), (100, 0.5)]), Curve("held out", [(100, 0.75)], True)]
    )
    drawing = svg_of(html)
    (first, second) = drawing.findall("polyline")
    (left, bottom), (middle, top), (right, half) = places(first)
    assert (left, right, middle) == (page.LEFT, page.WIDTH - page.RIGHT, (left + right) / 2)
    assert page.TOP < top < half < bottom <= page.HEIGHT - page.BOTTOM
    assert math.isclose(half, (top + bottom) / 2, abs_tol=0.2) and bottom == page.HEIGHT - page.BOTTOM
    assert places(second)[0][1] == pytest.approx((top + half) / 2, abs=0.2)
    (dot,) = drawing.findall("circle")
    assert dot[0].text == "step 100: 0.75"
    words = re.sub(r"<[^>]*>", "", html)
    assert "training 0.5" in words and "held out 0.75" in words and "100 steps" in words


def test_losses_that_span_orders_of_magnitude_are_logarithmic_if_wanted() -> None:
    points = [(0, 100.0), (1, 1.0), (2, 0.01)]
    for wanted in (True, False):
        (line,) = svg_of(page.chart("loss", [Curve("training", points)], is_logarithmic=wanted)).findall("polyline")
        (_, top), (_, middle), (_, bottom) = places(line)
        assert math.isclose(middle, (top + bottom) / 2, abs_tol=0.2) == wanted
    negative = Axis.of([-1.0, 100.0], 0, 1, is_logarithmic=True)
    near = Axis.of([1.0, 2.0], 0, 1, is_logarithmic=True)
    assert not negative.is_logarithmic and not near.is_logarithmic


@pytest.mark.parametrize("values", [[0.0, 1.0], [3.0, 3.0], [0.0, 0.0], [-2.5, 7.1], [1e-7, 3e-7], [12.0, 48_000.0]])
@pytest.mark.parametrize("is_logarithmic", [True, False])
def test_there_are_a_few_round_ticks_within_the_picture(values: list[float], is_logarithmic: bool) -> None:
    axis = Axis.of(values, 200, 10, is_logarithmic)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 8 and ticks == sorted(ticks)
    assert all(9.9 <= axis.place(tick) <= 200.1 for tick in ticks)
    assert all(10 <= axis.place(value) <= 200 for value in values)
    round_ones = ticks if axis.is_logarithmic else [ticks[1] - ticks[0]]
    assert {float(f"{value:.6e}".partition("e")[0]) for value in round_ones} <= {1, 2, 3, 5}


def test_no_numbers_are_said_to_be_none() -> None:
    assert "no numbers yet" in page.chart("loss", [Curve("training", [])])
