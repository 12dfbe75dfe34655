import gc
import io
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from data.meshes import box, content_of, random_mesh, seeded, write
from helicon.data.dataset import BadFile, unaugmented
from helicon.data.mesh import (
    MESH_EXTENSIONS,
    Mesh,
    MeshTransform,
    dequantize_coordinates,
    derive_face_edges_from_faces,
    face_edges,
    fit_to_cube,
    quantize_coordinates,
    read_mesh,
    tidy,
)
from helicon.data.mesh_data import mesh_data
from helicon.nn.bins import NUDGE

QUAD_BOX = """# a box\nv 0 0 0 0.5 0.5 0.5\nv 2 0 0\nv 2 1 0\nv 0 1 0\nv 0 0 1\nv 2 0 1\nv 2 1 1\nv 0 1 1\nvt 0 0\no box
f 4 3 2 1\nf 5/1 6/1 7/1 8/1\nf 1//2 2//2 6//2 5//2\nf -6 -5 -1 -2\nf 1 5 8 4\nf 2 3 7 6\n"""


@pytest.mark.parametrize("bins", [2, 7, 100, 128, 1000])
@pytest.mark.parametrize("limits", [(-1.0, 1.0), (0.0, 3.0)])
def test_quantizing_is_off_by_half_a_bin_at_most(bins: int, limits: tuple[float, float]):
    low, high = limits
    numbers = torch.linspace(low, high, 4001)
    there = quantize_coordinates(numbers, bins, limits)
    back = dequantize_coordinates(there, bins, limits)
    assert there.unique().tolist() == list(range(bins)) and back.dtype == torch.float32
    assert (back - numbers).abs().max() <= (high - low) / bins / 2 + 1e-6
    assert torch.equal(quantize_coordinates(back, bins, limits), there)
    outside = quantize_coordinates(torch.tensor([low - 9, high + 9]), bins, limits)
    assert outside.tolist() == [0, bins - 1]


def test_neighbouring_bin_borders_stay_apart():
    """(To round half to even would put every second pair of them into one bin.)"""
    borders = torch.arange(-64, 64) / 64
    assert quantize_coordinates(borders, 128).tolist() == list(range(128))


def test_fitting_keeps_the_proportions():
    vertices = fit_to_cube(torch.tensor([[5.0, 10, -3], [9, 12, -3], [7, 11, -2]]))
    assert vertices.tolist() == [[-1, -0.5, -0.25], [1, 0.5, -0.25], [0, 0, 0.25]]
    assert fit_to_cube(torch.full((4, 3), 7.0)).eq(0).all()


def naive_tidy(mesh: Mesh, bins: int) -> tuple[list, list]:
    places = [
        tuple(min(int((c + 1) / 2 * bins + NUDGE), bins - 1) for c in vertex)
        for vertex in mesh.vertices.double().tolist()
    ]
    kept = []
    for face in mesh.faces.tolist():
        corners = [places[index] for index in face]
        sides = [(2, 0), (3, 1)] if len(face) == 4 else [(1, 0), (2, 0)]  # of a quad, the diagonals
        normal = np.cross(*(np.subtract(corners[end], corners[begin]) for end, begin in sides))
        if len(set(corners)) == len(corners) and normal.any():
            kept.append(corners)
    used = sorted({place for corners in kept for place in corners}, key=lambda place: place[::-1])
    faces = [[used.index(place) for place in corners] for corners in kept]
    rotated = {tuple(face[face.index(min(face)) :] + face[: face.index(min(face))]) for face in faces}
    return [[(c + 0.5) / bins * 2 - 1 for c in place] for place in used], sorted(map(list, rotated))


