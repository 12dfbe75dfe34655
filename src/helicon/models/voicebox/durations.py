"""How long each phoneme lasts (Voicebox, Le et al. 2023, section 3.2): a regression, filled in as its speech is.

A bidirectional transformer reads the phonemes of an utterance and the durations of those whose durations are known, and says how
long the others last. While it learns, the durations of a run of phonemes, or of all, are hidden; the loss is the absolute error
of the logarithm of the hidden ones. What it says in evaluation depends on nothing random. The true durations come with the data
(the column `durations` of a manifest): there is no aligner.

Letters: b batch, m phonemes, t frames, d features.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from helicon.models.voicebox.model import ConvolvedPositions, checked_masking, hidden_mask, repeated
from helicon.nn.capture import evaluating
from helicon.nn.devices import drawn_by
from helicon.nn.network import Network
from helicon.nn.transformer import Transformer

USUAL = 0.1  # seconds of a phoneme: a network that has learned nothing says about this
SHORTEST = 0.005  # seconds; logarithms go no lower

Seconds = Float[Tensor, "b m"]


class DurationPredictor(Network):
    """Phonemes in, seconds (or frames) out."""

    audio_enc_dec: Any
    tokenizer: Any

    def __init__(
        self,
        *,
        audio_enc_dec: Network | None = None,
        tokenizer: Network | None = None,
        num_phoneme_tokens: int | None = None,
        dim_phoneme_emb: int = 512,
        dim: int = 512,
        depth: int = 10,
        dim_head: int = 64,
        heads: int = 8,
        ff_mult: float = 4,
        ff_dropout: float = 0.0,
        conv_pos_embed_kernel_size: int = 31,
        conv_pos_embed_groups: int | None = None,
        attn_dropout: float = 0.0,
        attn_flash: bool = False,
        attn_qk_norm: bool = True,
        use_gateloop_layers: bool = False,
        p_drop_prob: float = 0.2,
        frac_lengths_mask: tuple[float, float] | list[float] = (0.1, 1.0),
        aligner_kwargs: Mapping[str, Any] | None = None,
    ):
        """
        Args:
            audio_enc_dec: the space of the features whose frames `predict` counts. It is used, never changed nor saved here.
            tokenizer: makes phonemes of texts (`PhonemeTokenizer`, `PhonemeInventory`), likewise.
            num_phoneme_tokens: how many different phonemes there are; those of the tokenizer where there is one.
            dim_phoneme_emb: features of a phoneme.
            conv_pos_embed_groups: None for a convolution of each feature by itself.
            attn_flash: without effect: attention is always `scaled_dot_product_attention`, which chooses its kernel itself.
            use_gateloop_layers: there are none; True is refused.
            p_drop_prob: how often a row learns without any known duration.
            frac_lengths_mask: the least and the most of a row's phonemes that are hidden otherwise, in one run.
            aligner_kwargs: there is no aligner, durations come with the data; anything but None is refused.
        """
        super().__init__()
        if use_gateloop_layers:
            raise ValueError("use_gateloop_layers=True: there are no gateloop layers here, leave it out")
        if aligner_kwargs is not None:
            raise ValueError(
                "aligner_kwargs: there is no aligner here, leave it out; durations come from the column `durations` of a manifest"
            )
        # Not submodules: they are not ours to change.
        self.__dict__["audio_enc_dec"], self.__dict__["tokenizer"] = audio_enc_dec, tokenizer
        self.num_phoneme_tokens = _num_tokens(self.tokenizer, num_phoneme_tokens)
        self.p_drop_prob, self.frac_lengths_mask = checked_masking(p_drop_prob, frac_lengths_mask)
        self.embedding = nn.Embedding(self.num_phoneme_tokens, dim_phoneme_emb)
        # Beside a duration stands whether it is hidden: the usual one looks like a hidden one otherwise.
        self.to_hidden = nn.Linear(dim_phoneme_emb + 2, dim)
        self.positions = ConvolvedPositions(dim, conv_pos_embed_kernel_size, conv_pos_embed_groups)
        self.transformer = Transformer(
            dim,
            depth,
            heads=heads,
            dim_head=dim_head,
            ff_mult=ff_mult,
            qk_norm=attn_qk_norm,
            dropout=ff_dropout,
            attn_dropout=attn_dropout,
        )
        self.to_duration = nn.Linear(dim, 1)
        nn.init.zeros_(self.to_duration.weight)
        nn.init.zeros_(self.to_duration.bias)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "DurationPredictor":
        """Takes the feature space along to another device."""
        super()._apply(fn, recurse)
        if self.audio_enc_dec is not None:
            self.audio_enc_dec.to(self.device)
        return self

    @property
    def device(self) -> torch.device:
        return self.to_duration.weight.device

    def draw_hidden(
        self, is_phoneme: Bool[Tensor, "b m"], generator: torch.Generator | None = None
    ) -> Bool[Tensor, "b m"]:
        """Phonemes to learn from: all of a row in `p_drop_prob` of the rows, and one run of them in the others."""
        return hidden_mask(is_phoneme, self.p_drop_prob, self.frac_lengths_mask, generator)

    def forward(
        self,
        *,
        cond: Seconds | None = None,
        texts: Sequence[str] | None = None,
        phoneme_ids: Int[Tensor, "b m"] | None = None,
        cond_drop_prob: float = 0.0,
        target: Seconds | None = None,
        cond_mask: Bool[Tensor, "b m"] | None = None,
        self_attn_mask: Bool[Tensor, "b m"] | None = None,
        generator: torch.Generator | None = None,
    ) -> Seconds | Float[Tensor, ""]:
        """The seconds of each phoneme, 0 past the end; or, of a `target`, the loss: the mean absolute error of the logarithms of its
        hidden real phonemes.

        Args:
            cond: seconds, of which those outside of `cond_mask` are known; the target itself where there is one.
            texts, phoneme_ids: what is said, as texts or as ids, -1 past the end of a row.
            cond_drop_prob: how often a row's known durations are left out.
            cond_mask: True = hidden, to be found. Drawn while this learns (`draw_hidden`); all in evaluation.
            self_attn_mask: True = a real phoneme, where -1 does not tell.
            generator: of what is drawn.
        """
        phoneme_ids = self._ids(texts, phoneme_ids)
        is_phoneme = phoneme_ids >= 0 if self_attn_mask is None else self_attn_mask
        if cond is not None and target is None and cond_mask is None:
            raise ValueError(
                "which durations of cond are known? Give cond_mask, True for those that are hidden and to be found"
            )
        if cond_mask is None:
            learns = target is not None and self.training
            cond_mask = self.draw_hidden(is_phoneme, generator) if learns else is_phoneme
        hidden = cond_mask
        if cond_drop_prob:
            dropped = torch.rand(len(hidden), 1, device=hidden.device, **drawn_by(generator)) < cond_drop_prob
            hidden = hidden | dropped
        cond = target if cond is None else cond
        logarithms = self.logarithms(phoneme_ids, is_phoneme, hidden, cond)
        if target is None:
            return (USUAL * logarithms.exp()).masked_fill(~is_phoneme, 0.0)
        error = (logarithms - _logarithm(target)).abs()
        counted = cond_mask & is_phoneme
        return error.masked_fill(~counted, 0.0).sum() / counted.sum().clamp(min=1)

    def logarithms(
        self,
        phoneme_ids: Int[Tensor, "b m"],
        is_phoneme: Bool[Tensor, "b m"],
        hidden: Bool[Tensor, "b m"],
        seconds: Seconds | None,
    ) -> Float[Tensor, "b m"]:
        """ln(seconds / 0.1) of each phoneme, from the phonemes and the seconds that are not hidden."""
        dtype = self.to_hidden.weight.dtype
        known = torch.zeros_like(hidden, dtype=dtype) if seconds is None else _logarithm(seconds).to(dtype)
        if seconds is None:
            hidden = torch.ones_like(hidden)
        known = known.masked_fill(hidden | ~is_phoneme, 0.0)
        embedded = self.embedding(phoneme_ids.clamp(min=0)).to(dtype)
        x = self.to_hidden(torch.cat((embedded, known[..., None], hidden[..., None].to(dtype)), dim=-1)).to(dtype)
        x = self.positions(x.masked_fill(~is_phoneme[..., None], 0.0))
        return self.to_duration(self.transformer(x, is_phoneme))[..., 0].float()

    def forward_with_cond_scale(self, *, cond_scale: float = 1.0, **inputs: Any) -> Seconds:
        """The seconds of each phoneme, led away from what they would be if none were known: in logarithms,
        `unknowing + cond_scale (knowing - unknowing)`. `inputs` as for `forward`."""
        knowing = self(**inputs)
        if cond_scale == 1:
            return knowing
        unknowing = self(**inputs, cond_drop_prob=1.0)
        return (unknowing * (knowing / unknowing) ** cond_scale).masked_fill(knowing == 0, 0.0)

    @torch.no_grad()
    def predict_seconds(
        self,
        phoneme_ids: Int[Tensor, "b m"] | None = None,
        *,
        texts: Sequence[str] | None = None,
        cond: Seconds | None = None,
        cond_mask: Bool[Tensor, "b m"] | None = None,
        cond_scale: float = 1.0,
    ) -> Seconds:
        """How long each phoneme lasts, 0 past the end. Those of `cond` that are not hidden stay as they are."""
        phoneme_ids = self._ids(texts, phoneme_ids)
        cond = None if cond is None else cond.to(self.device)
        cond_mask = None if cond_mask is None else cond_mask.to(self.device)
        with evaluating(self):
            found = self.forward_with_cond_scale(
                cond_scale=cond_scale, phoneme_ids=phoneme_ids, cond=cond, cond_mask=cond_mask
            )
        if cond is None or cond_mask is None:
            return found
        return torch.where(cond_mask | (phoneme_ids < 0), found, cond.float())

    def predict(
        self,
        phoneme_ids: Int[Tensor, "b m"] | None = None,
        *,
        frame_hz: float | None = None,
        **inputs: Any,
    ) -> Int[Tensor, "b m"]:
        """The same in whole frames, `frame_hz` of them a second, or as many as the features of `audio_enc_dec` have. `inputs` as for
        `predict_seconds`."""
        if frame_hz is None:
            if self.audio_enc_dec is None:
                raise ValueError(
                    "how many frames has a second? Build this with audio_enc_dec, give frame_hz, or ask for predict_seconds"
                )
            frame_hz = self.audio_enc_dec.sample_hz / self.audio_enc_dec.downsample_factor
        return frames_of(self.predict_seconds(phoneme_ids, **inputs), frame_hz)

    def align_phoneme_ids_with_durations(
        self, phoneme_ids: Int[Tensor, "b m"], durations: Int[Tensor, "b m"]
    ) -> Int[Tensor, "b t"]:
        """The phoneme of each frame, where each phoneme lasts for so many frames; -1 past the end of a row."""
        durations = durations.clamp(min=0)
        return repeated(phoneme_ids, durations, int(durations.sum(dim=1).max()))

    def _ids(self, texts: Sequence[str] | None, phoneme_ids: Tensor | None) -> Int[Tensor, "b m"]:
        if (texts is None) == (phoneme_ids is None):
            raise ValueError("what is said? Give texts or phoneme_ids, one of them")
        if phoneme_ids is None:
            if self.tokenizer is None:
                raise ValueError(
                    "there is no tokenizer to read texts with: build this with tokenizer=..., or give phoneme_ids"
                )
            phoneme_ids = self.tokenizer(texts)
        if phoneme_ids.numel() == 0:
            raise ValueError("nothing is said in these texts: a batch needs at least one phoneme")
        return phoneme_ids.to(self.device)


def frames_of(seconds: Seconds, frame_hz: float, totals: Int[Tensor, " b"] | None = None) -> Int[Tensor, "b m"]:
    """Whole frames of each duration, each end rounded to the nearest frame, so that no error adds up.

    With `totals` a row has exactly so many: what its durations leave over, or take too much, is the last one's (the silence after the
    last word, as a rule). Durations of 0 at the end of a row are padding.
    """
    ends = (seconds.clamp(min=0).double().cumsum(dim=1) * frame_hz).round().long()
    if totals is not None:
        places = torch.arange(seconds.shape[1], device=seconds.device)
        last = torch.where(seconds > 0, places, 0).amax(dim=1, keepdim=True)
        ends = torch.where(places >= last, totals[:, None], torch.minimum(ends, totals[:, None]))
    return ends.diff(dim=1, prepend=torch.zeros_like(ends[:, :1]))


def _logarithm(seconds: Seconds) -> Float[Tensor, "b m"]:
    return (seconds.float().clamp(min=SHORTEST) / USUAL).log()


def _num_tokens(tokenizer: Any, given: int | None) -> int:
    if tokenizer is None:
        if given is None:
            raise ValueError("how many different phonemes are there? Give num_phoneme_tokens, or a tokenizer")
        return given
    if given not in (None, tokenizer.num_tokens):
        raise ValueError(f"num_phoneme_tokens={given} is not the {tokenizer.num_tokens} of the tokenizer: leave it out")
    return tokenizer.num_tokens
