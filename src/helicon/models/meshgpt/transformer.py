"""MeshTransformer: which tokens make up the next face of a mesh, or that there is none (MeshGPT, Siddiqui et al. 2023).

Two causal transformers, one in the other (RQ-Transformer, Lee et al. 2022). The coarse one has a position a face: it reads the faces
so far, each as one embedding made of its k tokens. The fine one goes over the k tokens of a face, behind what the coarse one says of it:

    coarse   [text,] start, face 1, face 2, ...           -> what face 1, face 2, face 3, ... shall be
    fine     what a face shall be, token 1, ..., token k-1 -> token 1, ..., token k

The end is a token more, `eos_id`, which can only stand in the place of a face's first token. Tokens that do not come in faces (k = 1) are
predicted by the coarse one alone. Codes are -1 past the end of a row; padding stands at the right, so that no real token sees any.

Letters: b batch, f faces, k tokens of a face, n = f k tokens, q codes of a vertex, d features (of a face), e features of a token,
v logits, m text tokens, t text features.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from helicon.models.meshgpt.layers import (
    NUM_BUCKETS,
    PAD,
    Condition,
    FaceTokens,
    bucket_of,
    filmed,
    for_each_face,
    layer_options,
    mean_cross_entropy,
    mean_of,
)
from helicon.models.text.conditioning import TextConditioned
from helicon.models.text.pretrained import PretrainedTextEncoder
from helicon.nn.absent import check_absent
from helicon.nn.numbers import check_probabilities
from helicon.nn.packing import Packed, Part, pack
from helicon.nn.sampling import Sampling, guide
from helicon.nn.transformer import Transformer

NO_GATELOOP = "there are no gateloop layers here, all is attention with rotary positions"
# Where the texts of other packages' encoders are read from by default.
TEXT_MODELS = {
    "t5": "google/t5-v1_1-base",
    "clip": "openai/clip-vit-base-patch32",
    "bge": "BAAI/bge-base-en-v1.5",
}


class MeshTransformer(TextConditioned):
    autoencoder: Any  # not a submodule: its weights are not trained with this network's

    def __init__(
        self,
        autoencoder: Any = None,
        *,
        dim: int | Sequence[int] = 512,
        max_seq_len: int = 8192,
        flash_attn: bool = True,
        attn_depth: int = 12,
        attn_dim_head: int = 64,
        attn_heads: int = 16,
        attn_kwargs: Mapping[str, Any] | None = None,
        cross_attn_num_mem_kv: int = 1,
        dropout: float = 0.0,
        coarse_pre_gateloop_depth: int = 0,
        coarse_post_gateloop_depth: int = 0,
        coarse_adaptive_rmsnorm: bool = False,
        fine_pre_gateloop_depth: int = 0,
        gateloop_use_heinsen: bool = False,
        fine_attn_depth: int = 2,
        fine_attn_dim_head: int = 32,
        fine_attn_heads: int = 8,
        fine_cross_attend_text: bool = False,
        pad_id: int = PAD,
        num_sos_tokens: int | None = None,
        condition_on_text: bool = False,
        text_cond_with_film: bool = False,
        text_condition_model_types: Sequence[str] = ("bytes",),
        text_condition_model_kwargs: Sequence[Mapping[str, Any]] = ({},),
        text_condition_cond_drop_prob: float = 0.25,
        quads: bool | None = None,
        codebook_size: int | None = None,
        tokens_per_face: int | None = None,
        text_embed_dim: int | None = None,
        cond_as_self_attn_prefix: bool = False,
        condition_on_num_faces: bool = False,
        checkpoint_activations: bool = False,
    ):
        """
        Args:
            autoencoder: the tokenizer, which makes codes of meshes and meshes of codes. A frozen copy is used, in evaluation mode, never
                trained nor saved here. None learns from codes alone: then `codebook_size`, `tokens_per_face` and `quads` say what
                they are.
            dim: features of a face, or (of a face, of a token).
            max_seq_len: the most tokens of a mesh; what is over whole faces is left out.
            flash_attn: without effect: attention is always `scaled_dot_product_attention`, which chooses its kernel itself.
            attn_kwargs: ff_glu, ff_swish, ff_mult, attn_qk_norm of both transformers, attn_kv_heads and attn_num_mem_kv (learned tokens in
                front of all that every face attends to) of the coarse one. What is not named stays as it is: see `layers.LAYERS`,
                and `nn/absent.py` for those that have no counterpart.
            cross_attn_num_mem_kv, coarse_pre_gateloop_depth, coarse_post_gateloop_depth, fine_pre_gateloop_depth, gateloop_use_heinsen:
                there is one learned key, in the place of a text that is not there, and no gateloop layer. The reference package's
                own defaults (4, 2, 0, 2, False) mean what leaving them out means; other values are refused.
            coarse_adaptive_rmsnorm: the mean of the text scales and shifts the norms of the coarse transformer.
            fine_cross_attend_text: the fine transformer reads the text, too.
            num_sos_tokens: learned tokens in front of the first face; by default 1, and with texts 4.
            condition_on_text: texts are read, by cross-attention of the coarse transformer, or as a prefix (`cond_as_self_attn_prefix`).
            text_cond_with_film: the mean of the text also scales and shifts the embeddings of the faces.
            text_condition_model_types: who reads the texts: "bytes", the built-in encoder, trained along; or "t5", "clip", "bge", or the name
                or folder of a `transformers` encoder, which stays frozen.
            text_condition_model_kwargs: the encoder's own keywords, and `name` for another than the usual of its type.
            text_condition_cond_drop_prob: how often a row learns without its text, for guidance (and without its number of faces).
            text_embed_dim: texts come as embeddings of this size (`text_embeds`), and no encoder is built.
            condition_on_num_faces: it learns how many faces there are, roughly, and can be asked for as many.
            checkpoint_activations: recomputes each layer in the backward pass: less memory, a third more time.
        """
        super().__init__()
        check_absent(
            pad_id=(pad_id, (PAD,), "past the end of a row stands -1"),
            cross_attn_num_mem_kv=(cross_attn_num_mem_kv, (1, 4), "there is one learned key"),
            coarse_pre_gateloop_depth=(coarse_pre_gateloop_depth, (0, 2), NO_GATELOOP),
            coarse_post_gateloop_depth=(coarse_post_gateloop_depth, (0,), NO_GATELOOP),
            fine_pre_gateloop_depth=(fine_pre_gateloop_depth, (0, 2), NO_GATELOOP),
            gateloop_use_heinsen=(gateloop_use_heinsen, (False,), NO_GATELOOP),
        )
        if autoencoder is not None:
            self.arguments["autoencoder"] = autoencoder = copy.deepcopy(autoencoder).requires_grad_(False).eval()
        self.__dict__["autoencoder"] = autoencoder
        sizes = _sizes(autoencoder, codebook_size, tokens_per_face, quads)
        self.codebook_size, self.tokens_per_face, self.num_vertices_per_face = sizes
        self.eos_id, self.cond_drop_prob = self.codebook_size, text_condition_cond_drop_prob
        check_probabilities(text_condition_cond_drop_prob=text_condition_cond_drop_prob)
        self.dim, fine_dim = _dims(dim, self.is_flat)
        self.max_faces = max_seq_len // self.tokens_per_face
        self.max_seq_len = self.max_faces * self.tokens_per_face
        if self.max_faces < 1:
            raise ValueError(f"max_seq_len={max_seq_len} is less than a face, which has {self.tokens_per_face} tokens")
        self._check_text_options(
            condition_on_text,
            coarse_adaptive_rmsnorm=coarse_adaptive_rmsnorm,
            fine_cross_attend_text=fine_cross_attend_text,
            text_cond_with_film=text_cond_with_film,
            cond_as_self_attn_prefix=cond_as_self_attn_prefix,
            text_embed_dim=text_embed_dim,
        )
        self._build_encoder(condition_on_text, text_condition_model_types, text_condition_model_kwargs, text_embed_dim)
        self.has_prefix = cond_as_self_attn_prefix
        shared, coarse_only = layer_options(attn_kwargs or {})
        shared |= {"causal": True, "dropout": dropout, "attn_dropout": dropout}
        shared["checkpoint_activations"] = checkpoint_activations
        self.tokens = FaceTokens(self.codebook_size, self.tokens_per_face, self.dim, fine_dim)
        self.coarse = Transformer(
            self.dim,
            attn_depth,
            heads=attn_heads,
            dim_head=attn_dim_head,
            cross_attend=condition_on_text and not cond_as_self_attn_prefix,
            norm="adaptive" if coarse_adaptive_rmsnorm else "rms",
            dim_cond=self.dim if coarse_adaptive_rmsnorm else None,
            **shared,
            **coarse_only,
        )
        self.fine: Transformer | None = None
        if not self.is_flat:
            self.fine = Transformer(
                fine_dim,
                fine_attn_depth,
                heads=fine_attn_heads,
                dim_head=fine_attn_dim_head,
                cross_attend=fine_cross_attend_text,
                dim_context=self.dim if fine_cross_attend_text else None,
                **shared,
            )
        num_sos_tokens = (4 if condition_on_text else 1) if num_sos_tokens is None else num_sos_tokens
        if num_sos_tokens < 1:
            raise ValueError(f"num_sos_tokens={num_sos_tokens} must be at least 1")
        self.start = nn.Parameter(torch.randn(num_sos_tokens, self.dim))
        self.film = nn.Linear(self.dim, 2 * self.dim, bias=False) if text_cond_with_film else None
        if self.film is not None:
            nn.init.zeros_(self.film.weight)  # starts as the network without
        self.num_faces_emb = nn.Embedding(NUM_BUCKETS + 1, self.dim) if condition_on_num_faces else None

    def _check_text_options(self, condition_on_text: bool, **options: Any) -> None:
        given = [name for name, value in options.items() if value]
        if given and not condition_on_text:
            raise ValueError(f"{' and '.join(given)} belong to condition_on_text=True")
        if options["fine_cross_attend_text"] and (self.is_flat or options["cond_as_self_attn_prefix"]):
            raise ValueError(
                "fine_cross_attend_text=True is for tokens that come in faces, and for texts that the coarse transformer "
                "attends to, too (cond_as_self_attn_prefix=False)"
            )

    def _build_encoder(
        self,
        condition_on_text: bool,
        types: Sequence[str],
        options: Sequence[Mapping[str, Any]],
        text_embed_dim: int | None,
    ) -> None:
        if isinstance(types, str) or len(types) != 1 or len(options) > 1:
            raise ValueError(
                f"text_condition_model_types={types!r}: texts are read by one encoder, e.g. ('bytes',) or ('t5',), "
                "with one mapping of keywords"
            )
        if text_embed_dim is not None and tuple(types) != ("bytes",):
            raise ValueError(
                f"text_condition_model_types={tuple(types)!r} reads texts, and text_embed_dim says they come embedded: give one"
            )
        keywords = dict(options[0]) if options else {}
        name = keywords.pop("name", TEXT_MODELS.get(types[0], types[0]))
        self._build_text(self.dim, {"name": name, **keywords}, text_embed_dim, condition_on_text)
        if isinstance(self.text_encoder, PretrainedTextEncoder):  # a relative path would be lost elsewhere
            self.arguments["text_condition_model_types"] = [self.text_encoder.name]
            self.arguments["text_condition_model_kwargs"] = [keywords]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "MeshTransformer":
        """Takes the tokenizer along to another device; its precision stays, for tokens depend on it."""
        super()._apply(fn, recurse)
        for network in self.frozen.values():
            network.to(self.device)
        return self

    @property
    def device(self) -> torch.device:
        return self.start.device

    @property
    def frozen(self) -> dict[str, Any]:
        return {} if self.autoencoder is None else {"autoencoder": self.autoencoder}

    @property
    def is_flat(self) -> bool:
        """Whether tokens come one by one, not in faces."""
        return self.tokens_per_face == 1

    def embed_texts(self, texts: Sequence[str]) -> Float[Tensor, "b m t"]:
        """Texts, to give as `text_embeds`."""
        return self.encode_text(texts)

    def _check_tokenizer(self) -> None:
        if self.autoencoder is None:
            raise ValueError(
                "this MeshTransformer was built without an autoencoder, which turns meshes into codes and codes into meshes: "
                "build it with one, or give and take codes (codes=..., return_codes=True)"
            )

    @contextmanager
    def _tokenizer(self) -> Iterator[Any]:
        """The tokenizer at work: in its own precision, without gradients."""
        self._check_tokenizer()
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            yield self.autoencoder

    def tokenize(
        self,
        vertices: Float[Tensor, "b _ 3"],
        faces: Int[Tensor, "b _ _"],
        face_edges: Int[Tensor, "b _ 2"] | None = None,
    ) -> Int[Tensor, "b n"]:
        """The codes of meshes, in a row, -1 past the end."""
        with self._tokenizer() as tokenizer:
            return tokenizer.tokenize(vertices, faces, face_edges).flatten(1)

    # ------------------------------------------------------------------ conditions

    def condition(
        self,
        rows: int,
        cond_drop_prob: float | None = None,
        num_faces: Int[Tensor, "#b"] | None = None,
        **texts: Any,
    ) -> Condition:
        """Texts and numbers of faces of a batch, some of them dropped; one alone is for all rows."""
        if cond_drop_prob is None:
            cond_drop_prob = self.cond_drop_prob if self.training else 0.0
        check_probabilities(cond_drop_prob=cond_drop_prob)
        return Condition(self.text_of(rows, cond_drop_prob, **texts), self.count_of(rows, cond_drop_prob, num_faces))

    def count_of(self, rows: int, cond_drop_prob: float, num_faces: Tensor | None) -> Float[Tensor, "b d"] | None:
        if self.num_faces_emb is None:
            if num_faces is not None:
                raise ValueError("num_faces belongs to condition_on_num_faces=True")
            return None
        if num_faces is not None and len(num_faces) not in (1, rows):
            raise ValueError(f"{len(num_faces)} num_faces cannot belong to {rows} meshes: give one for each, or one")
        bucket = bucket_of(num_faces) if num_faces is not None else torch.zeros(1, dtype=torch.long, device=self.device)
        keep = self.draw_keep(rows, cond_drop_prob)
        bucket = bucket.to(self.device).expand(rows)
        return self.num_faces_emb(bucket if keep is None else bucket * keep)

    def guided(self, condition: Condition) -> Condition:
        """2 b rows: with the text, then without; the number of faces is asked for in both."""
        num_faces = None if condition.num_faces is None else condition.num_faces.repeat(2, 1)
        return Condition(self.with_and_without(condition.text), num_faces)

    def film_of(self, condition: Condition) -> Float[Tensor, "b 2 d"] | None:
        """Scale and shift of the embeddings of faces."""
        if self.film is None or condition.text is None:
            return None
        return self.film(mean_of(condition.text)).unflatten(-1, (2, self.dim))

    # ------------------------------------------------------------------ the two transformers

    def sequence(
        self, codes: Int[Tensor, "b f k"], condition: Condition, is_prompt: bool = False
    ) -> tuple[Packed, dict[str, Any]]:
        """What the coarse transformer reads, and what else it attends to. Faces that others will follow need their padding hidden."""
        start = self.start.expand(len(codes), -1, -1)
        if condition.num_faces is not None:
            start = start + condition.num_faces[:, None]
        faces = torch.cat((start, self.tokens.embed(codes).to(start.dtype)), dim=1)
        faces = filmed(faces, self.film_of(condition))
        mask = F.pad((codes >= 0).all(dim=-1), (len(self.start), 0), value=True) if is_prompt else None
        parts, beside = [Part(faces, mask)], {}
        text = condition.text
        if text is not None and self.has_prefix:
            parts = [Part(*text), *parts]
        elif text is not None:
            beside = {"context": text.embeddings, "context_mask": text.mask}
        if text is not None and self.coarse.modulation is not None:
            beside["cond"] = mean_of(text)
        return pack(parts), beside

    def _hidden(self, codes: Int[Tensor, "b f k"], condition: Condition) -> Float[Tensor, "b f1 k e"]:
        """What is said of each token of each face, and of the one that follows (f1 = f + 1)."""
        packed, beside = self.sequence(codes, condition)
        said = packed.unpack(self.coarse(packed.embeddings, **beside))[-1][:, len(self.start) - 1 :]
        if self.fine is None:
            return said[:, :, None]
        inputs = self.tokens.fine_inputs(said, F.pad(codes, (0, 0, 0, 1)))
        given = {}
        if self.fine.cross_attend:
            assert condition.text is not None
            given["context_keys"] = for_each_face(self.fine.read_context(*condition.text), inputs.shape[1])
        hidden = self.fine(rearrange(inputs, "b f k e -> (b f) k e"), **given)
        return rearrange(hidden, "(b f) k e -> b f k e", b=len(codes))

    def by_face(self, codes: Int[Tensor, "b ..."]) -> Int[Tensor, "b f k"]:
        """Codes `[b, n, q]` or `[b, n]`, face by face."""
        k, q = self.tokens_per_face, max(1, self.tokens_per_face // self.num_vertices_per_face)
        flat = codes.flatten(1)
        if codes.ndim not in (2, 3) or (codes.ndim == 3 and codes.shape[2] != q) or flat.shape[1] % k:
            raise ValueError(
                f"codes of shape {list(codes.shape)} are not those of faces of {k} tokens: "
                f"give [b, n, {q}] with n a multiple of {k // q}, or [b, n] with n a multiple of {k}"
            )
        return flat.unflatten(1, (flat.shape[1] // k, k))

    def labels(self, codes: Int[Tensor, "b f k"], append_eos: bool = True) -> Int[Tensor, "b f1 k"]:
        """What is to be predicted; -1 where nothing is. The end follows the last face of a row."""
        is_face = (codes >= 0).all(dim=-1)
        labels = F.pad(codes.masked_fill(~is_face[..., None], PAD), (0, 0, 0, 1), value=PAD)
        if not append_eos:
            return labels
        is_end = torch.arange(labels.shape[1], device=codes.device) == is_face.sum(dim=1, keepdim=True)
        is_first = torch.arange(labels.shape[2], device=codes.device) == 0
        return labels.masked_fill(is_end[..., None] & is_first, self.eos_id)

    def num_labels(self, codes: Int[Tensor, "b ..."], append_eos: bool = True) -> Int[Tensor, ""]:
        """How many tokens the mean loss of these codes is over."""
        return (self.labels(self.by_face(codes), append_eos) >= 0).sum()

    def forward(
        self,
        *,
        vertices: Float[Tensor, "b _ 3"] | None = None,
        faces: Int[Tensor, "b _ _"] | None = None,
        face_edges: Int[Tensor, "b _ 2"] | None = None,
        codes: Int[Tensor, "b ..."] | None = None,
        cache: Any = None,
        **options: Any,
    ) -> Tensor:
        """The loss of meshes or of their codes; `options` are those of `forward_on_codes`. (`generate` alone has a cache.)"""
        if cache is not None:
            raise ValueError("cache: one is kept by generate and nobody else, leave it out")
        if codes is None:
            if vertices is None or faces is None:
                raise ValueError("there is nothing to learn from: give vertices and faces, or codes")
            codes = self.tokenize(vertices, faces, face_edges)
        if faces is not None and self.num_faces_emb is not None and options.get("num_faces") is None:
            options["num_faces"] = (faces >= 0).all(dim=-1).sum(dim=1)
        return self.forward_on_codes(codes, **options)

    def forward_on_codes(
        self,
        codes: Int[Tensor, "b ..."],
        return_loss: bool = True,
        append_eos: bool = True,
        *,
        texts: Sequence[str] | None = None,
        text_embeds: Float[Tensor, "#b m t"] | None = None,
        num_faces: Int[Tensor, "#b"] | None = None,
        cond_drop_prob: float | None = None,
        cond_scale: float = 1.0,
        rescale_phi: float = 0.0,
        remove_parallel_component: bool = False,
        **read: Any,
    ) -> Float[Tensor, ""] | Float[Tensor, "b n1 v"]:
        """The mean cross-entropy of all tokens and ends, or the logits of each token and of what follows the last (n1 = n + 1).

        append_eos   False for meshes that are cut off: nothing is learned about what follows
        num_faces    of a network that is conditioned on it; counted in the codes by default, where they come in faces
        cond_scale   guides the logits; see `nn.sampling.guide`, also for the two after it
        read         texts that were read before: `text_mask`, `text_ids`
        """
        tokens = self.by_face(codes)
        # Elsewhere the host would wait for the device.
        if tokens.device.type == "cpu" and not torch.compiler.is_compiling():
            check_codes(tokens, self.codebook_size)
        rows, num_tokens = len(tokens), tokens.shape[1] * self.tokens_per_face
        if num_tokens > self.max_seq_len:
            raise ValueError(
                f"{num_tokens} tokens are more than max_seq_len={self.max_seq_len}, which this MeshTransformer was built with"
            )
        if num_faces is None and self.num_faces_emb is not None:
            if self.is_flat:
                raise ValueError("these tokens do not come in faces: give num_faces, or vertices and faces")
            num_faces = (tokens >= 0).all(dim=-1).sum(dim=1)
        condition = self.condition(rows, cond_drop_prob, num_faces, texts=texts, text_embeds=text_embeds, **read)
        if return_loss:
            if cond_scale != 1:
                raise ValueError(f"cond_scale={cond_scale} is for logits: give return_loss=False, or leave it out")
            hidden, labels = self._hidden(tokens, condition), self.labels(tokens, append_eos)
            return mean_cross_entropy(hidden.flatten(0, -2), self.tokens.vectors.weight(), labels.flatten())
        if cond_scale != 1:
            tokens, condition = tokens.repeat(2, 1, 1), self.guided(condition)
        logits = self.tokens.to_logits(self._hidden(tokens, condition).flatten(1, 2)[:, : num_tokens + 1])
        if cond_scale == 1:
            return logits
        cond, null = logits.float().chunk(2)
        options: dict[str, Any] = {"remove_parallel_component": remove_parallel_component, "rescale_phi": rescale_phi}
        return guide(cond, null, cond_scale, **options)

    @torch.no_grad()
    def generate(
        self,
        prompt: Int[Tensor, "#b ..."] | None = None,
        batch_size: int | None = None,
        filter_logits_fn: str | Callable[..., Tensor] | None = None,
        filter_kwargs: Mapping[str, Any] | None = None,
        temperature: float = 1.0,
        return_codes: bool = False,
        texts: Sequence[str] | None = None,
        text_embeds: Float[Tensor, "#b m t"] | None = None,
        cond_scale: float = 1.0,
        cache_kv: bool = True,
        max_seq_len: int | None = None,
        face_coords_to_file: Callable[[Tensor], Any] | None = None,
        *,
        num_faces: int | Sequence[int] | Int[Tensor, "#b"] | None = None,
        filter_thres: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        rescale_phi: float = 0.0,
        remove_parallel_component: bool = False,
        seed: int | None = None,
        on_face: Callable[[Tensor], None] | None = None,
        **read: Any,
    ) -> Any:
        """Meshes, as (coordinates `[b, f, 3 or 4, 3]`, which faces are there `[b, f]`), or their codes `[b, n, q]`, -1 past the end.

        Args:
            prompt: codes of the first faces, which they begin with; of unequal number with -1.
            filter_logits_fn, filter_kwargs: "top_k" or "top_p" (or a function of that name) with `k`, `thres` or `frac_num_tokens`, in
                place of filter_thres.
            texts, text_embeds: what they shall be; none makes any mesh. `read` may hold `text_mask` or `text_ids`.
            cond_scale: guidance by the text, with `rescale_phi` and `remove_parallel_component` as in `nn.sampling.guide`.
            cache_kv: without effect: there is always one.
            max_seq_len: the most tokens, those of the prompt among them; what is over whole faces is left out.
            face_coords_to_file: called with the coordinates `[f, 3 or 4, 3]` of each mesh; what it returns is returned, as a list.
            num_faces: about how many faces to make, of a network that is conditioned on it: one number, or one for each mesh.
            top_k, top_p, filter_thres: which tokens are drawn from: the k likeliest, those that have a probability of p together,
                the likeliest 1 - filter_thres of all. Where none of the three is given, filter_thres is 0.9.
            seed: the same again for the same seed; None draws one.
            on_face: called with the codes of each new face as soon as it is there, `[b, 3 or 4, q]` (`[b, 1]` where they do not come in
                faces), -1 in rows that have ended.
        """
        from helicon.models.meshgpt.generate import Asked, draw, filters

        if not return_codes:
            self._check_tokenizer()
        kept = filters(filter_logits_fn, filter_kwargs, filter_thres=filter_thres, top_k=top_k, top_p=top_p)
        guidance: dict[str, Any] = {"remove_parallel_component": remove_parallel_component, "rescale_phi": rescale_phi}
        asked = Asked(
            texts={"texts": texts, "text_embeds": text_embeds, **read},
            num_faces=None if num_faces is None else torch.as_tensor(num_faces).reshape(-1),
            batch_size=batch_size,
            max_seq_len=self.max_seq_len if max_seq_len is None else max_seq_len,
            sampling=Sampling(temperature, **kept, cond_scale=cond_scale, **guidance),
            seed=seed,
        )
        show = None if on_face is None else lambda face: on_face(self.shaped(face))
        codes = self.shaped(draw(self, prompt, asked, show))
        if return_codes:
            return codes
        with self._tokenizer() as tokenizer:
            coordinates, mask = tokenizer.decode_from_codes_to_faces(codes)
        if face_coords_to_file is None:
            return coordinates, mask
        return [face_coords_to_file(row[there]) for row, there in zip(coordinates, mask, strict=True)]

    def shaped(self, codes: Int[Tensor, "b f k"]) -> Int[Tensor, "b ..."]:
        """Codes as the tokenizer has them: `[b, n, q]` by vertex, or `[b, n]` where they do not come in faces."""
        if self.is_flat:
            return codes.flatten(1)
        return rearrange(codes, "b f (w q) -> b (f w) q", w=self.num_vertices_per_face)


def check_codes(codes: Int[Tensor, "..."], codebook_size: int) -> None:
    if codes.numel() and int(codes.max()) >= codebook_size:
        raise ValueError(f"code {int(codes.max())} is none of the tokenizer's, which are 0 to {codebook_size - 1}")


def _sizes(
    autoencoder: Any, codebook_size: int | None, tokens_per_face: int | None, quads: bool | None
) -> tuple[int, int, int]:
    """Size of the codebook, tokens and vertices of a face: those of the autoencoder, with which what is given must agree."""
    vertices = None if quads is None else 3 + quads
    given = {"codebook_size": codebook_size, "tokens_per_face": tokens_per_face, "num_vertices_per_face": vertices}
    if autoencoder is not None:
        for name, value in given.items():
            own = getattr(autoencoder, name)
            if value is not None and value != own:
                raise ValueError(
                    f"the autoencoder has {name}={own}, and the transformer is asked for {value}: leave it out"
                )
            given[name] = own
    if given["codebook_size"] is None or given["tokens_per_face"] is None:
        raise ValueError("without an autoencoder give codebook_size and tokens_per_face (1: they do not come in faces)")
    size, tokens, vertices = given["codebook_size"], given["tokens_per_face"], given["num_vertices_per_face"] or 3
    if tokens != 1 and (tokens < 1 or tokens % vertices):
        raise ValueError(f"tokens_per_face={tokens} must be a multiple of the {vertices} vertices of a face, or 1")
    return size, tokens, vertices


def _dims(dim: int | Sequence[int], is_flat: bool) -> tuple[int, int]:
    coarse, fine = (dim, dim) if isinstance(dim, int) else dim
    if is_flat and coarse != fine:
        raise ValueError(f"dim={dim!r}: tokens that do not come in faces have one transformer, give one number")
    return coarse, fine
