from collections import Counter

import pytest
import torch

from helicon.data.synthetic_meshes import SyntheticMeshes
from helicon.metrics.mesh import (
    chamfer_distance,
    coordinate_accuracy,
    non_manifold_share,
    surface_points,
    triangle_accuracy,
)

SQUARE = torch.tensor([[[[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]]]]).float()


def test_accuracies_count_faces_alone():
    targets = torch.randint(128, (2, 5, 3, 3), generator=torch.Generator().manual_seed(0))
    is_face = torch.tensor([[True] * 5, [True] * 2 + [False] * 3])
    predicted = targets.clone()
    predicted[0, 1, 2, 0] += 1
    predicted[0, 3] += 1
    predicted[1, 2:] = -1  # padding
    assert triangle_accuracy(predicted, targets, is_face).item() == pytest.approx(5 / 7)
    assert coordinate_accuracy(predicted, targets, is_face).item() == pytest.approx(1 - 10 / 63)
    assert triangle_accuracy(targets, targets, torch.zeros_like(is_face)) == 0


@pytest.mark.parametrize("quads", [False, True])
def test_points_are_on_the_surface_and_spread_evenly(quads: bool):
    corners = SQUARE if quads else torch.cat((SQUARE[:, :, [0, 1, 2]], SQUARE[:, :, [0, 2, 3]]), dim=1)
    padded = torch.cat((corners, torch.full_like(corners, torch.nan)), dim=1)
    is_face = torch.tensor([[True] * corners.shape[1] + [False] * corners.shape[1]])
    points = surface_points(padded, is_face, 1000)
    assert points.shape == (1, 1000, 3) and points[..., 2].abs().max() == 0
    torch.testing.assert_close(points, surface_points(corners, is_face[:, : corners.shape[1]], 1000))
    counts = torch.histogramdd(points[0, :, :2], bins=[4, 4], range=[0, 1, 0, 1]).hist
    assert counts.sum() == 1000 and counts.min() > 45 and counts.max() < 80  # 62.5 on average
    torch.testing.assert_close(points.mean(dim=1), torch.tensor([[0.5, 0.5, 0.0]]), atol=5e-3, rtol=0)


def test_points_fall_on_faces_by_their_area():
    corners = torch.tensor([[[0, 0, 0], [1, 0, 0], [0, 1, 0]], [[5, 0, 0], [8, 0, 0], [5, 1, 0]]]).float()
    points = surface_points(corners[None], torch.ones(1, 2, dtype=torch.bool), 400)
    assert (points[0, :, 0] >= 5).sum() == 300


def test_a_mesh_without_area_has_no_points():
    points = surface_points(SQUARE.repeat(2, 1, 1, 1), torch.tensor([[True], [False]]), 8)
    assert points[0].isfinite().all() and points[1].isnan().all()


def test_the_chamfer_distance_is_of_nearest_points_both_ways():
    points = torch.tensor([[[0.0, 0, 0], [1, 0, 0]]])
    others = torch.tensor([[[0.0, 0, 0.1], [1, 0, 0], [1, 2, 0]]])
    expected = (0.01 + 0) / 2 + (0.01 + 0 + 4) / 3
    assert chamfer_distance(points, others).item() == pytest.approx(expected)
    assert chamfer_distance(others, points).item() == pytest.approx(expected)
    far = points + 1000
    assert chamfer_distance(far, far + 0.001).item() == pytest.approx(0, abs=1e-4)


def test_the_share_of_crowded_edges_is_the_counted_one():
    generator = torch.Generator().manual_seed(0)
    faces = torch.randint(6, (3, 17, 3), generator=generator)
    faces[1, 9:] = -1
    faces[2] = -1
    for mesh, share in zip(faces, non_manifold_share(faces), strict=True):
        edges = Counter(
            (min(a, b), max(a, b))
            for face in mesh.tolist()
            if min(face) >= 0
            for a, b in zip(face, face[1:] + face[:1], strict=True)
            if a != b
        )
        expected = sum(count > 2 for count in edges.values()) / max(len(edges), 1)
        assert share.item() == pytest.approx(expected)
    assert 0 < non_manifold_share(faces)[0] < 1


def test_a_closed_surface_has_no_crowded_edges_and_a_fin_makes_one():
    box = SyntheticMeshes(1, kinds=("box",), edges=False)[0]["faces"]
    assert non_manifold_share(box[None]) == 0
    fin = torch.cat((box, torch.tensor([[*box[0, :2].tolist(), 100]])))
    assert non_manifold_share(fin[None]).item() == pytest.approx(1 / 20)  # 18 edges of a box, and two of the fin
