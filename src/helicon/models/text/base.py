"""The contract of text encoders: a list of strings in, embeddings and their mask out.

Letters: b texts, n tokens, d features.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Bool, Float
from torch import Tensor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TextEmbedding:
    """Embeddings of a batch of texts, zero where the mask is False (padding)."""

    embeddings: Float[Tensor, "b n d"]
    mask: Bool[Tensor, "b n"]


@runtime_checkable
class TextEncoder(Protocol):
    """What a model asks of whatever reads its captions."""

    dim: int

    def encode(self, texts: Sequence[str]) -> TextEmbedding: ...


def readable(texts: Sequence[str]) -> list[str]:
    """The texts, each fit for UTF-8 (half of a surrogate pair becomes a question mark)."""
    if isinstance(texts, str):
        raise ValueError(f"encode takes a list of texts, not one: write encode([{texts!r}])")
    others = [text for text in texts if not isinstance(text, str)]
    if others:
        raise ValueError(f"the texts hold {others[0]!r}, which is no string: give a string for each row")
    return [text.encode("utf-8", "replace").decode() for text in texts]


class TruncationNotice:
    """Says that a text was cut, once for an encoder."""

    def __init__(self, max_length: int, unit: str):
        self.max_length, self.unit, self.is_given = max_length, unit, False

    def give(self, text: str, length: int) -> None:
        if self.is_given:
            return
        self.is_given = True
        logger.warning(
            "the text %r has %d %s and is cut to max_length=%d; others may be too, without notice",
            text[:40] + "...",
            length,
            self.unit,
            self.max_length,
        )
