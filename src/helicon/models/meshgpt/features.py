"""What a face is to the network: its coordinates, angles, area and normal, each put into bins and embedded.

Angles are those between the edges at each corner, and the normal is the face's own, so neither changes when the face is
moved. Areas of faces differ by a factor of thousands: they are binned by their logarithm. Angles of 45 and 90 degrees and
upright normals are the border of two bins: all three are nudged into one, so that a face has the same bins in any batch.

Letters: b batch, f faces, n corners of a face (3 or 4), d features.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from helicon.nn.bins import NUDGE, discretize


def corner_angles(coordinates: Float[Tensor, "b f n 3"]) -> Float[Tensor, "b f n"]:
    """Between the two edges that meet at each corner, 0 to pi; 0 where one of them has no length."""
    to_next = coordinates.roll(-1, dims=2) - coordinates
    to_last = coordinates.roll(1, dims=2) - coordinates
    across = torch.linalg.cross(to_next, to_last).norm(dim=-1)
    return torch.atan2(across, (to_next * to_last).sum(dim=-1))  # exact for small angles, where arccos is not


def area_vectors(coordinates: Float[Tensor, "b f n 3"]) -> Float[Tensor, "b f 3"]:
    """The normal times the area: half the product of two edges of a triangle, or of the diagonals of a quad."""
    if coordinates.shape[2] == 3:
        first, second = coordinates[:, :, 1] - coordinates[:, :, 0], coordinates[:, :, 2] - coordinates[:, :, 0]
    else:
        first, second = coordinates[:, :, 2] - coordinates[:, :, 0], coordinates[:, :, 3] - coordinates[:, :, 1]
    return torch.linalg.cross(first, second) / 2


def num_octaves(num_discrete: int) -> int:
    """How many times a wave of twice the range can be halved, itself counted, before it is shorter than four bins."""
    return max(1, math.ceil(math.log2(num_discrete)))


def wave_table(num_discrete: int, dim: int) -> Float[Tensor, "m d"]:
    """A row for each bin: waves whose periods halve from twice the range on, first the cosines, then other phases of them.

    Bins that are near have rows that are alike, and the signs of the cosines are a Gray code: all bins differ.
    """
    octaves = num_octaves(num_discrete)
    columns = torch.arange(dim, dtype=torch.float64)
    phases = torch.pi * (columns // octaves) / -(-dim // octaves)
    periods = 2 * num_discrete / 2 ** (columns % octaves)
    places = torch.arange(num_discrete, dtype=torch.float64)[:, None] + 0.5
    return (2 * torch.pi * places / periods + phases).cos().float()


@dataclass(frozen=True)
class FaceFeatures:
    """Faces with n corners, embedded."""

    coordinates: Tensor  # int64 [b, f, n, 3], the bins
    corners: Tensor  # [b, f, n, 3 * dim_coor_embed], of the coordinates alone
    faces: Tensor  # [b, f, d], of everything


class FaceEmbedding(nn.Module):
    """Coordinates `[b, f, n, 3]` to `FaceFeatures`; `dim` is the number of features of a face.

    Each kind of feature has its number of bins and its size. Areas are between half a square of the coordinates' bins, which
    no face in them goes below, and the square of their range.
    """

    def __init__(
        self,
        *,
        num_corners: int,
        continuous_range: tuple[float, float],
        coordinates: tuple[int, int],
        angles: tuple[int, int],
        area: tuple[int, int],
        normals: tuple[int, int],
    ):
        super().__init__()
        side = continuous_range[1] - continuous_range[0]
        self.continuous_range = continuous_range
        self.log_area_range = (math.log((side / coordinates[0]) ** 2 / 2), math.log(side**2))
        self.coordinate_embed = nn.Embedding(*coordinates)
        with torch.no_grad():
            self.coordinate_embed.weight.copy_(wave_table(*coordinates))
        self.angle_embed = nn.Embedding(*angles)
        self.area_embed = nn.Embedding(*area)
        self.normal_embed = nn.Embedding(*normals)
        self.dim = num_corners * (3 * coordinates[1] + angles[1]) + area[1] + 3 * normals[1]

    def forward(self, coordinates: Float[Tensor, "b f n 3"]) -> FaceFeatures:
        coordinates = coordinates.float()
        bins = discretize(coordinates, self.coordinate_embed.num_embeddings, self.continuous_range)
        corners = self.coordinate_embed(bins).flatten(3)
        vectors = area_vectors(coordinates)
        areas = vectors.norm(dim=-1, keepdim=True)
        binned = (
            (self.angle_embed, corner_angles(coordinates), (0.0, math.pi)),
            (self.area_embed, areas.clamp(min=1e-30).log(), self.log_area_range),
            (self.normal_embed, vectors / areas.clamp(min=1e-30), (-1.0, 1.0)),
        )
        others = [
            embed(discretize(values, embed.num_embeddings, value_range, NUDGE)).flatten(2)
            for embed, values, value_range in binned
        ]
        return FaceFeatures(bins, corners, torch.cat((corners.flatten(2), *others), dim=-1))
