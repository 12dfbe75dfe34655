"""Every benchmark script runs, at a size at which its numbers mean nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from helicon.data.image import image_data

FOLDER = Path(__file__).parents[1] / "benchmarks"
SMALL = {
    "decode": ["--tiny"],
    "vqgan": ["--tiny", "--repeats", "1"],
    "engine_overhead": ["--blocks", "1", "--steps", "10"],
    "lfq_entropy": ["--bits", "4", "--tokens", "8", "--repeats", "1"],
    "face_edges": ["--faces", "50", "--repeats", "1"],
    "maskgit": ["--tiny", "--repeats", "1", "--profile"],
    "audiolm": ["--tiny", "--repeats", "1"],
    "soundstream": ["--tiny", "--repeats", "1", "--profile"],
    "speech": ["--tiny", "--data", "synthetic", "--minutes", "0.02", "--run", "run"],
    "pictures": ["--tiny", "--data", "synthetic", "--minutes", "0.02", "--maskgit-minutes", "0.02", "--run", "run"],
}


EXPERIMENTS = ("pictures", "speech")  # which write a folder


def test_every_script_is_in_the_list() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} - {"report", "budget"} == SMALL.keys()


def run(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / script), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_prints_a_table_and_writes_its_numbers(name: str, tmp_path: Path) -> None:
    out = tmp_path / ("out" if name in EXPERIMENTS else "out.json")
    done = run(f"{name}.py", *SMALL[name], "--out", out)
    assert done.returncode == 0, done.stderr
    report = json.loads((out / "report.json" if name in EXPERIMENTS else out).read_text())
    assert report["rows"] and report["hardware"]["torch"] and "|---|" in done.stdout


@pytest.mark.slow
def test_the_stages_of_the_experiment_follow_each_other(tmp_path: Path) -> None:
    """Each in a command of its own; the second finds what the first left, and both are in the report."""
    common = ["--tiny", "--data", "synthetic", "--minutes", "0.02", "--maskgit-minutes", "0.02"]
    common += ["--out", str(tmp_path / "out"), "--run", str(tmp_path / "run")]
    early = run("pictures.py", *common, "--stage", "maskgit")
    assert early.returncode == 1 and "run --stage tokenizer first" in early.stderr
    for stage in ("tokenizer", "maskgit"):
        done = run("pictures.py", *common, "--stage", stage)
        assert done.returncode == 0, done.stderr
    rows = {row["case"]: row for row in json.loads((tmp_path / "out" / "report.json").read_text())["rows"]}
    assert rows["tokenizer, 32 px"]["PSNR, dB"] > 5 and 0 < rows["tokenizer, 32 px"]["codebook use"] <= 1
    assert rows["MaskGit, 8 x 8 tokens"]["cross entropy"] < 5 and "samples, guidance 3" in rows
    pictures = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert pictures == {"reconstructions.png", "samples.png", "tokenizer-curves.png", "maskgit-curves.png"}


SVG = """<svg xmlns="http://www.w3.org/2000/svg" xmlns:dc="http://purl.org/dc/elements/1.1/"
  xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><metadata><dc:title>{title}</dc:title>
  <dc:subject><rdf:Bag>{keywords}</rdf:Bag></dc:subject><dc:creator><dc:title>Ann Author</dc:title></dc:creator>
  </metadata></svg>"""


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """What is left of three packages: drawings of every kind, and stamps."""
    root = tmp_path / "unpacked" / "usr" / "share"

    def drawing(name: str, image: Image.Image, title: str, *keywords: str) -> None:
        listed = "".join(f"<rdf:li>{keyword}</rdf:li>" for keyword in keywords)
        for kind in ("png", "svg"):
            (root / "openclipart" / kind / name).parent.mkdir(parents=True, exist_ok=True)
        image.save(root / "openclipart" / "png" / f"{name}.png")
        (root / "openclipart" / "svg" / f"{name}.svg").write_text(SVG.format(title=title, keywords=listed))

    glass = Image.new("RGBA", (300, 200))
    glass.paste((200, 30, 30, 255), (100, 50, 160, 150))
    glass.putpixel((120, 70), (0, 0, 255, 255))
    drawing(
        "food/apple_ann_author_01", glass, "Apple", "food", "hash", "", "Ann Author", "red_fruit", "apples", "apple"
    )
    drawing("food/same_again", glass, "Another", "food")
    drawing("nothing", Image.new("RGBA", (64, 64)), "Nothing", "blank")
    for number in range(6):  # a collection: what each shows is in its name only
        image = Image.effect_mandelbrot((40 + number, 40), (-2, -1.5, 1, 1.5), 40).convert("RGB")
        drawing(f"icons/folder_bombRed-{number}", image, "Part of a collection", "icons")
    drawing("broken", glass, "Broken", "x")
    (root / "openclipart" / "png" / "broken.png").write_bytes(b"no picture")
    stamps = root / "tuxpaint" / "stamps" / "animals"
    stamps.mkdir(parents=True)
    Image.effect_noise((200, 200), 90).save(stamps / "cat.png")
    (stamps / "cat.txt").write_text("A Cat.\nfr.utf8=Un chat.\n")
    Image.radial_gradient("L").save(stamps / "silent.png")
    return tmp_path / "unpacked"


def test_packages_become_captioned_pictures(packages: Path, tmp_path: Path) -> None:
    out = tmp_path / "clipart"
    done = run("data/clipart.py", packages, out, "--size", "48", "--max-same", "4")
    assert done.returncode == 0, done.stderr
    rows = {row["source"]: row for row in map(json.loads, (out / "manifest.jsonl").read_text().splitlines())}
    apple = next(row for name, row in rows.items() if name.startswith("openclipart/food/"))
    assert apple["text"] in ("apple, food, red fruit, apples", "another, food")  # one of the two that look the same
    icons = [row["text"] for name, row in rows.items() if "icons/" in name]
    assert icons == ["folder bomb red, icons"] * 4 and rows["tuxpaint/animals/cat.png"]["text"] == "a cat"
    assert len(rows) == 6 and "6 of 11 pictures" in done.stdout
    for said in ("2 same text as many others", "1 duplicate", "1 blank or tiny", "1 unreadable or huge", "lossless"):
        assert said in done.stdout
    with Image.open(out / apple["path"]) as image:
        assert image.size == (48, 48) and image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
    data = image_data(out / "manifest.jsonl", 32, captions="column")
    assert len(data) == 6 and all(data[index]["images"].shape == (3, 32, 32) for index in range(6))


def test_pictures_fit_the_room_there_is(packages: Path, tmp_path: Path) -> None:
    bytes_in = lambda folder: sum(path.stat().st_size for path in (folder / "pictures").iterdir())
    assert run("data/clipart.py", packages, tmp_path / "whole").returncode == 0
    room = 0.8 * bytes_in(tmp_path / "whole")
    done = run("data/clipart.py", packages, tmp_path / "small", "--max-mb", str(room / 2**20))
    assert done.returncode == 0 and "quality" in done.stdout, done.stderr
    assert bytes_in(tmp_path / "small") <= room
    done = run("data/clipart.py", packages, tmp_path / "none", "--max-mb", "0.0001")
    assert done.returncode == 1 and "lower --size or raise --max-mb" in done.stderr and not (tmp_path / "none").exists()
    done = run("data/clipart.py", packages, tmp_path / "small")
    assert done.returncode == 2 and "exists" in done.stderr
    done = run("data/clipart.py", tmp_path / "small", tmp_path / "none")
    assert done.returncode == 2 and "unpack the packages there" in done.stderr
