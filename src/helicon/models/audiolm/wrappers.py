"""The stages of AudioLM, each a transformer with the frozen networks that make its tokens: how they learn and generate.

Letters: b batch, n tokens, t frames, q quantizers, d features, v logits, m text tokens, e text features, w samples.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from helicon.models.audiolm.generate import (
    Sampled,
    delayed_codes,
    fine_codes,
    flat_codes,
    semantic_tokens,
    waves_of,
)
from helicon.models.audiolm.stage import (
    PAD,
    Lengths,
    Stage,
    Wave,
    by_frame,
    check_pad,
    check_sizes,
    check_stages,
    needed,
    with_end,
)
from helicon.models.audiolm.transformers import (
    CoarseTransformer,
    DelayedTransformer,
    FineTransformer,
    SemanticTransformer,
    delayed,
)
from helicon.models.semantic.tokenizer import SemanticTokenizer
from helicon.models.soundstream.codecs import Codec
from helicon.nn.sampling import Sampling


class SemanticTransformerWrapper(Stage):
    condition_name = "semantic"

    transformer: SemanticTransformer

    def __init__(
        self,
        *,
        transformer: SemanticTransformer,
        wav2vec: SemanticTokenizer | None = None,
        audio_conditioner: Any = None,
        pad_id: int = PAD,
        unique_consecutive: bool = True,
        mask_prob: float = 0.15,
    ):
        """
        Args:
            wav2vec: makes the semantic tokens of audio. None learns from token ids alone.
            audio_conditioner: makes of a sound what stands in the place of a text: codes, which the transformer learns to read
                (`CodeConditioner`), or embeddings.
            unique_consecutive: tokens that repeat the one before are left out.
            mask_prob: the most of the past that is hidden while it learns (forgetful causal masking).
        """
        super().__init__()
        check_pad(pad_id)
        self._hold(transformer, mask_prob, wav2vec=wav2vec, audio_conditioner=audio_conditioner)
        self.unique_consecutive = unique_consecutive
        if wav2vec is not None:
            check_sizes(wav2vec=wav2vec.codebook_size, num_semantic_tokens=transformer.num_semantic_tokens)

    @property
    def embed_text(self) -> Callable[[Sequence[str]], Float[Tensor, "b m e"]]:
        """Texts to what can be given as `text_embeds`."""
        return self.transformer.encode_text

    def tokens(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return {"semantic_token_ids": self._semantic_of(batch), "is_end": batch.get("is_end")}

    def labels(
        self, semantic_token_ids: Int[Tensor, "b n"], is_end: Bool[Tensor, "b"] | None = None
    ) -> dict[str, Int[Tensor, "b _"]]:
        return {"semantic": with_end(semantic_token_ids, is_end, self.transformer.eos_id)}

    def forward(
        self,
        *,
        semantic_token_ids: Int[Tensor, "b n"] | None = None,
        raw_wave: Wave | None = None,
        text: Sequence[str] | None = None,
        text_embeds: Float[Tensor, "b m e"] | None = None,
        return_loss: bool = False,
        is_end: Bool[Tensor, "b"] | None = None,
        return_losses: bool = False,
        **options: Any,
    ) -> Any:
        """The logits, with `return_loss` the loss, with `return_losses` that and its parts (`Losses`).

        Give waves or tokens. `is_end` says which sounds truly end; `options` go to the transformer.
        """
        ids = self._given_ids(semantic_token_ids, raw_wave)
        tokens = {"semantic_token_ids": ids, "is_end": is_end}
        condition = self._condition(text, text_embeds, options, raw_wave=raw_wave)
        logits = self.transformer(ids=ids, forget_prob=self.forget_prob, **condition)
        return self._answer({"semantic": logits}, {}, tokens, return_loss, return_losses)

    @torch.no_grad()
    def generate(
        self,
        *,
        max_length: int,
        text: Sequence[str] | None = None,
        text_embeds: Float[Tensor, "#b m e"] | None = None,
        prime_wave: Wave | None = None,
        prime_wave_input_sample_hz: int | None = None,
        prime_ids: Int[Tensor, "#b n"] | None = None,
        batch_size: int = 1,
        cond_scale: float | None = None,
        filter_thres: float | None = None,
        temperature: float = 1.0,
        use_kv_cache: bool = True,
        include_eos_in_output: bool = False,
        prime_lengths: Lengths | None = None,
        seed: int | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        max_tokens: int | None = None,
        **texts: Any,
    ) -> Int[Tensor, "b _"]:
        """Tokens, at most `max_length` with those of the prompt, and -1 past the end of a row.

        Args:
            prime_wave, prime_ids: what they go on from; of rows of unequal length, with -1 or `prime_lengths` samples.
            top_k, top_p, filter_thres: which tokens are drawn from: the k likeliest, those that have a probability of p together,
                the likeliest 1 - filter_thres of all. Where none of the three is given, filter_thres is 0.9.
            cond_scale: guidance by the text; by default 3, and none (1) of a stage that is conditioned on codes.
            use_kv_cache: without effect: there is always one.
            include_eos_in_output: the token of the end stands behind rows that ended.
            seed: the same again for the same seed; None draws one.
            max_tokens: more tokens than this are made piece by piece, each hearing the last quarter of the one before: as many as
                the transformer learned from, at most.
        """
        if max_tokens is not None and max_tokens < 2 * self.groups:
            raise ValueError(f"max_tokens={max_tokens} must be at least {2 * self.groups}")
        if prime_wave is not None:
            prime_ids = self.prompt_ids(prime_wave, prime_lengths, prime_wave_input_sample_hz)
        sampling = Sampling.asked(temperature, top_k, top_p, filter_thres, self.guidance(cond_scale))
        condition = self.said(text, text_embeds, **texts)
        return semantic_tokens(
            self.transformer,
            max_length,
            None if prime_ids is None else self.deduplicated(prime_ids),
            Sampled(condition, batch_size, sampling, seed),
            include_eos_in_output,
            max_tokens,
            self.groups,
        )


class CoarseTransformerWrapper(Stage):
    condition_name = "coarse"

    transformer: CoarseTransformer

    def __init__(
        self,
        *,
        transformer: CoarseTransformer,
        codec: Codec | None = None,
        wav2vec: SemanticTokenizer | None = None,
        audio_conditioner: Any = None,
        pad_id: int = PAD,
        unique_consecutive: bool = True,
        semantic_cross_entropy_loss_weight: float = 1.0,
        mask_prob: float = 0.15,
    ):
        """
        Args:
            codec: makes the codes of audio, and audio of codes. None learns from token ids alone.
            semantic_cross_entropy_loss_weight: how much predicting the semantic tokens counts.
            The others: see `SemanticTransformerWrapper`.
        """
        super().__init__()
        check_pad(pad_id)
        self._hold(transformer, mask_prob, codec=codec, wav2vec=wav2vec, audio_conditioner=audio_conditioner)
        self.unique_consecutive = unique_consecutive
        self.semantic_cross_entropy_loss_weight = semantic_cross_entropy_loss_weight
        check_stages(transformer, codec, wav2vec, transformer.num_coarse_quantizers)

    def tokens(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        codes = self._codes_of(batch)[..., : self.transformer.num_coarse_quantizers]
        return {
            "semantic_token_ids": self._semantic_of(batch),
            "coarse_token_ids": codes,
            "is_end": batch.get("is_end"),
        }

    def labels(
        self,
        semantic_token_ids: Int[Tensor, "b n"],
        coarse_token_ids: Int[Tensor, "b t q"],
        is_end: Bool[Tensor, "b"] | None = None,
    ) -> dict[str, Int[Tensor, "b _"]]:
        coarse = with_end(coarse_token_ids.flatten(1), is_end, self.transformer.eos_id)
        if self.transformer.to_semantic_logits is None or not self.semantic_cross_entropy_loss_weight:
            return {"coarse": coarse}
        return {"semantic": semantic_token_ids, "coarse": coarse}

    def forward(
        self,
        *,
        semantic_token_ids: Int[Tensor, "b n"] | None = None,
        raw_wave: Wave | None = None,
        raw_wave_for_codec: Wave | None = None,
        text: Sequence[str] | None = None,
        text_embeds: Float[Tensor, "b m e"] | None = None,
        coarse_token_ids: Int[Tensor, "b ..."] | None = None,
        return_loss: bool = False,
        is_end: Bool[Tensor, "b"] | None = None,
        return_losses: bool = False,
        **options: Any,
    ) -> Any:
        """Logits (semantic, coarse); with `return_loss` the loss, with `return_losses` that and its parts.

        Give waves or tokens; `raw_wave_for_codec` is `raw_wave` unless the codec has another rate.
        """
        q, ids = self.transformer.num_coarse_quantizers, self._given_ids(semantic_token_ids, raw_wave)
        codes = self._given_codes(
            coarse_token_ids, semantic_token_ids, raw_wave, raw_wave_for_codec, "coarse_token_ids"
        )
        given = {
            "semantic_token_ids": ids,
            "coarse_token_ids": by_frame(codes if coarse_token_ids is not None else codes[..., :q], q),
        }
        tokens = {**given, "is_end": is_end}
        waves = {"raw_wave": raw_wave, "raw_wave_for_codec": raw_wave_for_codec}
        condition = self._condition(text, text_embeds, options, **waves, semantic_token_ids=semantic_token_ids)
        semantic, coarse_logits = self.transformer(**given, forget_prob=self.forget_prob, **condition)
        weights = {"semantic": self.semantic_cross_entropy_loss_weight}
        return self._answer(
            {"semantic": semantic, "coarse": coarse_logits}, weights, tokens, return_loss, return_losses
        )

    @torch.no_grad()
    def generate(
        self,
        *,
        semantic_token_ids: Int[Tensor, "#b n"],
        prime_wave: Wave | None = None,
        prime_wave_input_sample_hz: int | None = None,
        prime_coarse_token_ids: Int[Tensor, "#b t q"] | None = None,
        text: Sequence[str] | None = None,
        text_embeds: Float[Tensor, "#b m e"] | None = None,
        max_time_steps: int = 512,
        cond_scale: float | None = None,
        filter_thres: float | None = None,
        temperature: float = 1.0,
        reconstruct_wave: bool = False,
        use_kv_cache: bool = True,
        prime_lengths: Lengths | None = None,
        seed: int | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        max_frames: int | None = None,
        **texts: Any,
    ) -> Any:
        """Codes `[b, t, q]`, at most `max_time_steps` frames with those of the prompt, and -1 past the end of a row; or their
        sound (`reconstruct_wave`).

        Args:
            max_frames: more frames than this are made piece by piece, each from its own semantic tokens and hearing the last quarter
                of the piece before: as many as the transformer learned from, at most.
            The others: see `SemanticTransformerWrapper.generate`.
        """
        if prime_wave is not None:
            codes = self.prompt_codes(prime_wave, prime_lengths, prime_wave_input_sample_hz)
            prime_coarse_token_ids = codes[..., : self.transformer.num_coarse_quantizers]
        sampling = Sampling.asked(temperature, top_k, top_p, filter_thres, self.guidance(cond_scale))
        condition = self.said(text, text_embeds, **texts)
        made = flat_codes(
            self.transformer,
            self.deduplicated(semantic_token_ids),
            max_time_steps,
            prime_coarse_token_ids,
            Sampled(condition, len(semantic_token_ids), sampling, seed),
            self._pieces(max_frames),
        )
        return waves_of(self.needed_codec, made) if reconstruct_wave else made


class FineTransformerWrapper(Stage):
    condition_name = "fine"

    transformer: FineTransformer

    def __init__(
        self,
        *,
        transformer: FineTransformer,
        codec: Codec | None = None,
        audio_conditioner: Any = None,
        coarse_cross_entropy_loss_weight: float = 1.0,
        pad_id: int = PAD,
        mask_prob: float = 0.15,
    ):
        """
        Args:
            coarse_cross_entropy_loss_weight: how much predicting the coarse codes counts.
            The others: see `CoarseTransformerWrapper`.
        """
        super().__init__()
        check_pad(pad_id)
        self._hold(transformer, mask_prob, codec=codec, audio_conditioner=audio_conditioner)
        self.coarse_cross_entropy_loss_weight = coarse_cross_entropy_loss_weight
        check_stages(transformer, codec, None, transformer.num_coarse_quantizers + transformer.num_fine_quantizers)

    def tokens(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return self._split(self._codes_of(batch))

    def _split(self, codes: Int[Tensor, "b t _"]) -> dict[str, Any]:
        coarse, fine = self.transformer.num_coarse_quantizers, self.transformer.num_fine_quantizers
        if codes.shape[2] < coarse + fine:
            raise ValueError(f"codes of shape {list(codes.shape)} must be [b, t, {coarse + fine}], of all quantizers")
        codes = self._padded_alike(codes)
        return {"coarse_token_ids": codes[..., :coarse], "fine_token_ids": codes[..., coarse : coarse + fine]}

    def _padded_alike(self, codes: Int[Tensor, "b t _"]) -> Int[Tensor, "b t _"]:
        """-1 also where the transformer's own pad_id stands past the end of a row."""
        return codes.long().masked_fill(codes == self.transformer.pad_id, PAD)

    def labels(
        self, coarse_token_ids: Int[Tensor, "b t q"], fine_token_ids: Int[Tensor, "b t r"]
    ) -> dict[str, Int[Tensor, "b _"]]:
        fine = fine_token_ids.flatten(1)
        if not self.transformer.project_coarse_logits or not self.coarse_cross_entropy_loss_weight:
            return {"fine": fine}
        return {"coarse": coarse_token_ids.flatten(1), "fine": fine}

    def forward(
        self,
        *,
        raw_wave: Wave | None = None,
        text: Sequence[str] | None = None,
        text_embeds: Float[Tensor, "b m e"] | None = None,
        token_ids: Int[Tensor, "b t q"] | None = None,
        coarse_token_ids: Int[Tensor, "b ..."] | None = None,
        fine_token_ids: Int[Tensor, "b ..."] | None = None,
        return_loss: bool = False,
        return_losses: bool = False,
        **options: Any,
    ) -> Any:
        """Logits (coarse, fine); with `return_loss` the loss, with `return_losses` that and its parts.

        Give a wave, the codes of all quantizers (`token_ids`), or the coarse and the fine ones.
        """
        transformer = self.transformer
        if coarse_token_ids is None or fine_token_ids is None:
            tokens = self._split(self.codes(needed(raw_wave, "token_ids")) if token_ids is None else token_ids)
        else:
            tokens = {
                "coarse_token_ids": self._padded_alike(by_frame(coarse_token_ids, transformer.num_coarse_quantizers)),
                "fine_token_ids": self._padded_alike(by_frame(fine_token_ids, transformer.num_fine_quantizers)),
            }
        condition = self._condition(text, text_embeds, options, raw_wave=raw_wave)
        coarse, fine = transformer(**tokens, forget_prob=self.forget_prob, **condition)
        weights = {"coarse": self.coarse_cross_entropy_loss_weight}
        logits = {"coarse": coarse, "fine": fine[:, :-1]}
        return self._answer(logits, weights, tokens, return_loss, return_losses)

    @torch.no_grad()
    def generate(
        self,
        *,
        coarse_token_ids: Int[Tensor, "#b ..."],
        prime_wave: Wave | None = None,
        prime_wave_input_sample_hz: int | None = None,
        prime_fine_token_ids: Int[Tensor, "#b t q"] | None = None,
        text: Sequence[str] | None = None,
        text_embeds: Float[Tensor, "#b m e"] | None = None,
        cond_scale: float | None = None,
        filter_thres: float | None = None,
        temperature: float = 1.0,
        reconstruct_wave: bool = False,
        use_kv_cache: bool = True,
        mask_out_generated_fine_tokens: bool = False,
        prime_lengths: Lengths | None = None,
        max_frames: int | None = None,
        seed: int | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        **texts: Any,
    ) -> Any:
        """The fine codes `[b, t, q]` of the frames of coarse ones, and -1 where those are; or their sound (`reconstruct_wave`).

        Args:
            coarse_token_ids: `[b, t, q]`, or flat.
            mask_out_generated_fine_tokens: without effect: there are never fine codes without coarse ones.
            max_frames: more frames than this are made piece by piece, each hearing the last quarter of the one before: as
                many as the transformer learned from, at most.
            The others: see `SemanticTransformerWrapper.generate`.
        """
        coarse = self._padded_alike(by_frame(coarse_token_ids, self.transformer.num_coarse_quantizers))
        coarse = coarse.masked_fill((coarse < 0).any(dim=-1, keepdim=True), PAD)
        if prime_wave is not None:
            codes = self.prompt_codes(prime_wave, prime_lengths, prime_wave_input_sample_hz)
            prime_fine_token_ids = self._split(codes)["fine_token_ids"]
        elif prime_fine_token_ids is not None:
            prime_fine_token_ids = self._padded_alike(prime_fine_token_ids)
        sampling = Sampling.asked(temperature, top_k, top_p, filter_thres, self.guidance(cond_scale))
        condition = self.said(text, text_embeds, **texts)
        fine = fine_codes(
            self.transformer, coarse, prime_fine_token_ids, max_frames, Sampled(condition, len(coarse), sampling, seed)
        )
        return waves_of(self.needed_codec, torch.cat((coarse, fine), dim=-1)) if reconstruct_wave else fine


