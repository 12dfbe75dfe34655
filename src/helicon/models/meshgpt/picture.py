"""A mesh as a picture: flat shaded, with its edges, seen from the front, a little from the right and from above.

The triangles' pixels are listed row by row, all triangles at once, and each pixel of the picture keeps the nearest. What
looks away from the viewer is drawn in another colour: faces wound the wrong way, and the inside of open meshes.

Letters: v vertices, f triangles, m pixels of triangles.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from helicon.data.mesh import Mesh
from helicon.metrics.contact_sheet import contact_sheet

TURN, TILT = math.radians(-32), math.radians(24)  # about the y axis, then towards the viewer
MARGIN = 0.06  # of the picture, on each side
FINER = 2  # pixels are drawn as so many a side, and averaged
FRONT, BACK, EDGE = (176, 203, 236), (240, 186, 156), (36, 48, 70)  # red, green, blue
LIGHT = (-0.45, 0.75, 0.6)  # where it comes from: left, above, in front
DIMMEST = 0.3  # a face that looks away from the light, against one that looks at it
EDGE_WIDTH = 0.9  # pixels, on either side
DENSE = 7.0  # pixels that a triangle is high, below which its edges are fainter
EMPTY = np.iinfo(np.int64).max

Floats = NDArray[np.floating]
Integers = NDArray[np.int64]


def mesh_picture(mesh: Mesh, size: int = 256) -> Image.Image:
    """`size` x `size` pixels on white, y up. The mesh may be anywhere and of any size: it fills the picture."""
    if size < 8:
        raise ValueError(f"size={size}: a picture needs at least 8 pixels a side")
    fine = FINER * size
    pixels = np.full((fine * fine, 3), 255, dtype=np.float32)
    if len(mesh.faces):
        triangles, is_edge = _triangles(mesh.faces.cpu().numpy())
        corners = _seen(mesh.vertices.detach().cpu().double().numpy(), triangles, fine)
        place, face = _nearest(corners, fine)
        pixels[place] = _shades(corners, is_edge, place, face, fine)
    rows = pixels.reshape(size, FINER, size, FINER, 3)
    parts = [rows[:, row, :, column] for row in range(FINER) for column in range(FINER)]
    return Image.fromarray(np.mean(parts, axis=0).round().astype(np.uint8))


def mesh_sheet(rows: Sequence[Sequence[Mesh]], captions: Sequence[str], size: int = 256) -> Image.Image:
    """Rows of meshes; column i has caption i under each of its pictures."""
    pictures = [np.stack([np.asarray(mesh_picture(mesh, size)) for mesh in row]) for row in rows]
    return contact_sheet([torch.from_numpy(row).permute(0, 3, 1, 2) / 255 for row in pictures], captions)


def _triangles(faces: Integers) -> tuple[Integers, NDArray[np.bool_]]:
    """And whether the side across from each corner is an edge of the mesh: the diagonal of a quad is none."""
    if faces.shape[1] == 3:
        return faces, np.ones((len(faces), 3), dtype=bool)
    halves = faces[:, [0, 1, 2, 0, 2, 3]].reshape(-1, 3)
    return halves, np.tile([[True, False, True], [True, True, False]], (len(faces), 1))


def _seen(vertices: Floats, triangles: Integers, size: int) -> Floats:
    """The corners [f, 3, 3] as x to the right, y down, both in pixels, and z towards the viewer."""
    turn = np.array([[math.cos(TURN), 0, math.sin(TURN)], [0, 1, 0], [-math.sin(TURN), 0, math.cos(TURN)]])
    tilt = np.array([[1, 0, 0], [0, math.cos(TILT), -math.sin(TILT)], [0, math.sin(TILT), math.cos(TILT)]])
    corners = vertices[triangles] @ (tilt @ turn).T * (1, -1, 1)
    low, high = corners.min(axis=(0, 1)), corners.max(axis=(0, 1))
    scale = (1 - 2 * MARGIN) * size / max((high - low)[:2].max(), 1e-12)
    return (corners - (low + high) / 2) * scale + (size / 2, size / 2, 0)


def _nearest(corners: Floats, size: int) -> tuple[Integers, Integers]:
    """The pixels that some triangle covers, and which of them is the nearest there."""
    face, row = _repeated(*_between(corners[..., 1].min(axis=1), corners[..., 1].max(axis=1)))
    begin, end = _crossed(corners[face], row + 0.5)
    line, column = _repeated(*_between(begin, end))
    face, row = face[line], row[line]
    depth = _depth(corners, face, column + 0.5, row + 0.5)
    # Both in one number, the depth in the higher bits, so that the least of them is the nearest triangle.
    span = max(np.ptp(depth), 1e-12) if len(depth) else 1.0
    rank = ((depth.max(initial=0) - depth) / span * (2**30 - 1)).astype(np.int64)
    buffer = np.full(size * size, EMPTY)
    np.minimum.at(buffer, row * size + column, rank << 32 | face)
    place = np.flatnonzero(buffer != EMPTY)
    return place, buffer[place] & (2**32 - 1)


def _between(low: Floats, high: Floats) -> tuple[Integers, Integers]:
    """The first pixel whose middle is in the interval, and how many are."""
    first = np.ceil(low - 0.5)
    return first.astype(np.int64), np.maximum(np.ceil(high - 0.5) - first, 0).astype(np.int64)


def _repeated(first: Integers, count: Integers) -> tuple[Integers, Integers]:
    """The numbers from `first` on, `count` of them, for all intervals in a row; and which interval each is of."""
    owner = np.repeat(np.arange(len(count)), count)
    return owner, first[owner] + np.arange(len(owner)) - (np.cumsum(count) - count)[owner]


def _crossed(corners: Floats, y: Floats) -> tuple[Floats, Floats]:
    """From where to where each of these triangles [m, 3, 3] is on a horizontal line."""
    start, end = corners[..., :2], np.roll(corners[..., :2], -1, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        along = (y[:, None] - start[..., 1]) / (end[..., 1] - start[..., 1])
        x = start[..., 0] + along * (end[..., 0] - start[..., 0])
    is_met = (along >= 0) & (along <= 1)
    return np.where(is_met, x, np.inf).min(axis=1), np.where(is_met, x, -np.inf).max(axis=1)


def _normals(corners: Floats) -> Floats:
    """Of the sides that look at the viewer where they are wound counter-clockwise as seen (y is down here, so mirrored)."""
    return np.cross(corners[:, 2] - corners[:, 0], corners[:, 1] - corners[:, 0])


def _depth(corners: Floats, face: Integers, x: Floats, y: Floats) -> Floats:
    """Of points on the triangles' planes; of those seen from the edge, which have no plane here, somewhere on them."""
    normals = _normals(corners)
    slope = -normals[:, :2] / np.where(np.abs(normals[:, 2:]) > 1e-9, normals[:, 2:], np.inf)
    low, high, start = corners[..., 2].min(axis=1), corners[..., 2].max(axis=1), corners[:, 0]
    level = start[:, 2] - (slope * start[:, :2]).sum(axis=1)
    return np.clip(level[face] + slope[face, 0] * x + slope[face, 1] * y, low[face], high[face])


