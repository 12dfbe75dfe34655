"""What networks share that are conditioned on texts: the encoder, its projection, and which rows learn without their text.

In the place of a text may stand codes of a joint space of sounds and texts, which each network embeds by a table of its own.

Letters: b batch, t text tokens, e text features, d features, q quantizers.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from helicon.models.text.byte import ByteTextEncoder
from helicon.models.text.pretrained import PretrainedTextEncoder
from helicon.nn.lengths import before
from helicon.nn.network import Network
from helicon.nn.norms import RMSNorm

# Training texts are padded to a multiple of this, so that a compiled network meets few different lengths: on a GPU, where each costs
# a minute of compiling and padding costs next to nothing, mostly one.
TEXT_LENGTHS = {"cpu": 16, "cuda": 64}


class Context(NamedTuple):
    """What tokens are conditioned on; where `mask` is False there is nothing."""

    embeddings: Tensor  # [b, m, d]
    mask: Tensor  # [b, m]


def stacked(first: Context, second: Context) -> Context:
    """Two contexts as one batch, the shorter padded with nothing."""
    length = max(first.mask.shape[1], second.mask.shape[1])

    def padded(context: Context) -> Context:
        missing = length - context.mask.shape[1]
        return Context(F.pad(context.embeddings, (0, 0, 0, missing)), F.pad(context.mask, (0, missing), value=False))

    pairs = zip(padded(first), padded(second), strict=True)
    return Context(*(torch.cat(pair) for pair in pairs))


class CodeTable(nn.Module):
    """Embeddings of the codes that stand for a sound or a text, a table for each quantizer."""

    def __init__(self, num_quantizers: int, codebook_size: int, dim: int):
        super().__init__()
        self.num_quantizers, self.codebook_size = num_quantizers, codebook_size
        self.embedding = nn.Embedding(num_quantizers * codebook_size, dim)

    def check(self, ids: Int[Tensor, "b q"]) -> None:
        """Raises where there are codes that are not in the tables: they would be read as another quantizer's. (It waits for the device.)"""
        least, most = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
        if least < 0 or most >= self.codebook_size:
            raise ValueError(
                f"condition_ids hold {least if least < 0 else most}, and the transformer knows 0 to {self.codebook_size - 1}: "
                "give those it was trained on"
            )

    def forward(self, ids: Int[Tensor, "b q"]) -> Float[Tensor, "b q e"]:
        if ids.shape[1] != self.num_quantizers:
            raise ValueError(
                f"condition_ids of shape {list(ids.shape)} are not those of {self.num_quantizers} quantizers: "
                f"give [b, {self.num_quantizers}]"
            )
        ids = ids.to(self.embedding.weight.device, torch.long)
        return self.embedding(ids + torch.arange(self.num_quantizers, device=ids.device) * self.codebook_size)


