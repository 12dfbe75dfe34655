"""A mesh tokenizer whose codes are the coordinates of a face's corners, rounded: exact, and without weights that learn.

In faces: `num_vertices_per_face` corners of three codes each. Flat: the same codes, as tokens that do not come in faces.
"""

from typing import Any

import torch
from torch import Tensor, nn

from helicon.models.meshgpt.transformer import MeshTransformer
from helicon.nn.network import Network

BINS = 8
BYTES = {"dim": 12, "depth": 1, "heads": 2, "dim_head": 6}
SIZES: dict[str, Any] = {
    "dim": (16, 12),
    "attn_depth": 2,
    "attn_heads": 2,
    "attn_dim_head": 8,
    "fine_attn_heads": 3,
    "fine_attn_dim_head": 4,
    "max_seq_len": 100,
}
TEXT: dict[str, Any] = {"condition_on_text": True, "text_condition_model_kwargs": [BYTES]}
CONDITIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "text": TEXT,
    "prefix": {**TEXT, "cond_as_self_attn_prefix": True},
    "everything": {
        **TEXT,
        "text_cond_with_film": True,
        "coarse_adaptive_rmsnorm": True,
        "fine_cross_attend_text": True,
        "condition_on_num_faces": True,
    },
}
TEXTS = ["a box", "a long table", "x"]


class ToyTokenizer(Network):
    pad_id = -1

    def __init__(self, num_vertices_per_face: int = 3, flat: bool = False, bins: int = BINS):
        super().__init__()
        self.num_vertices_per_face, self.flat, self.codebook_size = num_vertices_per_face, flat, bins
        self.tokens_per_face = 1 if flat else 3 * num_vertices_per_face
        self.dropout = nn.Dropout(0.5)  # tokens of a tokenizer in training mode would be others
        self.scale = nn.Parameter(torch.ones(()))

    def tokenize(self, vertices: Tensor, faces: Tensor, face_edges: Tensor | None = None) -> Tensor:
        corners = torch.stack([row[face.clamp(min=0)] for row, face in zip(vertices, faces, strict=True)])
        bins = ((self.dropout(corners) * self.scale + 1) / 2 * self.codebook_size).long()
        bins = bins.clamp(0, self.codebook_size - 1).masked_fill((faces < 0)[..., None], -1)
        return bins.flatten(1) if self.flat else bins.flatten(1, 2)

    def decode_from_codes_to_faces(self, codes: Tensor, face_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        flat = codes.flatten(1)
        size = 3 * self.num_vertices_per_face
        faces = flat[:, : flat.shape[1] // size * size].unflatten(1, (-1, self.num_vertices_per_face, 3))
        coordinates = (faces + 0.5) / self.codebook_size * 2 - 1
        return coordinates * self.scale, (faces >= 0).all(dim=-1).all(dim=-1)


def build(tokenizer: ToyTokenizer | None = None, **options: Any) -> MeshTransformer:
    """A small one with random weights, large enough that its tokens differ."""
    torch.manual_seed(0)
    tokenizer = ToyTokenizer() if tokenizer is None else tokenizer
    sizes = {**SIZES, "dim": 16} if tokenizer.flat else SIZES
    network = MeshTransformer(tokenizer, **{**sizes, **options})
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.ndim > 1 and "text_encoder" not in name:
                scale = 1.0 if "vectors.own" in name else 0.1 if "vectors" in name else 0.4
                parameter.copy_(torch.randn_like(parameter) * scale)
    return network.eval()


def meshes(num_vertices_per_face: int = 3) -> dict[str, Tensor]:
    """Three meshes of 4, 2 and 3 faces."""
    generator = torch.Generator().manual_seed(3)
    faces = torch.randint(7, (3, 4, num_vertices_per_face), generator=generator)
    faces[1, 2:], faces[2, 3:] = -1, -1
    return {"vertices": torch.rand(3, 7, 3, generator=generator) * 1.9 - 0.95, "faces": faces}


def codes_of(*lengths: int, tokens: int = 9, seed: int = 1) -> Tensor:
    """Random codes of so many faces (or tokens), -1 past the end."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(BINS, (len(lengths), max(lengths) * tokens), generator=generator)
    for row, length in enumerate(lengths):
        codes[row, length * tokens :] = -1
    return codes
