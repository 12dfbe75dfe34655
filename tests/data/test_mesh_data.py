from pathlib import Path

import pytest
import torch
import trimesh
from torch import Tensor
from torch.utils.data import Dataset

from data.meshes import box, content_of, random_mesh, seeded, write
from helicon.data.dataset import BadFile, unaugmented
from helicon.data.loader import Loader
from helicon.data.mesh import MESH_EXTENSIONS, MeshTransform, face_edges, read_mesh
from helicon.data.mesh_data import DatasetFromTransforms, collate_meshes, custom_collate, mesh_data
from helicon.data.split import split


def test_a_folder_with_bad_and_large_files_trains_and_lists_them(tmp_path: Path):
    folder = write(tmp_path / "data", "a.obj", "b/c.stl", "b/d.glb", "e.ply")
    write(folder, "large.off", mesh=trimesh.creation.icosphere(1))
    write(folder, "small.off", mesh=trimesh.Trimesh([[0, 0, 0], [1, 0, 0], [0, 1, 0]], [[0, 1, 2]]))
    (folder / "junk.glb").write_bytes(b"junk")
    data = mesh_data(folder, MeshTransform(min_faces=2, max_faces=20))
    loader = Loader(data, batch_size=3, collate=collate_meshes, bad_files=tmp_path / "bad_files.txt")
    batches = [*loader.validation(None)]
    assert [batch["faces"].shape[1:] for batch in batches] == [(12, 3)] * 3
    reasons = dict(line.split("\t") for line in (tmp_path / "bad_files.txt").read_text().splitlines())
    assert reasons[str(folder / "large.off")] == "it has 80 faces, more than max_faces=20"
    assert reasons[str(folder / "small.off")] == "it has 1 faces, fewer than min_faces=2"
    assert len(reasons) == 3 and sorted(loader.bad) == sorted(reasons)


def test_captions_beside_files_in_folder_names_and_in_a_manifest(tmp_path: Path):
    write(tmp_path, "round_table/1.obj", "chair/2.stl")
    for name in ("round_table/1", "chair/2"):
        (tmp_path / f"{name}.txt").write_text(f"mesh {name}\n")
    assert [s["texts"] for s in mesh_data(str(tmp_path), captions="beside")] == ["mesh chair/2", "mesh round_table/1"]
    data = mesh_data(tmp_path, captions="folder")
    assert [s["texts"] for s in data] == ["chair", "round table"] and set(data[0]) >= {"vertices", "faces"}
    (tmp_path / "list.csv").write_text("path,title\nround_table/1.obj,first\nchair/2.stl,second\n")
    listed = mesh_data(tmp_path / "list.csv", captions="column", text_column="title")
    assert [s["texts"] for s in listed] == ["first", "second"] and list(listed.keys) == [
        "round_table/1.obj",
        "chair/2.stl",
    ]
    with pytest.raises(ValueError, match="has no column text"):
        mesh_data(tmp_path / "list.csv", captions="column")
    with pytest.raises(ValueError, match="a folder has no columns"):
        mesh_data(tmp_path, captions="column")
    with pytest.raises(ValueError, match="holds no obj file"):
        mesh_data(write(tmp_path / "other", "x.stl"), exts=MESH_EXTENSIONS[:1])


def test_a_split_augments_the_training_part_only(tmp_path: Path):
    write(tmp_path, *(f"{number}.obj" for number in range(8)))
    train, valid = split(mesh_data(tmp_path), 0.25, 42)
    assert valid is not None and len(valid) == 2
    for part, expected in ((valid, 1), (train, 5)):
        assert len({tuple(seeded(part, seed)["vertices"].flatten().tolist()) for seed in range(5)}) == expected


