"""Mesh files of tiny MeshTransformers on both kinds of tokens, as `helicon generate` makes them."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from typer.testing import CliRunner, Result

import helicon
from helicon import registry
from helicon.cli import app
from helicon.cli.generate import write_folder
from helicon.data.mesh import Mesh, MeshTransform, face_edges, read_mesh, tidy
from helicon.data.mesh_data import mesh_data
from helicon.data.synthetic_meshes import SyntheticMeshes
from helicon.metrics.contact_sheet import ACROSS
from helicon.models.meshgpt.assemble import assembled, mesh_report, write_mesh
from helicon.models.meshgpt.autoencoder import MeshAutoencoder
from helicon.models.meshgpt.compact import CompactMeshTokenizer
from helicon.models.meshgpt.meshes import ON_A_SHEET, PICTURE_SIZE, MadeMesh, MeshMaker, picture_beside
from helicon.models.meshgpt.picture import mesh_picture
from helicon.models.meshgpt.transformer import MeshTransformer

DOCS = Path(__file__).parents[3] / "docs" / "meshgpt.md"
BYTES = {"dim": 12, "depth": 1, "heads": 2, "dim_head": 6}
TEXT: dict[str, Any] = {"condition_on_text": True, "text_condition_model_kwargs": [BYTES]}
A = ["--text", "a tall table"]
SHORT = ["max_seq_len=120"]


def autoencoder(quads: bool = False, span: tuple[float, float] = (-1.0, 1.0)) -> MeshAutoencoder:
    torch.manual_seed(0)
    return MeshAutoencoder(
        coor_continuous_range=span,
        encoder_dims_through_depth=(8, 10),
        decoder_dims_through_depth=(12, 12),
        dim_codebook=16,
        codebook_size=64,
        quads=quads,
    )


def transformer(tokenizer: Any, **options: Any) -> MeshTransformer:
    """With random weights, large enough that its tokens differ."""
    torch.manual_seed(0)
    sizes = {"dim": 16, "attn_depth": 1, "attn_heads": 2, "attn_dim_head": 8, "fine_attn_heads": 2}
    network = MeshTransformer(tokenizer, **sizes, **{"max_seq_len": 600, **options})
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.ndim > 1 and "text_encoder" not in name:
                parameter.copy_(torch.randn_like(parameter) * (0.1 if "vectors" in name else 0.4))
    return network


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved networks of every kind."""
    folder = tmp_path_factory.mktemp("networks")
    triangles, compact = autoencoder(), CompactMeshTokenizer(num_discrete_coors=64)
    networks = {
        "autoencoder": triangles,
        "words": transformer(triangles, **TEXT),
        "compact": transformer(compact, **TEXT),
        "mute": transformer(compact),
        "counting": transformer(triangles, condition_on_num_faces=True),
        "quads": transformer(autoencoder(quads=True)),
        "codes": transformer(None, codebook_size=9, tokens_per_face=6),
        "embedded": transformer(triangles, condition_on_text=True, text_embed_dim=7),
    }
    for name, network in networks.items():
        network.save_pretrained(folder / name)
    return folder


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["generate", *map(str, arguments)])


def said(*arguments: str | Path) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def loaded(folder: Path) -> Any:
    return helicon.load(folder)


def expected(network: Any, *texts: str, **options: Any) -> list[Mesh]:
    coordinates, mask = network.generate(texts=list(texts) or None, **{"max_seq_len": 120, **options})
    return [assembled(*row) for row in zip(coordinates, mask, strict=True)]


def read(path: str | Path) -> Mesh:
    path = Path(path)
    return read_mesh(path, path.suffix[1:], str(path))


def same(path: str | Path, mesh: Mesh) -> bool:
    found = read(path)
    return torch.equal(found.faces, mesh.faces) and torch.allclose(found.vertices.float(), mesh.vertices, atol=1e-6)


