"""Stages of AudioLM small enough for tests, with tokens for each: two rows of unequal length."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from helicon.models.audiolm.stage import Stage
from helicon.models.audiolm.transformers import (
    CoarseTransformer,
    DelayedTransformer,
    FineTransformer,
    SemanticTransformer,
    TokenTransformer,
)
from helicon.models.audiolm.wrappers import (
    CoarseTransformerWrapper,
    DelayedTransformerWrapper,
    FineTransformerWrapper,
    SemanticTransformerWrapper,
)
from helicon.models.semantic.tokenizer import MelKmeans
from helicon.models.soundstream.model import SoundStream
from models.soundstream.tiny import HZ
from models.soundstream.tiny import tiny as tiny_codec

SEMANTIC, CODES, COARSE, FINE = 11, 7, 3, 2  # how many tokens, codes and quantizers
SIZES: dict[str, Any] = {"dim": 16, "depth": 2, "heads": 2, "dim_head": 8}
BYTES = {"name": "bytes", "dim": 12, "depth": 1, "heads": 2, "dim_head": 6}
TEXTS = ["a bell", "rain, far away"]
CONDITIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "text": {"has_condition": True, "t5_name": BYTES},
    "prefix": {"has_condition": True, "t5_name": BYTES, "cond_as_self_attn_prefix": True},
}


def padded(*shape: int, high: int, lengths: tuple[int, ...], seed: int) -> Tensor:
    """Random ids, -1 past the lengths."""
    ids = torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))
    for row, length in enumerate(lengths):
        ids[row, length:] = -1
    return ids


IDS = padded(2, 6, high=SEMANTIC, lengths=(6, 3), seed=1)
ALL_CODES = padded(2, 5, COARSE + FINE, high=CODES, lengths=(3, 5), seed=2)


@dataclass(frozen=True)
class Kind:
    """One of the stages."""

    transformer: type[TokenTransformer]
    wrapper: type[Stage]
    sizes: Mapping[str, int]
    tokens: Mapping[str, Tensor]  # as the wrapper takes them
    has_end: bool = True

    def build(self, seed: int = 0, **options: Any) -> Any:
        torch.manual_seed(seed)
        return self.transformer(**{**SIZES, **self.sizes, **options})

    def stage(self, transformer: TokenTransformer | None = None, **options: Any) -> Any:
        """In evaluation mode, and without leaving out repeated tokens."""
        own = {} if self.wrapper is FineTransformerWrapper else {"unique_consecutive": False}
        return self.wrapper(transformer=transformer or self.build(), **{**own, **options}).eval()  # type: ignore[call-arg]

    def alone(self, row: int) -> dict[str, Tensor]:
        """The tokens of one row, without padding."""
        return {name: ids[row : row + 1, : lengths_of(ids)[row]] for name, ids in self.tokens.items()}


def lengths_of(ids: Tensor) -> list[int]:
    return (ids.flatten(2)[..., 0] if ids.ndim > 2 else ids).ge(0).sum(dim=1).tolist()


def given(options: Mapping[str, Any], rows: slice = slice(None)) -> dict[str, Any]:
    """The texts of a network with these options."""
    return {"text": TEXTS[rows]} if options else {}


KINDS = {
    "semantic": Kind(
        SemanticTransformer, SemanticTransformerWrapper, {"num_semantic_tokens": SEMANTIC}, {"semantic_token_ids": IDS}
    ),
    "coarse": Kind(
        CoarseTransformer,
        CoarseTransformerWrapper,
        {"num_semantic_tokens": SEMANTIC, "codebook_size": CODES, "num_coarse_quantizers": COARSE},
        {"semantic_token_ids": IDS, "coarse_token_ids": ALL_CODES[..., :COARSE]},
    ),
    "fine": Kind(
        FineTransformer,
        FineTransformerWrapper,
        {"codebook_size": CODES, "num_coarse_quantizers": COARSE, "num_fine_quantizers": FINE},
        {"coarse_token_ids": ALL_CODES[..., :COARSE], "fine_token_ids": ALL_CODES[..., COARSE:]},
        has_end=False,
    ),
    "delayed": Kind(
        DelayedTransformer,
        DelayedTransformerWrapper,
        {"num_semantic_tokens": SEMANTIC, "codebook_size": CODES, "num_quantizers": COARSE + FINE},
        {"semantic_token_ids": IDS, "token_ids": ALL_CODES},
    ),
}


def as_tuple(logits: Any) -> tuple[Tensor, ...]:
    return logits if isinstance(logits, tuple) else (logits,)


# ------------------------------------------------------------------ sounds, and what makes tokens of them


def chirps(lengths: tuple[int, ...], hz: int = HZ) -> Tensor:
    """Sounds `[b, n]` of so many samples at 8 kHz that change all the time, at `hz`; silence past their lengths."""
    time = torch.arange(max(lengths) * hz // HZ) / hz
    speed = torch.tensor([900.0 + 450.0 * row for row in range(len(lengths))])[:, None]
    waves = 0.5 * torch.sin(6.283 * (200 + speed * (time / 0.05) ** 2) * time)
    counted = torch.arange(waves.shape[1]) < torch.tensor(lengths)[:, None] * hz // HZ
    return waves * counted


def codec(**changes: Any) -> SoundStream:
    """40 samples a frame at 8 kHz, three quantizers of 16 codes."""
    return tiny_codec(**{"strides": (4, 10), **changes})


@functools.lru_cache
def wav2vec() -> MelKmeans:
    """320 samples a token at 16 kHz."""
    tokenizer = MelKmeans(codebook_size=SEMANTIC)
    tokenizer.fit([(chirps((4000, 3000, 2000), 16000), None)], num_frames=75)
    return tokenizer


def stage_with_codec(name: str, network: SoundStream | None = None, options: Any = None, **stage: Any) -> Any:
    """A stage with a codec of three quantizers (of which two are coarse) and a tokenizer."""
    network = network or codec()
    sizes: dict[str, Any] = {"codebook_size": network.codebook_size}
    if name == "semantic":
        sizes, frozen = {}, {"wav2vec": wav2vec()}
    elif name == "fine":
        sizes |= {"num_coarse_quantizers": 2, "num_fine_quantizers": network.num_quantizers - 2}
        frozen = {"codec": network}
    else:
        coarse = {"num_coarse_quantizers": 2} if name == "coarse" else {"num_quantizers": network.num_quantizers}
        sizes, frozen = {**sizes, **coarse}, {"codec": network, "wav2vec": wav2vec()}
    return KINDS[name].stage(KINDS[name].build(**sizes, **(options or {})), **{**frozen, **stage})