def test_hugging_face_datasets():
    datasets = pytest.importorskip("datasets")
    files = [content_of(box(), "glb"), content_of(box(), "stl"), b"junk"]
    rows = {
        "mesh": [
            {"bytes": content, "path": path} for content, path in zip(files, [None, "b.stl", "c.obj"], strict=True)
        ],
        "raw": [files[0], content_of(box(), "ply"), files[1]],
        "text": ["a", None, "c"],
    }
    source = datasets.Dataset.from_dict(rows)
    data = mesh_data(source, captions="column", augment=False)
    assert data[0]["texts"] == "a" and data[0]["faces"].shape == (12, 3) and len(data) == 3
    assert torch.equal(mesh_data(source, augment=False)[1]["vertices"], data[0]["vertices"])
    with pytest.raises(BadFile, match="row 1: its column text holds no text"):
        data[1]
    with pytest.raises(BadFile, match=r"row 2 c.obj: it has no faces"):
        data[2]
    raw = mesh_data(source, mesh_column="raw", augment=False)
    assert torch.equal(raw[1]["vertices"], raw[0]["vertices"]) and torch.equal(raw[0]["faces"], data[0]["faces"])
    with pytest.raises(BadFile, match="row 2: meshes are read from obj, glb, ply, stl, off files, not from these"):
        raw[2]
    with pytest.raises(BadFile, match="row 1: its column text holds no mesh file"):
        mesh_data(source, mesh_column="text")[1]
    with pytest.raises(ValueError, match="no column 'model': its columns are mesh, raw, text"):
        mesh_data(source, mesh_column="model")
    with pytest.raises(ValueError, match="captions='beside' is for files"):
        mesh_data(source, captions="beside")
    with pytest.raises(ValueError, match="choose a split"):
        mesh_data(datasets.DatasetDict({"train": source}))


class Own(Dataset):
    def __init__(self, *samples: object):
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> object:
        return self.samples[index]


def test_a_users_own_dataset():
    vertices, faces = random_mesh(9, 7).vertices, random_mesh(9, 7).faces
    padded = torch.cat([faces.int(), torch.full((3, 3), -1, dtype=torch.int32)])
    edges = face_edges(faces)
    samples = [
        (vertices, faces),
        ("a", faces, vertices),
        {"vertices": 7 * vertices.double() + 3, "faces": padded, "face_edges": edges, "texts": "b"},
    ]
    data = mesh_data(Own(*samples), augment=False)
    for index in range(3):
        assert torch.equal(data[index]["faces"], data[0]["faces"]) and data[index]["vertices"].dtype == torch.float32
        assert torch.equal(data[index]["face_edges"], face_edges(data[0]["faces"]))
    assert data[1]["texts"] == "a" and data[2]["texts"] == "b"
    assert "face_edges" not in mesh_data(Own(*samples), MeshTransform(edges=False))[2]
    quad = random_mesh(9, 7, corners=4).faces
    assert mesh_data(Own((vertices, quad)), MeshTransform(quads=True))[0]["faces"].shape[1] == 4
    with pytest.raises(BadFile, match="item 0: its faces have 4 corners: with quads=False they must have 3"):
        mesh_data(Own((vertices, quad)))[0]
    with pytest.raises(BadFile, match="item 0: its faces refer to vertices"):
        mesh_data(Own((vertices[:3], faces)))[0]
    with pytest.raises(ValueError, match=r"fit no fields: found float32 \[9, 3\]; the fields are vertices"):
        mesh_data(Own(vertices))[0]
    with pytest.raises(ValueError, match=r"the faces of item 0 are not an integer tensor \[f, 3\] or \[f, 4\]"):
        mesh_data(Own({"vertices": vertices, "faces": vertices}))[0]
    with pytest.raises(ValueError, match="let the dataset itself return the texts"):
        mesh_data(Own(), captions="beside")
    with pytest.raises(ValueError, match="int is no source of meshes"):
        mesh_data(3)


