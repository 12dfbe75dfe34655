"""Layers over the faces of a mesh: along its edges (GraphSAGE, Hamilton et al. 2017), and along the order of faces.

A face's neighbours stand in a row of a table, padded with -1. The table is built on the device, and its size depends on
shapes alone, so the host never waits. Pairs of faces that somebody else found are taken as they are.

Letters: b batch, f faces of a mesh, n corners of a face, k neighbours of a face at most, e pairs of faces,
v vertices, d and c features.
"""

from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from torch.nn import functional as F

from helicon.nn.attention import additive
from helicon.nn.conv import convolve
from helicon.nn.norms import RMSNorm
from helicon.nn.transformer import Transformer

NEAR = (-2, -1, 1, 2)  # where the others of three faces at an edge stand, seen from any of them


@torch.no_grad()
def neighbour_table(faces: Int[Tensor, "b f n"], num_vertices: int) -> Int[Tensor, "b f 2*n"]:
    """The faces that share an edge with each one, in order, without itself; a face with a negative corner is none.

    All of them where at most three faces meet at each edge, and so in any proper surface. Where more do, a face knows the
    two before and the two after it in the order of faces; and of all its neighbours it keeps the 2n lowest.
    """
    num_faces, num_corners = faces.shape[1:]
    ends = faces.roll(-1, dims=2)
    low, high = torch.minimum(faces, ends).long(), torch.maximum(faces, ends).long()
    is_edge = (low != high) & (faces >= 0).all(dim=2, keepdim=True)
    keys = torch.where(is_edge, low * num_vertices + high, -1)
    keys, order = rearrange(keys, "b f n -> b (f n)").sort(dim=1, stable=True)
    others = torch.stack([_at_distance(keys, order // num_corners, step, num_faces) for step in NEAR], dim=2)
    others = torch.empty_like(others).scatter_(1, order[..., None].expand_as(others), others)
    rows = rearrange(others, "b (f n) s -> b f (n s)", n=num_corners)
    is_itself = rows == torch.arange(num_faces, device=rows.device)[:, None]
    rows = rows.masked_fill(is_itself, num_faces).sort(dim=2).values
    is_repeated = F.pad(rows[..., 1:] == rows[..., :-1], (1, 0))
    rows = rows.masked_fill(is_repeated, num_faces).sort(dim=2).values[..., : 2 * num_corners]
    return rows.masked_fill(rows == num_faces, -1)


def _at_distance(keys: Int[Tensor, "b m"], owners: Int[Tensor, "b m"], step: int, nobody: int) -> Int[Tensor, "b m"]:
    """The owner of the key `step` places on, where it is the same key; `nobody` elsewhere."""
    places = torch.arange(keys.shape[1], device=keys.device) + step
    within = places.clamp(0, keys.shape[1] - 1)
    is_same = (places == within) & (keys >= 0) & (keys[:, within] == keys)
    return torch.where(is_same, owners[:, within], nobody)


@dataclass(frozen=True)
class TableNeighbours:
    """From a table `[b, f, k]`, padded with -1: a gather and a sum."""

    table: Int[Tensor, "b f k"]

    def mean(self, x: Float[Tensor, "b f d"]) -> Float[Tensor, "b f d"]:
        batch, num_faces = x.shape[:2]
        is_there = self.table >= 0
        first = num_faces * torch.arange(batch, device=x.device)[:, None, None]
        rows = (self.table.clamp(min=0) + first).flatten()
        # (index_select, because the gradient of indexing by a tensor is sorted first.)
        others = x.flatten(0, 1).index_select(0, rows).unflatten(0, self.table.shape)
        total = x + torch.where(is_there[..., None], others, 0).sum(dim=2)
        return total / (1 + is_there.sum(dim=2, keepdim=True))


@dataclass(frozen=True)
class EdgeNeighbours:
    """From pairs of faces `[b, e, 2]`, padded with -1; the first of a pair is a neighbour of the second.

    Padding, and a face paired with itself, is added to a row that is then left out: no shape depends on the pairs.
    """

    face_edges: Int[Tensor, "b e 2"]

    def mean(self, x: Float[Tensor, "b f d"]) -> Float[Tensor, "b f d"]:
        batch, num_faces = x.shape[:2]
        sources, targets = self.face_edges.unbind(dim=2)
        is_there = (sources >= 0) & (targets >= 0) & (sources != targets)
        first = num_faces * torch.arange(batch, device=x.device)[:, None]
        sources = torch.where(is_there, sources + first, 0).flatten()
        targets = torch.where(is_there, targets + first, batch * num_faces).flatten()
        wide = x.flatten(0, 1).float()  # half precision would lose what is added to a sum of many
        total = F.pad(wide, (0, 0, 0, 1)).index_add(0, targets, wide.index_select(0, sources))
        counts = wide.new_ones(len(total)).index_add(0, targets, wide.new_ones(len(targets)))
        return (total / counts[:, None])[:-1].unflatten(0, (batch, num_faces)).to(x.dtype)


Neighbours = TableNeighbours | EdgeNeighbours  # either way, a face is among its own neighbours, and once


class GraphConv(nn.Module):
    """`W mean(project(neighbours)) + W' x`, scaled to unit length.

    project: a linear layer and a ReLU before the mean.
    normalize: whether the outcome has unit length.
    """

    def __init__(self, dim: int, dim_out: int, normalize: bool = True, project: bool = True):
        super().__init__()
        self.project = nn.Sequential(nn.Linear(dim, dim), nn.ReLU()) if project else nn.Identity()
        self.from_neighbours = nn.Linear(dim, dim_out)
        self.from_itself = nn.Linear(dim, dim_out, bias=False)
        self.normalize = normalize

    def forward(self, x: Float[Tensor, "b f d"], neighbours: Neighbours) -> Float[Tensor, "b f c"]:
        out = self.from_neighbours(neighbours.mean(self.project(x))) + self.from_itself(x)
        return F.normalize(out, dim=-1) if self.normalize else out


class GraphBlock(nn.Module):
    """`x + act(norm(conv(x)))`; x is projected where the widths differ."""

    def __init__(self, dim: int, dim_out: int, **conv_options: bool):
        super().__init__()
        self.conv = GraphConv(dim, dim_out, **conv_options)
        self.norm = RMSNorm(dim_out)
        self.residual = nn.Identity() if dim == dim_out else nn.Linear(dim, dim_out, bias=False)

    def forward(self, x: Float[Tensor, "b f d"], neighbours: Neighbours) -> Float[Tensor, "b f c"]:
        return self.residual(x) + F.silu(self.norm(self.conv(x, neighbours)))


class MaskedConv(nn.Module):
    """A convolution over the faces in their order. What is not a face counts as nothing, as beyond the ends."""

    def __init__(self, dim: int, dim_out: int, kernel_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim_out, kernel_size, dim) * (kernel_size * dim) ** -0.5)
        self.bias = nn.Parameter(torch.zeros(dim_out))

    def forward(self, x: Float[Tensor, "b f d"], is_face: Bool[Tensor, "b f"]) -> Float[Tensor, "b f c"]:
        reach = self.weight.shape[1] // 2
        faces = torch.where(is_face[..., None], x, 0)
        return convolve(F.pad(faces, (0, 0, reach, reach)), self.weight, self.bias)


class SqueezeExcite(nn.Module):
    """Every channel scaled by a gate that is computed from the mean of all channels over the mesh (Hu et al., 2017)."""

    def __init__(self, dim: int):
        super().__init__()
        inner = max(8, dim // 4)
        self.gate = nn.Sequential(nn.Linear(dim, inner), nn.SiLU(), nn.Linear(inner, dim), nn.Sigmoid())

    def forward(self, x: Float[Tensor, "b f d"], is_face: Bool[Tensor, "b f"]) -> Float[Tensor, "b f d"]:
        total = torch.where(is_face[..., None], x, 0).sum(dim=1, keepdim=True, dtype=torch.float32)
        mean = total / is_face.sum(dim=1).clamp(min=1)[:, None, None]
        return x * self.gate(mean.to(x.dtype)).to(x.dtype)


class ResidualBlock(nn.Module):
    """`x + gate(layer(layer(x)))`, a layer being a convolution, a norm and an activation; x is projected to a new width."""

    def __init__(self, dim: int, dim_out: int, dropout: float):
        super().__init__()
        self.convs = nn.ModuleList([MaskedConv(dim, dim_out, 3), MaskedConv(dim_out, dim_out, 3)])
        self.norms = nn.ModuleList([RMSNorm(dim_out), RMSNorm(dim_out)])
        self.dropout = nn.Dropout(dropout)
        self.squeeze_excite = SqueezeExcite(dim_out)
        self.residual = nn.Identity() if dim == dim_out else nn.Linear(dim, dim_out, bias=False)

    def forward(self, x: Float[Tensor, "b f d"], is_face: Bool[Tensor, "b f"]) -> Float[Tensor, "b f c"]:
        hidden = x
        for conv, norm in zip(self.convs, self.norms, strict=True):
            hidden = self.dropout(F.silu(norm(conv(hidden, is_face))))
        return self.residual(x) + self.squeeze_excite(hidden, is_face)


class LocalAttention(nn.Module):
    """A transformer in which every face sees those less than `window_size` places away, on either side."""

    def __init__(
        self,
        dim: int,
        depth: int,
        window_size: int,
        *,
        heads: int = 8,
        dim_head: int = 32,
        dropout: float = 0.0,
        attn_dropout: float = 0.0,
    ):
        super().__init__()
        self.window_size = window_size
        self.transformer = Transformer(
            dim, depth, heads=heads, dim_head=dim_head, qk_norm=True, dropout=dropout, attn_dropout=attn_dropout
        )

    def forward(self, x: Float[Tensor, "b f d"], is_face: Bool[Tensor, "b f"]) -> Float[Tensor, "b f d"]:
        place = torch.arange(x.shape[1], device=x.device)
        is_near = (place[:, None] - place).abs() < self.window_size
        return self.transformer(x, is_face, bias=additive(is_near, x.dtype)[None, None])


class Corners:
    """Which vertex each corner of the faces is: features go from corners to vertices, as a mean, and back.

    `is_face` tells faces from padding, whose corners belong to no vertex; `is_used`, the vertices that some face has.
    """

    def __init__(self, faces: Int[Tensor, "b f n"], num_vertices: int):
        batch = len(faces)
        self.shape, self.vertices_shape = faces.shape, (batch, num_vertices)
        self.is_face: Bool[Tensor, "b f"] = (faces >= 0).all(dim=2)
        first = num_vertices * torch.arange(batch, device=faces.device)[:, None, None]
        # Rows of the vertices of all meshes, one after another; padding has the one after the last.
        self.rows = torch.where(self.is_face[..., None], faces + first, batch * num_vertices).long().flatten()
        self.counts = self._sums(torch.ones_like(self.rows, dtype=torch.float32)[:, None])
        self.is_used: Bool[Tensor, "b v"] = self.counts[..., 0] > 0

    def means(self, x: Float[Tensor, "b f n d"]) -> Float[Tensor, "b v d"]:
        """Of the corners at each vertex, in float32; zero where there is none."""
        return self._sums(x.flatten(0, 2).float()) / self.counts.clamp(min=1)

    def gather(self, x: Shaped[Tensor, "b v d"], padding: int = 0) -> Shaped[Tensor, "b f n d"]:
        """What each corner's vertex has."""
        rows = F.pad(x.flatten(0, 1), (0, 0, 0, 1), value=padding)
        return rows.index_select(0, self.rows).unflatten(0, self.shape)

    def _sums(self, values: Float[Tensor, "m d"]) -> Float[Tensor, "b v d"]:
        batch, num_vertices = self.vertices_shape
        sums = values.new_zeros(batch * num_vertices + 1, values.shape[1]).index_add(0, self.rows, values)
        return sums[:-1].unflatten(0, self.vertices_shape)