@pytest.mark.parametrize("corners", [3, 4])
@pytest.mark.parametrize(("bins", "num_vertices"), [(2, 9), (3, 20), (5, 40), (128, 31)])
def test_tidying_is_what_the_definition_says(bins: int, num_vertices: int, corners: int):
    mesh = random_mesh(num_vertices, 77, corners, seed=bins)
    tidied = tidy(mesh, bins)
    vertices, faces = naive_tidy(mesh, bins)
    assert tidied.faces.tolist() == faces and len(faces) > 0
    torch.testing.assert_close(tidied.vertices, torch.tensor(vertices), rtol=0, atol=1e-6)
    again = tidy(tidied, bins)
    assert torch.equal(again.vertices, tidied.vertices) and torch.equal(again.faces, tidied.faces)


def test_the_order_of_the_file_does_not_matter():
    mesh, generator = random_mesh(30, 50), torch.Generator().manual_seed(1)
    expected = tidy(mesh)
    for _ in range(3):
        order = torch.randperm(30, generator=generator)
        faces = order.argsort()[mesh.faces][torch.randperm(50, generator=generator)].roll(1, dims=1)
        shuffled = tidy(Mesh(mesh.vertices[order], torch.cat([faces, faces[:5]])))
        assert torch.equal(shuffled.vertices, expected.vertices) and torch.equal(shuffled.faces, expected.faces)


def test_errors_of_rounding_do_not_tear_the_middle_apart():
    sheet = torch.tensor([[-1.0, -1, 1e-7], [1, -1, -1e-7], [1, 1, 1e-8], [-1, 1, 0], [1e-7, 1, 0], [-1e-7, 1, -1e-8]])
    tidied = tidy(Mesh(sheet, torch.tensor([[0, 1, 2], [0, 2, 4], [0, 5, 3]])))
    assert len(tidied.vertices) == 5 and tidied.vertices[:, 2].unique().tolist() == [1 / 128]


def test_the_two_sides_of_a_sheet_both_stay():
    corners = torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [-1, 0, 0]])
    faces = torch.tensor([[0, 1, 2], [1, 2, 0], [2, 1, 0], [0, 0, 1], [3, 0, 1]])  # the last two have no area
    tidied = tidy(Mesh(corners, faces), 101)
    assert tidied.faces.tolist() == [[0, 1, 2], [0, 2, 1]] and len(tidied.vertices) == 3


def naive_edges(faces: Tensor, pad: int, include_self: bool, share_one_vertex: bool) -> list[list[int]]:
    def parts(face: list[int]) -> set:
        if pad in face:
            return set()
        sides = zip(face, face[1:] + face[:1], strict=True)
        return set(face) if share_one_vertex else {frozenset(side) for side in sides if side[0] != side[1]}

    rows = [parts(face) for face in faces.tolist()]
    pairs = [[i, j] for i in range(len(rows)) for j in range(len(rows)) if i != j and rows[i] & rows[j]]
    own = [[i, i] for i, face in enumerate(faces.tolist()) if include_self and pad not in face]
    return sorted(pairs + own)


@pytest.mark.parametrize("share_one_vertex", [False, True])
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("corners", [3, 4])
def test_neighbours_equal_those_of_the_definition(corners: int, include_self: bool, share_one_vertex: bool):
    for seed, (num_vertices, num_faces, pad) in enumerate([(5, 1, -1), (6, 13, -1), (9, 60, -7), (40, 90, -1)]):
        faces = random_mesh(num_vertices, num_faces, corners, seed).faces
        faces[::7] = pad
        faces[1::7, 0] = faces[1::7, 1]  # a corner that is there twice
        faces[3::11, 1] = pad  # half a face is none
        edges = face_edges(faces, pad, include_self, share_one_vertex)
        assert edges.tolist() == naive_edges(faces, pad, include_self, share_one_vertex)
        assert torch.equal(face_edges(faces.int(), pad, include_self, share_one_vertex), edges)


class Largest(TorchDispatchMode):
    """The most numbers a tensor had."""

    numel = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for each in made if isinstance(made, (tuple, list)) else (made,):
            self.numel = max(self.numel, each.numel() if isinstance(each, Tensor) else 0)
        return made