class DelayedTransformerWrapper(Stage):
    """Codes of all quantizers with one step a frame, in the place of the coarse and the fine stage."""

    condition_name = "coarse"

    transformer: DelayedTransformer

    def __init__(
        self,
        *,
        transformer: DelayedTransformer,
        codec: Codec | None = None,
        wav2vec: SemanticTokenizer | None = None,
        audio_conditioner: Any = None,
        unique_consecutive: bool = True,
        mask_prob: float = 0.15,
    ):
        """The arguments: see `CoarseTransformerWrapper`."""
        super().__init__()
        self._hold(transformer, mask_prob, codec=codec, wav2vec=wav2vec, audio_conditioner=audio_conditioner)
        self.unique_consecutive = unique_consecutive
        check_stages(transformer, codec, wav2vec, transformer.num_quantizers)

    def tokens(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        codes = self._codes_of(batch)[..., : self.transformer.num_quantizers]
        return {"semantic_token_ids": self._semantic_of(batch), "token_ids": codes, "is_end": batch.get("is_end")}

    def labels(
        self,
        semantic_token_ids: Int[Tensor, "b n"],
        token_ids: Int[Tensor, "b t q"],
        is_end: Bool[Tensor, "b"] | None = None,
    ) -> dict[str, Int[Tensor, "b _"]]:
        """The end is said by the first quantizer alone: that the others end after it needs no saying."""
        first, *finer = delayed(token_ids, PAD).unbind(dim=-1)
        ended = with_end(first[:, :-1], is_end, self.transformer.eos_id)
        return {"codes": torch.stack((ended, *finer), dim=-1).flatten(1)}

    def forward(
        self,
        *,
        semantic_token_ids: Int[Tensor, "b n"] | None = None,
        raw_wave: Wave | None = None,
        raw_wave_for_codec: Wave | None = None,
        token_ids: Int[Tensor, "b t q"] | None = None,
        text: Sequence[str] | None = None,
        text_embeds: Float[Tensor, "b m e"] | None = None,
        return_loss: bool = False,
        is_end: Bool[Tensor, "b"] | None = None,
        return_losses: bool = False,
        **options: Any,
    ) -> Any:
        """Logits `[b, t + q, q, v]`; with `return_loss` the loss, with `return_losses` that and its parts."""
        ids = self._given_ids(semantic_token_ids, raw_wave)
        codes = self._given_codes(token_ids, semantic_token_ids, raw_wave, raw_wave_for_codec, "token_ids")
        given = {"semantic_token_ids": ids, "token_ids": codes[..., : self.transformer.num_quantizers]}
        tokens = {**given, "is_end": is_end}
        waves = {"raw_wave": raw_wave, "raw_wave_for_codec": raw_wave_for_codec}
        condition = self._condition(text, text_embeds, options, **waves, semantic_token_ids=semantic_token_ids)
        logits = self.transformer(**given, forget_prob=self.forget_prob, **condition)
        if not (return_loss or return_losses):
            return logits
        return self._answer({"codes": logits.flatten(1, 2)}, {}, tokens, return_loss, return_losses)

    @torch.no_grad()
    def generate(
        self,
        *,
        semantic_token_ids: Int[Tensor, "#b n"],
        prime_wave: Wave | None = None,
        prime_wave_input_sample_hz: int | None = None,
        prime_token_ids: Int[Tensor, "#b t q"] | None = None,
        text: Sequence[str] | None = None,
        text_embeds: Float[Tensor, "#b m e"] | None = None,
        max_time_steps: int = 512,
        cond_scale: float | None = None,
        filter_thres: float | None = None,
        temperature: float = 1.0,
        reconstruct_wave: bool = False,
        prime_lengths: Lengths | None = None,
        seed: int | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        max_frames: int | None = None,
        **texts: Any,
    ) -> Any:
        """Codes `[b, t, q]` of all quantizers, or their sound. The arguments: see `CoarseTransformerWrapper.generate`."""
        if prime_wave is not None:
            codes = self.prompt_codes(prime_wave, prime_lengths, prime_wave_input_sample_hz)
            prime_token_ids = codes[..., : self.transformer.num_quantizers]
        sampling = Sampling.asked(temperature, top_k, top_p, filter_thres, self.guidance(cond_scale))
        condition = self.said(text, text_embeds, **texts)
        made = delayed_codes(
            self.transformer,
            self.deduplicated(semantic_token_ids),
            max_time_steps,
            prime_token_ids,
            Sampled(condition, len(semantic_token_ids), sampling, seed),
            self._pieces(max_frames),
        )
        return waves_of(self.needed_codec, made) if reconstruct_wave else made