def test_a_dataset_from_transforms(tmp_path: Path):
    write(tmp_path, "b.obj", "sub/a.stl", "c.glb")
    (tmp_path / "d.OBJ").write_text("junk")

    def read(path: Path) -> tuple[Tensor, Tensor]:
        mesh = read_mesh(path, path.suffix[1:].lower(), str(path))
        return mesh.vertices.float(), mesh.faces

    def stl(path: Path) -> tuple[Tensor, Tensor]:
        raise OSError("a broken disk")

    def stretched(values: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return values[0] * torch.rand(1), values[1]

    data = DatasetFromTransforms(tmp_path, {".obj": read, "stl": stl}, augment_fn=stretched)
    assert list(data.keys) == ["b.obj", "d.OBJ", "sub/a.stl"] and set(data[0]) == {"vertices", "faces"}
    assert unaugmented(data)[0]["vertices"].max() == 1 and not torch.equal(data[0]["vertices"], data[0]["vertices"])
    for index, problem in (
        (1, "d.OBJ: it has no faces"),
        (2, r"a.stl: its transform failed \(OSError: a broken disk\)"),
    ):
        with pytest.raises(BadFile, match=problem):
            data[index]
    loader = Loader(data, batch_size=2, collate=custom_collate, seed=5)
    first, again = (next(loader.steps())[0]["vertices"] for _ in range(2))
    assert torch.equal(first, again) and len(loader.bad) <= 2
    assert mesh_data(data)[0]["faces"].shape == (12, 3)
    named = DatasetFromTransforms(
        tmp_path, {"glb": lambda path: (*read(path), "a box")}, ["vertices", "faces", "texts"]
    )
    assert named[0]["texts"] == "a box"
    with pytest.raises(ValueError, match=r"the data folder .*nowhere does not exist"):
        DatasetFromTransforms(tmp_path / "nowhere", {"glb": read})
    with pytest.raises(ValueError, match="gives 3 values, not vertices, faces"):
        DatasetFromTransforms(tmp_path, {"glb": lambda path: (*read(path), "a box")})[0]


def test_a_mesh_is_the_same_each_time_and_that_of_its_own_dataset(tmp_path: Path):
    write(tmp_path / "train", "a.obj", mesh=box())
    write(tmp_path / "valid", "a.obj", mesh=trimesh.creation.icosphere(1))
    train, valid = (mesh_data(tmp_path / name, augment=False) for name in ("train", "valid"))
    for _ in range(2):
        for data, count in ((train, 12), (valid, 80)):
            assert len(data[0]["faces"]) == count and data[0]["faces"].dtype == torch.int64
            assert data[0]["face_edges"].dtype == torch.int64
            assert torch.equal(data[0]["face_edges"], face_edges(data[0]["faces"]))


def test_batches_are_padded():
    samples = [
        {"vertices": torch.ones(v, 3), "faces": torch.ones(f, 3, dtype=torch.long), "texts": text, "size": f}
        for v, f, text in ((5, 2, "a"), (3, 4, "b"))
    ]
    batch = collate_meshes(samples)
    assert (
        batch["vertices"].shape == (2, 5, 3) and batch["vertices"][1, 3:].eq(0).all() and batch["vertices"].sum() == 24
    )
    assert (
        batch["faces"].shape == (2, 4, 3) and batch["faces"][0, 2:].eq(-1).all() and batch["faces"][0, :2].eq(1).all()
    )
    assert batch["texts"] == ["a", "b"] and batch["size"].tolist() == [2, 4]
    assert collate_meshes(samples, pad_id=-7)["faces"].min() == -7
    reordered = [samples[0], dict(reversed(samples[1].items()))]  # entries go by name, not by place
    assert all(torch.equal(custom_collate(reordered)[name], batch[name]) for name in ("vertices", "faces"))
    vertices, faces, texts = custom_collate([tuple(sample.values())[:3] for sample in samples], pad_id=-1)
    assert torch.equal(vertices, batch["vertices"]) and torch.equal(faces, batch["faces"]) and texts == ["a", "b"]


def test_batches_of_unlike_samples_are_refused():
    mesh = {"vertices": torch.ones(5, 3), "faces": torch.ones(2, 3, dtype=torch.long)}
    with pytest.raises(ValueError, match="are there triangles and quads"):
        collate_meshes([mesh, {**mesh, "faces": torch.ones(2, 4, dtype=torch.long)}])
    with pytest.raises(ValueError, match="a sample lacks faces"):
        collate_meshes([mesh, {"vertices": mesh["vertices"]}])
    with pytest.raises(ValueError, match="different entries"):
        collate_meshes([mesh, {**mesh, "texts": "a"}])
