"""How good meshes are, as pure functions of tensors.

Letters: b batch, f faces, n corners of a face (3 or 4), p and m points.
"""

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor


def coordinate_accuracy(
    predicted: Int[Tensor, "b f n 3"], targets: Int[Tensor, "b f n 3"], is_face: Bool[Tensor, "b f"]
) -> Float[Tensor, ""]:
    """The share of the faces' coordinates that are in the right bin; what is not a face does not count."""
    return _share((predicted == targets).float().mean(dim=(2, 3)), is_face)


def triangle_accuracy(
    predicted: Int[Tensor, "b f n 3"], targets: Int[Tensor, "b f n 3"], is_face: Bool[Tensor, "b f"]
) -> Float[Tensor, ""]:
    """The share of faces (quads, too) of which every coordinate is in the right bin."""
    return _share((predicted == targets).flatten(2).all(dim=2).float(), is_face)


def _share(values: Float[Tensor, "b f"], is_face: Bool[Tensor, "b f"]) -> Float[Tensor, ""]:
    return torch.where(is_face, values, 0).sum() / is_face.sum().clamp(min=1)


def surface_points(
    coordinates: Float[Tensor, "b f n 3"], is_face: Bool[Tensor, "b f"], num_points: int = 2048
) -> Float[Tensor, "b p 3"]:
    """Points spread evenly over the surface of each mesh, the same each time; NaN where it has no area.

    Equal steps of area choose the triangles (a quad is two), and within them the points follow the R2 sequence.
    """
    coordinates = torch.where(is_face[..., None, None], coordinates, 0).double()
    if coordinates.shape[2] == 4:
        coordinates = rearrange(coordinates[:, :, [0, 1, 2, 0, 2, 3]], "b f (t n) c -> b (f t) n c", t=2)
    first, second = (coordinates[:, :, corner] - coordinates[:, :, 0] for corner in (1, 2))
    areas = torch.linalg.cross(first, second).norm(dim=-1).cumsum(dim=1)
    steps = torch.arange(num_points, device=areas.device, dtype=areas.dtype)
    chosen = torch.searchsorted(areas, (steps + 0.5) / num_points * areas[:, -1:]).clamp(max=areas.shape[1] - 1)
    u, v = (steps * 0.7548776662466927) % 1, (steps * 0.5698402909980532) % 1
    u, v = torch.where(u + v > 1, 1 - u, u), torch.where(u + v > 1, 1 - v, v)
    corner, first, second = (
        part.gather(1, chosen[..., None].expand(-1, -1, 3)) for part in (coordinates[:, :, 0], first, second)
    )
    points = corner + u[:, None] * first + v[:, None] * second
    return points.masked_fill(areas[:, -1:, None] <= 0, torch.nan).float()


def chamfer_distance(points: Float[Tensor, "b p 3"], others: Float[Tensor, "b m 3"]) -> Float[Tensor, "b"]:
    """The mean squared distance from a point to the nearest of the others, and from those to the nearest of these, added up.

    Points on one surface that were drawn anew are not at distance 0: compare with that, at the same numbers of points.
    """
    # The faster way, by products of matrices, loses what is small against the distance to the origin.
    squared = torch.cdist(points, others, compute_mode="donot_use_mm_for_euclid_dist").square()
    return squared.amin(dim=2).mean(dim=1) + squared.amin(dim=1).mean(dim=1)


def non_manifold_share(faces: Int[Tensor, "b f n"]) -> Float[Tensor, "b"]:
    """The share of each mesh's edges at which more than two faces meet; 0 where there are none.

    A face with a negative corner is padding, and an edge between a vertex and itself is none.
    """
    ends = faces.roll(-1, dims=2)
    low, high = torch.minimum(faces, ends).long(), torch.maximum(faces, ends).long()
    is_edge = (low != high) & (faces >= 0).all(dim=2, keepdim=True)
    keys = torch.where(is_edge, low * (faces.amax() + 1) + high, -1).flatten(1).sort(dim=1).values
    place = torch.arange(keys.shape[1], device=keys.device)

    def is_repeated(times: int) -> Bool[Tensor, "b m"]:
        """Whether the same edge stands `times` places before."""
        return (place >= times) & (keys[:, (place - times).clamp(min=0)] == keys)

    num_edges = ((keys >= 0) & ~is_repeated(1)).sum(dim=1)
    num_crowded = ((keys >= 0) & is_repeated(2) & ~is_repeated(3)).sum(dim=1)  # each has one third face
    return num_crowded / num_edges.clamp(min=1)
