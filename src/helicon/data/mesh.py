"""Meshes of any kind to vertices [v, 3] in [-1, 1] and faces [f, n] of n corners: triangles, or quads where asked for.

A mesh is centred and scaled to the cube (its proportions kept), its coordinates go to the centres of `num_discrete_coors`
bins, vertices that meet there become one, and what then has no area or is there twice goes. The order is the one a
sequence model learns: vertices by (z, y, x), each face from its lowest corner on, faces by their corners. All of it is
integer arithmetic on bins, so it is the same everywhere.

Datasets of them are in `mesh_data`. v vertices, f faces, n corners, e edges.
"""

import io
import math
import struct
import threading
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from helicon.data.dataset import BadFile
from helicon.nn.bins import NUDGE, discretize, undiscretize

MESH_EXTENSIONS = ("obj", "glb", "ply", "stl", "off")
TEXT_EXTENSIONS = ("obj", "off")
QUAD_EXTENSIONS = TEXT_EXTENSIONS  # whose quads are kept: the other readers cut them into triangles
PADDING = -1  # of faces and edges
CUBE = (-1.0, 1.0)
PLACES = 2**14  # in half the cube's side: vertices nearer than that are in one place, whatever a file has rounded

# What trimesh raises for damaged and foreign files: its readers are many, and each fails in its own way.
READING_ERRORS = (
    OSError,
    ValueError,  # (and with it json's and unicode's errors)
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    NotImplementedError,
    MemoryError,  # a damaged count asks for more than there is
    RecursionError,
    ImportError,  # a packed glb needs a package that is not there
    struct.error,
    zlib.error,
)


@dataclass(frozen=True)
class Mesh:
    """Corners are indices of vertices, counter-clockwise as seen from outside."""

    vertices: Float[Tensor, "v 3"]
    faces: Int[Tensor, "f n"]


def quantize_coordinates(
    coordinates: Float[Tensor, "*shape"],
    num_discrete_coors: int = 128,
    continuous_range: tuple[float, float] = CUBE,
) -> Int[Tensor, "*shape"]:
    """The bin each number is in: `num_discrete_coors` equal ones; what is outside of the range is in the first or last."""
    return discretize(coordinates, num_discrete_coors, continuous_range)


def dequantize_coordinates(
    bins: Int[Tensor, "*shape"],
    num_discrete_coors: int = 128,
    continuous_range: tuple[float, float] = CUBE,
) -> Float[Tensor, "*shape"]:
    """The centres of the bins: at most half a bin from what was there."""
    return undiscretize(bins, num_discrete_coors, continuous_range)


def fit_to_cube(vertices: Float[Tensor, "v 3"]) -> Float[Tensor, "v 3"]:
    """Centred, the longest side from -1 to 1."""
    low, high = vertices.amin(dim=0), vertices.amax(dim=0)
    half = (high - low).max() / 2
    return (vertices - (low + high) / 2) / torch.where(half > 0, half, 1)


def moved_to_range(
    vertices: Float[Tensor, "v 3"], old: tuple[float, float], new: tuple[float, float]
) -> Float[Tensor, "v 3"]:
    """From the cube that one range of coordinates spans to that of another."""
    if old == new:
        return vertices
    return (vertices - old[0]) / (old[1] - old[0]) * (new[1] - new[0]) + new[0]


