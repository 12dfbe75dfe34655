"""The networks of the family at their smallest, and batches for them."""

from typing import Any

import torch

from helicon.data.collate import Batch
from helicon.data.mesh_data import collate_meshes
from helicon.data.synthetic_meshes import SyntheticMeshes
from helicon.models.meshgpt.autoencoder import MeshAutoencoder
from helicon.models.meshgpt.compact import CompactMeshTokenizer
from helicon.models.meshgpt.transformer import MeshTransformer

AUTOENCODER: dict[str, Any] = {
    "num_discrete_coors": 64,
    "dim_coor_embed": 6,
    "dim_area_embed": 3,
    "dim_normal_embed": 4,
    "dim_angle_embed": 3,
    "encoder_dims_through_depth": (10, 14),
    "decoder_dims_through_depth": (12, 10),
    "dim_codebook": 9,
    "codebook_size": 64,
}
TRANSFORMER: dict[str, Any] = {
    "dim": 16,
    "max_seq_len": 480,
    "attn_depth": 1,
    "attn_heads": 2,
    "attn_dim_head": 8,
    "fine_attn_depth": 1,
    "fine_attn_heads": 2,
    "fine_attn_dim_head": 8,
}
BYTES = {"dim": 12, "depth": 1, "heads": 2, "dim_head": 6}
TEXT: dict[str, Any] = {"condition_on_text": True, "text_condition_model_kwargs": [BYTES]}
COUNTED: dict[str, Any] = {"condition_on_num_faces": True}


def autoencoder(seed: int = 0, **changes: Any) -> MeshAutoencoder:
    torch.manual_seed(seed)
    return MeshAutoencoder(**{**AUTOENCODER, **changes})


def compact() -> CompactMeshTokenizer:
    return CompactMeshTokenizer(64, 8)


def transformer(tokenizer: Any, **changes: Any) -> MeshTransformer:
    torch.manual_seed(1)
    return MeshTransformer(tokenizer, **{**TRANSFORMER, **changes})


def furniture(count: int = 5, **options: Any) -> SyntheticMeshes:
    return SyntheticMeshes(count, num_discrete_coors=64, edges=False, **options)


def batch_of(count: int = 3, **options: Any) -> Batch:
    data = furniture(count, **options)
    return collate_meshes([data[index] for index in range(count)])
