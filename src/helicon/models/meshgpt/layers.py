"""What MeshTransformer is made of besides its two transformers: tokens on their way in and out, conditions, and the loss.

Letters: b batch, f faces, k tokens of a face, n rows of logits or features, d features (of a face), e features of a token, v logits.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from helicon.models.text.conditioning import Context
from helicon.nn.absent import ABSENT, check_absent_layers
from helicon.nn.attention import ContextKeys
from helicon.nn.codes import CodeVectors
from helicon.nn.norms import RMSNorm
from helicon.nn.transformer import Glu

PAD = -1
LOGITS_AT_ONCE = 2**26  # a quarter of a gigabyte in fp32
BUCKETS_PER_OCTAVE, NUM_BUCKETS = 4, 64  # of numbers of faces, up to 2^16
LAYERS = {
    "ff_glu": True,
    "ff_swish": False,
    "ff_mult": 4,
    "attn_num_mem_kv": 4,
    "attn_kv_heads": None,
    "attn_qk_norm": True,
}


class Condition(NamedTuple):
    """What the faces of each row are conditioned on."""

    text: Context | None = None
    num_faces: Tensor | None = None  # [b, d], an embedding of how many there shall be


class FaceTokens(nn.Module):
    """How tokens enter the transformers and leave them: each has its embedding and that of its place in the face."""

    def __init__(self, codebook_size: int, tokens_per_face: int, dim: int, fine_dim: int):
        super().__init__()
        self.codebook_size, self.tokens_per_face = codebook_size, tokens_per_face
        self.vectors = CodeVectors(codebook_size, fine_dim)
        if not self.is_flat:
            self.place = nn.Parameter(torch.randn(tokens_per_face, fine_dim))
            self.to_face = nn.Sequential(nn.Linear(tokens_per_face * fine_dim, dim, bias=False), RMSNorm(dim))
            self.to_fine = nn.Linear(dim, fine_dim, bias=False)

    @property
    def is_flat(self) -> bool:
        return self.tokens_per_face == 1

    def embed(self, codes: Int[Tensor, "*b k"]) -> Float[Tensor, "*b d"]:
        """Whole faces; what padding and the end become is nobody's concern."""
        embedded = self.vectors(codes.clamp(0, self.codebook_size - 1))
        return embedded[..., 0, :] if self.is_flat else self.to_face((embedded + self.place).flatten(-2))

    def embed_token(self, codes: Int[Tensor, "*b"], place: int) -> Float[Tensor, "*b e"]:
        return self.vectors(codes.clamp(0, self.codebook_size - 1)) + self.place[place]

    def to_logits(self, hidden: Float[Tensor, "*b e"]) -> Float[Tensor, "*b v"]:
        return F.linear(hidden, self.vectors.weight())

    def fine_inputs(self, hidden: Float[Tensor, "b f d"], codes: Int[Tensor, "b f k"]) -> Float[Tensor, "b f k e"]:
        """What the coarse transformer says of each face, then all of its tokens but the last."""
        tokens = self.vectors(codes[..., :-1].clamp(min=0)) + self.place[:-1]
        # In the type of the weights, also under autocast: it is what the layers add up in.
        return torch.cat((self.to_fine(hidden)[:, :, None].to(tokens.dtype), tokens), dim=2)


def mean_cross_entropy(
    hidden: Float[Tensor, "n e"], weight: Float[Tensor, "v e"], labels: Int[Tensor, "n"]
) -> Float[Tensor, ""]:
    """Of the labels that are not -1, without ever holding all logits: a part at a time, made again in the backward pass."""
    size = max(1, LOGITS_AT_ONCE // len(weight))
    parts = list(zip(hidden.split(size), labels.split(size), strict=True))
    if len(parts) == 1 or not torch.is_grad_enabled():
        summed = [_summed_cross_entropy(*part, weight) for part in parts]
    else:
        summed = [
            checkpoint(_summed_cross_entropy, *part, weight, use_reentrant=False, preserve_rng_state=False)
            for part in parts
        ]
    return torch.stack(summed).sum() / (labels >= 0).sum().clamp(min=1)


def _summed_cross_entropy(hidden: Tensor, labels: Tensor, weight: Tensor) -> Float[Tensor, ""]:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, ignore_index=PAD, reduction="sum")


def bucket_of(num_faces: Int[Tensor, "b"]) -> Int[Tensor, "b"]:
    """Numbers of faces that differ by less than a fifth are mostly the same; 0 is kept for those that are not known."""
    octaves = num_faces.clamp(min=1).float().log2()
    return 1 + (BUCKETS_PER_OCTAVE * octaves + 1e-3).long().clamp(max=NUM_BUCKETS - 1)


def mean_of(context: Context) -> Float[Tensor, "b d"]:
    """The mean of a text, zeros where there is none."""
    there = context.mask[..., None].to(context.embeddings.dtype)
    return (context.embeddings * there).sum(dim=1) / there.sum(dim=1).clamp(min=1)


def filmed(x: Float[Tensor, "b n d"], film: Float[Tensor, "b 2 d"] | None) -> Float[Tensor, "b n d"]:
    """Scaled and shifted (FiLM, Perez et al. 2017)."""
    if film is None:
        return x
    scale, shift = film.to(x.dtype)[:, :, None].unbind(1)
    return x * (1 + scale) + shift


def for_each_face(context: ContextKeys, faces: int) -> ContextKeys:
    """The keys of a batch, for a batch that has every face as a row."""

    def repeated(x: Tensor) -> Tensor:
        return x.repeat_interleave(faces, dim=0)

    bias = None if context.bias is None else repeated(context.bias)
    return ContextKeys([*map(repeated, context.keys)], [*map(repeated, context.values)], bias)


def layer_options(attn_kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keywords of other packages for layers, as those of `Transformer`: of both, and of the coarse one alone."""
    check_absent_layers("attn_kwargs: ", **{name: value for name, value in attn_kwargs.items() if name in ABSENT})
    unknown = [name for name in attn_kwargs if name not in LAYERS and name not in ABSENT]
    if unknown:
        raise ValueError(f"attn_kwargs: {unknown[0]} is not known here, leave it out; known are {', '.join(LAYERS)}")
    asked: dict[str, Any] = {**LAYERS, **attn_kwargs}
    if asked["ff_swish"] and not asked["ff_glu"]:
        raise ValueError("attn_kwargs: ff_swish=True is for a gate, and belongs to ff_glu=True")
    glu: Glu | None = ("swiglu" if asked["ff_swish"] else "geglu") if asked["ff_glu"] else None
    shared = {"glu": glu, "ff_mult": asked["ff_mult"], "qk_norm": asked["attn_qk_norm"]}
    return shared, {"kv_heads": asked["attn_kv_heads"], "registers": asked["attn_num_mem_kv"]}
