import math

import pytest
import torch

from helicon.data.mesh import quantize_coordinates
from helicon.data.mesh_data import collate_meshes
from helicon.data.synthetic_meshes import SyntheticMeshes
from helicon.models.meshgpt.features import (
    FaceEmbedding,
    area_vectors,
    corner_angles,
    num_octaves,
    wave_table,
)

RIGHT_TRIANGLE = torch.tensor([[[[0.0, 0, 0], [1, 0, 0], [0, 1, 0]]]])
SQUARE = torch.tensor([[[[0.0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]]]])


def embedding(num_corners: int = 3) -> FaceEmbedding:
    torch.manual_seed(0)
    return FaceEmbedding(
        num_corners=num_corners,
        continuous_range=(-1.0, 1.0),
        coordinates=(128, 10),
        angles=(32, 3),
        area=(64, 5),
        normals=(16, 4),
    )


@pytest.mark.parametrize("offset", [0.0, 5.0])
def test_angles_are_between_edges_wherever_the_face_is(offset: float):
    """D-M5: the reference takes those between the corners as seen from the origin."""
    angles = corner_angles(RIGHT_TRIANGLE + offset)
    torch.testing.assert_close(angles, math.pi * torch.tensor([[[1 / 2, 1 / 4, 1 / 4]]]))
    torch.testing.assert_close(corner_angles(SQUARE + offset), torch.full((1, 1, 4), math.pi / 2))


