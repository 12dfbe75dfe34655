"""The demo of music at its smallest: really trained, searched and shown."""

import json
import re
import shlex
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest
from typer.testing import CliRunner, Result

from helicon.cli import app
from helicon.cli.demos import music as kind
from helicon.cli.demos.music import MULAN, Findings, sounds_anew, texts_of
from helicon.config import load_recipe
from helicon.data.synthetic_sounds import SyntheticSounds
from helicon.metrics.retrieval import Recall
from helicon.models.musiclm.search import Found

QUERIES, SHOWN, SOUNDS = 2, 3, 40
TOWER = {"dim": 16, "depth": 1, "heads": 2, "dim_head": 8}
TINY = [
    *("data.num_samples=24", "data.data_max_length_seconds=0.5", "batch_size=4", "num_train_steps=4", "log_every=1"),
    *("valid_frac=0.2", "save_results_every=2", "save_model_every=2"),
    *(f"model.{tower}.{name}={value}" for tower in ("audio", "text") for name, value in TOWER.items()),
]


def demo_of_music(out: Path, *more: str) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"NUM_QUERIES": QUERIES, "NUM_SHOWN": SHOWN, "NUM_SOUNDS": SOUNDS}.items():
            patch.setattr(kind, name, value)
        return CliRunner().invoke(app, ["demo", "music", "-o", str(out), *TINY, *more])


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "a demo"
    result = demo_of_music(folder)
    assert result.exit_code == 0, result.output
    assert f"[1/1] mulan: {MULAN.recipe}" in result.stdout
    return folder


def test_the_page_plays_what_was_found_and_says_what_it_is(shown: Path) -> None:
    html = (shown / "index.html").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in (shown / "collection/manifest.jsonl").read_text().splitlines()]
    captions = [line["text"] for line in lines]
    assert html.count("<audio ") == html.count("<img ") == 2 * QUERIES * SHOWN and len(lines) == SOUNDS
    queries = [
        unescape(query) for query in re.findall(r"<figure><figcaption>([^<]*)</figcaption><div class=\"row\"", html)
    ]
    assert len(set(queries)) == 2 * QUERIES and set(queries) <= set(captions)
    right: list[int] = []
    for query, figure in zip(queries, html.split("<figure><figcaption>")[1:], strict=False):
        marks = re.findall(r"<span>(\d)\. (✓|✗) ([^<]*) \(-?\d\.\d\d\)</span>", figure)
        assert [rank for rank, _, _ in marks] == ["1", "2", "3"]
        assert all((mark == "✓") == (caption == query) and caption in captions for _, mark, caption in marks)
        right.append(sum(mark == "✓" for _, mark, _ in marks))
    told = [
        int(number) for number in re.findall(rf"(\d+) of these {QUERIES * SHOWN} are what was asked for, where", html)
    ]
    assert told == [sum(right[:QUERIES]), sum(right[QUERIES:])]
    assert len(re.findall(r"<b>\d+ %</b><span>a right sound [^<]*; by chance \d+ %</span>", html)) == 6
    assert len(re.findall(r"<svg.*?</svg>", html, re.DOTALL)) == 2 and html.count("<polyline ") == 4
    assert "no numbers yet" not in html and "<script" not in html and "http" not in html
    links = re.findall(r'href="([^"]*)"', html)
    assert len(links) >= 5 and all((shown / unquote(link)).exists() for link in links)


def test_the_commands_of_the_page_find_what_it_shows(shown: Path) -> None:
    html = unescape((shown / "index.html").read_text(encoding="utf-8"))
    by_text, by_sound = re.findall(r"helicon (search .*)", html)
    found = CliRunner().invoke(app, [*shlex.split(by_text), "--top", str(SHOWN), "--index", "index"])
    assert found.exit_code == 0, found.output
    similarities = [row.split()[1][:-1] for row in found.stdout.splitlines()[3:]]
    page = re.findall(r"<span>\d\. . [^<]* \((-?\d\.\d\d)\)</span>", html)[:SHOWN]
    assert [float(value) for value in similarities] == pytest.approx([float(value) for value in page], abs=0.011)
    alike = CliRunner().invoke(app, [*shlex.split(by_sound), "--index", "index"])
    assert alike.exit_code == 0 and f"0 recordings read, {SOUNDS} known" in alike.stdout, alike.output


def test_a_demo_of_music_that_is_shown_is_not_made_again_and_goes_on_where_it_was(shown: Path) -> None:
    before = (shown / "index.html").stat().st_mtime_ns
    again = demo_of_music(shown)
    assert again.exit_code == 0 and again.stdout.startswith("Open ")
    assert (shown / "index.html").stat().st_mtime_ns == before
    longer = demo_of_music(shown, "num_train_steps=5")
    assert longer.exit_code == 0 and "mulan: resuming from step 4" in longer.stdout
    assert (shown / "index.html").stat().st_mtime_ns > before


def test_the_sounds_are_none_that_were_learned_from() -> None:
    data = load_recipe(MULAN.recipe, ["data.num_samples=200"]).data
    anew = sounds_anew(data, 8000)
    kept = [(pair[0], pair[1]) for pair in data["sounds"]["held_out"]]
    learned = SyntheticSounds(200, 8000, anew.seconds, held_out=kept, durations=data["sounds"]["durations"])
    assert anew.seconds == data["data_max_length_seconds"]
    waves = {bytes(learned[index]["audio"].numpy()) for index in range(200)}
    assert not any(bytes(anew[index]["audio"].numpy()) in waves for index in range(len(anew)))
    read, never_read = texts_of(data, anew)
    captions = {anew.attributes(index).caption for index in range(len(anew))}
    assert {*read} | {*never_read} == captions and len(read) + len(never_read) == len(captions)
    told = {learned.attributes(index).caption for index in range(200)}
    assert never_read and not told & {*never_read} and len(told & {*read}) > len(told) // 2
    assert texts_of({}, SyntheticSounds(20, 8000))[1] == []


def test_what_is_right_is_counted() -> None:
    found = [Found(name, 0.0, 1.0, 0.5) for name in ("a", "b")]
    recall = Recall(3, {1: 0.5, 5: 1.0, 10: 1.0}, {1: 1 / 3, 5: 1.0, 10: 1.0})
    findings = Findings({"a": "a tone", "b": "a chirp"}, {"a tone": found, "a chirp": found[:1]}, recall)
    assert findings.verdict() == "1 of these 3 are what was asked for, where the best search would show 2."
    assert kind._recalls(recall)[0] == ("50 %", "a right sound comes first; by chance 33 %")
    assert [findings.is_right("a chirp", one) for one in found] == [False, True]
