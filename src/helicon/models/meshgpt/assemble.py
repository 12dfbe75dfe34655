"""The corners of faces, as a tokenizer decodes them, to a mesh; what state it is in; and files other programs read.

Letters: f faces, n corners of a face (3 or 4), v vertices.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from helicon.data.mesh import Mesh
from helicon.data.tokens import write_whole

FLAT = 1e-7  # of the square of a face's longest side: twice the area below which it has none
COLOUR = (150, 176, 206, 255)  # of glb files: red, green, blue, and opaque


class Side(NamedTuple):
    """An edge as one of its faces has it."""

    face: int
    goes_up: bool  # from the lower vertex to the higher


Edges = dict[tuple[int, int], list[Side]]  # by their vertices, the lower first


@dataclass(frozen=True)
class MeshReport:
    """The state of a mesh. `dropped` are faces that were given and are not in it."""

    faces: int
    vertices: int
    dropped: int
    boundary_edges: int  # of one face
    non_manifold_edges: int  # of three faces or more
    watertight: bool  # two faces at each edge, and no two of them wound against each other

    def __str__(self) -> str:
        counted = [_counted(self.faces, "face"), _counted(self.vertices, "vertex", "vertices")]
        counted += [f"{_counted(self.dropped, 'face')} dropped"] * bool(self.dropped)
        counted += [_counted(self.boundary_edges, "boundary edge")] * bool(self.boundary_edges)
        counted += [_counted(self.non_manifold_edges, "non-manifold edge")] * bool(self.non_manifold_edges)
        return ", ".join(counted) + (": watertight" if self.watertight else ": not watertight")


def _counted(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def assembled(coords: Float[Tensor, "f n 3"], mask: Bool[Tensor, "f"] | None = None) -> Mesh:
    """The mesh of the faces that `mask` keeps: equal corners are one vertex, and faces look one way.

    Faces of no area and those that are there twice are dropped. Where faces join at edges of two, they are turned to be
    wound alike: outward if they enclose a volume, else as most of their area is. (So is a closed part inside another, as the
    shell of a cavity looks inward, and that of a thing outward.) Vertices stand in (z, y, x) order, faces from
    their lowest corner on, in order, as those of `tidy` do.
    """
    coords = (coords if mask is None else coords[mask]).detach().double().cpu()
    if not coords.isfinite().all():
        raise ValueError("the corners are not all finite numbers: give the mask that came with them")
    places, corners = torch.unique(coords[_has_area(coords)].flip(-1).flatten(0, 1) + 0.0, dim=0, return_inverse=True)
    vertices = places.flip(-1)
    faces = _in_order(corners.view(-1, coords.shape[1]))
    faces = _in_order(_wound_alike(vertices, faces))  # two sides of one face may have become the same
    return Mesh(vertices.float(), faces)


def mesh_report(mesh: Mesh, dropped: int = 0) -> MeshReport:
    """What can be said of the mesh, and of `dropped` faces that did not make it into it."""
    edges = _edges(mesh.faces.tolist())
    boundary = sum(len(sides) == 1 for sides in edges.values())
    crowded = sum(len(sides) > 2 for sides in edges.values())
    is_closed = len(edges) > 0 and boundary == crowded == 0
    watertight = is_closed and all(first.goes_up != second.goes_up for first, second in edges.values())
    return MeshReport(len(mesh.faces), len(mesh.vertices), dropped, boundary, crowded, watertight)


def write_mesh(path: str | Path, mesh: Mesh) -> None:
    """A glb, obj, ply or stl file, whole or not at all. Quads stay quads in obj and ply, and are cut in two in the others."""
    path = Path(path)
    kind = path.suffix.lower().removeprefix(".")
    if kind not in WRITERS:
        raise ValueError(f"{path}: meshes are written to {', '.join(WRITERS)} files; end the name with one of these")
    if len(mesh.faces) == 0:
        raise ValueError(f"{path}: the mesh has no faces, so there is nothing to write")
    vertices, faces = mesh.vertices.detach().cpu().float().numpy(), mesh.faces.cpu().numpy()
    write_whole(path, WRITERS[kind](vertices, faces))


def _area_vectors(corners: Float[Tensor, "f n 3"]) -> Float[Tensor, "f 3"]:
    """The normals, as long as twice the area: the product of two sides, or of the diagonals of a quad."""
    return torch.linalg.cross(corners[:, -2] - corners[:, 0], corners[:, -1] - corners[:, -3])


def _volumes(corners: Float[Tensor, "f n 3"]) -> Float[Tensor, "f"]:
    """Six times those between the faces and the origin, negative where a face looks toward it."""
    triangles = [corners[:, [0, last - 1, last]] for last in range(2, corners.shape[1])]
    return torch.stack([torch.linalg.det(triangle) for triangle in triangles]).sum(dim=0)


def _has_area(corners: Float[Tensor, "f n 3"]) -> Bool[Tensor, "f"]:
    """Which faces have one, and no two corners in one place."""
    places = torch.combinations(torch.arange(corners.shape[1]))
    distances = (corners[:, places[:, 0]] - corners[:, places[:, 1]]).norm(dim=-1)
    is_flat = _area_vectors(corners).norm(dim=-1) <= FLAT * distances.amax(dim=1).square()
    return ~is_flat & (distances.amin(dim=1) > 0)


def _in_order(faces: Int[Tensor, "f n"]) -> Int[Tensor, "g n"]:
    """From the lowest corner on, each once."""
    if len(faces) == 0:
        return faces
    turns = torch.arange(faces.shape[1])
    return torch.unique(faces.gather(1, (faces.argmin(dim=1, keepdim=True) + turns) % len(turns)), dim=0)


def _edges(faces: list[list[int]]) -> Edges:
    edges: Edges = defaultdict(list)
    for number, face in enumerate(faces):
        for start, end in zip(face, [*face[1:], face[0]], strict=True):
            edges[min(start, end), max(start, end)].append(Side(number, start < end))
    return edges


def _wound_alike(vertices: Float[Tensor, "v 3"], faces: Int[Tensor, "f n"]) -> Int[Tensor, "f n"]:
    edges = _edges(faces.tolist())
    corners = vertices[faces]
    volumes, areas = _volumes(corners).tolist(), _area_vectors(corners).norm(dim=-1).tolist()
    is_turned = [False] * len(faces)
    parts = [*_parts(len(faces), edges)]
    as_given = _open_parts(parts, edges)
    closed = {number: part for number, part in enumerate(parts) if number not in as_given}
    as_given |= _enclosed_parts(closed, corners)
    for number, part in enumerate(parts):
        amounts = areas if number in as_given else volumes
        is_wrong = sum(-amounts[face] if turned else amounts[face] for face, turned in part.items()) < 0
        for face, turned in part.items():
            is_turned[face] = turned != is_wrong
    return torch.where(torch.tensor(is_turned, dtype=torch.bool)[:, None], faces.flip(1), faces)


def _parts(num_faces: int, edges: Edges) -> Iterator[dict[int, bool]]:
    """The faces that join at edges of two, and whether each must be turned to be wound as the first of its part is.

    (Of a one-sided surface, a Moebius strip say, some neighbours stay wound against each other.)
    """
    neighbours: dict[int, list[tuple[int, bool]]] = defaultdict(list)
    for first, second in (sides for sides in edges.values() if len(sides) == 2):
        is_against = first.goes_up == second.goes_up
        neighbours[first.face].append((second.face, is_against))
        neighbours[second.face].append((first.face, is_against))
    seen: set[int] = set()
    for start in range(num_faces):
        if start in seen:
            continue
        part, waiting = {start: False}, [start]
        while waiting:
            face = waiting.pop()
            for other, is_against in neighbours[face]:
                if other not in part:
                    part[other] = part[face] != is_against
                    waiting.append(other)
        seen |= part.keys()
        yield part


def _open_parts(parts: Sequence[Mapping[int, bool]], edges: Edges) -> set[int]:
    """Those with an edge at which not two of their faces meet."""
    part_of = {face: number for number, part in enumerate(parts) for face in part}
    counts = (Counter(part_of[side.face] for side in sides) for sides in edges.values())
    return {part for count in counts for part, met in count.items() if met != 2}


def _enclosed_parts(parts: Mapping[int, Mapping[int, bool]], corners: Float[Tensor, "f n 3"]) -> set[int]:
    """Those of closed parts that lie inside another: its box is around theirs, and it winds around a corner of theirs."""
    boxes = [(corners[[*part]].amin(dim=(0, 1)), corners[[*part]].amax(dim=(0, 1))) for part in parts.values()]
    if len(boxes) < 2:
        return set()
    low, high = (torch.stack(ends) for ends in zip(*boxes, strict=True))
    is_around = ((low < low[:, None]) & (high > high[:, None])).all(dim=-1)
    numbers = [*parts]
    pairs = [(numbers[inner], numbers[outer]) for inner, outer in is_around.nonzero().tolist()]
    return {
        inner for inner, outer in pairs if _winds_around(parts[outer], corners, corners[next(iter(parts[inner])), 0])
    }


def _winds_around(part: Mapping[int, bool], corners: Float[Tensor, "f n 3"], point: Float[Tensor, "3"]) -> bool:
    """Whether the angles under which the faces of a closed part are seen make a whole sphere (van Oosterom and Strackee, 1983)."""
    seen = corners[[*part]] - point
    signs = 1 - 2 * torch.tensor([*part.values()], dtype=seen.dtype)
    angles = torch.zeros_like(signs)
    for last in range(2, seen.shape[1]):
        a, b, c = seen[:, 0], seen[:, last - 1], seen[:, last]
        far_a, far_b, far_c = a.norm(dim=-1), b.norm(dim=-1), c.norm(dim=-1)
        spread = far_a * far_b * far_c + (a * b).sum(-1) * far_c + (b * c).sum(-1) * far_a + (c * a).sum(-1) * far_b
        angles += 2 * torch.atan2((a * torch.linalg.cross(b, c)).sum(-1), spread)
    return bool(
        (signs * angles).sum().abs() > 3 * torch.pi
    )  # 4 pi inside, nothing outside, 2 pi or less on the surface


def _triangles(faces: NDArray[np.int64]) -> NDArray[np.int64]:
    return faces if faces.shape[1] == 3 else faces[:, [0, 1, 2, 0, 2, 3]].reshape(-1, 3)


def _obj(vertices: NDArray[np.float32], faces: NDArray[np.int64]) -> bytes:
    lines = [f"v {x:.9g} {y:.9g} {z:.9g}" for x, y, z in vertices.tolist()]  # as many digits as a float32 has
    lines += [f"f {' '.join(map(str, face))}" for face in (faces + 1).tolist()]
    return ("\n".join(lines) + "\n").encode()


def _ply(vertices: NDArray[np.float32], faces: NDArray[np.int64]) -> bytes:
    header = ["ply", "format binary_little_endian 1.0", f"element vertex {len(vertices)}"]
    header += [f"property float {axis}" for axis in "xyz"]
    header += [f"element face {len(faces)}", "property list uchar int vertex_indices", "end_header", ""]
    rows = np.empty(len(faces), dtype=[("count", "u1"), ("corners", "<i4", faces.shape[1])])
    rows["count"], rows["corners"] = faces.shape[1], faces
    return "\n".join(header).encode() + vertices.astype("<f4").tobytes() + rows.tobytes()


def _stl(vertices: NDArray[np.float32], faces: NDArray[np.int64]) -> bytes:
    corners = vertices[_triangles(faces)]
    normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    rows = np.zeros(len(corners), dtype=[("normal", "<f4", 3), ("corners", "<f4", (3, 3)), ("unused", "<u2")])
    rows["normal"] = normals / np.maximum(np.linalg.norm(normals, axis=1, keepdims=True), 1e-12)
    rows["corners"] = corners
    return bytes(80) + np.uint32(len(rows)).astype("<u4").tobytes() + rows.tobytes()


def _glb(vertices: NDArray[np.float32], faces: NDArray[np.int64]) -> bytes:
    """Without normals, so that viewers shade it flat, and with both sides of a face to be seen."""
    import trimesh  # takes a second

    material = trimesh.visual.material.PBRMaterial(
        baseColorFactor=COLOUR, metallicFactor=0.0, roughnessFactor=0.8, doubleSided=True
    )
    visual = trimesh.visual.TextureVisuals(material=material)
    mesh = trimesh.Trimesh(vertices, _triangles(faces), visual=visual, process=False)
    content = mesh.export(file_type="glb")
    assert isinstance(content, bytes)
    return content


WRITERS: dict[str, Callable[[NDArray[np.float32], NDArray[np.int64]], bytes]] = {
    "glb": _glb,
    "obj": _obj,
    "ply": _ply,
    "stl": _stl,
}