def test_neighbours_are_found_in_memory_that_grows_with_the_faces():
    side = 40
    low = (torch.arange(side)[:, None] * (side + 1) + torch.arange(side)).flatten()
    faces = torch.cat([low[:, None] + torch.tensor(corners) for corners in ([0, 1, side + 1], [1, side + 2, side + 1])])
    with Largest() as largest:
        edges = face_edges(faces, include_self=False)
    assert len(edges) == 2 * (3 * side**2 - 2 * side) and largest.numel < 10 * len(faces)


def test_neighbours_of_nothing():
    assert face_edges(torch.empty(0, 3, dtype=torch.long)).shape == (0, 2)
    assert face_edges(torch.full((4, 4), -1)).shape == (0, 2)
    assert face_edges(torch.tensor([[2, 0, 1]]), include_self=False).shape == (0, 2)


def test_quads_that_share_a_diagonal_are_no_neighbours():
    faces = torch.tensor([[0, 1, 2, 3], [0, 4, 2, 5], [1, 0, 6, 7]])
    assert face_edges(faces, include_self=False).tolist() == [[0, 2], [2, 0]]


def test_neighbours_of_a_batch_are_those_of_each_mesh():
    faces = torch.stack([random_mesh(8, 11, seed=seed).faces for seed in range(3)])
    faces[1, 4:] = -1
    for options in ({}, {"include_self": False}, {"neighbor_if_share_one_vertex": True}):
        batch = derive_face_edges_from_faces(faces, **options)
        for each, edges in zip(faces, batch, strict=True):
            alone = derive_face_edges_from_faces(each, **options)
            assert torch.equal(edges[: len(alone)], alone) and edges[len(alone) :].eq(-1).all()
    assert len(alone) == len(face_edges(faces[2], share_one_vertex=True))


@pytest.mark.parametrize("kind", MESH_EXTENSIONS)
def test_every_kind_of_file_gives_the_same_mesh(tmp_path: Path, kind: str):
    write(tmp_path, f"x.{kind.upper()}")
    data = mesh_data(tmp_path, augment=False)
    sample = data[0]
    assert set(sample) == {"vertices", "faces", "face_edges"} and list(data.keys) == [f"x.{kind.upper()}"]
    half = 1 - 1 / 128
    expected = [[x, y, z] for z in (-0.5, 0.5) for y in (-0.5, 0.5) for x in (-half, half)]
    assert (sample["vertices"] - torch.tensor(expected)).abs().max() <= 1 / 128
    assert sample["faces"].shape == (12, 3) and sample["faces"].dtype == torch.int64
    assert len(sample["face_edges"]) == 12 * 4 and torch.equal(sample["face_edges"], face_edges(sample["faces"]))
    solid = trimesh.Trimesh(sample["vertices"].numpy(), sample["faces"].numpy(), process=False)
    assert solid.is_watertight and solid.volume > 0
    assert set(mesh_data(tmp_path, MeshTransform(edges=False))[0]) == {"vertices", "faces"}


def test_the_parts_of_a_scene_stand_where_they_belong(tmp_path: Path):
    scene = trimesh.Scene()
    scene.add_geometry(box(1, 1, 1))
    scene.add_geometry(box(1, 1, 1), transform=trimesh.transformations.translation_matrix([9, 0, 0]))
    (tmp_path / "x.glb").write_bytes(scene.export(file_type="glb"))
    vertices = mesh_data(tmp_path, MeshTransform(100), augment=False)[0]["vertices"]
    assert vertices[:, 0].unique().tolist() == pytest.approx([-0.99, -0.79, 0.81, 0.99], abs=0.021)
    assert len(vertices) == 16


