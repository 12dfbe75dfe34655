from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from helicon.data.mesh import derive_face_edges_from_faces
from helicon.data.synthetic_meshes import SyntheticMeshes
from helicon.models.meshgpt.graph import (
    Corners,
    EdgeNeighbours,
    GraphBlock,
    GraphConv,
    LocalAttention,
    MaskedConv,
    Neighbours,
    ResidualBlock,
    SqueezeExcite,
    TableNeighbours,
    neighbour_table,
)

ROUTES: dict[str, Callable[[Tensor, int], Neighbours]] = {
    "table": lambda faces, num_vertices: TableNeighbours(neighbour_table(faces, num_vertices)),
    "pairs": lambda faces, _: EdgeNeighbours(derive_face_edges_from_faces(faces)),
    "pairs_without_itself": lambda faces, _: EdgeNeighbours(derive_face_edges_from_faces(faces, include_self=False)),
}


def padded(*meshes: Tensor) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(meshes), batch_first=True, padding_value=-1)


def tidy_meshes(quads: bool) -> Tensor:
    data = SyntheticMeshes(4, quads=quads, edges=False)
    return padded(*(data[index]["faces"] for index in range(4)))


def fan(num_faces: int) -> Tensor:
    """Faces that all meet at the edge between the vertices 0 and 1."""
    return torch.tensor([[0, 1, 2 + face] for face in range(num_faces)])


MESHES = {
    "triangles": tidy_meshes(False),
    "quads": tidy_meshes(True),
    "three_faces_at_an_edge": padded(fan(3), torch.cat((fan(3), torch.tensor([[0, 4, 5], [9, 8, 7]])))),
    "both_sides": padded(torch.tensor([[0, 1, 2], [0, 2, 1], [1, 2, 3]]), torch.tensor([[3, 3, 4], [4, 3, 5]])),
    "alone": torch.tensor([[[4, 0, 2]], [[-1, -1, -1]]]),
}


def edges_of(face: list[int]) -> set[tuple[int, int]]:
    pairs = zip(face, face[1:] + face[:1], strict=True)
    return {(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]}


