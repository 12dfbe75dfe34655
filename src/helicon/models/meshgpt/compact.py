"""A mesh as a flat sequence of two to three tokens a face, exactly and without a network (after BPT, Weng et al. 2024).

A vertex on the grid of `num_discrete_coors` places a side is the block it is in and its offset there: two tokens, or one
where the block is that of the vertex before. A *patch* is a fan of faces around one vertex, its centre:

    centre, first, second, third ...    for the faces (centre, first, second), (centre, second, third) ...

The block of a centre comes from a range of ids of its own, which marks where a patch begins. The vertices around a centre
stand in the order of the faces' winding, so a decoded face looks the same way; a closed fan ends with the vertex it began
with. Nothing is asked of the mesh: holes, parts that touch nowhere and edges of many faces only make for shorter fans.

The sequence is a function of the set of faces alone. Patches come in the order of the lowest face they hold that none
before has, where vertices rank by (z, y, x) and faces by their corners, lowest first. A face takes at most six tokens (a
patch of its own whose vertices are in three blocks).

Letters: b meshes, v vertices, f faces, n tokens.
"""

import itertools
from collections import defaultdict, deque

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from helicon.data.mesh import CUBE
from helicon.nn.bins import discretize, undiscretize
from helicon.nn.lengths import before
from helicon.nn.network import Network

MOST_TOKENS_PER_FACE = 6  # so 4,000 faces are at most 24,000 tokens; of real meshes, with 2.4 a face, about 9,600

RECENT = 4  # how many tokens tell what may follow: as many as a patch of two vertices has at most

Face = tuple[int, int, int]
Patch = list[int]  # the centre, then the vertices around it
Neighbours = dict[tuple[int, int], list[int]]


