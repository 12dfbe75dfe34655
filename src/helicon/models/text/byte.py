"""The built-in text encoder: a small bidirectional transformer over UTF-8 bytes, trained with the model it serves.

It needs no download, no vocabulary and no tokenizer, reads every language, and is the default. (ByT5, Xue et al. 2021,
shows that bytes do.)

Letters: b texts, n tokens, d features.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from helicon.models.text.base import TextEmbedding, TruncationNotice, readable
from helicon.nn.devices import sent
from helicon.nn.lengths import before
from helicon.nn.network import Network
from helicon.nn.transformer import Transformer

PAD, BEGIN, END = 256, 257, 258  # after the 256 bytes
VOCABULARY = 259


def bytes_of(text: str, truncation: TruncationNotice) -> bytes:
    """As many as there is room for beside the begin and end tokens, whole characters cut from the end."""
    limit, encoded = truncation.max_length - 2, text.encode()
    if len(encoded) <= limit:
        return encoded
    truncation.give(text, len(encoded) + 2)
    return encoded[:limit].decode(errors="ignore").encode()  # not half a character


class ByteTextEncoder(Network):
    """Reads `begin, the bytes of the text, end`: at most `max_length` tokens, whole characters cut from the end.

    Usage: `ByteTextEncoder(dim=512).encode(["a red circle"])` gives `embeddings [b, n, d]` and `mask [b, n]`.
    """

    def __init__(
        self,
        dim: int = 256,
        *,
        depth: int = 4,
        heads: int = 4,
        dim_head: int = 64,
        max_length: int = 256,
        dropout: float = 0.0,
    ):
        super().__init__()
        if max_length < 2:
            raise ValueError(
                f"max_length={max_length} leaves no room for the begin and end tokens: it must be at least 2"
            )
        self.dim = dim
        self.max_length = max_length
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.transformer = Transformer(dim, depth, heads=heads, dim_head=dim_head, dropout=dropout)
        self.truncation = TruncationNotice(max_length, "byte tokens")

    def tokenize(self, texts: Sequence[str]) -> tuple[Int[Tensor, "b n"], Bool[Tensor, "b n"]]:
        """Token ids and which of them are real, on the device of the weights."""
        rows = [torch.tensor([BEGIN, *bytes_of(text, self.truncation), END]) for text in readable(texts)]
        device = self.embed.weight.device
        if not rows:
            empty = torch.empty(0, 2, dtype=torch.long, device=device)
            return empty, empty.bool()
        ids = pad_sequence(rows, batch_first=True, padding_value=PAD)
        mask = before(torch.tensor([len(row) for row in rows]), ids.shape[1])
        return sent(ids, device), sent(mask, device)

    def encode(self, texts: Sequence[str]) -> TextEmbedding:
        return self.encode_tokens(*self.tokenize(texts))

    def encode_tokens(self, ids: Int[Tensor, "b n"], mask: Bool[Tensor, "b n"]) -> TextEmbedding:
        """What `tokenize` gave, encoded: tensors alone, for a compiled network."""
        embeddings = self.transformer(self.embed(ids), mask=mask)
        return TextEmbedding(embeddings.masked_fill(~mask[..., None], 0.0), mask)

    forward = encode