def test_quads_are_kept_where_asked_for(tmp_path: Path):
    (tmp_path / "x.obj").write_text(QUAD_BOX)
    lines = [line.split() for line in QUAD_BOX.splitlines()]
    vertices = [" ".join(words[1:4]) for words in lines if words[0] == "v"]
    faces = ["4 3 2 1 0 0.5 0.5 0.5", "4 4 5 6 7", "4 0 1 5 4", "4 2 3 7 6", "4 0 4 7 3", "4 1 2 6 5"]
    (tmp_path / "y.off").write_text("\n".join(["OFF  # made by hand", "8 6 0", *vertices, *faces]))
    (tmp_path / "z.off").write_text("\n".join(["OFF 8 6 0", *vertices, *faces]))
    data = mesh_data(tmp_path, MeshTransform(quads=True), augment=False)
    for sample in data:
        assert sample["faces"].shape == (6, 4) and len(sample["vertices"]) == 8 and len(sample["face_edges"]) == 6 * 5
        assert torch.equal(sample["faces"], data[0]["faces"])
    triangles = mesh_data(tmp_path, augment=False)[0]
    assert triangles["faces"].shape == (12, 3) and torch.equal(triangles["vertices"], data[0]["vertices"])


def test_what_has_no_quads_is_a_bad_file(tmp_path: Path):
    write(tmp_path, "a.glb", "b.obj")
    (tmp_path / "c.off").write_text("OFF\n3 9 0\n0 0 0\n")
    (tmp_path / "d.off").write_text("4 9 0")
    (tmp_path / "e.obj").write_text("v 0 0\n" * 6 + "f 1 2 3 4\n")
    data = mesh_data(tmp_path, MeshTransform(quads=True))
    for index, problem in enumerate(
        ["from obj, off files, not from glb", "12 of its 12 faces", "promises", "begin with", "fewer than three"]
    ):
        with pytest.raises(BadFile, match=problem):
            data[index]


TRIANGLE = "v 0 0 0\nv 1 0 0\nv 0 1 0\n"


def test_what_is_no_mesh_is_a_bad_file_with_a_sentence(tmp_path: Path):
    points = "ply\nformat ascii 1.0\nelement vertex 1\nproperty float x\nproperty float y\nproperty float z\nend_header\n0 0 0\n"
    contents = {
        "empty.obj": ("", "it has no faces"),
        "empty.glb": ("", "not a readable glb mesh"),
        "junk.ply": ("junk", r"not a readable ply mesh \(ValueError: Not a ply file"),
        "points.ply": (points, "it has no faces"),
        "lonely.obj": (TRIANGLE, "it has no faces"),
        "line.obj": (TRIANGLE + "f 1 2 2\nf 3 3 3\n", "none of its faces has an area"),
        "thin.obj": (
            "v 0 0 0\nv 1 0 0\nv 0 0.000001 0\nf 1 2 3\n",
            "none of its faces has an area, with coordinates in 128",
        ),
        "spot.obj": ("v 1 1 1\n" * 3 + "f 1 2 3\n", "none of its faces"),
        "nan.obj": (TRIANGLE + "v nan 0 0\nf 1 2 4\n", "not all finite"),
        "infinite.obj": (TRIANGLE + "v inf 0 0\nf 1 2 4\n", "not all finite"),
        "far.off": ("OFF\n3 1 0\n0 0 0\n1 0 0\n0 1 0\n3 0 1 7\n", r"(refer to|range of its) vertices"),
    }
    for name, (content, problem) in contents.items():
        (tmp_path / name).write_text(content)
        path = tmp_path / name
        with pytest.raises(BadFile, match=problem) as error:
            MeshTransform()(read_mesh(path, path.suffix[1:], str(path)), str(path))
        assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)
    with pytest.raises(BadFile, match="FileNotFoundError"):
        read_mesh(tmp_path / "gone.obj", "obj", "gone")
    with pytest.raises(BadFile, match="from obj, glb, ply, stl, off files, not from fbx"):
        read_mesh(tmp_path / "x.fbx", "fbx", "x")


