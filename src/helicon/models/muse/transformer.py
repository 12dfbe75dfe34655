"""Transformers over image tokens (MaskGIT, Chang et al. 2022; Muse, Chang et al. 2023) and the critics that judge them.

Every token attends to every other and to a context: a text, a class, the tokens of a low-resolution picture, or any of
these together. Where text and class are dropped only the learned null key is left: that is the unconditional network
which guidance needs.

Letters: b batch, n tokens, m context tokens, d features, t text tokens, e text features, v outputs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from helicon.models.text.conditioning import Context, TextConditioned, stacked
from helicon.nn.attention import ContextKeys
from helicon.nn.codes import CodeVectors, check_ids
from helicon.nn.network import Network
from helicon.nn.sampling import guide
from helicon.nn.transformer import FeedForward, run_layer
from helicon.nn.transformer import Transformer as Layers


def place_features(height: int, width: int, dim: int, device: torch.device | None = None) -> Float[Tensor, "n d"]:
    """Waves over the picture, from half a period to 32 of them, at the centre of each cell of a grid, row by row.

    Grids of different fineness get like features at like places. The slow waves come first.
    """
    waves = -(-dim // 4)
    frequencies = 0.5 * 64 ** (torch.arange(waves, device=device) / max(1, waves - 1))

    def along(size: int) -> Tensor:
        angles = 2 * torch.pi * (torch.arange(size, device=device) + 0.5)[:, None] / size * frequencies
        return torch.stack((angles.sin(), angles.cos()), dim=-1)

    down = repeat(along(height), "h wave s -> h w wave s", w=width)
    across = repeat(along(width), "w wave s -> h w wave s", h=height)
    return rearrange([down, across], "side h w wave s -> (h w) (wave side s)")[:, :dim]


class Guided(Network):
    """A network that can be led away from a negative text."""

    def forward_with_cond_scale(self, x: Int[Tensor, "b n"], cond_scale: float = 3.0, **condition: Any) -> Any:
        raise NotImplementedError

    def forward_with_neg_prompt(
        self,
        x: Int[Tensor, "b n"],
        text_embed: Float[Tensor, "b t e"] | None = None,
        neg_text_embed: Float[Tensor, "b u e"] | None = None,
        cond_scale: float = 3.0,
        *,
        texts: Sequence[str] | None = None,
        negative_texts: Sequence[str] | None = None,
        **rest: Any,
    ) -> Any:
        """Outputs guided away from a negative text, `negative + cond_scale * (positive - negative)`; texts as strings or embedded.

        `rest` goes to `forward_with_cond_scale`.
        """
        if (neg_text_embed is None) == (negative_texts is None):
            raise ValueError("give neg_text_embed or negative_texts, one of them")
        negative = {"text_embeds": neg_text_embed} if negative_texts is None else {"texts": negative_texts}
        return self.forward_with_cond_scale(
            x, cond_scale, texts=texts, text_embeds=text_embed, negative_text=negative, **rest
        )


class Transformer(TextConditioned, Guided):
    """Token ids in, logits out."""

    has_mask_id: ClassVar[bool] = False  # whether there is one more token, the mask, where `add_mask_id` does not say
    default_dim_out: ClassVar[int | None] = None  # None: as many as there are tokens

    def __init__(
        self,
        *,
        num_tokens: int,
        dim: int,
        seq_len: int,
        depth: int,
        dim_out: int | None = None,
        t5_name: str | Mapping[str, Any] | None = None,
        self_cond: bool = False,
        add_mask_id: bool | None = None,
        dim_head: int = 64,
        heads: int = 8,
        ff_mult: float = 4,
        flash: bool = True,
        num_classes: int | None = None,
        condition_on_text: bool | None = None,
        text_embed_dim: int | None = None,
        cond_num_tokens: int | None = None,
        dropout: float = 0.0,
        checkpoint_activations: bool = False,
    ):
        """
        Args:
            num_tokens: the size of the codebook.
            seq_len: the most tokens a picture has.
            dim_out: logits a token; by default as many as there are tokens (a TokenCritic has one).
            t5_name: who reads the texts. None: the built-in encoder over bytes, trained along; otherwise the name or folder of
                a `transformers` encoder, which stays frozen, or a mapping with `name` and the encoder's own keywords.
            self_cond: the network also sees the embeddings it made before (Chen et al. 2022).
            add_mask_id: one more token, the mask; a MaskGitTransformer always has it.
            flash: without effect: attention is always `scaled_dot_product_attention`, which chooses its kernel itself.
            num_classes: conditions on a class.
            condition_on_text: by default yes, unless there are classes.
            text_embed_dim: texts come as embeddings of this size (`text_embeds`), and no encoder is built.
            cond_num_tokens: low-resolution tokens have a codebook of their own, of this size; by default they share
                this one's. Needed to condition a network on them that has neither text nor classes.
        """
        super().__init__()
        has_mask_id = self.has_mask_id if add_mask_id is None else add_mask_id
        if self.has_mask_id and not has_mask_id:
            raise ValueError(f"add_mask_id=False, but a {type(self).__name__} has a mask token: leave it out")
        self.condition_on_text = num_classes is None if condition_on_text is None else condition_on_text
        self.num_tokens, self.dim, self.seq_len, self.self_cond = num_tokens, dim, seq_len, self_cond
        self.mask_id = num_tokens if has_mask_id else None
        self.dim_out = dim_out or self.default_dim_out or num_tokens
        self.token_emb = CodeVectors(num_tokens, dim)  # and of the mask
        self.cond_emb = None if cond_num_tokens is None else CodeVectors(cond_num_tokens, dim)
        self.class_emb = None if num_classes is None else nn.Embedding(num_classes, dim)
        if not self.condition_on_text and (t5_name is not None or text_embed_dim is not None):
            raise ValueError(
                "t5_name and text_embed_dim belong to condition_on_text=True: set that, or leave them out (t5_name=null in a recipe)"
            )
        if t5_name is not None and text_embed_dim is not None:
            raise ValueError(f"t5_name={t5_name!r} reads texts, and text_embed_dim says they come embedded: give one")
        self._build_text(dim, t5_name, text_embed_dim, self.condition_on_text)
        self.layers = Layers(
            dim,
            depth,
            heads=heads,
            dim_head=dim_head,
            positions="learned",
            max_seq_len=seq_len,
            ff_mult=ff_mult,
            qk_norm=True,
            cross_attend=self.is_conditional or cond_num_tokens is not None,
            dropout=dropout,
            checkpoint_activations=checkpoint_activations,
        )
        self._initialise_positions()
        self.self_cond_to_init_embed = FeedForward(dim) if self_cond else None
        self.head = None if self.dim_out == num_tokens else nn.Linear(dim, self.dim_out, bias=False)

    @torch.no_grad()
    def _initialise_positions(self) -> None:
        """A square grid starts with positions that the places of low-resolution tokens match; they are learned from there."""
        side = int(self.seq_len**0.5)
        assert self.layers.positions is not None
        if side * side == self.seq_len:
            self.layers.positions.weight.copy_(place_features(side, side, self.dim))

    @property
    def is_conditional(self) -> bool:
        """Whether there is a text or a class to guide by."""
        return self.condition_on_text or self.class_emb is not None

    @property
    def device(self) -> torch.device:
        return self.token_emb.own.weight.device

    def context(
        self,
        *,
        texts: Sequence[str] | None = None,
        text_embeds: Float[Tensor, "b t e"] | None = None,
        text_mask: Bool[Tensor, "b t"] | None = None,
        text_ids: Int[Tensor, "b t"] | None = None,
        classes: Int[Tensor, "b"] | None = None,
        conditioning_token_ids: Int[Tensor, "b ..."] | None = None,
        keep: Bool[Tensor, "b"] | None = None,
    ) -> Context | None:
        """All that is given, as one sequence; None where nothing is. `keep` says which rows keep their text and class."""
        text = self.text_context(texts=texts, text_embeds=text_embeds, text_mask=text_mask, text_ids=text_ids)
        found = [] if text is None else [text]
        if classes is not None:
            if self.class_emb is None:
                raise ValueError(f"this {type(self).__name__} does not take classes: build it with num_classes")
            found.append(Context(self.class_emb(classes)[:, None], torch.ones_like(classes, dtype=torch.bool)[:, None]))
        if keep is not None:
            found = [Context(embeddings, mask & keep[:, None]) for embeddings, mask in found]
        if conditioning_token_ids is not None:
            found.append(self._low_resolution(conditioning_token_ids))
        if not found:
            return None
        return Context(torch.cat([c.embeddings for c in found], dim=1), torch.cat([c.mask for c in found], dim=1))

    def _low_resolution(self, ids: Int[Tensor, "b ..."]) -> Context:
        """Low-resolution tokens, each with the features of its place: without these nobody could tell which part of the
        picture it stands for."""
        if not self.layers.cross_attend:
            raise ValueError(
                "this network has no context: build it with cond_num_tokens to give it low-resolution tokens"
            )
        side = int(ids[0].numel() ** 0.5)
        height, width = ids.shape[1:] if ids.ndim == 3 else (side, side)
        ids = ids.flatten(1)
        if height * width != ids.shape[1]:
            raise ValueError(
                f"{ids.shape[1]} low-resolution tokens are no square: give them as [batch, height, width], not in a row"
            )
        embed = self.token_emb if self.cond_emb is None else self.cond_emb
        check_ids(ids, embed.num_codes, "low-resolution token")
        embeddings = embed(ids) + place_features(height, width, self.dim, ids.device).to(embed.own.weight.dtype)
        return Context(embeddings, torch.ones_like(ids, dtype=torch.bool))

    def no_context(self, rows: int) -> Context | None:
        """Nothing to attend to but the null key."""
        if not self.layers.cross_attend:
            return None
        nothing = self.token_emb.own.weight.new_zeros(rows, 1, self.dim)
        return Context(nothing, torch.zeros(rows, 1, dtype=torch.bool, device=self.device))

    def guided_context(self, rows: int, negative_text: Mapping[str, Any] | None = None, **condition: Any) -> Context:
        """2 b rows: the context of `condition` (the keywords of `context`), then what to guide away from, the negative text
        or the same without text and class."""
        positive = self.context(**condition) or self.no_context(rows)
        if negative_text is None:
            drop = torch.zeros(rows, dtype=torch.bool, device=self.device)
            negative = self.context(**condition, keep=drop) or self.no_context(rows)
        else:
            texts = ("texts", "text_embeds", "text_mask", "text_ids")
            other = {key: value for key, value in condition.items() if key not in texts}
            negative = self.context(**other, **negative_text)
        assert positive is not None and negative is not None
        return stacked(positive, negative)

    def read_context(self, context: Context | None) -> ContextKeys | None:
        """Keys and values of a context, to be given as `context` to many passes."""
        return None if context is None else self.layers.read_context(context.embeddings, context.mask)

    def embed(
        self,
        x: Int[Tensor, "b n"],
        *,
        self_cond_embed: Float[Tensor, "b n d"] | None = None,
        cond_drop_prob: float = 0.0,
        context: Context | ContextKeys | None = None,
        run_layer: Callable[..., Tensor] = run_layer,
        **condition: Any,
    ) -> Float[Tensor, "b n d"]:
        """What the layers make of the tokens: all but the last step, the logits. See `forward`."""
        if context is None:
            self.check_condition(len(x), cond_drop_prob, **condition)
            context = self.context(**condition, keep=self.draw_keep(len(x), cond_drop_prob)) or self.no_context(len(x))
        embeddings = self.token_emb(x)
        if self.self_cond_to_init_embed is not None:
            before = torch.zeros_like(embeddings) if self_cond_embed is None else self_cond_embed
            embeddings = embeddings + self.self_cond_to_init_embed(before)
        elif self_cond_embed is not None:
            raise ValueError("self_cond_embed belongs to self_cond=True")
        if isinstance(context, ContextKeys):
            return self.layers(embeddings, context_keys=context, run_layer=run_layer)
        if context is None:
            return self.layers(embeddings, run_layer=run_layer)
        return self.layers(embeddings, context=context.embeddings, context_mask=context.mask, run_layer=run_layer)

    def to_logits(self, embed: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]:
        if self.head is not None:
            return self.head(embed)
        return F.linear(embed, self.token_emb.weight()[: self.num_tokens])

    def forward(
        self,
        x: Int[Tensor, "b n"],
        return_embed: bool = False,
        return_logits: bool = False,
        labels: Int[Tensor, "b n"] | Float[Tensor, "b n"] | None = None,
        ignore_index: int = -1,
        self_cond_embed: Float[Tensor, "b n d"] | None = None,
        cond_drop_prob: float = 0.0,
        conditioning_token_ids: Int[Tensor, "b ..."] | None = None,
        texts: Sequence[str] | None = None,
        text_embeds: Float[Tensor, "b t e"] | None = None,
        **condition: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The logits `[b, n, v]`, or the loss where there are labels.

        return_embed   gives (logits, embeddings); return_logits with labels gives (loss, logits).
        labels         token ids, of which those equal to ignore_index do not count; for one output a token: how likely true.
        condition      the further keywords of `context`; or a `context` made before, in place of all conditions. And
                       `run_layer`, how to call a layer.
        """
        embed = self.embed(
            x,
            self_cond_embed=self_cond_embed,
            cond_drop_prob=cond_drop_prob,
            conditioning_token_ids=conditioning_token_ids,
            texts=texts,
            text_embeds=text_embeds,
            **condition,
        )
        logits = self.to_logits(embed)
        if return_embed:
            return logits, embed
        if labels is None:
            return logits
        if self.dim_out == 1:
            loss = critic_loss(logits, labels)
        else:
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=ignore_index)
        return (loss, logits) if return_logits else loss

    def check_condition(self, rows: int, cond_drop_prob: float = 0.0, **condition: Any) -> None:
        """Raises where a condition this network was built for is missing (it would learn without it and say nothing), or is not
        that of so many pictures."""
        self.check_texts(cond_drop_prob, **condition)
        classes = condition.get("classes")
        if self.class_emb is not None and classes is None and cond_drop_prob < 1:
            raise ValueError("this network is conditioned on classes: give classes (or cond_drop_prob=1 for none)")
        for name in ("texts", "text_embeds", "text_ids", "classes"):
            given = condition.get(name)
            if given is not None and not isinstance(given, str) and len(given) != rows:
                raise ValueError(f"{len(given)} {name} cannot belong to {rows} pictures: give one for each")
        if self.class_emb is not None and classes is not None:
            check_ids(classes, self.class_emb.num_embeddings, "class")

    def forward_with_cond_scale(
        self,
        x: Int[Tensor, "b n"],
        cond_scale: float = 3.0,
        return_embed: bool = False,
        *,
        self_cond_embed: Float[Tensor, "b n d"] | None = None,
        negative_text: Mapping[str, Any] | None = None,
        **condition: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Guided logits, `null + cond_scale * (cond - null)`, from one pass over both; the embeddings are the conditional ones."""
        if cond_scale == 1 or not self.is_conditional:
            return self(x, return_embed=return_embed, self_cond_embed=self_cond_embed, **condition)
        context = self.guided_context(len(x), negative_text, **condition)
        twice = None if self_cond_embed is None else torch.cat((self_cond_embed, self_cond_embed))
        logits, embed = self(torch.cat((x, x)), return_embed=True, self_cond_embed=twice, context=context)
        cond, null = logits.float().chunk(2)
        guided = guide(cond, null, cond_scale)
        return (guided, embed.chunk(2)[0]) if return_embed else guided


class MaskGitTransformer(Transformer):
    """Predicts tokens where the mask token stands."""

    has_mask_id = True


class TokenCritic(Transformer):
    """Says of each token how likely it is not the true one (Lezama et al. 2022)."""

    default_dim_out = 1


class SelfCritic(Guided):
    """A critic that reads the embeddings of the transformer it judges, with one layer of its own."""

    parts: ClassVar[tuple[str, ...]] = ("net",)

    def __init__(self, net: Transformer):
        super().__init__()
        self.net = net
        self.to_pred = nn.Linear(net.dim, 1)

    def forward(
        self, x: Int[Tensor, "b n"], labels: Tensor | None = None, **condition: Any
    ) -> Float[Tensor, "b n 1"] | Float[Tensor, ""]:
        """Logits, or the loss where there are labels (1 = not the true token); `condition` as for the transformer."""
        logits = self.to_pred(self.net.embed(x, **condition))
        return logits if labels is None else critic_loss(logits, labels)

    def forward_with_cond_scale(
        self,
        x: Int[Tensor, "b n"],
        cond_scale: float = 3.0,
        *,
        negative_text: Mapping[str, Any] | None = None,
        **condition: Any,
    ) -> Float[Tensor, "b n 1"]:
        if cond_scale == 1 or not self.net.is_conditional:
            return self(x, **condition)
        context = self.net.guided_context(len(x), negative_text, **condition)
        cond, null = self(torch.cat((x, x)), context=context).float().chunk(2)
        return guide(cond, null, cond_scale)


def critic_loss(logits: Float[Tensor, "b n 1"], labels: Tensor) -> Float[Tensor, ""]:
    """Of saying which tokens are not the true ones (labels 1)."""
    return F.binary_cross_entropy_with_logits(logits[..., 0].float(), labels.float())