def tidy(mesh: Mesh, num_discrete_coors: int = 128) -> Mesh:
    """The mesh of the bins' centres in the one order; vertices no face has are gone, and there may be no faces left.

    A face is dropped if two of its corners meet or its area is zero, and if it is there twice. (The same corners the
    other way round are the other side, which stays.) Vertices are in [-1, 1] already.
    """
    _check_resolution(num_discrete_coors)
    x, y, z = discretize(mesh.vertices.double(), num_discrete_coors, CUBE, NUDGE).unbind(dim=1)
    places, to_place = torch.unique((z * num_discrete_coors + y) * num_discrete_coors + x, return_inverse=True)
    planes, x = places // num_discrete_coors, places % num_discrete_coors
    bins = torch.stack([x, planes % num_discrete_coors, planes // num_discrete_coors], dim=1)
    faces = to_place[mesh.faces]
    used, corners = torch.unique(faces[_has_area(bins, faces)], return_inverse=True)
    turns = torch.arange(corners.shape[1], device=corners.device)
    rotated = corners.gather(1, (corners.argmin(dim=1, keepdim=True) + turns) % len(turns))
    return Mesh(dequantize_coordinates(bins[used], num_discrete_coors), torch.unique(rotated, dim=0))


def _check_resolution(num_discrete_coors: int) -> None:
    if not 2 <= num_discrete_coors <= 2**20:  # of which three are one whole number of 64 bits
        raise ValueError(f"num_discrete_coors={num_discrete_coors}: it must be 2 to {2**20}")


def _has_area(bins: Int[Tensor, "v 3"], faces: Int[Tensor, "f n"]) -> Tensor:
    """Exactly: the normal of a triangle, and of a quad the product of its diagonals, in whole numbers."""
    corners = bins[faces]
    if faces.shape[1] == 3:
        first, second = corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]
    else:
        first, second = corners[:, 2] - corners[:, 0], corners[:, 3] - corners[:, 1]
    ordered = faces.sort(dim=1).values
    return torch.linalg.cross(first, second).ne(0).any(dim=1) & ordered.diff(dim=1).ne(0).all(dim=1)


def face_edges(
    faces: Int[Tensor, "f n"], pad: int = PADDING, include_self: bool = True, share_one_vertex: bool = False
) -> Int[Tensor, "e 2"]:
    """Pairs of faces with an edge (or `share_one_vertex`: a vertex) in common, both ways round, in order.

    Each face is also its own neighbour unless `include_self` is False; a face with a corner `pad` is none. What the faces
    have in common is found by sorting, in time linear in the pairs there are (but for the sort).
    """
    num_faces, num_corners = faces.shape
    numbers = (faces != pad).all(dim=1).nonzero().flatten()
    corners = faces[numbers].long()
    if share_one_vertex:
        shared, is_proper = corners, torch.ones_like(corners, dtype=torch.bool)
    else:
        ends = corners.roll(-1, dims=1)
        low, high = torch.minimum(corners, ends), torch.maximum(corners, ends)
        span = int(high.max()) + 1 if len(high) else 1
        shared, is_proper = low * span + high, low != high
    owners = numbers.repeat_interleave(num_corners).view_as(corners)
    first, second = _pairs_with_equal(shared[is_proper], owners[is_proper])
    pairs = first * num_faces + second
    if include_self:
        pairs = torch.cat([pairs, numbers * (num_faces + 1)])
    else:
        pairs = pairs[first != second]
    pairs = torch.unique(pairs)
    return torch.stack([pairs // max(num_faces, 1), pairs % max(num_faces, 1)], dim=1)


def _pairs_with_equal(values: Int[Tensor, "m"], owners: Int[Tensor, "m"]) -> tuple[Int[Tensor, "p"], Int[Tensor, "p"]]:
    """All ordered pairs of owners of equal values, each with itself too."""
    values, order = values.sort(stable=True)
    owners = owners[order]
    counts = torch.unique_consecutive(values, return_counts=True)[1]
    group_starts = (counts.cumsum(0) - counts).repeat_interleave(counts)
    partners = counts.repeat_interleave(counts)  # how many owners a value has, for each of them
    begins = (partners.cumsum(0) - partners).repeat_interleave(partners)
    within = torch.arange(len(begins), device=values.device) - begins
    return owners.repeat_interleave(partners), owners[group_starts.repeat_interleave(partners) + within]


def derive_face_edges_from_faces(
    faces: Int[Tensor, "*b f n"],
    pad_id: int = PADDING,
    neighbor_if_share_one_vertex: bool = False,
    include_self: bool = True,
) -> Int[Tensor, "*b e 2"]:
    """`face_edges` of one mesh, or of a batch, padded with `pad_id`."""
    if faces.ndim == 2:
        return face_edges(faces, pad_id, include_self, neighbor_if_share_one_vertex)
    edges = [face_edges(each, pad_id, include_self, neighbor_if_share_one_vertex) for each in faces]
    return pad_sequence(edges, batch_first=True, padding_value=pad_id)


def read_mesh(source: Path | io.BytesIO, kind: str, name: str, quads: bool = False) -> Mesh:
    """The mesh in a file of the kind `kind` (an extension), all parts of it in one; BadFile if there is none.

    Polygons are cut into triangles, unless `quads`: then all faces must be quads, in an obj or off file.
    """
    if kind not in (QUAD_EXTENSIONS if quads else MESH_EXTENSIONS):
        known = ", ".join(QUAD_EXTENSIONS if quads else MESH_EXTENSIONS)
        raise BadFile(name, f"{'quads' if quads else 'meshes'} are read from {known} files, not from {kind or 'these'}")
    try:
        content = source.read_bytes() if isinstance(source, Path) else source.getvalue()
        if kind in TEXT_EXTENSIONS:  # whose comments and names may be in any encoding
            content = content.decode(errors="replace").encode()
        vertices, faces = (_read_quads if quads else _read_triangles)(content, kind)
    except READING_ERRORS as error:
        raise BadFile(name, f"not a readable {kind} mesh ({type(error).__name__}: {error})") from error
    return checked_mesh(torch.from_numpy(vertices), torch.from_numpy(faces), name)


# Threads read one after the other: filters of warnings are the process's, and so is, in Python 3.11, a count that the parser of
# Python keeps, with which numpy reads what a ply says of its types.
_reading = threading.Lock()


def _read_triangles(content: bytes, kind: str) -> tuple[np.ndarray, np.ndarray]:
    import trimesh  # takes a second

    # Given the content and not the path, it reads no textures and nothing else beside the file.
    with _reading, warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # remarks on damaged files; whether the mesh is sound is seen below
        mesh = trimesh.load_mesh(io.BytesIO(content), file_type=kind, process=False, skip_materials=True)
        return np.array(mesh.vertices, dtype=np.float64), np.array(mesh.faces, dtype=np.int64)


def _read_quads(content: bytes, kind: str) -> tuple[np.ndarray, np.ndarray]:
    lines = [line.partition("#")[0].split() for line in content.decode().splitlines()]
    vertices, polygons = (_parse_obj if kind == "obj" else _parse_off)([words for words in lines if words])
    others = sum(len(polygon) != 4 for polygon in polygons)
    if others:
        raise ValueError(f"{others} of its {len(polygons)} faces are not quads")
    if any(len(vertex) != 3 for vertex in vertices):
        raise ValueError("a vertex has fewer than three coordinates")
    return np.array(vertices, dtype=np.float64).reshape(-1, 3), np.array(polygons, dtype=np.int64).reshape(-1, 4)


def _parse_obj(lines: list[list[str]]) -> tuple[list[list[float]], list[list[int]]]:
    vertices, polygons = [], []
    for command, *words in lines:
        if command == "v":
            vertices.append([float(word) for word in words[:3]])
        elif command == "f":  # corners are counted from 1, or from the end backwards, with texture and normal after a /
            corners = [int(word.partition("/")[0]) for word in words]
            polygons.append([corner - 1 if corner > 0 else len(vertices) + corner for corner in corners])
    return vertices, polygons


def _parse_off(lines: list[list[str]]) -> tuple[list[list[float]], list[list[int]]]:
    if not lines or lines[0][0] != "OFF":
        raise ValueError("it does not begin with OFF")
    header, *rows = [lines[0][1:], *lines[1:]] if len(lines[0]) > 1 else lines[1:]
    num_vertices, num_faces = int(header[0]), int(header[1])
    if len(rows) < num_vertices + num_faces:
        raise ValueError(f"it promises {num_vertices} vertices and {num_faces} faces, and has {len(rows)} lines")
    vertices = [[float(word) for word in row[:3]] for row in rows[:num_vertices]]
    faces = rows[num_vertices : num_vertices + num_faces]
    return vertices, [[int(word) for word in row[1 : 1 + int(row[0])]] for row in faces]  # colours may follow


def checked_mesh(vertices: Tensor, faces: Tensor, name: str) -> Mesh:
    """A mesh whose faces refer to finite vertices; rows of padding are gone, and so are vertices no face has."""
    faces = faces[(faces != PADDING).any(dim=1)].long()
    if len(faces) == 0:
        raise BadFile(name, "it has no faces")
    if int(faces.min()) < 0 or int(faces.max()) >= len(vertices):
        raise BadFile(
            name, f"its faces refer to vertices {int(faces.min())} to {int(faces.max())}, and it has {len(vertices)}"
        )
    used, corners = torch.unique(faces, return_inverse=True)
    vertices = vertices[used].double()
    if not (vertices.amax(dim=0) - vertices.amin(dim=0)).isfinite().all():  # (NaN and an overflow show here too)
        raise BadFile(name, "its coordinates are not all finite numbers")
    return Mesh(vertices, corners)


def _noise_of_places(vertices: Float[Tensor, "v 3"], generator: torch.Generator | None) -> Float[Tensor, "v 3"]:
    """Numbers from -1 to 1, the same for vertices in one place: many files have a vertex again for each of its faces, and those
    must not come apart."""
    x, y, z = (vertices.double() * PLACES).round().long().unbind(dim=1)
    places, of_vertex = torch.unique((z * 4 * PLACES + y) * 4 * PLACES + x, return_inverse=True)
    return (2 * torch.rand(len(places), 3, generator=generator, dtype=torch.float64) - 1)[of_vertex]


@dataclass(frozen=True)
class MeshTransform:
    """A mesh to a sample, and how it is changed at random while training.

    `scale` is the range of a factor, one for each axis or the same for all, `jitter` how far a vertex may be moved along
    each axis (the cube's side is 2), `rotation` how many degrees about the `up` axis, either way. What then leaves the
    cube is shrunk to fit. A changed mesh outside of `min_faces` to `max_faces` gives way to the unchanged one.
    """

    num_discrete_coors: int = 128
    quads: bool = False
    min_faces: int = 1
    max_faces: int | None = None
    edges: bool = True  # give the pairs of neighbours too
    scale: tuple[float, float] = (0.75, 1.25)
    scale_per_axis: bool = True
    jitter: float = 0.0
    rotation: float = 0.0
    up: Literal["y", "z"] = "y"  # as glTF has it, or as 3-d printers and Blender do

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", tuple(self.scale))  # a recipe's list
        _check_resolution(self.num_discrete_coors)
        if self.min_faces < 1 or (self.max_faces is not None and self.max_faces < self.min_faces):
            raise ValueError(
                f"min_faces={self.min_faces}, max_faces={self.max_faces}: the first must be at least 1, and the second no less"
            )
        if len(self.scale) != 2 or not 0 < self.scale[0] <= self.scale[1] or self.jitter < 0 or self.rotation < 0:
            raise ValueError(
                f"scale={self.scale}, jitter={self.jitter}, rotation={self.rotation}: scale is two factors, the smaller "
                "first, and the others are not negative"
            )
        if self.up not in ("y", "z"):
            raise ValueError(f"up={self.up!r}: it must be y or z")

    def __call__(
        self, mesh: Mesh, name: str, augment: bool = False, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        corners = mesh.faces.shape[1]
        if corners != 3 + self.quads:
            raise BadFile(
                name, f"its faces have {corners} corners: with quads={self.quads} they must have {3 + self.quads}"
            )
        mesh = Mesh(fit_to_cube(mesh.vertices), mesh.faces)
        plain = tidy(mesh, self.num_discrete_coors)
        problem = self._problem(plain)
        if problem is not None:
            raise BadFile(name, problem)
        if augment:
            changed = tidy(self.augmented(mesh, generator), self.num_discrete_coors)
            plain = changed if self._problem(changed) is None else plain
        sample: dict[str, Tensor] = {"vertices": plain.vertices, "faces": plain.faces}
        return {**sample, "face_edges": face_edges(plain.faces)} if self.edges else sample

    def _problem(self, mesh: Mesh) -> str | None:
        count = len(mesh.faces)
        if count == 0:
            return f"none of its faces has an area, with coordinates in {self.num_discrete_coors} bins"
        if count < self.min_faces:
            return f"it has {count} faces, fewer than min_faces={self.min_faces}"
        if self.max_faces is not None and count > self.max_faces:
            return f"it has {count} faces, more than max_faces={self.max_faces}"
        return None

    def augmented(self, mesh: Mesh, generator: torch.Generator | None = None) -> Mesh:
        """A mesh in the cube, changed and still in it."""
        low, high = self.scale
        factors = low + (high - low) * torch.rand(3, generator=generator, dtype=torch.float64)
        angle = math.radians(self.rotation) * (2 * torch.rand((), generator=generator, dtype=torch.float64).item() - 1)
        vertices = mesh.vertices.double() * (factors if self.scale_per_axis else factors[0])
        vertices = self._turned(vertices, angle)
        if self.jitter:
            vertices = vertices + self.jitter * _noise_of_places(mesh.vertices, generator)
        return Mesh(vertices / vertices.abs().max().clamp(min=1), mesh.faces)

    def _turned(self, vertices: Float[Tensor, "v 3"], angle: float) -> Float[Tensor, "v 3"]:
        x, y, z = vertices.unbind(dim=1)
        cos, sin = math.cos(angle), math.sin(angle)
        if self.up == "y":
            return torch.stack([cos * x + sin * z, y, cos * z - sin * x], dim=1)
        return torch.stack([cos * x - sin * y, cos * y + sin * x, z], dim=1)