@pytest.mark.parametrize("kind", MESH_EXTENSIONS)
def test_flipped_bytes_are_a_mesh_or_a_bad_file_never_a_crash(kind: str):
    whole, generator, transform = content_of(trimesh.creation.icosphere(1), kind), random.Random(0), MeshTransform(16)
    bad = 0
    for number in range(60):
        content = bytearray(whole[: generator.randrange(len(whole))] if number % 5 == 0 else whole)
        for _ in range(generator.choice((1, 3, 30)) if content else 0):
            content[generator.randrange(min(len(content), generator.choice((60, 400, 10**6))))] = generator.randrange(
                256
            )
        for quads in (False, True):
            try:
                sample = transform(read_mesh(io.BytesIO(content), kind, "x", quads), "x")
                assert sample["vertices"].isfinite().all() and sample["faces"].max() < len(sample["vertices"])
            except BadFile:
                bad += 1
    assert bad > 60


def test_threads_read_side_by_side():
    content = content_of(box(), "ply")

    def give_way(phase: str, info: dict[str, int]) -> None:
        time.sleep(0)

    thresholds = gc.get_threshold()
    gc.set_threshold(20)
    gc.callbacks.append(give_way)  # in the middle of what Python does without a pause otherwise
    try:
        with ThreadPoolExecutor(6) as pool:
            read = list(pool.map(lambda _: read_mesh(io.BytesIO(content), "ply", "box"), range(400)))
    finally:
        gc.callbacks.remove(give_way)
        gc.set_threshold(*thresholds)
    assert all(len(mesh.faces) == 12 for mesh in read)


def test_names_in_any_encoding_do_no_harm(tmp_path: Path):
    content = "# M\u00f6bel\no St\u00fchle\n".encode("latin-1") + (TRIANGLE + "f 1 2 3\n").encode()
    (tmp_path / "x.obj").write_bytes(b"mtllib none.mtl\nusemtl none\n" + content)
    assert len(mesh_data(tmp_path)[0]["faces"]) == 1


def test_a_far_vertex_that_no_face_has_does_not_shrink_the_mesh(tmp_path: Path):
    (tmp_path / "x.obj").write_text("v 1e9 0 0\n" + TRIANGLE + "f 2 3 4\n")
    vertices = mesh_data(tmp_path, augment=False)[0]["vertices"]
    assert len(vertices) == 3 and vertices.min() < -0.99 and vertices.max() > 0.99


def sides(sample: dict[str, Tensor]) -> list[float]:
    return (sample["vertices"].amax(dim=0) - sample["vertices"].amin(dim=0)).tolist()


def test_augmentation_is_drawn_from_the_generator_alone(tmp_path: Path):
    write(tmp_path, "x.obj")
    data = mesh_data(tmp_path, MeshTransform(jitter=0.05, rotation=30.0))
    plain = unaugmented(data)
    assert torch.equal(seeded(data, 3)["vertices"], seeded(data, 3)["vertices"])
    assert len({tuple(seeded(data, seed)["vertices"].flatten().tolist()) for seed in range(9)}) == 9
    assert all(torch.equal(seeded(plain, seed)["vertices"], plain[0]["vertices"]) for seed in range(3))
    for seed in range(9):
        assert seeded(data, seed)["vertices"].abs().max() <= 1
    state = torch.get_rng_state()
    seeded(data, 0)
    assert torch.equal(torch.get_rng_state(), state)


def test_scale_is_per_axis_or_the_same_for_all(tmp_path: Path):
    write(tmp_path, "x.obj", mesh=box(1, 1, 1))
    per_axis = [sides(seeded(mesh_data(tmp_path, MeshTransform(2000)), seed)) for seed in range(30)]
    ratios = [max(each) / min(each) for each in per_axis]
    assert max(ratios) > 1.3 and max(ratios) <= 1.25 / 0.75 + 0.01 and max(map(max, per_axis)) <= 2
    uniform = MeshTransform(2000, scale=(0.5, 1.0), scale_per_axis=False)
    same = [sides(seeded(mesh_data(tmp_path, uniform), seed)) for seed in range(30)]
    assert all(max(each) - min(each) < 0.003 for each in same)
    assert 0.99 < min(map(min, same)) < 1.1 and 1.9 < max(map(max, same)) <= 2