def pixels(path: str | Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def furniture(name: str = "bucket.obj", quads: bool = False, scale: float = 3.0) -> dict[str, Any]:
    """A made-up mesh as a file, of another size and place than a network knows them; returns it as a network does."""
    sample = SyntheticMeshes(1, seed=2, quads=quads, kinds=["bucket"], num_discrete_coors=64)[0]
    write_mesh(name, Mesh(sample["vertices"] * scale + scale, sample["faces"]))
    return sample


def tokens_of(network: Any, mesh: dict[str, Tensor] | Mesh) -> Tensor:
    if isinstance(mesh, Mesh):
        mesh = {"vertices": mesh.vertices, "faces": mesh.faces, "face_edges": face_edges(mesh.faces)}
    return network.tokenize(*(mesh[name][None] for name in ("vertices", "faces", "face_edges")))


@pytest.mark.parametrize("name", ["words", "compact"])
def test_one_mesh_has_its_picture_beside_it_and_is_told_of(made: Path, name: str) -> None:
    words = said(made / name, *A, "--seed", "5", "-o", "new/table.glb", *SHORT)
    (mesh,) = expected(loaded(made / name), "a tall table", seed=5)
    assert same("new/table.glb", mesh) and len(mesh.faces) > 3
    assert (pixels("new/table.png") == np.asarray(mesh_picture(mesh, PICTURE_SIZE))).all()
    report = str(mesh_report(mesh)).partition(", ")[0]
    assert f"\nnew/table.glb: {report}, " in words and "watertight\n" in words
    assert words.endswith("\nwrote new/table.glb\n")
    assert sorted(path.name for path in Path("new").iterdir()) == ["table.glb", "table.png"]


def test_several_meshes_are_a_folder_that_is_a_dataset(made: Path) -> None:
    words = said(made / "words", *A, "--text", "a box", "--samples", "2", "-o", "out", *SHORT)
    assert "wrote out: 4 files, manifest.jsonl, and sheet.png to look at" in words
    lines = [json.loads(line) for line in Path("out/manifest.jsonl").read_text().splitlines()]
    assert [line["text"] for line in lines] == ["a tall table", "a box"] * 2
    meshes = expected(loaded(made / "words"), *["a tall table", "a box"] * 2, seed=0)
    for line, mesh in zip(lines, meshes, strict=True):
        assert same(Path("out", line["path"]), mesh) and picture_beside(Path("out", line["path"])).exists()
        assert f"\nout/{line['path']}: {len(mesh.faces)} faces, {len(mesh.vertices)} vertices" in words
    data = mesh_data("out/manifest.jsonl", MeshTransform(), captions="column", augment=False)
    assert len(data) == 4 and data[1]["texts"] == "a box"
    assert pixels("out/sheet.png").shape[1] == 2 * ON_A_SHEET + 6


@pytest.mark.parametrize("suffix", MeshMaker.suffixes[:-1])
def test_every_kind_of_file_holds_the_mesh(made: Path, suffix: str) -> None:
    said(made / "mute", "-o", f"parts/one{suffix}", *SHORT)
    (mesh,) = expected(loaded(made / "mute"), seed=0)
    found = tidy(read(f"parts/one{suffix}"), 64)
    assert len(found.faces) == len(tidy(mesh, 64).faces)
    assert torch.allclose(found.vertices, tidy(mesh, 64).vertices)


def test_a_pattern_says_the_kind_and_the_names_of_the_files(made: Path) -> None:
    said(made / "mute", "--samples", "2", "-o", "out/part-*.obj", *SHORT)
    names = ["manifest.jsonl", "part-00000.obj", "part-00000.png", "part-00001.obj", "part-00001.png", "sheet.png"]
    assert sorted(path.name for path in Path("out").iterdir()) == names
    assert json.loads(Path("out/manifest.jsonl").read_text().splitlines()[1])["path"] == "part-00001.obj"
    assert "wrote plain: 1 files" in said(made / "mute", "-o", "plain/*", *SHORT)
    assert Path("plain/00000.glb").exists()


def test_a_picture_shows_one_or_all(made: Path) -> None:
    said(made / "mute", "-o", "one.png", *SHORT)
    (mesh,) = expected(loaded(made / "mute"), seed=0)
    assert (pixels("one.png") == np.asarray(mesh_picture(mesh, PICTURE_SIZE))).all()
    assert "wrote all.png, a sheet of 9" in said(made / "mute", "--samples", str(ACROSS + 1), "-o", "all.png", *SHORT)
    assert pixels("all.png").shape[1] == ACROSS * (ON_A_SHEET + 6) - 6
    assert pixels("all.png").shape[0] > 2 * ON_A_SHEET
    assert list(Path.cwd().glob("*.glb")) == []


def test_the_default_name_is_a_file_for_one_and_a_folder_for_several(made: Path) -> None:
    assert said(made / "words", *A, *SHORT).endswith("wrote a-tall-table.glb\n")
    assert "wrote a-tall-table: 2 files" in said(made / "words", *A, "--samples", "2", *SHORT)


def test_options_reach_the_network(made: Path) -> None:
    options = ["temperature=0.7", "top_k=9", "top_p=0.8", "filter_thres=null", "cond_scale=1.7"]
    options += ["remove_parallel_component=true", "rescale_phi=0.6"]
    said(made / "words", *A, "-o", "out.obj", *SHORT, *options)
    chosen = {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "filter_thres": None, "cond_scale": 1.7}
    chosen |= {"remove_parallel_component": True, "rescale_phi": 0.6}
    (mesh,) = expected(loaded(made / "words"), "a tall table", seed=0, **chosen)
    assert same("out.obj", mesh)
    for without in ({"remove_parallel_component": False}, {"rescale_phi": 0.0}):
        (other,) = expected(loaded(made / "words"), "a tall table", seed=0, **{**chosen, **without})
        assert not same("out.obj", other)
    said(made / "counting", "-o", "few.obj", *SHORT, "num_faces=4")
    said(made / "counting", "-o", "any.obj", *SHORT)
    (few,), (any_number,) = (
        expected(loaded(made / "counting"), seed=0, num_faces=4),
        expected(loaded(made / "counting"), seed=0),
    )
    assert same("few.obj", few) and same("any.obj", any_number) and not same("few.obj", any_number)


@pytest.mark.parametrize(("name", "quads"), [("words", False), ("compact", False), ("quads", True)])
def test_half_a_mesh_is_completed(made: Path, name: str, quads: bool) -> None:
    whole, network = furniture(quads=quads), loaded(made / name)
    texts = [] if quads else ["a bucket", "a box"]
    arguments = [word for text in texts for word in ("--text", text)]
    said(
        made / name, "--prompt", "bucket.obj", "keep=0.5", "--samples", "2", "-o", "out", *arguments, "max_seq_len=150"
    )
    if name != "compact":  # these count 128 bins
        whole = MeshTransform(128, quads)(Mesh(whole["vertices"], whole["faces"]), "")
    codes = tokens_of(network, whole)
    size = network.tokens_per_face
    kept = codes[:, : round(codes.shape[1] / 2 / size) * size]
    assert 0.4 < kept.shape[1] / codes.shape[1] < 0.6
    meshes = expected(network, *texts * 2, prompt=kept, seed=0, batch_size=4 if texts else 2, max_seq_len=150)
    if quads:
        assert [len(read(f"out/{number:05d}.glb").faces) for number in range(2)] == [2 * len(m.faces) for m in meshes]
    else:
        assert all(same(f"out/{number:05d}.glb", mesh) for number, mesh in enumerate(meshes))


def test_what_is_kept_can_be_seen(made: Path) -> None:
    whole = furniture()
    maker = MeshMaker(loaded(made / "compact"), prompt=Path("bucket.obj"), keep=0.5)
    kept = maker.beginning().mesh
    assert 0.3 < len(kept.faces) / len(whole["faces"]) < 0.7
    corners = {tuple(sorted(map(tuple, face))) for face in whole["vertices"][whole["faces"]].tolist()}
    assert {tuple(sorted(map(tuple, face))) for face in kept.vertices[kept.faces].tolist()} <= corners


def test_a_part_of_a_mesh_stays_where_it_is(made: Path) -> None:
    whole = furniture("whole.obj", scale=1.0)
    part = Mesh(whole["vertices"], whole["faces"][: len(whole["faces"]) // 3])
    write_mesh("part.stl", part)
    maker = MeshMaker(loaded(made / "mute"), prompt=Path("part.stl"), max_seq_len=200)
    kept = maker.beginning().mesh
    assert torch.equal(kept.vertices, tidy(part, 64).vertices) and len(kept.faces) == len(part.faces)
    (mesh,) = (made.mesh for made in maker.make([0], seed=1))
    assert len(mesh.faces) > len(part.faces)


@pytest.mark.parametrize("keep", [1.0, 0.5])
def test_a_prompt_is_in_the_range_of_the_tokenizer(keep: float) -> None:
    """Half of any mesh, or a part of one in the cube of that range, has the tokens of the same in another range."""
    part = furniture(scale=1.0)
    prompts = []
    for span in ((-1.0, 1.0), (0.0, 3.0)):
        low, high = span
        vertices = (part["vertices"] + 1) / 2 * (high - low) + low
        write_mesh(Path("part.obj"), Mesh(vertices, part["faces"]))
        maker = MeshMaker(transformer(autoencoder(span=span)), prompt=Path("part.obj"), keep=keep)
        prompts.append(maker.prompt)
        vertices = maker.beginning().mesh.vertices
        assert vertices.min() >= low and vertices.max() <= high
    assert torch.equal(*prompts)
    if keep == 1:
        with pytest.raises(ValueError, match="is not in the cube from -1 to 1"):
            MeshMaker(transformer(autoencoder()), prompt=Path("part.obj"))


def test_a_mesh_without_faces_is_left_out_where_there_are_others(made: Path) -> None:
    nothing = Mesh(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.long))
    one = furniture()
    table = Mesh(one["vertices"], one["faces"])
    things = [("a", MadeMesh.of(nothing, dropped=2)), ("b", MadeMesh.of(table))]
    maker, told = MeshMaker(loaded(made / "compact"), texts=["a", "b"]), []
    Path("out").mkdir()
    assert write_folder(things, maker, Path("out"), 0, tell=told.append).startswith("out: 1 files")
    assert [json.loads(line)["text"] for line in Path("out/manifest.jsonl").read_text().splitlines()] == ["b"]
    assert told[0] == "out/00000.glb: the mesh has no faces, so there is nothing to write"
    assert told[1].startswith("out/00001.glb: ") and "faces" in told[1] and len(told) == 2
    assert not Path("out/00000.png").exists() and pixels("out/sheet.png").shape[1] == 2 * ON_A_SHEET + 6
    for arguments in ([], ["--samples", "2"]):
        result = call(made / "mute", *arguments, "max_seq_len=2", "-o", "none" if arguments else "none.glb")
        assert result.exit_code == 1 and "the mesh has no faces, so there is nothing to write\n" in result.stderr


ROOM = "is 42 tokens, which leaves nothing of the 30 a mesh may have here: keep less of it, as in keep=0.5"
CUBE = (
    "bucket.obj is not in the cube from -1 to 1, so where in the whole it belongs is not known: move it there, or give the whole mesh "
    "and keep a part of it, as in keep=0.5"
)
LENGTHS = "max_seq_len={} must be 6, the tokens of a face, to 600, which the network was built for"
PROMPT = ["--prompt", "bucket.obj"]
KINDS = ".glb or .obj or .ply or .stl or .png; a name without an ending is a folder"


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("mute", A, "this MeshTransformer was trained without texts: leave --text out"),
        ("embedded", A, "this MeshTransformer reads embedded texts: call its generate with text_embeds, in Python"),
        ("codes", [], "this MeshTransformer learned from codes, without a tokenizer: it makes no meshes"),
        ("words", [*A, "rescale_phi=.nan"], "rescale_phi=nan must be a finite number"),
        ("words", ["cond_scale=3"], "cond_scale=3 guides by a text: give one with --text, or leave it out"),
        ("words", [*A, "temperature=-1"], "temperature=-1.0 must not be negative (0 takes the likeliest token)"),
        ("words", [*A, "num_faces=9"], "this MeshTransformer learned nothing of numbers of faces: leave num_faces out"),
        ("counting", ["num_faces=0"], "num_faces=0 must be at least 1"),
        ("words", [*A, "max_seq_len=5"], LENGTHS.format(5)),
        ("words", [*A, "max_seq_len=606"], LENGTHS.format(606)),
        ("words", [*A, "keep=0.5"], "keep=0.5 is how much of a mesh to go on from: give that with --prompt"),
        ("words", [*A, "kep=0.5"], "generate has no argument 'kep': did you mean keep?"),
        ("words", [*PROMPT, "keep=0"], "keep=0 is the share of bucket.obj to go on from: give more than 0, and at most 1"),
        ("words", PROMPT, CUBE),
        ("words", [*PROMPT, "keep=0.25", "max_seq_len=30"], f"bucket.obj {ROOM}"),
        ("words", ["--prompt", "absent.obj"], "--prompt absent.obj is not there: name a mesh file"),
        ("words", ["--prompt", "bucket.step"], "bucket.step: meshes are read from obj, glb, ply, stl, off files, not from step"),
        ("quads", ["--prompt", "bucket.stl"], "bucket.stl: quads are read from obj, off files, not from stl"),
        ("words", ["--prompt", "empty.obj"], "empty.obj: it has no faces"),
        ("words", ["--prompt", "flat.obj"], "flat.obj: none of its faces has an area, with coordinates in 128 bins"),
        ("words", [*A, "--image", "x.png"], "--image is nothing for the network in {}: leave it out"),
        ("words", [*A, "-o", "out.wav"], f"out.wav would be a .wav file, and what is made here is {KINDS}"),
        ("words", [*A, "-o", "out/*.wav"], f"out/*.wav would be a .wav file, and what is made here is {KINDS}"),
        ("words", [*A, "--samples", "2", "-o", "two.glb"], "2 things do not fit into two.glb: give a folder, two"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence(made: Path, name: str, arguments: list[str], sentence: str) -> None:
    furniture()
    for path in ("bucket.step", "bucket.stl"):
        Path(path).write_text("x")
    Path("empty.obj").write_text("v 0 0 0\n")
    Path("flat.obj").write_text("v 0 0 0\nv 0 0 1\nv 0 0 0.5\nf 1 2 3\n")
    before = sorted(Path.cwd().rglob("*"))
    result = call(made / name, *arguments)
    assert (result.exit_code, result.stderr, result.stdout) == (1, f"error: {sentence.format(made / name)}\n", "")
    assert sorted(Path.cwd().rglob("*")) == before


def test_a_damaged_mesh_is_named(made: Path) -> None:
    Path("a.glb").write_text("no mesh")
    result = call(made / "words", "--prompt", "a.glb")
    assert result.exit_code == 1 and result.stderr.startswith("error: a.glb: not a readable glb mesh")


def test_the_registry_knows_the_maker(made: Path) -> None:
    assert registry.maker_of(made / "words") is MeshMaker
    result = call(made / "autoencoder")
    assert "holds a MeshAutoencoder, which makes nothing by itself" in result.stderr and result.exit_code == 1


@pytest.mark.slow
def test_the_python_of_the_docs_runs() -> None:
    snippets = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert len(snippets) == 2
    snippet = "\n".join(snippets)
    small = "encoder_dims_through_depth=(8, 10), decoder_dims_through_depth=(12, 12), codebook_size=64"
    for written, smaller in {
        "num_discrete_coors=128": f"num_discrete_coors=64, {small}",
        "num_train_steps=100_000": "num_train_steps=2",
        "batch_size=16": "batch_size=2",
        "dim=512": "dim=16, attn_depth=1",
        "max_seq_len=4800": "max_seq_len=180",
    }.items():
        assert written in snippet
        snippet = snippet.replace(written, smaller)
    meshes = SyntheticMeshes(12, kinds=["box", "bucket"])
    for number, sample in enumerate(meshes):
        path = Path("meshes", str(sample["texts"]), f"{number}.obj")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_mesh(path, Mesh(sample["vertices"], sample["faces"]))
    names: dict[str, Any] = {}
    exec(compile(snippet, str(DOCS), "exec"), names)
    assert same("table.glb", names["mesh"]) and names["is_face"].shape == (1, len(names["faces"]))
