from pathlib import Path

import numpy as np
import pytest
import torch
import trimesh
from torch import Tensor

from helicon.data.mesh import Mesh, read_mesh, tidy
from helicon.data.synthetic_meshes import SyntheticMeshes
from helicon.models.meshgpt.assemble import WRITERS, MeshReport, assembled, mesh_report, write_mesh


def corners_of(index: int, quads: bool = False) -> tuple[Mesh, Tensor]:
    sample = SyntheticMeshes(index + 1, quads=quads, kinds=["cylinder", "bucket", "box"])[index]
    mesh = Mesh(sample["vertices"], sample["faces"])
    return mesh, mesh.vertices[mesh.faces]


def volume(mesh: Mesh) -> float:
    triangles = mesh.faces[:, [0, 1, 2, 0, 2, 3]].reshape(-1, 3) if mesh.faces.shape[1] == 4 else mesh.faces
    return torch.linalg.det(mesh.vertices[triangles].double()).sum().item() / 6


def shuffled(coords: Tensor, seed: int = 0) -> Tensor:
    """Faces in another order, from another corner on, some of them wound the other way."""
    generator = torch.Generator().manual_seed(seed)
    coords = coords[torch.randperm(len(coords), generator=generator)].roll(1, dims=1)
    return torch.where((torch.rand(len(coords), generator=generator) < 0.45)[:, None, None], coords.flip(1), coords)


@pytest.mark.parametrize("quads", [False, True])
def test_faces_in_any_order_and_winding_are_the_mesh_again(quads: bool):
    for index in range(4):
        mesh, coords = corners_of(index, quads)
        again = assembled(shuffled(coords, index))
        assert torch.equal(again.vertices, mesh.vertices) and torch.equal(again.faces, mesh.faces)
        assert mesh_report(again).watertight and volume(again) > 0.1


def test_parts_are_turned_each_for_itself():
    """Two boxes, one wound inward, that have one edge in common: four faces meet there."""
    box = trimesh.creation.box()
    corners = torch.tensor(np.array(box.vertices[box.faces]), dtype=torch.float32)
    both = assembled(torch.cat([corners, corners.flip(1) + torch.tensor([1.0, 1.0, 0.0])]))
    assert volume(both) == pytest.approx(2) and len(both.vertices) == 14
    assert mesh_report(both) == MeshReport(24, 14, 0, 0, 1, False)


def shell(side: float, centre: tuple[float, float, float] = (0, 0, 0)) -> Tensor:
    """The triangles of a cube, from outside."""
    box = trimesh.creation.box()
    return side * torch.tensor(np.array(box.vertices[box.faces]), dtype=torch.float32) + torch.tensor(centre)


def test_the_shell_of_a_cavity_looks_inward_and_a_thing_inside_stays_one():
    hollow = torch.cat([shell(4), shell(2).flip(1)])
    hollow[::5] = hollow[::5].flip(1)  # a few faces of each are wound against the others
    assert volume(assembled(hollow)) == pytest.approx(64 - 8)
    assert volume(assembled(torch.cat([hollow, shell(1)]))) == pytest.approx(64 - 8 + 1)
    assert volume(assembled(torch.cat([shell(4).flip(1), shell(2)]))) == pytest.approx(
        64 + 8
    )  # what is outermost is turned
    assert mesh_report(assembled(hollow)).watertight


def test_what_is_in_the_box_of_another_and_not_inside_it_looks_outward():
    """A cube in the notch of an L, and one that sticks out."""
    outline = torch.tensor([[0, 0], [4, 0], [4, 2], [2, 2], [2, 4], [0, 4]], dtype=torch.float32)
    bottom, top = (torch.cat([outline, torch.full((6, 1), height)], dim=1) for height in (0.0, 4.0))
    fan = torch.tensor([[0, 1, 2], [0, 2, 3], [0, 3, 4], [0, 4, 5]])
    ahead, above = bottom.roll(-1, dims=0), top.roll(-1, dims=0)
    sides = torch.cat([torch.stack([bottom, ahead, above], dim=1), torch.stack([bottom, above, top], dim=1)])
    notched = torch.cat([top[fan], bottom[fan].flip(1), sides])
    beside = shell(1, (3, 3, 2)).flip(1)
    assert volume(assembled(torch.cat([notched, beside]))) == pytest.approx(12 * 4 + 1)
    sticking_out = shell(2, (0, 1, 2)).flip(1)
    assert volume(assembled(torch.cat([notched, sticking_out]))) == pytest.approx(12 * 4 + 8)


def test_an_open_sheet_is_wound_as_most_of_it_was():
    steps = torch.arange(6.0)
    low, high = torch.stack([steps, 0 * steps, 0 * steps], 1), torch.stack([steps, 1 + 0 * steps, 0 * steps], 1)
    sheet = torch.stack([low[:-1], low[1:], high[1:], high[:-1]], dim=1)  # it looks along +z
    turned = torch.cat([sheet[:2].flip(1), sheet[2:]])
    for coords, sign in ((turned, 1), (turned.flip(1), -1)):
        mesh = assembled(coords)
        first, second, _, last = mesh.vertices[mesh.faces].unbind(dim=1)
        assert (sign * torch.linalg.cross(second - first, last - first)[:, 2] > 0).all() and len(mesh.faces) == 5
    assert (
        str(mesh_report(mesh, dropped=3)) == "5 faces, 12 vertices, 3 faces dropped, 12 boundary edges: not watertight"
    )