@pytest.mark.parametrize("up", ["y", "z"])
def test_rotation_leaves_what_is_up(tmp_path: Path, up: str):
    (tmp_path / "x.obj").write_text("v 0 0 0\nv 4 0 0\nv 0 2 0\nv 0 0 1\nf 1 2 3\nf 1 2 4\nf 1 3 4\nf 2 3 4\n")
    transform = MeshTransform(4000, scale=(1.0, 1.0), rotation=180.0, up=up)
    data, axis = mesh_data(tmp_path, transform), "xyz".index(up)
    angles = []
    for seed in range(40):
        turned = seeded(data, seed)["vertices"]
        scale = sides({"vertices": turned})[axis] / {"y": 1.0, "z": 0.5}[up]  # it may have been shrunk to fit
        distances = torch.pdist(turned).sort().values / scale
        expected = torch.pdist(unaugmented(data)[0]["vertices"]).sort().values
        assert (distances - expected).abs().max() < 0.01
        tip = turned[torch.cdist(turned, turned).sum(dim=1).argmax()] - turned.mean(dim=0)
        angles.append(torch.atan2(tip[3 - axis], tip[0]).item())
    assert min(angles) < -2.5 and max(angles) > 2.5 and len({round(angle, 2) for angle in angles}) > 30


def test_jitter_moves_each_vertex_a_little(tmp_path: Path):
    write(tmp_path, "x.obj", mesh=box(2, 1, 1))
    still, moved = (mesh_data(tmp_path, MeshTransform(5000, scale=(0.8, 0.8), jitter=j)) for j in (0.0, 0.1))
    nearest = torch.cdist(seeded(moved, 0)["vertices"], seeded(still, 0)["vertices"]).amin(dim=1)
    assert 0.02 < nearest.max() <= 0.1 * 3**0.5 + 0.01 and len(nearest.unique()) == 8


def test_jitter_does_not_tear_a_mesh_apart_whose_file_has_a_vertex_for_each_corner(tmp_path: Path):
    mesh = trimesh.creation.icosphere(subdivisions=1)
    mesh.unmerge_vertices()
    mesh.vertices += np.random.default_rng(0).uniform(-1e-7, 1e-7, mesh.vertices.shape)  # rounded here and there
    for name in ("x.stl", "x.glb"):
        folder = tmp_path / name[2:]
        folder.mkdir()
        mesh.export(folder / name)
        sample = seeded(mesh_data(folder, MeshTransform(jitter=0.05)), 0)
        assert len(sample["vertices"]) == 42 and len(sample["faces"]) == 80 and len(sample["face_edges"]) == 4 * 80


def test_a_changed_mesh_that_breaks_the_limits_gives_way_to_the_unchanged_one(tmp_path: Path):
    write(tmp_path, "x.obj", mesh=box(2, 0.001, 1))  # so thin that its narrow sides are gone, until they are jittered
    plain = mesh_data(tmp_path, MeshTransform(7), augment=False)[0]
    count = len(plain["faces"])
    loose, tight = (mesh_data(tmp_path, MeshTransform(7, max_faces=limit, jitter=0.16)) for limit in (None, count))
    counts = [len(seeded(loose, seed)["faces"]) for seed in range(20)]
    assert count == 4 and max(counts) > 4 >= min(counts)
    for seed, changed in enumerate(counts):
        sample = seeded(tight, seed)
        assert torch.equal(sample["vertices"], plain["vertices"]) == (changed > count) and len(sample["faces"]) <= count


def test_options_are_checked():
    for wrong in (
        {"num_discrete_coors": 1},
        {"min_faces": 0},
        {"min_faces": 9, "max_faces": 8},
        {"scale": (1.2, 0.8)},
        {"scale": (0.0, 1.0)},
        {"jitter": -0.1},
        {"rotation": -1.0},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
            MeshTransform(**wrong)
    with pytest.raises(ValueError, match="num_discrete_coors=1"):
        tidy(random_mesh(5, 5), 1)
