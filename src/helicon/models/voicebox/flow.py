"""Conditional flow matching (Lipman et al. 2022; Voicebox, Le et al. 2023): how a VoiceBox learns, and how it speaks.

With x1 the features of a sound and x0 noise, the straight path between them and its velocity are

    w = (1 - (1 - sigma) t) x0 + t x1,    u = x1 - (1 - sigma) x0,    loss = |velocity(w, t) - u|^2  over hidden frames

and a sound is made by following the velocity from noise at t = 0 to t = 1. The context that the network sees is the clean x1,
outside of what is hidden. Features are standardised here: `feature_mean` and `feature_std` are saved with the weights, and so is
how many tokens a frame of what was learned from has, `feature_pace`.

Letters: b batch, n frames, w samples, d features, m tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from helicon.config import nearest
from helicon.models.soundstream.codecs import check_floats
from helicon.models.voicebox.model import VoiceBox, repeated
from helicon.models.voicebox.solving import Drawn, Evaluator, Prompt, Solving, canvas
from helicon.nn.capture import evaluating
from helicon.nn.devices import drawn_by, sent
from helicon.nn.lengths import before
from helicon.nn.network import Network

Sound = Float[Tensor, "b w"] | Float[Tensor, "b n d"]  # a wave, or its features
Lengths = Int[Tensor, " b"]
Durations = Int[Tensor, "_ _"]  # frames of each phoneme
Said = Mapping[str, Any]  # tokens or texts, by one of the names below

THEIR_METHODS = {"dopri5": "adaptive"}  # what torchdiffeq calls ours
SAID = ("texts", "text_token_ids", "semantic_token_ids", "phoneme_ids")
LEAST_STD = 1e-5  # of a feature; one that never changes is left as large as it is


class Randomness(NamedTuple):
    """All that is random in one pass of training."""

    noise: Tensor  # [b, n, d]
    times: Tensor  # [b]
    hidden: Tensor  # [b, n], the real frames that the loss counts
    keep: Tensor  # [b], False where a row learns without text and context

    @property
    def num_hidden(self) -> Int[Tensor, ""]:
        """How many frames the loss is the mean of: what a batch weighs beside others."""
        return self.hidden.sum()


class ConditionalFlowMatcherWrapper(Network):
    parts: ClassVar[tuple[str, ...]] = ("voicebox",)
    later: ClassVar[tuple[str, ...]] = ("feature_pace",)

    text_to_semantic: Any
    duration_predictor: Any
    tokenizer: Any
    feature_mean: Tensor
    feature_std: Tensor
    feature_pace: Tensor  # 0 where it is not known

    def __init__(
        self,
        voicebox: VoiceBox,
        text_to_semantic: Network | None = None,
        duration_predictor: Network | None = None,
        sigma: float = 0.0,
        ode_atol: float = 1e-5,
        ode_rtol: float = 1e-5,
        use_torchode: bool = False,
        torchdiffeq_ode_method: str = "midpoint",
        torchode_method_klass: Any = None,
        cond_drop_prob: float = 0.2,
        *,
        tokenizer: Network | None = None,
        semantic_hz: float | None = None,
    ):
        """
        Args:
            text_to_semantic: makes semantic tokens of texts (a `SemanticTransformerWrapper` that keeps repeated tokens), and with its
                `wav2vec` of sounds.
            duration_predictor: says how long each phoneme of a text lasts, and so how long the whole does.
            sigma: noise that is left at t = 1.
            ode_atol, ode_rtol: errors that the adaptive solver allows for.
            use_torchode: the adaptive solver, that of Dormand and Prince (torchode itself is not used).
            torchdiffeq_ode_method: the solver where `sample` names none: "euler", "midpoint", "rk4", or "adaptive" ("dopri5").
            cond_drop_prob: how often a row learns without text and context. Guidance is nothing without it.
            tokenizer: makes tokens of texts (`CharacterTokenizer`, `PhonemeTokenizer`); the duration_predictor's by default.
            semantic_hz: semantic tokens a second, where `text_to_semantic` does not tell.
            text_to_semantic, duration_predictor and tokenizer are used, never changed nor saved here.
        """
        super().__init__()
        if torchode_method_klass is not None:
            raise ValueError("torchode_method_klass: torchode is not used; leave it out, and name a method in sample")
        if not 0 <= sigma < 1:
            raise ValueError(f"sigma={sigma} must be at least 0 and below 1")
        if not 0 <= cond_drop_prob < 1:
            raise ValueError(f"cond_drop_prob={cond_drop_prob} must be at least 0 and below 1")
        self.voicebox = voicebox
        # Not submodules: their weights and their mode are not this network's to change.
        self.__dict__["text_to_semantic"] = text_to_semantic
        self.__dict__["duration_predictor"] = duration_predictor
        self.__dict__["tokenizer"] = getattr(duration_predictor, "tokenizer", None) if tokenizer is None else tokenizer
        self.sigma, self.cond_drop_prob = sigma, cond_drop_prob
        method = "adaptive" if use_torchode else THEIR_METHODS.get(torchdiffeq_ode_method, torchdiffeq_ode_method)
        self.solving = Solving(method=method, atol=ode_atol, rtol=ode_rtol)
        self.evaluator = Evaluator()
        self.semantic_hz = _semantic_hz(text_to_semantic, semantic_hz)
        self.register_buffer("feature_mean", torch.zeros(voicebox.dim_in))
        self.register_buffer("feature_std", torch.ones(voicebox.dim_in))
        self.register_buffer("feature_pace", torch.zeros(()))
        self._check_tokens()

    def _check_tokens(self) -> None:
        if self.tokenizer is not None and self.text_to_semantic is not None:
            raise ValueError("tokenizer and text_to_semantic both read texts: give one of them")
        sizes = {
            "tokenizer": getattr(self.tokenizer, "num_tokens", None),
            "text_to_semantic": getattr(getattr(self.text_to_semantic, "wav2vec", None), "codebook_size", None),
        }
        if self.voicebox.alignment == "frames":
            sizes["duration_predictor"] = getattr(self.duration_predictor, "num_phoneme_tokens", None)
        for name, size in sizes.items():
            if size is not None and size != self.voicebox.num_cond_tokens:
                raise ValueError(
                    f"the {name} has {size} tokens, and the voicebox num_cond_tokens={self.voicebox.num_cond_tokens}: build it with {size}"
                )

    def _apply(self, fn: Any, recurse: bool = True) -> "ConditionalFlowMatcherWrapper":
        """Takes the frozen networks along to another device; their precision stays."""
        super()._apply(fn, recurse)
        for network in self.frozen.values():
            network.to(self.device)
        return self

    @property
    def device(self) -> torch.device:
        return self.voicebox.device

    @property
    def audio_enc_dec(self) -> Any:
        return self.voicebox.audio_enc_dec

    @property
    def frozen(self) -> dict[str, Any]:
        names = ("audio_enc_dec", "text_to_semantic", "duration_predictor", "tokenizer")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    # ------------------------------------------------------------------ sounds to features

    @torch.no_grad()
    def fit_normalisation(self, features: Float[Tensor, "b n d"], mask: Bool[Tensor, "b n"] | None = None) -> None:
        """Takes mean and standard deviation of each feature, over real frames."""
        real = features.flatten(0, 1) if mask is None else features[mask]
        if not len(real) or not real.isfinite().all():
            raise ValueError(
                f"{len(real)} frames of features, all of which must be finite numbers, say nothing of their mean"
            )
        std, mean = torch.std_mean(real.double(), dim=0, correction=0)
        self.feature_mean.copy_(mean)
        self.feature_std.copy_(torch.where(std > LEAST_STD, std, 1.0))

    @property
    def is_fitted(self) -> bool:
        """Whether mean and standard deviation of the features are known."""
        return bool((self.feature_mean != 0).any() or (self.feature_std != 1).any())

    def normalise(self, features: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        return (features.float() - self.feature_mean) / self.feature_std

    def denormalise(self, features: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        return features * self.feature_std + self.feature_mean

    @torch.no_grad()
    def features(
        self, audio: Float[Tensor, "b w"], lengths: Lengths | None = None, input_sampling_rate: int | None = None
    ) -> tuple[Float[Tensor, "b n d"], Lengths]:
        """The features of sounds, and how many frames each has. `lengths` count samples at the rate of the audio."""
        space = self._space("turn sounds into features")
        with torch.autocast(audio.device.type, enabled=False), evaluating(space):
            found = space.encode(audio.float(), lengths, input_sampling_rate)
        if lengths is None:
            return found, torch.full((len(found),), found.shape[1], device=found.device)
        return found, space.frame_lengths(self._samples(lengths, input_sampling_rate))

    def _samples(self, lengths: Lengths, input_sampling_rate: int | None) -> Lengths:
        """Lengths at the rate of the feature space, as `resample` makes them."""
        rate = self.audio_enc_dec.sample_hz
        return lengths if input_sampling_rate is None else -(-lengths * rate // input_sampling_rate)

    def _space(self, purpose: str) -> Any:
        if self.audio_enc_dec is None:
            raise ValueError(
                f"this VoiceBox was built without an audio_enc_dec to {purpose}: build it with one, or give features, and lengths in "
                "frames"
            )
        return self.audio_enc_dec

    def _framed(
        self, sound: Sound, lengths: Lengths | None, input_sampling_rate: int | None
    ) -> tuple[Float[Tensor, "b n d"], Lengths | None]:
        """Features are taken as they are; `lengths` count samples of waves, frames of features."""
        if sound.ndim == 2:
            features, frames = self.features(sound, lengths, input_sampling_rate)
            return features, None if lengths is None else frames
        return self.checked(sound), lengths

    def checked(self, features: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """Features that are given, once it is seen that they may be this network's; in single precision."""
        if features.shape[-1] != self.voicebox.dim_in:
            raise ValueError(
                f"features of {features.shape[-1]} numbers a frame, and this VoiceBox takes {self.voicebox.dim_in} (dim_in); waves "
                "are [b, n], one channel"
            )
        return features.float()

    # ------------------------------------------------------------------ learning

    def randomness(
        self,
        features: Float[Tensor, "b n d"],
        mask: Bool[Tensor, "b n"] | None = None,
        cond_mask: Bool[Tensor, "b n"] | None = None,
        cond_drop_prob: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Randomness:
        """What a pass over these features needs that is random; the same again for a generator in the same state.

        The rows of a batch draw their times from its b equal strata, one each: each time is still uniform, and batches
        vary less. Without `cond_drop_prob` it is the wrapper's own in training, and 0 in evaluation.
        """
        rows, n, _ = features.shape
        noise = torch.randn(features.shape, device=features.device, **drawn_by(generator))
        order, within = torch.rand(2, rows, device=features.device, **drawn_by(generator))
        times = (order.argsort() + within) / rows
        is_frame = torch.ones(rows, n, dtype=torch.bool, device=features.device) if mask is None else mask
        hidden = self.voicebox.draw_hidden(is_frame, generator) if cond_mask is None else cond_mask & is_frame
        if cond_drop_prob is None:
            cond_drop_prob = self.cond_drop_prob if self.training else 0.0
        keep = self.voicebox.draw_keep(rows, cond_drop_prob, generator)
        return Randomness(noise, times, hidden | (is_frame & ~keep[:, None]), keep)

    def forward(
        self,
        x1: Sound,
        *,
        mask: Bool[Tensor, "b n"] | None = None,
        lengths: Lengths | Sequence[int] | None = None,
        texts: Sequence[str] | None = None,
        text_token_ids: Int[Tensor, "b m"] | None = None,
        semantic_token_ids: Int[Tensor, "b m"] | None = None,
        phoneme_ids: Int[Tensor, "b m"] | None = None,
        phoneme_durations: Int[Tensor, "b m"] | None = None,
        cond: Float[Tensor, "b ..."] | None = None,
        cond_mask: Bool[Tensor, "b n"] | None = None,
        input_sampling_rate: int | None = None,
        cond_drop_prob: float | None = None,
        randomness: Randomness | None = None,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, ""]:
        """The loss: the mean squared error of the velocity over hidden real frames.

        Args:
            x1: waves, or the features of waves as `audio_enc_dec` makes them.
            mask: True = a real frame; or `lengths`, in samples of waves and frames of features.
            texts, text_token_ids, semantic_token_ids, phoneme_ids: what is said, one of them; ids have -1 past the end of a row.
            phoneme_durations: frames of each phoneme, for `alignment="frames"`.
            cond: the context, where it is not x1 itself (a sound with other noise, say); as long as x1.
            cond_mask: True = hidden; drawn by default.
            cond_drop_prob, generator: see `randomness`, which may be given as a whole.
        """
        if mask is not None and lengths is not None:
            raise ValueError("give mask or lengths, not both")
        lengths = None if lengths is None else torch.as_tensor(lengths, device=x1.device)
        given = (texts, text_token_ids, semantic_token_ids, phoneme_ids)
        said = {name: value for name, value in zip(SAID, given, strict=True) if value is not None}
        if self.text_to_semantic is not None and x1.ndim == 2 and not said.keys() - {"texts"}:
            said = {"semantic_token_ids": self.heard(x1, lengths, input_sampling_rate)}
        features, frames = self._framed(x1, lengths, input_sampling_rate)
        if frames is not None:
            mask = before(frames, features.shape[1])
        ids = self._ids(said, phoneme_durations, features.shape[1])
        if ids is None and self.voicebox.condition_on_text:
            raise ValueError(f"this VoiceBox learns what is said: give one of {', '.join(SAID)}")
        if ids is not None and len(ids) != len(features):
            raise ValueError(f"what is said: {len(ids)} cannot belong to {len(features)} sounds: give one for each")
        clean = self.normalise(features)
        context = clean if cond is None else self.normalise(self._framed(cond, None, input_sampling_rate)[0])
        if context.shape != clean.shape:
            raise ValueError(f"cond has {context.shape[1]} frames, and x1 {clean.shape[1]}: they must be equally long")
        if randomness is None:
            randomness = self.randomness(features, mask, cond_mask, cond_drop_prob, generator)
        noise, times, hidden, keep = randomness
        left, t = 1 - self.sigma, times[:, None, None]
        return self.voicebox(
            (1 - left * t) * noise + t * clean,
            times=times,
            cond_token_ids=ids,
            self_attn_mask=mask,
            target=clean - left * noise,
            cond=context,
            cond_mask=hidden,
            keep=keep,
        )

    # ------------------------------------------------------------------ what is said

    def tokenize(self, texts: Sequence[str]) -> Int[Tensor, "b m"]:
        """Tokens of texts, -1 past the end of a row."""
        if self.tokenizer is None:
            raise ValueError("there is no tokenizer to read texts with: build this with tokenizer=..., or give ids")
        return sent(self.tokenizer(texts), self.device)

    def _ids(self, said: Said, durations: Durations | None, n: int | None = None) -> Int[Tensor, "b m"] | None:
        """The tokens that are given, in one of the ways there are; with durations one for each of n frames."""
        if len(said) > 1:
            raise ValueError(f"give one of {' and '.join(said)}: they say the same thing")
        if durations is not None and "phoneme_ids" not in said:
            raise ValueError("phoneme_durations belong to phoneme_ids")
        if not said:
            return None
        ((name, given),) = said.items()
        ids = self.tokenize(given) if name == "texts" else given.to(self.device)
        if durations is None:
            return ids
        if self.voicebox.alignment != "frames":
            raise ValueError('phoneme_durations belong to a VoiceBox built with alignment="frames"')
        durations = durations.to(self.device)
        return repeated(ids, durations, int(durations.sum(dim=1).max()) if n is None else n)

    def heard(
        self, audio: Float[Tensor, "b w"], lengths: Lengths | None = None, input_sampling_rate: int | None = None
    ) -> Int[Tensor, "b m"]:
        """The semantic tokens of sounds."""
        rate = input_sampling_rate or self._space("know the rate of sounds").sample_hz
        wav2vec = self.text_to_semantic.wav2vec
        with torch.no_grad(), torch.autocast(audio.device.type, enabled=False), evaluating(wav2vec):
            return wav2vec(audio.float(), input_sample_hz=rate, lengths=lengths)

    def _speech(
        self, said: Said, durations: Durations | None, is_timed: bool
    ) -> tuple[Int[Tensor, "b m"] | None, Int[Tensor, " b"] | None]:
        """The tokens to say, and how many frames they take where durations or a rate tell. The predictor is asked if it matters."""
        ids = self._ids(said, None)
        if ids is not None and "semantic_token_ids" in said and self.semantic_hz is not None:
            return ids, ((ids >= 0).sum(dim=1) * (self.frame_hz / self.semantic_hz)).round().long()
        is_asked = self.duration_predictor is not None and not (is_timed and self.voicebox.alignment == "free")
        if ids is not None and durations is None and is_asked:
            said, durations = {"phoneme_ids": ids}, self._durations(said, ids)
        if durations is None:
            return ids, None
        if self.voicebox.alignment == "frames":
            ids = self._ids(said, durations)
        return ids, durations.to(self.device).clamp(min=0).sum(dim=1)

    def _durations(self, said: Said, ids: Int[Tensor, "b m"]) -> Durations:
        """Frames of each phoneme, by the predictor, which may read texts in a way of its own."""
        predictor = self.duration_predictor
        reads_texts = "texts" in said and predictor.tokenizer is not None
        if not reads_texts and predictor.num_phoneme_tokens != self.voicebox.num_cond_tokens:
            raise ValueError("the duration_predictor knows other tokens than the voicebox: give texts, or lengths")
        given = {"texts": said["texts"]} if reads_texts else {"phoneme_ids": ids}
        with torch.autocast(self.device.type, enabled=False):
            return predictor.predict(**given, frame_hz=self.frame_hz)

    @property
    def frame_hz(self) -> float:
        """Frames a second."""
        space = self._space("know how many frames a second has")
        return space.sample_hz / space.downsample_factor

    # ------------------------------------------------------------------ speaking

    @torch.no_grad()
    def sample(
        self,
        *,
        decode_to_audio: bool = True,
        decode_to_codes: bool = False,
        spec_decode: bool = False,
        spec_decode_gamma: int = 5,
        **options: Any,
    ) -> Float[Tensor, "b w"] | Float[Tensor, "b n d"] | Int[Tensor, "b n q"]:
        """Waves; or features (`decode_to_audio=False`, or no audio_enc_dec), or the codes of a codec (`decode_to_codes`).

        `options` as for `draw`: cond, cond_mask, texts, text_token_ids, semantic_token_ids, phoneme_ids, max_semantic_token_ids,
        lengths, seconds, seed, steps, cond_scale and others.
        spec_decode, spec_decode_gamma: without effect: they are about the speed of the reference's text_to_semantic.
        """
        if decode_to_codes and not hasattr(self.audio_enc_dec, "decode_to_codes"):
            space = (
                "a VoiceBox without audio_enc_dec" if self.audio_enc_dec is None else type(self.audio_enc_dec).__name__
            )
            raise ValueError(f"{space} has no codes: leave out decode_to_codes")
        drawn = self.draw(**options)
        if self.audio_enc_dec is None or not (decode_to_audio or decode_to_codes):
            return drawn.features
        with torch.autocast(self.device.type, enabled=False), evaluating(self.audio_enc_dec):
            if decode_to_codes:
                return self.audio_enc_dec.decode_to_codes(drawn.features, drawn.lengths)
            return self.audio_enc_dec.decode(drawn.features, drawn.lengths)

    @torch.no_grad()
    def draw(
        self,
        *,
        cond: Shaped[Tensor, "..."] | None = None,
        cond_lengths: Int[Tensor, "_"] | Sequence[int] | None = None,
        cond_mask: Shaped[Tensor, "_ _"] | None = None,
        input_sampling_rate: int | None = None,
        texts: Sequence[str] | None = None,
        text_token_ids: Int[Tensor, "_ _"] | None = None,
        semantic_token_ids: Int[Tensor, "_ _"] | None = None,
        phoneme_ids: Int[Tensor, "_ _"] | None = None,
        phoneme_durations: Shaped[Tensor, "_ _"] | None = None,
        max_semantic_token_ids: int = 2048,
        lengths: Int[Tensor, "_"] | Sequence[int] | int | None = None,
        seconds: Tensor | Sequence[float] | float | None = None,
        batch_size: int = 1,
        seed: int | None = None,
        **solving: Any,
    ) -> Drawn:
        """Features for what is said, in the voice of a prompt. One prompt, text or length alone is for all sounds.

        On CUDA the first sounds of a shape take longer than the others; see `helicon.models.voicebox.solving.Evaluator`.

        Args:
            cond: the prompt, waves or features, of which the first `cond_lengths` samples or frames count. It is kept as it is, and
                what follows is made.
            cond_mask: frames of `cond` to make anew, in its middle for instance; the others are kept.
            texts, text_token_ids, semantic_token_ids, phoneme_ids: what is said, from the beginning of the prompt on; one of them.
                None: whatever the model likes.
            phoneme_durations: frames of each phoneme; by default what the duration_predictor says.
            max_semantic_token_ids: the most that text_to_semantic makes of a text.
            lengths, seconds: of the whole, with the prompt; lengths in frames. By default as long as durations or semantic tokens
                say, or (with `cond_mask`) as `cond`.
            batch_size: sounds to make, where nothing else tells.
            seed: the same seed gives the same sounds; None draws from torch's own generator.
            solving: steps, method, grid, cond_scale, guidance_interval: see `helicon.models.voicebox.solving.Solving`.
        """
        known = [field.name for field in fields(Solving)]
        for name in solving.keys() - set(known):
            raise ValueError(f"sample has no option {name!r}: {nearest(name, known)}")
        how = replace(self.solving, **solving)
        if cond_mask is not None and cond_mask.dtype != torch.bool:
            raise ValueError(
                f"cond_mask is of {cond_mask.dtype}: give bools, True for frames to make anew (cond_mask > 0)"
            )
        _check_types(cond, phoneme_durations)
        cond_lengths = None if cond_lengths is None else torch.as_tensor(cond_lengths)
        prompt = None if cond is None else self._prompt(cond, cond_lengths, cond_mask, input_sampling_rate)
        if prompt is None and cond_mask is not None:
            raise ValueError("cond_mask says which frames of cond are made anew: give cond")
        given = (texts, text_token_ids, semantic_token_ids, phoneme_ids)
        said: Said = {name: value for name, value in zip(SAID, given, strict=True) if value is not None}
        if "texts" in said and self.text_to_semantic is not None:
            prime = {} if cond is None or cond.ndim == 3 else {"prime_wave": cond, "prime_lengths": cond_lengths}
            said = self._semantic(said["texts"], prime, input_sampling_rate, max_semantic_token_ids, seed)
        if prompt is not None and prompt.remade is not None and lengths is None and seconds is None:
            lengths = prompt.frames
        self._check_ids(said)
        ids, told = self._speech(said, phoneme_durations, lengths is not None or seconds is not None)
        frames = self._num_frames(lengths, seconds, told)
        rows = _rows(batch_size, {"cond": cond, "what is said": ids, "lengths": frames})
        blank = canvas(frames.expand(rows), self.voicebox.dim_in, prompt)
        return self._filled(blank, None if ids is None else ids.expand(rows, -1), how, seed)

    def _prompt(
        self,
        cond: Float[Tensor, "_ ..."],
        lengths: Int[Tensor, "_"] | None,
        remade: Bool[Tensor, "_ _"] | None,
        input_sampling_rate: int | None,
    ) -> Prompt:
        lengths, remade = (None if part is None else part.to(self.device) for part in (lengths, remade))
        if lengths is None:
            lengths = torch.full((len(cond),), cond.shape[1], device=self.device)
        features, frames = self._framed(cond.to(self.device), lengths, input_sampling_rate)
        assert frames is not None
        if cond.ndim == 2 and remade is None:
            # The last frame of a sound that is cut off is filled up with silence, from which nothing goes on.
            frames = torch.minimum(
                frames, self._samples(lengths, input_sampling_rate) // self.audio_enc_dec.downsample_factor
            )
        return Prompt(features, frames, remade)

    def _semantic(
        self, texts: Sequence[str], prime: Mapping[str, Any], rate: int | None, most: int, seed: int | None
    ) -> Said:
        """Semantic tokens of texts, which go on from those of a prompt."""
        if prime:
            prime = {name: part.to(self.device) for name, part in prime.items() if part is not None}
            prime = {**prime, "prime_wave_input_sample_hz": rate or self._space("know the rate of sounds").sample_hz}
        ids = self.text_to_semantic.generate(text=texts, batch_size=len(texts), max_length=most, seed=seed, **prime)
        return {"semantic_token_ids": ids}

    def _num_frames(
        self,
        lengths: Int[Tensor, "_"] | Sequence[int] | int | None,
        seconds: Tensor | Sequence[float] | float | None,
        told: Int[Tensor, "_"] | None,
    ) -> Int[Tensor, "_"]:
        """How long each sound is to be: as it is asked for, else as what is given tells."""
        if lengths is not None and seconds is not None:
            raise ValueError("give lengths or seconds, not both")
        if seconds is not None:
            each = torch.as_tensor(seconds, device="cpu", dtype=torch.float64).reshape(-1)
            lengths = [round(value * self.frame_hz) for value in each.tolist()]
        found = told if lengths is None else lengths
        if found is None:
            raise ValueError(
                "how long shall it be? Give seconds, or lengths in frames; durations, semantic tokens with semantic_hz, and cond_mask tell, too"
            )
        frames = torch.as_tensor(found, device=self.device).long().reshape(-1)
        if frames.min() < 1:
            raise ValueError(f"lengths of {frames.tolist()} frames: each must be at least 1")
        return frames

    def _filled(self, blank: Drawn, ids: Int[Tensor, "b m"] | None, how: Solving, seed: int | None) -> Drawn:
        """The canvas with its hidden frames made."""
        self._check_room(blank, ids)
        if not blank.features.isfinite().all():
            raise ValueError(
                "cond has values that are infinite or not numbers where it is kept: there is nothing to go on from"
            )
        generator = None if seed is None else torch.Generator(self.device).manual_seed(seed)
        noise = torch.randn(blank.features.shape, device=self.device, **drawn_by(generator))
        context, mask = None, None if bool(blank.mask.all()) else blank.mask
        if bool((blank.mask & ~blank.hidden).any()):
            context = self.normalise(blank.features)
        elif ids is None:  # there is nothing to be guided by
            how = replace(how, cond_scale=1.0)
        condition = {"cond": context, "cond_token_ids": ids, "self_attn_mask": mask}
        known = None if context is None else context - (1 - self.sigma) * noise
        with self.evaluator.running(self.voicebox):
            solution = how.solve(self.voicebox, noise, blank.hidden, condition, known, self.evaluator)
        return blank.filled(self.denormalise(solution.value), solution.evaluations)

    def _check_ids(self, said: Said) -> None:
        for name, ids in said.items():
            most = self.voicebox.num_cond_tokens
            if name != "texts" and most is not None and ids.numel() and int(ids.max()) >= most:
                raise ValueError(
                    f"{name} has {int(ids.max())}, and this VoiceBox knows 0 to {most - 1} (num_cond_tokens)"
                )

    def _check_room(self, blank: Drawn, ids: Int[Tensor, "b m"] | None) -> None:
        if ids is None or self.voicebox.alignment != "free":
            return
        count = (ids >= 0).sum(dim=1)
        if (count > blank.lengths).any():
            raise ValueError(
                f"{count.tolist()} tokens cannot be said in {blank.lengths.tolist()} frames: there must be one for each at least"
            )


def _check_types(cond: Shaped[Tensor, "..."] | None, durations: Shaped[Tensor, "_ _"] | None) -> None:
    if durations is not None and durations.is_floating_point():
        raise ValueError(
            f"phoneme_durations are of {durations.dtype}: give whole frames (seconds times frames a second, rounded)"
        )
    if cond is None:
        return
    if cond.ndim not in (2, 3):
        raise ValueError(
            f"cond has the shape {list(cond.shape)}: give waves [b, n], one of them as wave[None], or features [b, t, d]"
        )
    check_floats(cond)


def _rows(batch_size: int, given: Mapping[str, Tensor | None]) -> int:
    """How many sounds there are to make: as many as there are of anything; one alone is for all."""
    sizes = {name: len(value) for name, value in given.items() if value is not None}
    rows = max([batch_size, *sizes.values()])
    for name, size in sizes.items():
        if size not in (1, rows):
            raise ValueError(f"{name}: {size} cannot belong to {rows} sounds: give one for each, or one")
    return rows


def _semantic_hz(text_to_semantic: Any, semantic_hz: float | None) -> float | None:
    if text_to_semantic is None:
        return semantic_hz
    wav2vec = getattr(text_to_semantic, "wav2vec", None)
    if wav2vec is None:
        raise ValueError("text_to_semantic must have its wav2vec, which says how many tokens a second has")
    if getattr(text_to_semantic, "unique_consecutive", False):
        raise ValueError(
            "this text_to_semantic leaves out tokens that repeat the one before, so that they tell no time: build it with unique_consecutive=False"
        )
    found = wav2vec.sample_hz * wav2vec.groups / wav2vec.downsample_factor
    if semantic_hz not in (None, found):
        raise ValueError(
            f"semantic_hz={semantic_hz} is not the {found:g} tokens a second of text_to_semantic: leave it out"
        )
    return found