def test_what_is_no_face_is_dropped_and_padding_is_not_looked_at():
    mesh, coords = corners_of(0)
    flat = torch.stack([coords[0, 0], coords[0, 1], (coords[0, 0] + coords[0, 1]) / 2])[None]
    doubled = coords[3:4, [1, 2, 0]]
    together = coords[5:6, [0, 0, 1]]
    padding = torch.full((2, 3, 3), torch.nan)
    given = torch.cat([padding[:1], flat, coords, doubled, together, padding])
    mask = ~given.flatten(1).isnan().any(dim=1)
    again = assembled(given, mask)
    assert torch.equal(again.faces, mesh.faces) and torch.equal(again.vertices, mesh.vertices)
    report = mesh_report(again, dropped=int(mask.sum()) - len(again.faces))
    assert report == MeshReport(len(mesh.faces), len(mesh.vertices), 3, 0, 0, True)
    assert str(report) == f"{len(mesh.faces)} faces, {len(mesh.vertices)} vertices, 3 faces dropped: watertight"
    with pytest.raises(ValueError, match="give the mask that came with them"):
        assembled(given)


def test_every_tidy_face_has_an_area_here_too():
    generator = torch.Generator().manual_seed(0)
    faces = torch.rand(400, 60, generator=generator).argsort(dim=1)[:, :3]
    for bins in (4, 128):
        mesh = tidy(Mesh(2 * torch.rand(60, 3, generator=generator) - 1, faces), bins)
        corner_sets = lambda found: {tuple(sorted(face)) for face in found.faces.tolist()}
        again = assembled(mesh.vertices[mesh.faces])
        assert torch.equal(again.vertices, mesh.vertices) and corner_sets(again) == corner_sets(mesh)


def test_nothing_is_a_mesh_of_nothing(tmp_path: Path):
    mesh = assembled(torch.full((3, 4, 3), torch.nan), torch.zeros(3, dtype=torch.bool))
    assert mesh.vertices.shape == (0, 3) and mesh.faces.shape == (0, 4)
    assert str(mesh_report(mesh, dropped=2)) == "0 faces, 0 vertices, 2 faces dropped: not watertight"
    assert str(mesh_report(mesh, dropped=1)) == "0 faces, 0 vertices, 1 face dropped: not watertight"
    with pytest.raises(ValueError, match="has no faces, so there is nothing to write"):
        write_mesh(tmp_path / "x.glb", mesh)


def test_a_one_sided_strip_is_not_watertight():
    """A Moebius strip of triangles, and a box with one face turned: neither has a consistent winding."""
    box = torch.from_numpy(np.array(trimesh.creation.box().faces))
    box[0] = box[0].flip(0)
    closed = Mesh(torch.from_numpy(np.array(trimesh.creation.box().vertices)).float(), box)
    assert mesh_report(closed).boundary_edges == 0 and not mesh_report(closed).watertight
    angles = torch.arange(9) * 2 * torch.pi / 9
    ring = torch.stack([angles.cos(), angles.sin(), 0 * angles], dim=1)
    across = torch.stack(
        [(angles / 2).cos() * angles.cos(), (angles / 2).cos() * angles.sin(), (angles / 2).sin()], dim=1
    )
    inner, outer = ring - 0.3 * across, ring + 0.3 * across
    ahead = lambda side, other: torch.cat([side[1:], other[:1]])  # once around, inside is outside
    coords = torch.cat(
        [
            torch.stack([inner, outer, ahead(outer, inner)], dim=1),
            torch.stack([inner, ahead(outer, inner), ahead(inner, outer)], dim=1),
        ]
    )
    report = mesh_report(assembled(coords))
    assert report == MeshReport(18, 18, 0, 18, 0, False)


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("quads", [False, True])
def test_files_hold_the_mesh(tmp_path: Path, kind: str, quads: bool):
    mesh, _ = corners_of(2, quads)
    path = tmp_path / f"mesh.{kind.upper()}"
    write_mesh(path, mesh)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    triangles = mesh.faces[:, [0, 1, 2, 0, 2, 3]].reshape(-1, 3) if quads else mesh.faces
    read = tidy(read_mesh(path, kind, "written"))
    if kind in ("glb", "stl") or not quads:
        expected = tidy(Mesh(mesh.vertices, triangles))
        assert torch.equal(read.vertices, expected.vertices) and torch.equal(read.faces, expected.faces)
    else:
        assert len(read.faces) == len(triangles) and volume(read) == pytest.approx(volume(mesh), rel=1e-5)
    if quads and kind == "obj":
        assert torch.equal(read_mesh(path, kind, "written", quads=True).faces, mesh.faces)
    if quads and kind == "ply":
        assert f"element face {len(mesh.faces)}\n".encode() in path.read_bytes()
    assert torch.equal(read_mesh(path, kind, "written").vertices.float().unique(dim=0), mesh.vertices.unique(dim=0))


def test_files_that_cannot_be_written_say_why(tmp_path: Path):
    mesh, _ = corners_of(0)
    for name in ("mesh.png", "mesh"):
        with pytest.raises(ValueError, match=f"{name}: meshes are written to glb, obj, ply, stl files"):
            write_mesh(tmp_path / name, mesh)
    with pytest.raises(OSError, match=r"x.obj cannot be written"):
        write_mesh(tmp_path / "missing" / "x.obj", mesh)