def plain_mean(x: Tensor, faces: Tensor) -> Tensor:
    """By comparing all faces with all others."""
    out = x.clone()
    for mesh, rows in enumerate(faces.tolist()):
        for i, face in enumerate(rows):
            near = [j for j, other in enumerate(rows) if min(other) >= 0 and edges_of(face) & edges_of(other)]
            out[mesh, i] = x[mesh, sorted({i, *near})].mean(dim=0) if min(face) >= 0 else x[mesh, i]
    return out


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", MESHES)
def test_every_route_gives_the_mean_of_the_faces_around(name: str, route: str):
    faces = MESHES[name]
    x = torch.randn(*faces.shape[:2], 5, generator=torch.Generator().manual_seed(0))
    mean = ROUTES[route](faces, int(faces.max()) + 1).mean(x)
    torch.testing.assert_close(mean, plain_mean(x, faces))


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_has_the_same_gradient(route: str):
    faces = MESHES["triangles"]
    x = torch.randn(*faces.shape[:2], 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    (found,) = torch.autograd.grad((ROUTES[route](faces, 400).mean(x) * weights).sum(), x)
    (expected,) = torch.autograd.grad((plain_mean(x, faces) * weights).sum(), x)
    torch.testing.assert_close(found, expected)


def test_the_table_is_in_order_and_without_the_face_itself():
    table = neighbour_table(padded(fan(3), fan(2)), 5)
    assert table.tolist() == [
        [[1, 2, -1, -1, -1, -1], [0, 2, -1, -1, -1, -1], [0, 1, -1, -1, -1, -1]],
        [[1, -1, -1, -1, -1, -1], [0, -1, -1, -1, -1, -1], [-1, -1, -1, -1, -1, -1]],
    ]


def test_at_a_crowded_edge_a_face_knows_the_two_before_and_after_it():
    table = neighbour_table(fan(6)[None], 8)[0]
    expected = [[j for j in range(6) if 0 < abs(i - j) <= 2] for i in range(6)]
    assert [[j for j in row if j >= 0] for row in table.tolist()] == expected


def test_neighbours_do_not_depend_on_the_padding_or_the_batch():
    faces = MESHES["triangles"]
    for mesh, rows in zip(faces, neighbour_table(faces, 500), strict=True):
        count = int((mesh[:, 0] >= 0).sum())
        assert torch.equal(rows[:count], neighbour_table(mesh[None, :count], 200)[0])
        assert (rows[count:] == -1).all()


def test_pairs_are_counted_as_they_are_given():
    """More neighbours than a table has room for, and one direction alone."""
    edges = torch.tensor([[[face, 0] for face in range(1, 20)] + [[-1, -1], [3, 3]]])
    x = torch.arange(20.0)[None, :, None]
    mean = EdgeNeighbours(edges).mean(x)
    assert mean[0, 0] == 9.5 and torch.equal(mean[0, 1:], x[0, 1:])


@pytest.mark.parametrize("route", ["table", "pairs"])
def test_half_precision_stays_and_is_summed_in_full(route: str):
    faces = MESHES["triangles"]
    x = 1 + torch.rand(*faces.shape[:2], 4, generator=torch.Generator().manual_seed(0))
    mean = ROUTES[route](faces, 400).mean(x.bfloat16())
    assert mean.dtype == torch.bfloat16
    torch.testing.assert_close(mean.float(), plain_mean(x.bfloat16().float(), faces), atol=0.01, rtol=0)


@pytest.mark.parametrize("project", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_convolution_is_the_formula(project: bool, normalize: bool):
    torch.manual_seed(0)
    faces = MESHES["triangles"]
    x = torch.randn(*faces.shape[:2], 6)
    conv = GraphConv(6, 5, normalize=normalize, project=project)
    out = conv(x, ROUTES["table"](faces, 400))
    mean = plain_mean(conv.project[0](x).relu() if project else x, faces)
    expected = conv.from_neighbours(mean) + x @ conv.from_itself.weight.T
    if normalize:
        expected = expected / expected.norm(dim=-1, keepdim=True)
        torch.testing.assert_close(out.norm(dim=-1), torch.ones(out.shape[:2]))
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("dim_out", [6, 9])
def test_a_block_keeps_what_it_was_given(dim_out: int):
    torch.manual_seed(0)
    faces = MESHES["triangles"]
    x, block = torch.randn(*faces.shape[:2], 6), GraphBlock(6, dim_out)
    with torch.no_grad():
        block.norm.weight.zero_()
    expected = x if dim_out == 6 else x @ block.residual.weight.T
    torch.testing.assert_close(block(x, ROUTES["table"](faces, 400)), expected)


def test_a_convolution_over_faces_sees_nothing_beyond_them():
    torch.manual_seed(0)
    conv, x = MaskedConv(4, 6, 5), torch.randn(2, 9, 4)
    is_face = torch.arange(9) < torch.tensor([[9], [5]])
    x[1, 5:] = torch.nan
    out = conv(x, is_face)
    kernel = conv.weight.permute(0, 2, 1)
    torch.testing.assert_close(out[0], F.conv1d(x[:1].mT, kernel, conv.bias, padding=2)[0].T)
    torch.testing.assert_close(out[1, :5], F.conv1d(x[1:, :5].mT, kernel, conv.bias, padding=2)[0].T)


def test_the_gate_is_of_the_mean_over_the_faces():
    torch.manual_seed(0)
    layer, x = SqueezeExcite(12), torch.randn(2, 6, 12)
    is_face = torch.arange(6) < torch.tensor([[6], [4]])
    x[1, 4:] = torch.nan
    out = layer(x, is_face)
    torch.testing.assert_close(out[0], x[0] * layer.gate(x[0].mean(dim=0)))
    torch.testing.assert_close(out[1, :4], x[1, :4] * layer.gate(x[1, :4].mean(dim=0)))


@pytest.mark.parametrize("dim_out", [8, 12])
def test_padding_does_not_leak_through_a_block(dim_out: int):
    torch.manual_seed(0)
    block, x = ResidualBlock(8, dim_out, dropout=0.0), torch.randn(1, 7, 8)
    padded_x = F.pad(x, (0, 0, 0, 4), value=1000.0)
    is_face = (torch.arange(11) < 7)[None]
    torch.testing.assert_close(block(padded_x, is_face)[:, :7], block(x, is_face[:, :7]))


def test_attention_sees_the_window_on_either_side():
    torch.manual_seed(0)
    layer, x = LocalAttention(8, 1, window_size=3, heads=2, dim_head=4), torch.randn(1, 12, 8)
    is_face = torch.ones(1, 12, dtype=torch.bool)
    other = x.clone()
    other[0, 5] += 1
    changed = (layer(x, is_face) - layer(other, is_face)).abs().amax(dim=2)[0] > 1e-6
    assert changed.nonzero().flatten().tolist() == [3, 4, 5, 6, 7]


def test_corners_share_their_vertex():
    faces = torch.tensor([[[0, 1, 2], [0, 2, 4]], [[3, 1, 0], [-1, -1, -1]]])
    corners = Corners(faces, 5)
    x = torch.randn(2, 2, 3, 7, generator=torch.Generator().manual_seed(0))
    means = corners.means(x)
    assert corners.is_used.tolist() == [[True, True, True, False, True], [True, True, False, True, False]]
    assert corners.is_face.tolist() == [[True, True], [True, False]]
    torch.testing.assert_close(means[0, 0], (x[0, 0, 0] + x[0, 1, 0]) / 2)
    torch.testing.assert_close(means[0, 2], (x[0, 0, 2] + x[0, 1, 1]) / 2)
    torch.testing.assert_close(means[1, 3], x[1, 0, 0])
    assert (means[~corners.is_used] == 0).all()
    back = corners.gather(means, padding=-9)
    assert (back[1, 1] == -9).all()
    torch.testing.assert_close(back[0, 0, 2], back[0, 1, 1])
    torch.testing.assert_close(back[1, 0], x[1, 0])
    assert corners.gather(torch.arange(10).view(2, 5, 1))[1, 0].tolist() == [[8], [6], [5]]


def test_means_of_half_precision_are_in_full():
    corners = Corners(torch.zeros(1, 300, 3, dtype=torch.long), 1)
    x = torch.full((1, 300, 3, 1), 1.0).bfloat16()
    x[0, 0, 0] = 100
    torch.testing.assert_close(corners.means(x), torch.tensor([[[(899 + 100) / 900]]]))
