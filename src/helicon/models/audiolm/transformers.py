"""The transformers of AudioLM (Borsos et al. 2022), and one that stands in the place of two of them.

Each is causal over one sequence, whose parts begin with a learned token each:

    semantic    text, semantic tokens
    coarse      text, semantic tokens, codes of the first quantizers     (flat: the quantizers of a frame in turn)
    fine        text, codes of the first quantizers, codes of the others (flat)
    delayed     text, semantic tokens, codes of all quantizers           (one step a frame, each quantizer a step later)

Token ids are -1 past the end of a row. Rows are packed (nn/packing.py), so that nothing stands between their parts and a row
gives what it gives alone. An id is never shared: every quantizer has its own embeddings and its own logits.

Letters: b batch, n tokens, t frames, s steps, q quantizers, d features, v logits, m text tokens, e text features.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from helicon.models.text.conditioning import CodeTable, Context, TextConditioned
from helicon.nn.absent import check_absent_layers
from helicon.nn.numbers import check_counts, check_probabilities
from helicon.nn.packing import Packed, Part, pack
from helicon.nn.sampling import guide
from helicon.nn.transformer import Transformer

Logits = Tensor | tuple[Tensor | None, Tensor]


class TokenTransformer(TextConditioned):
    """What the stages share: the layers, and texts by cross-attention or as a prefix."""

    how_to_read_texts = "has_condition=True"

    def __init__(
        self,
        *,
        dim: int,
        depth: int,
        heads: int = 8,
        dim_head: int = 64,
        attn_dropout: float = 0.0,
        ff_dropout: float = 0.0,
        t5_name: str | Mapping[str, Any] | None = None,
        cond_dim: int | None = None,
        has_condition: bool = False,
        audio_text_condition: bool = False,
        cond_as_self_attn_prefix: bool = False,
        cond_drop_prob: float = 0.5,
        grad_shrink_alpha: float | None = None,
        rel_pos_bias: bool = True,
        flash_attn: bool = True,
        checkpoint_activations: bool = False,
        cond_codes: Sequence[int] | None = None,
        add_value_residual: bool | None = None,
        num_residual_streams: int | None = None,
    ):
        """
        Args:
            t5_name: who reads the texts (`has_condition`). None: the built-in encoder over bytes, trained along; otherwise the
                name or folder of a `transformers` encoder, which stays frozen, or a mapping with `name` and its keywords.
            cond_dim: texts come as embeddings of this size (`text_embeds`), and no encoder is built.
            has_condition: texts are read.
            audio_text_condition: embeddings come from a joint space of sound and text; `cond_dim` is then `dim` by default. Where
                they come as codes (`condition_ids`), their embeddings are learned here: see `condition_on_codes`.
            cond_as_self_attn_prefix: the text stands in front of the tokens, in place of cross-attention.
            cond_drop_prob: how often a row learns without its text, for guidance.
            grad_shrink_alpha, rel_pos_bias, flash_attn: without effect. Positions are rotary, and attention is always
                `scaled_dot_product_attention`, which chooses its kernel itself.
            checkpoint_activations: recomputes each layer in the backward pass: less memory, a third more time.
            cond_codes: how many codes stand for a sound or a text, and how many different ones each may be; a stage with an
                audio_conditioner that has codes says so itself.
            add_value_residual, num_residual_streams: without effect: there is one residual stream, and values are not mixed with those
                of the first layer. Other numbers of streams than the reference package's 4, or 1, are refused.
        """
        super().__init__()
        check_absent_layers(add_value_residual=add_value_residual, num_residual_streams=num_residual_streams)
        check_counts(dim=dim, depth=depth, heads=heads, dim_head=dim_head)
        check_probabilities(cond_drop_prob=cond_drop_prob)
        reads_texts = has_condition or audio_text_condition
        if audio_text_condition and cond_dim is None:
            cond_dim = dim
        if not reads_texts and (t5_name is not None or cond_dim is not None):
            raise ValueError("t5_name and cond_dim belong to has_condition=True")
        if t5_name is not None and cond_dim is not None:
            raise ValueError(f"t5_name={t5_name!r} reads texts, and cond_dim says they come embedded: give one")
        if cond_as_self_attn_prefix and not reads_texts:
            raise ValueError("cond_as_self_attn_prefix=True belongs to has_condition=True")
        self.dim, self.cond_drop_prob, self.has_prefix = dim, cond_drop_prob, cond_as_self_attn_prefix
        self._build_text(dim, t5_name, cond_dim, reads_texts)
        self.audio_text_condition, self.cond_dim = audio_text_condition, cond_dim
        if cond_codes is not None:
            self.code_table = self._new_table(*cond_codes)
        self.layers = Transformer(
            dim,
            depth,
            heads=heads,
            dim_head=dim_head,
            causal=True,
            qk_norm=True,
            cross_attend=reads_texts and not cond_as_self_attn_prefix,
            dropout=ff_dropout,
            attn_dropout=attn_dropout,
            checkpoint_activations=checkpoint_activations,
        )

    @property
    def device(self) -> torch.device:
        return next(self.layers.parameters()).device

    @property
    def has_condition(self) -> bool:
        return self.text_proj is not None

    def condition_on_codes(
        self, num_quantizers: int, codebook_size: int, initial: Float[Tensor, "n e"] | None = None
    ) -> None:
        """From now on it is conditioned on codes, whose embeddings are trained and saved with it. They begin with `initial`, all those
        of a quantizer in turn, where it has the right size. A network that is conditioned on such codes already stays as it is."""
        asked = (num_quantizers, codebook_size)
        if self.code_table is not None:
            own = (self.code_table.num_quantizers, self.code_table.codebook_size)
            if own != asked:
                raise ValueError(
                    f"this {type(self).__name__} is conditioned on {own[0]} codes of {own[1]}, and the audio_conditioner makes "
                    f"{asked[0]} of {asked[1]}: give the one it was trained with"
                )
            return
        table = self._new_table(*asked)
        if initial is not None and initial.shape == table.embedding.weight.shape:
            with torch.no_grad():
                table.embedding.weight.copy_(initial)
        self.code_table = table.to(self.device)
        self.arguments["cond_codes"] = [*asked]

    def _new_table(self, num_quantizers: int, codebook_size: int) -> CodeTable:
        if not self.audio_text_condition:
            raise ValueError(
                f"this {type(self).__name__} takes no codes in the place of texts: build it with audio_text_condition=True"
            )
        assert self.cond_dim is not None
        return CodeTable(num_quantizers, codebook_size, self.cond_dim)

    def guided_context(self, rows: int, **texts: Any) -> Context:
        """2 b rows: with the text, then without."""
        return self.with_and_without(self.text_of(rows, 0.0, **texts))

    def sequence(self, parts: Sequence[Part], context: Context | None) -> tuple[Packed, dict[str, Tensor]]:
        """The parts of a sequence as one, behind their prefix; and what the layers attend to beside it."""
        if self.has_prefix and context is not None:
            return pack([Part(*context), *parts]), {}
        return pack(parts), {} if context is None else {"context": context.embeddings, "context_mask": context.mask}

    def run(
        self, parts: Sequence[Part], context: Context | None, forget_prob: float = 0.0
    ) -> list[Float[Tensor, "b _ d"]]:
        """What the layers make of each part. See `remembered` for forget_prob."""
        packed, beside = self.sequence(parts, context)
        if forget_prob:
            beside["mask"] = remembered(packed.embeddings, forget_prob)
            beside["positions"] = torch.arange(packed.embeddings.shape[1], device=self.device)[None]
        hidden = self.layers(packed.embeddings, **beside)
        return packed.unpack(hidden)[-len(parts) :]

    def forward_with_cond_scale(self, *tokens: Tensor, cond_scale: float = 3.0, **inputs: Any) -> Any:
        """Guided logits, `null + cond_scale * (cond - null)`, from one pass over both; `tokens` and `inputs` as for `forward`."""
        if cond_scale == 1 or not self.has_condition:
            return self(*tokens, **inputs, cond_drop_prob=0.0)
        texts = {name: inputs.pop(name) for name in [*inputs] if name.startswith(("text", "condition"))}
        texts["texts"] = texts.pop("text", None)
        both = {name: twice(value) if isinstance(value, Tensor) else value for name, value in inputs.items()}
        rows = next(len(value) for value in (*tokens, *inputs.values()) if isinstance(value, Tensor))
        logits = self(*map(twice, tokens), **both, context=self.guided_context(rows, **texts))
        if isinstance(logits, Tensor):
            return _guided(logits, cond_scale)
        return tuple(None if part is None else _guided(part, cond_scale) for part in logits)


def twice(x: Tensor) -> Tensor:
    return torch.cat((x, x))


def _guided(logits: Float[Tensor, "r ..."], cond_scale: float) -> Float[Tensor, "b ..."]:
    cond, null = logits.float().chunk(2)
    return guide(cond, null, cond_scale)


def remembered(x: Float[Tensor, "b n d"], forget_prob: float) -> Bool[Tensor, "b n"]:
    """The keys that attention sees: forgetful causal masking (Liu et al. 2022).

    Each row hides some of them, as many as a number drawn between none and `forget_prob` of all; the first is always there.
    """
    rows, n, _ = x.shape
    hidden = torch.rand(rows, 1, device=x.device) * (forget_prob * n)
    order = torch.rand(rows, n, device=x.device)
    order[:, 0].fill_(1)
    return order.argsort(dim=1).argsort(dim=1) + 1 > hidden


def with_shared_arguments(constructor: Callable[..., None]) -> Callable[..., None]:
    """An `__init__` whose `**shared` are the keywords of TokenTransformer says so in its signature."""
    own = inspect.signature(constructor)
    named = [entry for entry in own.parameters.values() if entry.kind is not entry.VAR_KEYWORD]
    shared = [e for e in inspect.signature(TokenTransformer.__init__).parameters.values() if e.kind is e.KEYWORD_ONLY]
    constructor.__signature__ = own.replace(parameters=[*named, *shared])  # type: ignore[attr-defined]
    return constructor


class Tokens(nn.Module):
    """A kind of token: where its part of a sequence begins, and its embeddings."""

    def __init__(self, dim: int, num_tokens: int):
        super().__init__()
        self.num_tokens = num_tokens
        self.start = nn.Parameter(torch.randn(dim))
        self.embedding = nn.Embedding(num_tokens, dim)

    def part(self, ids: Int[Tensor, "b n"], is_last: bool = False) -> Part:
        """`start, ids`, without the padding of a part that others follow."""
        mask = None if is_last else F.pad(ids >= 0, (1, 0), value=True)
        return Part(self.behind_start(self.embed(ids)), mask)

    def behind_start(self, embeddings: Float[Tensor, "b n d"]) -> Float[Tensor, "b _ d"]:
        start = self.start.to(embeddings.dtype).expand(len(embeddings), 1, -1)
        return torch.cat((start, embeddings), dim=1)

    def embed(self, ids: Int[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
        return self.embedding(ids.clamp(min=0))


class Codes(Tokens):
    """Codes in a row, the quantizers of a frame in turn, each with its own embeddings and logits.

    `num_ends` is 1 where the logits have one more, that of the end.
    """

    def __init__(self, dim: int, num_quantizers: int, codebook_size: int, num_ends: int = 0):
        super().__init__(dim, num_quantizers * codebook_size)
        self.num_quantizers, self.codebook_size = num_quantizers, codebook_size
        self.logit_weights = nn.Parameter(torch.randn(num_quantizers, codebook_size + num_ends, dim) * dim**-0.5)

    def flat(self, codes: Int[Tensor, "b ..."]) -> Int[Tensor, "b n"]:
        """Codes `[b, t, q]` in a row."""
        if codes.ndim > 2 and codes.shape[2:] != (self.num_quantizers,):
            raise ValueError(
                f"codes of shape {list(codes.shape)} are not those of {self.num_quantizers} quantizers: "
                f"give [b, t, {self.num_quantizers}], or [b, n]"
            )
        return codes.flatten(1)

    def embed(self, ids: Int[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
        quantizer = torch.arange(ids.shape[1], device=ids.device) % self.num_quantizers
        return self.embedding(ids.clamp(min=0) + quantizer * self.codebook_size)

    def logits(self, hidden: Float[Tensor, "b n d"]) -> Float[Tensor, "b n v"]:
        """Number j of the row is what is said of quantizer j mod q."""
        batch, n, q = len(hidden), hidden.shape[1], self.num_quantizers
        whole = F.pad(hidden, (0, 0, 0, -n % q))
        logits = rearrange(whole, "b (t q) d -> q (b t) d", q=q) @ self.logit_weights.to(hidden.dtype).mT
        return rearrange(logits, "q (b t) v -> b (t q) v", b=batch)[:, :n]

    def embed_one(self, tokens: Int[Tensor, "r"], index: Int[Tensor, ""]) -> Float[Tensor, "r d"]:
        return self.embedding(tokens + index % self.num_quantizers * self.codebook_size)

    def logits_of_one(self, hidden: Float[Tensor, "r d"], index: Int[Tensor, ""]) -> Float[Tensor, "r v"]:
        return hidden @ self.logit_weights.index_select(0, (index % self.num_quantizers)[None])[0].mT


class SemanticTransformer(TokenTransformer):
    """What comes next in a row of semantic tokens, or that it ends."""

    @with_shared_arguments
    def __init__(self, *, num_semantic_tokens: int, **shared: Any):
        super().__init__(**shared)
        check_counts(num_semantic_tokens=num_semantic_tokens)
        self.num_semantic_tokens = self.eos_id = num_semantic_tokens
        self.semantic = Tokens(self.dim, num_semantic_tokens)
        self.to_logits = nn.Linear(self.dim, num_semantic_tokens + 1, bias=False)

    def forward(
        self,
        *,
        ids: Int[Tensor, "b n"],
        text: Sequence[str] | None = None,
        text_embeds: Float[Tensor, "b m e"] | None = None,
        cond_drop_prob: float | None = None,
        context: Context | None = None,
        forget_prob: float = 0.0,
        **texts: Any,
    ) -> Float[Tensor, "b n1 v"]:
        """Logits of each token and of what follows the last; the last logit is that of the end.

        text, text_embeds   one of them, where the network reads texts; `texts` may hold `text_mask` or `text_ids`,
                            or `condition_ids` in the place of all of them
        context             texts read before, in place of all of these
        forget_prob         see `remembered`
        """
        if context is None:
            context = self.text_of(len(ids), cond_drop_prob, texts=text, text_embeds=text_embeds, **texts)
        (hidden,) = self.run([self.semantic.part(ids, is_last=True)], context, forget_prob)
        return self.to_logits(hidden)


class CoarseTransformer(TokenTransformer):
    """The codes of the first quantizers, from semantic tokens."""

    @with_shared_arguments
    def __init__(
        self,
        *,
        codebook_size: int,
        num_coarse_quantizers: int,
        num_semantic_tokens: int,
        project_semantic_logits: bool = True,
        **shared: Any,
    ):
        """
        Args:
            project_semantic_logits: semantic tokens are predicted here too, which helps to learn them.
        """
        super().__init__(**shared)
        check_counts(codebook_size=codebook_size, num_coarse_quantizers=num_coarse_quantizers)
        check_counts(num_semantic_tokens=num_semantic_tokens)
        self.codebook_size, self.num_coarse_quantizers = codebook_size, num_coarse_quantizers
        self.num_semantic_tokens, self.eos_id = num_semantic_tokens, codebook_size
        self.semantic = Tokens(self.dim, num_semantic_tokens)
        self.coarse = Codes(self.dim, num_coarse_quantizers, codebook_size, num_ends=1)
        self.to_semantic_logits = (
            nn.Linear(self.dim, num_semantic_tokens, bias=False) if project_semantic_logits else None
        )

    def forward(
        self,
        *,
        semantic_token_ids: Int[Tensor, "b n"],
        coarse_token_ids: Int[Tensor, "b ..."],
        text: Sequence[str] | None = None,
        text_embeds: Float[Tensor, "b m e"] | None = None,
        cond_drop_prob: float | None = None,
        return_only_coarse_logits: bool = False,
        context: Context | None = None,
        forget_prob: float = 0.0,
        **texts: Any,
    ) -> Logits:
        """Logits of the semantic tokens `[b, n, v]` (None without project_semantic_logits) and of the codes `[b, t q + 1, v]`.

        Codes are `[b, t, q]`, or flat `[b, n]`. The logits of the codes are one more, for what follows the last; theirs end with
        the logit of the end, which can only stand in the place of a frame's first code.
        """
        if context is None:
            rows = len(semantic_token_ids)
            context = self.text_of(rows, cond_drop_prob, texts=text, text_embeds=text_embeds, **texts)
        codes = self.coarse.flat(coarse_token_ids)
        parts = [self.semantic.part(semantic_token_ids), self.coarse.part(codes, is_last=True)]
        semantic, coarse = self.run(parts, context, forget_prob)
        coarse_logits = self.coarse.logits(coarse)
        if return_only_coarse_logits:
            return coarse_logits
        return None if self.to_semantic_logits is None else self.to_semantic_logits(semantic[:, :-1]), coarse_logits


class FineTransformer(TokenTransformer):
    """The codes of the other quantizers, from those of the first."""

    @with_shared_arguments
    def __init__(
        self,
        *,
        num_coarse_quantizers: int,
        num_fine_quantizers: int,
        codebook_size: int,
        project_coarse_logits: bool = True,
        pad_id: int = -1,
        **shared: Any,
    ):
        """
        Args:
            project_coarse_logits: the codes of the first quantizers are predicted here too, which helps to learn them.
            pad_id: what stands past the end of a row, beside -1.
        """
        super().__init__(**shared)
        check_counts(codebook_size=codebook_size, num_coarse_quantizers=num_coarse_quantizers)
        check_counts(num_fine_quantizers=num_fine_quantizers)
        self.codebook_size, self.pad_id = codebook_size, pad_id
        if 0 <= pad_id < codebook_size:
            raise ValueError(f"pad_id={pad_id} is a code of codebook_size={codebook_size}: give -1")
        self.num_coarse_quantizers, self.num_fine_quantizers = num_coarse_quantizers, num_fine_quantizers
        self.coarse = Codes(self.dim, num_coarse_quantizers, codebook_size)
        self.fine = Codes(self.dim, num_fine_quantizers, codebook_size)
        self.project_coarse_logits = project_coarse_logits
        if not project_coarse_logits:
            self.coarse.register_parameter("logit_weights", None)

    def forward(
        self,
        coarse_token_ids: Int[Tensor, "b ..."],
        fine_token_ids: Int[Tensor, "b ..."],
        text: Sequence[str] | None = None,
        text_embeds: Float[Tensor, "b m e"] | None = None,
        cond_drop_prob: float | None = None,
        return_only_fine_logits: bool = False,
        *,
        context: Context | None = None,
        forget_prob: float = 0.0,
        **texts: Any,
    ) -> Logits:
        """Logits of the coarse codes `[b, n, v]` (None without project_coarse_logits), and of the fine ones and what follows the
        last of them `[b, k + 1, v]`. Codes are `[b, t, q]`, or flat `[b, n]`."""
        if context is None:
            rows = len(coarse_token_ids)
            context = self.text_of(rows, cond_drop_prob, texts=text, text_embeds=text_embeds, **texts)
        known, others = self.coarse.flat(coarse_token_ids), self.fine.flat(fine_token_ids)
        known, others = (ids.masked_fill(ids == self.pad_id, -1) for ids in (known, others))
        parts = [self.coarse.part(known), self.fine.part(others, is_last=True)]
        coarse, fine = self.run(parts, context, forget_prob)
        fine_logits = self.fine.logits(fine)
        if return_only_fine_logits:
            return fine_logits
        return self.coarse.logits(coarse[:, :-1]) if self.project_coarse_logits else None, fine_logits


class DelayedTransformer(TokenTransformer):
    """The codes of all quantizers, from semantic tokens, with one step a frame (the delay pattern of MusicGen, Copet et al. 2023).

    At step s it says code s of the first quantizer, code s - 1 of the second, and so on: a code is known before the finer ones
    of its frame are asked for. It stands in the place of coarse and fine transformer, with t + q - 1 steps in place of t q.
    """

    @with_shared_arguments
    def __init__(self, *, codebook_size: int, num_quantizers: int, num_semantic_tokens: int, **shared: Any):
        super().__init__(**shared)
        check_counts(
            codebook_size=codebook_size, num_quantizers=num_quantizers, num_semantic_tokens=num_semantic_tokens
        )
        self.codebook_size, self.num_quantizers = codebook_size, num_quantizers
        self.num_semantic_tokens = num_semantic_tokens
        # The end as the first quantizer says it, and what stands where a quantizer has not begun yet or is done.
        self.eos_id = self.none_id = codebook_size
        self.semantic = Tokens(self.dim, num_semantic_tokens)
        self.codes = Tokens(self.dim, num_quantizers * (codebook_size + 1))
        self.logit_weights = nn.Parameter(torch.randn(num_quantizers, codebook_size + 1, self.dim) * self.dim**-0.5)

    def forward(
        self,
        *,
        semantic_token_ids: Int[Tensor, "b n"],
        token_ids: Int[Tensor, "b t q"],
        text: Sequence[str] | None = None,
        text_embeds: Float[Tensor, "b m e"] | None = None,
        cond_drop_prob: float | None = None,
        context: Context | None = None,
        forget_prob: float = 0.0,
        **texts: Any,
    ) -> Float[Tensor, "b s q v"]:
        """The logits of s = t + q steps; `delayed` tells which code they are of.

        The last logit is that of the end, which the first quantizer says. The others are done a step later each.
        """
        if token_ids.shape[2] != self.num_quantizers:
            raise ValueError(f"codes of shape {list(token_ids.shape)} must be [b, t, {self.num_quantizers}]")
        if context is None:
            rows = len(semantic_token_ids)
            context = self.text_of(rows, cond_drop_prob, texts=text, text_embeds=text_embeds, **texts)
        columns = delayed(token_ids, self.none_id)[:, :-1]
        steps = Part(self.codes.behind_start(self.embed_steps(columns)))
        _, hidden = self.run([self.semantic.part(semantic_token_ids), steps], context, forget_prob)
        return self.logits(hidden)

    def embed_steps(self, columns: Int[Tensor, "*b q"]) -> Float[Tensor, "*b d"]:
        quantizer = torch.arange(self.num_quantizers, device=columns.device)
        return self.codes.embedding(columns + quantizer * (self.codebook_size + 1)).sum(dim=-2)

    def logits(self, hidden: Float[Tensor, "*b d"]) -> Float[Tensor, "*b q v"]:
        logits = F.linear(hidden, self.logit_weights.to(hidden.dtype).flatten(0, 1))
        return logits.unflatten(-1, self.logit_weights.shape[:2])


def delayed(codes: Int[Tensor, "b t q"], none_id: int) -> Int[Tensor, "b s q"]:
    """Codes by step, s = t + q of them: at step i of quantizer k, code i - k; `none_id` where there is none."""
    rows, frames, quantizers = codes.shape
    step = torch.arange(frames + quantizers, device=codes.device)[:, None]
    frame = step - torch.arange(quantizers, device=codes.device)
    filled = F.pad(codes.masked_fill(codes < 0, none_id), (0, 0, 0, 1), value=none_id)
    inside = torch.where((frame >= 0) & (frame < frames), frame, frames)
    return filled.gather(1, inside.expand(rows, -1, -1))


def undelayed(steps: Int[Tensor, "b s q"], frames: int) -> Int[Tensor, "b t q"]:
    """The first `frames` frames of codes by step, which must be there."""
    quantizers = steps.shape[-1]
    step = torch.arange(frames, device=steps.device)[:, None] + torch.arange(quantizers, device=steps.device)
    return steps.gather(1, step.expand(len(steps), -1, -1))