class CompactMeshTokenizer(Network):
    """Triangle meshes in the cube [-1, 1] to tokens and back, without loss but for the grid.

    Vertices outside of the cube go to its border. Ids: blocks, then the same blocks as the beginning of a patch, then
    offsets in a block. It has nothing to learn, and stands where a trained `MeshAutoencoder` could.
    """

    tokens_per_face = 1  # a flat sequence: tokens do not come in faces
    num_vertices_per_face = 3
    pad_id = -1
    coor_continuous_range = CUBE

    def __init__(self, num_discrete_coors: int = 128, blocks_per_side: int = 8):
        super().__init__()
        if not 1 < num_discrete_coors <= 1024 or blocks_per_side < 1 or num_discrete_coors % blocks_per_side:
            raise ValueError(
                f"num_discrete_coors={num_discrete_coors}, blocks_per_side={blocks_per_side}: the first must be 2 to 1024 "
                "and a multiple of the second"
            )
        self.num_discrete_coors, self.blocks_per_side = num_discrete_coors, blocks_per_side
        self.places_per_block_side = num_discrete_coors // blocks_per_side
        self.num_blocks, self.num_offsets = blocks_per_side**3, self.places_per_block_side**3
        self.codebook_size = 2 * self.num_blocks + self.num_offsets
        # All there is in its weights: without it, tokenizers of different grids would have the same hash.
        self.register_buffer("grid", torch.tensor([num_discrete_coors, blocks_per_side]))

    @torch.no_grad()
    def tokenize(
        self,
        vertices: Float[Tensor, "*b v 3"],
        faces: Int[Tensor, "*b f c"],
        face_edges: Int[Tensor, "*b e 2"] | None = None,
    ) -> Int[Tensor, "*b n"]:
        """The tokens of one mesh, or of a batch, padded with `pad_id`. Faces with a negative corner are padding.

        (Neighbours, which an autoencoder needs, are not looked at.) Faces of which two corners are in one place of the
        grid, and those that are there twice, leave no tokens.
        """
        if faces.shape[-1] != self.num_vertices_per_face:
            raise ValueError(
                f"the faces have {faces.shape[-1]} corners: this tokenizer takes triangles (a MeshAutoencoder takes quads)"
            )
        if faces.ndim == 2:
            return self._tokens(vertices, faces).to(faces.device)
        rows = [self._tokens(*mesh) for mesh in zip(vertices, faces, strict=True)]
        return pad_sequence(rows, batch_first=True, padding_value=self.pad_id).to(faces.device)

    @torch.no_grad()
    def decode_from_codes_to_faces(
        self,
        codes: Int[Tensor, "*codes"],
        face_mask: Bool[Tensor, "*b n"] | None = None,
    ) -> tuple[Float[Tensor, "*b f 3 3"], Bool[Tensor, "*b f"]]:
        """The corners of each face, and which faces are no padding (padding is NaN), of codes [n], [b, n] or [b, n, 1].

        Any tokens will do: those that make no sense where they stand (an offset before the first patch, a block before
        another block) are passed over, as are faces of which two corners are the same. `face_mask` says which tokens count
        (one for each: they do not come in faces).
        """
        if codes.ndim == 3:
            codes = codes.squeeze(-1)
        if face_mask is not None:
            codes = codes.masked_fill(~face_mask, self.pad_id)
        if codes.ndim == 1:
            corners = self._corners(codes).to(codes.device)
            return corners, torch.ones(len(corners), dtype=torch.bool, device=codes.device)
        rows = [self._corners(row) for row in codes]
        lengths = torch.tensor([len(row) for row in rows])
        coords = pad_sequence(rows, batch_first=True, padding_value=torch.nan).to(codes.device)
        mask = before(lengths, coords.shape[1])
        return coords, mask.to(codes.device)

    def _tokens(self, vertices: Float[Tensor, "v 3"], faces: Int[Tensor, "f 3"]) -> Int[Tensor, "n"]:
        faces = faces[(faces >= 0).all(dim=-1)].long()
        if len(faces) == 0:
            return torch.zeros(0, dtype=torch.long)
        used, corners = torch.unique(faces, return_inverse=True)
        if not vertices[used].isfinite().all():
            raise ValueError("the vertices are not all finite numbers: there is no place on the grid for them")
        bins = discretize(vertices[used].double(), self.num_discrete_coors, CUBE)
        places, proper = self._in_order(bins.cpu().numpy(), corners.cpu().numpy())
        patches = fans(proper)
        order = np.array([vertex for patch in patches for vertex in patch], dtype=np.int64)
        is_centre = np.array([place == 0 for patch in patches for place in range(len(patch))], dtype=bool)
        return torch.from_numpy(self._sequence(places[order], is_centre))

    def _in_order(
        self, places: NDArray[np.int64], faces: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The places ranked by (z, y, x), and the proper faces between them, lowest corner first, each once, in order."""
        ranked, ranks = np.unique(_flattened(places, self.num_discrete_coors), return_inverse=True)
        corners = ranks[faces]
        corners = corners[(corners != np.roll(corners, 1, axis=1)).all(axis=1)]
        turns = (corners.argmin(axis=1)[:, None] + np.arange(3)) % 3
        faces_in_order = np.unique(np.take_along_axis(corners, turns, axis=1), axis=0)
        return _unflattened(ranked, self.num_discrete_coors), faces_in_order

    def _sequence(self, places: NDArray[np.int64], is_centre: NDArray[np.bool_]) -> NDArray[np.int64]:
        """The tokens of vertices in their order: offsets, with the block before it where it is needed."""
        blocks = _flattened(places // self.places_per_block_side, self.blocks_per_side)
        offsets = _flattened(places % self.places_per_block_side, self.places_per_block_side) + 2 * self.num_blocks
        is_new = is_centre | (np.diff(blocks, prepend=-1) != 0)
        pairs = np.stack([blocks + self.num_blocks * is_centre, offsets], axis=1)
        return pairs[np.stack([is_new, np.ones_like(is_new)], axis=1)]

    def _corners(self, codes: Int[Tensor, "n"]) -> Float[Tensor, "f 3 3"]:
        tokens = codes.cpu().numpy()
        tokens = tokens[(tokens >= 0) & (tokens < self.codebook_size)]
        begins_patch = (tokens >= self.num_blocks) & (tokens < 2 * self.num_blocks)
        patches = np.cumsum(begins_patch, dtype=np.int64)
        last_block = np.maximum.accumulate(np.where(tokens < 2 * self.num_blocks, np.arange(len(tokens)), 0))
        blocks = tokens[last_block] % self.num_blocks
        is_vertex = (tokens >= 2 * self.num_blocks) & (patches > 0)
        offsets, blocks, patches = tokens[is_vertex] - 2 * self.num_blocks, blocks[is_vertex], patches[is_vertex]
        places = self.places_per_block_side * _unflattened(blocks, self.blocks_per_side)
        places = places + _unflattened(offsets, self.places_per_block_side)
        return undiscretize(torch.from_numpy(places[_faces_of(patches, places)]), self.num_discrete_coors, CUBE)


def may_follow(recent: Int[Tensor, "b n"], num_blocks: int, vocabulary: int) -> Bool[Tensor, "b v"]:
    """Which tokens make sense behind the last `RECENT` of a sequence (-1 before its beginning); the end is the last of all.

    A patch comes first, an offset behind each block, and a patch, which has at least three vertices, behind one that has them.
    """
    token = torch.arange(vocabulary, device=recent.device)
    is_end, is_offset = token == vocabulary - 1, (token >= 2 * num_blocks) & (token < vocabulary - 1)
    begins = (token >= num_blocks) & (token < 2 * num_blocks)
    last, offsets = recent[:, -1:], recent >= 2 * num_blocks
    vertices = offsets.flip(1).cumsum(dim=1).flip(1)  # from each token on
    is_short = ((recent >= num_blocks) & ~offsets & (vertices < 3)).any(dim=1, keepdim=True)
    after_vertex = ~((begins | is_end) & is_short)
    return torch.where(last < 0, begins, torch.where(last < 2 * num_blocks, is_offset, after_vertex))


def _flattened(places: NDArray[np.int64], side: int) -> NDArray[np.int64]:
    return (places[:, 2] * side + places[:, 1]) * side + places[:, 0]


def _unflattened(numbers: NDArray[np.int64], side: int) -> NDArray[np.int64]:
    return np.stack([numbers % side, numbers // side % side, numbers // side**2], axis=1)


def _faces_of(patches: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """The faces between vertices of which the patch of each is known: its first is the centre."""
    first = np.searchsorted(patches, patches)
    second, third = np.arange(len(patches)) - 1, np.arange(len(patches))
    faces = np.stack([first, second, third], axis=1)[third - first >= 2]
    corners = places[faces]
    meets_next = (corners == np.roll(corners, 1, axis=1)).all(axis=2)
    return faces[~meets_next.any(axis=1)]


def fans(faces: NDArray[np.int64]) -> list[Patch]:
    """All faces (each once, lowest corner first, in order) as fans: the longest that the first face left can be in.

    The link of a vertex is a directed graph (each face around it is an edge, from its next corner to the one after), and
    a fan is a walk there that takes no edge twice. Where faces meet in a jumble, it goes on to the lowest vertex.
    """
    listed: list[Face] = [(a, b, c) for a, b, c in faces.tolist()]
    following: Neighbours = defaultdict(list)  # (centre, vertex) -> the vertices after it, lowest first
    preceding: Neighbours = defaultdict(list)
    for centre, vertex, after in sorted(turned for face in listed for turned in _turned(face)):
        following[centre, vertex].append(after)
        preceding[centre, after].append(vertex)
    left, patches = set(listed), []
    for face in listed:
        if face not in left:
            continue
        patches.append(max((_fan(turned, following, preceding) for turned in _turned(face)), key=len))
        first, *around = patches[-1]
        for taken in zip(itertools.repeat(first), around, around[1:], strict=False):
            left.remove(min(_turned(taken)))
            for centre, vertex, after in _turned(taken):
                following[centre, vertex].remove(after)
                preceding[centre, after].remove(vertex)
    return patches


def _turned(face: Face) -> tuple[Face, Face, Face]:
    a, b, c = face
    return (a, b, c), (b, c, a), (c, a, b)


def _fan(face: Face, following: Neighbours, preceding: Neighbours) -> Patch:
    """The fan around the face's first corner, as far as it goes both ways; a closed one begins with its lowest vertex."""
    centre, vertex, after = face
    around, taken = deque([vertex, after]), {(vertex, after)}
    while free := [v for v in following[centre, around[-1]] if (around[-1], v) not in taken]:
        taken.add((around[-1], free[0]))
        around.append(free[0])
    while free := [v for v in preceding[centre, around[0]] if (v, around[0]) not in taken]:
        taken.add((free[0], around[0]))
        around.appendleft(free[0])
    if around[0] == around[-1]:
        around.pop()
        around.rotate(-around.index(min(around)))
        around.append(around[0])
    return [centre, *around]