def _shades(corners: Floats, is_edge: NDArray[np.bool_], place: Integers, face: Integers, size: int) -> Floats:
    """Red, green and blue of these pixels, of which the triangle is known."""
    normals = _normals(corners) * (1, -1, 1)
    normals /= np.maximum(np.linalg.norm(normals, axis=1, keepdims=True), 1e-12)
    is_front = normals[:, 2:] > 0
    slant = np.where(is_front, normals, -normals) @ (np.array(LIGHT) / np.linalg.norm(LIGHT))
    colours = np.where(is_front, FRONT, BACK) * (DIMMEST + (1 - DIMMEST) * (1 + slant[:, None]) / 2)
    ink = _ink(corners, is_edge, place, face, size)[:, None]
    return colours.astype(np.float32)[face] * (1 - ink) + np.array(EDGE, dtype=np.float32) * ink


def _ink(corners: Floats, is_edge: NDArray[np.bool_], place: Integers, face: Integers, size: int) -> Floats:
    """How much of these pixels is edge, 0 to 1: fainter where triangles are so small that all would be edges."""
    x, y = (place % size + 0.5).astype(np.float32), (place // size + 0.5).astype(np.float32)
    distance = np.full(len(place), np.inf, dtype=np.float32)
    longest = np.full(len(corners), 1e-12)
    for side in range(3):  # across from this corner
        start, end = corners[:, side - 2, :2], corners[:, side - 1, :2]
        length = np.maximum(np.linalg.norm(end - start, axis=1), 1e-12)
        across = np.stack([end[:, 1] - start[:, 1], start[:, 0] - end[:, 0]], axis=1) / length[:, None]
        line = np.stack([*across.T, (across * start).sum(axis=1)]).astype(np.float32)
        line[2, ~is_edge[:, side]] = np.inf
        np.minimum(distance, np.abs(line[0, face] * x + line[1, face] * y - line[2, face]), out=distance)
        longest = np.maximum(longest, length)
    height = np.abs(_normals(corners)[:, 2]) / longest
    strength = (0.9 * np.clip(height / (DENSE * FINER), 0.1, 1)).astype(np.float32)
    return strength[face] * np.clip(EDGE_WIDTH * FINER / 2 - distance + 0.5, 0, 1)