class TextConditioned(Network):
    """A network that may read texts, as strings or embedded; `_build_text` gives it what it needs for that.

    `text_proj` is None where it does not, `text_encoder` where texts come embedded, and `code_table` where they do not come as codes.
    """

    how_to_read_texts = "condition_on_text=True"  # of the constructor

    dim: int
    cond_drop_prob: float  # how often a row learns without its text
    text_encoder: ByteTextEncoder | PretrainedTextEncoder | None
    text_proj: nn.Module | None
    code_table: CodeTable | None

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def _build_text(
        self, dim: int, t5_name: str | Mapping[str, Any] | None, text_embed_dim: int | None, reads_texts: bool
    ) -> None:
        """
        Args:
            dim: features that texts are projected to.
            t5_name: who reads the texts: None for the built-in encoder over bytes, trained along; otherwise the name or folder
                of a `transformers` encoder, which stays frozen, or a mapping with `name` and the encoder's own keywords.
            text_embed_dim: texts come as embeddings of this size, and no encoder is built.
        """
        from helicon.models.text import build_text_encoder

        self.text_encoder, self.text_proj, self.code_table = None, None, None
        if not reads_texts:
            return
        if text_embed_dim is None:
            self.text_encoder = build_text_encoder(t5_name)
            text_embed_dim = self.text_encoder.dim
            if isinstance(self.text_encoder, PretrainedTextEncoder) and isinstance(t5_name, str):
                self.arguments["t5_name"] = self.text_encoder.name  # a relative path would be lost elsewhere
        self.text_proj = nn.Sequential(RMSNorm(text_embed_dim), nn.Linear(text_embed_dim, dim, bias=False))

    def read_texts(self, texts: Sequence[str], multiple_of: int = 1) -> dict[str, Tensor]:
        """Texts as tensors, the keywords `forward` takes: tokens for the encoder that is trained along, or embeddings.

        A compiled network must not see strings. `multiple_of` pads the length, so that it meets few different ones.
        """
        if self.text_encoder is None:
            instead = "it does not take texts" if self.text_proj is None else "give text_embeds"
            if self.code_table is not None:
                instead = "give condition_ids, or the audio_conditioner that makes codes of texts"
            raise ValueError(f"this {type(self).__name__} has no text encoder: {instead}")
        if isinstance(self.text_encoder, ByteTextEncoder):
            ids, mask = self.text_encoder.tokenize(texts)
            name, values = "text_ids", F.pad(ids, (0, -ids.shape[1] % multiple_of))
        else:
            embedded = self.text_encoder.encode(texts)
            mask, name = embedded.mask, "text_embeds"
            values = F.pad(embedded.embeddings, (0, 0, 0, -mask.shape[1] % multiple_of))
        return {name: values, "text_mask": F.pad(mask, (0, -mask.shape[1] % multiple_of), value=False)}

    def batch_texts(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """The texts of a training batch as the tensors `forward` takes: embedded ones where there are some (padded with zeros, or with
        their lengths beside them), else those that are read here, outside of what is compiled. Or the codes in their place."""
        if self.text_proj is None:
            return {}
        if self.code_table is not None:
            return {name: batch[name] for name in ("condition_ids",) if name in batch}
        if "text_mask" in batch:  # read before
            return {name: batch[name] for name in ("text_ids", "text_embeds", "text_mask") if name in batch}
        if "text_embeds" not in batch:
            multiple = TEXT_LENGTHS.get(self.device.type, TEXT_LENGTHS["cpu"])
            return self.read_texts(batch["texts"], multiple) if "texts" in batch else {}
        embeds, lengths = batch["text_embeds"], batch.get("text_embeds_lengths")
        if lengths is None:
            return {"text_embeds": embeds}
        return {
            "text_embeds": embeds,
            "text_mask": before(lengths, embeds.shape[1]),
        }

    def encode_text(self, texts: Sequence[str]) -> Float[Tensor, "b t e"]:
        """Embeddings to give as `text_embeds`, zero where a text is padded."""
        return self._embedded_text(**self.read_texts(texts))[0]

    def text_context(
        self,
        *,
        texts: Sequence[str] | None = None,
        text_embeds: Float[Tensor, "b t e"] | None = None,
        text_mask: Bool[Tensor, "b t"] | None = None,
        text_ids: Int[Tensor, "b t"] | None = None,
        condition_ids: Int[Tensor, "b q"] | None = None,
    ) -> Context | None:
        """The texts, or the codes in their place, projected; None where none are given."""
        if condition_ids is not None:
            return self._code_context(condition_ids)
        if texts is not None:
            given = self.read_texts(texts)
            text_embeds, text_mask, text_ids = (given.get(name) for name in ("text_embeds", "text_mask", "text_ids"))
        if text_embeds is not None and self.code_table is not None:
            raise ValueError(
                f"this {type(self).__name__} has learned embeddings of its own, of codes: give condition_ids in the place of text_embeds"
            )
        if text_embeds is None and text_ids is None:
            return None
        if self.text_proj is None:
            raise ValueError(f"this {type(self).__name__} does not take texts: build it with {self.how_to_read_texts}")
        embeddings, mask = self._embedded_text(text_embeds, text_mask, text_ids)
        return Context(self.text_proj(embeddings), mask)

    def _code_context(self, ids: Int[Tensor, "b q"]) -> Context:
        if self.code_table is None or self.text_proj is None:
            raise ValueError(
                f"this {type(self).__name__} takes no condition_ids: build it with audio_text_condition=True and cond_codes"
            )
        embeddings = self.text_proj(self.code_table(ids))
        return Context(embeddings, torch.ones(embeddings.shape[:2], dtype=torch.bool, device=embeddings.device))

    def _embedded_text(
        self, text_embeds: Tensor | None = None, text_mask: Tensor | None = None, text_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if text_ids is not None:
            assert isinstance(self.text_encoder, ByteTextEncoder) and text_mask is not None
            embedded = self.text_encoder.encode_tokens(text_ids, text_mask)
            return embedded.embeddings, embedded.mask
        assert text_embeds is not None and self.text_proj is not None
        *_, weight = self.text_proj.parameters()
        if text_embeds.shape[-1] != weight.shape[1]:
            raise ValueError(
                f"text_embeds have {text_embeds.shape[-1]} features, and this {type(self).__name__} takes {weight.shape[1]}"
            )
        if not torch.compiler.is_compiling() and text_embeds.is_inference():
            text_embeds = text_embeds.clone()  # autograd refuses what was made in inference mode
        mask = (text_embeds != 0).any(dim=-1) if text_mask is None else text_mask
        return text_embeds.to(weight), mask.to(weight.device)

    def check_texts(self, cond_drop_prob: float = 0.0, **condition: Any) -> None:
        """Raises where the text this network was built for is missing: it would learn without it and say nothing."""
        names = ("texts", "text_embeds", "text_ids", "condition_ids")
        given = [name for name in names if condition.get(name) is not None]
        if len(given) > 1:
            raise ValueError(f"give one of {' and '.join(given)}, not both")
        if self.text_proj is not None and not given and cond_drop_prob < 1:
            wanted = "reads texts: give texts or text_embeds"
            if self.code_table is not None:
                wanted = "is conditioned on codes: give condition_ids, or a sound and the audio_conditioner that makes codes of it"
            raise ValueError(f"this network {wanted} (or cond_drop_prob=1 for none)")

    def draw_keep(self, rows: int, cond_drop_prob: float) -> Bool[Tensor, "b"] | None:
        """Which rows keep their condition, at random."""
        return torch.rand(rows, device=self.device) >= cond_drop_prob if cond_drop_prob else None

    def text_of(self, rows: int, cond_drop_prob: float | None = None, **texts: Any) -> Context | None:
        """The texts of a batch, some of them dropped; one alone is for all rows. None for a network that reads none.

        `texts` are the keywords of `text_context`; without `cond_drop_prob` it is the network's own, in training alone.
        """
        if cond_drop_prob is None:
            cond_drop_prob = self.cond_drop_prob if self.training else 0.0
        self.check_texts(cond_drop_prob, **texts)
        context = self.text_context(**texts)
        if context is None:
            return self.no_context(rows)
        if len(context.mask) not in (1, rows):
            raise ValueError(f"{len(context.mask)} texts cannot belong to {rows} rows: give one for each, or one")
        embeddings, mask = (part.expand(rows, *part.shape[1:]) for part in context)
        keep = self.draw_keep(rows, cond_drop_prob)
        return Context(embeddings, mask if keep is None else mask & keep[:, None])

    def no_context(self, rows: int) -> Context | None:
        """Nothing to attend to; None for a network that reads no texts."""
        if self.text_proj is None:
            return None
        *_, weight = self.text_proj.parameters()
        return Context(weight.new_zeros(rows, 1, self.dim), torch.zeros(rows, 1, dtype=torch.bool, device=self.device))

    def with_and_without(self, context: Context | None) -> Context:
        """2 b rows, for guidance: with the text, then without."""
        if context is None:
            raise ValueError(
                f"this {type(self).__name__} has no text to be guided by: build it with {self.how_to_read_texts}"
            )
        nothing = self.no_context(len(context.mask))
        assert nothing is not None
        return stacked(context, nothing)