def test_angles_of_any_triangle_add_up():
    corners = torch.randn(2, 50, 3, 3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(corner_angles(corners).sum(dim=2), torch.full((2, 50), math.pi))


def test_a_face_without_an_edge_has_an_angle_all_the_same():
    assert (corner_angles(torch.zeros(1, 1, 3, 3)) == 0).all()


def test_area_and_normal_of_triangles_and_quads():
    triangle = area_vectors(2 * RIGHT_TRIANGLE + 7)
    torch.testing.assert_close(triangle, torch.tensor([[[0.0, 0, 2]]]))
    torch.testing.assert_close(area_vectors(3 * SQUARE.flip(2) - 1), torch.tensor([[[0.0, 0, -9]]]))


def test_areas_spread_over_the_bins():
    """D-M6: in the reference all faces of sides below 0.25 have the same bin."""
    embed = embedding()
    with torch.no_grad():
        embed.area_embed.weight.copy_(torch.arange(64.0)[:, None].expand(-1, 5))  # each bin is its number
    sides = torch.tensor([1 / 64, 1 / 32, 1 / 16, 0.1, 0.2, 0.4, 0.8, 2.0])
    bins = embed(sides[:, None, None, None] * RIGHT_TRIANGLE).faces[:, 0, 99].tolist()
    assert bins == sorted(set(bins)) and bins[0] == 0 and 55 < bins[-1] < 64


@pytest.mark.parametrize("num_discrete", [5, 64, 128])
def test_waves_tell_all_bins_apart_by_their_signs_and_change_slowly(num_discrete: int):
    table = wave_table(num_discrete, 2 * num_octaves(num_discrete) + 1)
    signs = table[:, : num_octaves(num_discrete)] > 0
    assert len(signs.unique(dim=0)) == num_discrete
    if num_discrete & (num_discrete - 1) == 0:
        assert (signs[1:] != signs[:-1]).sum(dim=1).eq(1).all()  # a Gray code
    distances = torch.cdist(table, table)
    assert (distances[0, 1:] >= distances[0, 1] - 1e-4).all()


@pytest.mark.parametrize("num_corners", [3, 4])
def test_all_features_of_a_face_are_embedded(num_corners: int):
    embed = embedding(num_corners)
    corners = torch.rand(2, 5, num_corners, 3, generator=torch.Generator().manual_seed(0))
    found = embed(corners)
    assert embed.dim == num_corners * (30 + 3) + 5 + 12
    assert found.faces.shape == (2, 5, embed.dim) and found.corners.shape == (2, 5, num_corners, 30)
    assert torch.equal(found.coordinates, quantize_coordinates(corners))
    assert torch.equal(found.faces[..., : num_corners * 30], found.corners.flatten(2))
    found.faces.sum().backward()
    for name, parameter in embed.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_only_the_coordinates_change_when_a_face_is_moved():
    embed = embedding()
    found, moved = embed(RIGHT_TRIANGLE / 4), embed(RIGHT_TRIANGLE / 4 - 0.5)
    assert torch.equal(found.faces[..., 90:], moved.faces[..., 90:])
    assert not torch.equal(found.corners, moved.corners)
    assert not torch.equal(found.faces[..., 90:], embed(RIGHT_TRIANGLE.flip(2) / 4).faces[..., 90:])  # the other side


def square_boxes(count: int) -> list[dict[str, torch.Tensor]]:
    """With two square sides each, which their triangles cut at 45 degrees, anywhere on a grid of 64 places a side."""
    generator = torch.Generator().manual_seed(0)
    corners = torch.cartesian_prod(*[torch.tensor([0, 1])] * 3)
    found = []
    for _ in range(count):
        width, height = torch.randint(1, 31, (2,), generator=generator).tolist()
        start = torch.randint(0, 32, (3,), generator=generator)
        places = start + corners * torch.tensor([width, height, width])[torch.randperm(3, generator=generator)]
        sides = torch.tensor([[0, 1, 3, 2], [4, 5, 7, 6], [0, 1, 5, 4], [2, 3, 7, 6], [0, 2, 6, 4], [1, 3, 7, 5]])
        found.append(
            {"vertices": (places + 0.5) / 32 - 1, "faces": torch.cat((sides[:, :3], sides[:, [0, 2, 3]]))},
        )
    return found


@pytest.mark.parametrize("meshes", ["furniture", "quads", "boxes"])
def test_a_face_has_the_same_bins_alone_and_in_a_batch(meshes: str):
    """45 degrees are the border of two bins out of 128, and arithmetic rounds differently in batches of different sizes."""
    torch.manual_seed(0)
    size, quads = (128, 2), meshes == "quads"
    embed = FaceEmbedding(
        num_corners=3 + quads, continuous_range=(-1.0, 1.0), coordinates=size, angles=size, area=size, normals=size
    )
    furniture = SyntheticMeshes(96, 1, num_discrete_coors=64, quads=quads, edges=False)
    given = square_boxes(96) if meshes == "boxes" else [furniture[index] for index in range(96)]
    for start in range(0, 96, 16):
        some = given[start : start + 16]
        batch = collate_meshes(some)
        rows = torch.arange(len(some))[:, None, None]
        together = embed(batch["vertices"][rows, batch["faces"].clamp(min=0)]).faces
        for mesh, row in zip(some, together, strict=True):
            alone = embed(mesh["vertices"][mesh["faces"]][None]).faces[0]
            assert torch.equal(row[: len(alone)], alone)


@pytest.mark.parametrize("num_discrete", [32, 100, 126, 127, 128])
def test_common_angles_and_normals_are_off_the_borders_of_bins(num_discrete: int):
    embed = FaceEmbedding(
        num_corners=3,
        continuous_range=(-1.0, 1.0),
        coordinates=(64, 1),
        angles=(num_discrete, 1),
        area=(num_discrete, 1),
        normals=(num_discrete, 1),
    )
    bent = [
        [[0.0, 0, 0], [1, 0, 0], [0, 1, 0]],
        [[0, 0, 0], [1, 0, 0], [0.5, 3**0.5 / 2, 0]],
        [[0, 0, 0], [1, 0, 1], [0, 1, 0]],
    ]
    corners = torch.tensor(bent)[None] / 4
    noise = 1e-7 * torch.randn(200, 3, 3, 3, generator=torch.Generator().manual_seed(0))
    features = embed(corners + noise).faces[..., 9:]  # behind the coordinates
    assert torch.equal(features, embed(corners).faces[..., 9:].expand_as(features))
