"""What the stages of AudioLM share: a transformer over tokens with the frozen networks that make them, and the loss.

Audio comes as waves or as the tokens of a cache, with the same loss. A sound that truly ends (`is_end`) ends with the token of the
end; one that was merely cut off does not, or the model would learn to stop where crops do.

Letters: b batch, n tokens, t frames, q quantizers, w samples.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from helicon.models.audiolm.transformers import TokenTransformer
from helicon.nn.capture import evaluating
from helicon.nn.network import Network
from helicon.nn.packing import unique_consecutive

PAD = -1
FOR_CONDITIONER = "raw_wave_for_conditioner"  # the entry of a batch that is at the rate of an audio_conditioner
Wave = Float[Tensor, "#b _"] | Float[Tensor, "#b _ _"]  # [b, w] or [b, c, w]; two of one call may differ in length
Lengths = Int[Tensor, " #b"]


@runtime_checkable
class CodeConditioner(Protocol):
    """A network that makes codes of sounds and texts, alike for those that belong together. As an audio_conditioner, each stage has
    learned embeddings of its own of them. (Any other module makes the embeddings itself: `conditioner(wavs= or texts=, namespace=)`.)"""

    sample_hz: int
    num_quantizers: int
    codebook_size: int

    def codes(
        self,
        wavs: Float[Tensor, "b ..."] | None = None,
        texts: Sequence[str] | None = None,
        lengths: Int[Tensor, " b"] | None = None,
        input_sample_hz: int | None = None,
    ) -> Int[Tensor, "b q"]: ...

    def initial_embeddings(self, namespace: str) -> Float[Tensor, "n e"] | None:
        """Of all codes, one quantizer after the other, for a stage to begin with."""
        ...


@dataclass(frozen=True)
class Pieces:
    """How a stage makes codes piece by piece, from semantic tokens of which each has its time."""

    max_frames: int
    max_steps: int  # frames of the tokenizer in as much sound
    groups: int  # tokens each
    frames_a_step: Fraction


class Losses(NamedTuple):
    """What a stage learns from; all but `total` are for looking at."""

    total: Tensor  # nats a token
    parts: dict[str, Tensor]


@contextmanager
def _used(network: Any, device: torch.device) -> Iterator[None]:
    """A frozen network at work: in evaluation mode, in its own precision, without gradients."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False), evaluating(network):
        yield


class Stage(Network):
    """A transformer over tokens, and the frozen networks that make them."""

    parts: ClassVar[tuple[str, ...]] = ("transformer",)
    condition_name: ClassVar[str]  # by which an audio_conditioner knows this stage

    transformer: TokenTransformer
    # Of `tokens`: what is to be predicted, by kind, [b, n]; -1 where nothing is.
    labels: Callable[..., dict[str, Tensor]]
    codec: Any = None
    wav2vec: Any = None
    audio_conditioner: Any = None
    unique_consecutive: bool = False
    mask_prob: float

    def _hold(self, transformer: TokenTransformer, mask_prob: float, **frozen: Any) -> None:
        if not 0 <= mask_prob < 1:
            raise ValueError(f"mask_prob={mask_prob} must be at least 0 and below 1")
        self.transformer, self.mask_prob = transformer, mask_prob
        self.__dict__.update(frozen)  # not submodules: their weights and their mode are not this network's to change
        coder = self.code_conditioner
        if coder is not None:
            initial = coder.initial_embeddings(self.condition_name)
            transformer.condition_on_codes(coder.num_quantizers, coder.codebook_size, initial)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "Stage":
        """Takes the frozen networks along to another device; their precision stays, for tokens depend on it."""
        super()._apply(fn, recurse)
        for network in self.frozen.values():
            network.to(self.device)
        return self

    @property
    def frozen(self) -> dict[str, Any]:
        names = ("codec", "wav2vec", "audio_conditioner")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def code_conditioner(self) -> CodeConditioner | None:
        """The audio_conditioner of a stage that is conditioned on its codes."""
        given: Any = self.audio_conditioner
        is_one = isinstance(given, Network) and isinstance(given, CodeConditioner)
        return given if is_one and self.transformer.has_condition else None

    @property
    def device(self) -> torch.device:
        return self.transformer.device

    # ------------------------------------------------------------------ audio to tokens

    def semantic_ids(
        self, raw_wave: Wave, lengths: Lengths | None = None, input_sample_hz: int | None = None
    ) -> Int[Tensor, "b n"]:
        """Semantic tokens of audio, without those that repeat the one before where `unique_consecutive` says so."""
        return self.deduplicated(self._all_semantic_ids(raw_wave, lengths, input_sample_hz))

    def _all_semantic_ids(self, raw_wave: Wave, lengths: Lengths | None, input_sample_hz: int | None) -> Tensor:
        if self.wav2vec is None:
            raise ValueError(
                f"this {type(self).__name__} was built without wav2vec, which makes semantic tokens of sound: "
                "build it with wav2vec=..., or give token ids"
            )
        mono = raw_wave.mean(dim=1) if raw_wave.ndim == 3 else raw_wave
        with _used(self.wav2vec, mono.device):
            return self.wav2vec(mono, input_sample_hz=input_sample_hz, lengths=lengths)

    def deduplicated(self, ids: Int[Tensor, "..."]) -> Int[Tensor, "b n"]:
        if ids.ndim != 2:
            raise ValueError(f"semantic tokens of shape {list(ids.shape)} are not [b, n]: give rows, of one ids[None]")
        return unique_consecutive(ids, PAD) if self.unique_consecutive else ids

    @property
    def keeps_time(self) -> bool:
        """Whether each semantic token has its time, so that a part of them belongs to a part of a sound."""
        return self.wav2vec is not None and not self.unique_consecutive

    @property
    def groups(self) -> int:
        """Semantic tokens a frame."""
        return 1 if self.wav2vec is None else self.wav2vec.groups

    def num_semantic(self, frames: int) -> int:
        """Semantic tokens of a sound of so many frames of the codec."""
        codec, wav2vec = self.needed_codec, self.wav2vec
        samples = -(-frames * codec.downsample_factor * wav2vec.sample_hz // codec.sample_hz)
        return int(wav2vec.code_lengths(torch.tensor([samples])))

    def _pieces(self, max_frames: int | None) -> Pieces | None:
        if max_frames is None:
            return None
        if max_frames < 2:
            raise ValueError(f"max_frames={max_frames} must be at least 2")
        if not self.keeps_time:
            raise ValueError(
                f"max_frames={max_frames} needs semantic tokens that each have their time: "
                "build the stage with a wav2vec and unique_consecutive=False"
            )
        codec, wav2vec = self.needed_codec, self.wav2vec
        frames_a_step = Fraction(
            wav2vec.downsample_factor * codec.sample_hz, wav2vec.sample_hz * codec.downsample_factor
        )
        return Pieces(max_frames, max(1, self.num_semantic(max_frames) // self.groups), self.groups, frames_a_step)

    def codes(
        self, raw_wave: Wave, lengths: Lengths | None = None, input_sample_hz: int | None = None
    ) -> Int[Tensor, "b t q"]:
        """The codec's codes of audio, of all its quantizers."""
        with _used(self.needed_codec, raw_wave.device):
            return self.codec.encode(raw_wave, lengths, input_sample_hz)

    # The last frame of a sound that is cut off is filled up with silence, from which nothing goes on: prompts end before it.

    def prompt_ids(self, wave: Wave, lengths: Lengths | None, input_sample_hz: int | None) -> Int[Tensor, "b n"]:
        ids = self._all_semantic_ids(wave, lengths, input_sample_hz)
        frames = whole_frames(self.wav2vec, wave, lengths, input_sample_hz)
        return self.deduplicated(without_padding(ids, frames * self.wav2vec.groups))

    def prompt_codes(self, wave: Wave, lengths: Lengths | None, input_sample_hz: int | None) -> Int[Tensor, "b t q"]:
        codes = self.codes(wave, lengths, input_sample_hz)
        return without_padding(codes, whole_frames(self.codec, wave, lengths, input_sample_hz))

    @property
    def needed_codec(self) -> Any:
        if self.codec is None:
            raise ValueError(
                f"this {type(self).__name__} was built without a codec, which turns codes into sound and sound into codes: "
                "build it with codec=..., or give and take token ids"
            )
        return self.codec

    def condition_of(
        self, raw_wave: Wave | None, lengths: Lengths | None = None, input_sample_hz: int | None = None
    ) -> dict[str, Tensor]:
        """What an audio_conditioner makes of the sound, in the place of a text."""
        if self.audio_conditioner is None or raw_wave is None or not self.transformer.has_condition:
            return {}
        with _used(self.audio_conditioner, raw_wave.device):
            if self.code_conditioner is None:
                return {"text_embeds": self.audio_conditioner(wavs=raw_wave, namespace=self.condition_name)}
            mono = raw_wave.mean(dim=1) if raw_wave.ndim == 3 else raw_wave
            ids = self.code_conditioner.codes(wavs=mono, lengths=lengths, input_sample_hz=input_sample_hz)
            return {"condition_ids": ids}

    def condition_of_batch(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """What the transformer is conditioned on, of a training batch: what is in it, or what an audio_conditioner makes of the sound."""
        made = "text_embeds" if self.code_conditioner is None else "condition_ids"
        if self.audio_conditioner is None or made in batch:
            return self.transformer.batch_texts(batch)
        name, rate = self._heard(batch)
        return self.condition_of(batch.get(name), batch.get(f"{name}_lengths"), rate)

    def _heard(self, given: Mapping[str, Any]) -> tuple[str, int | None]:
        """Which of the waves that are given an audio_conditioner hears, and its rate."""
        if given.get(FOR_CONDITIONER) is not None:
            return FOR_CONDITIONER, self.audio_conditioner.sample_hz
        if given.get("raw_wave") is None:
            return "raw_wave_for_codec", None if self.codec is None else self.codec.sample_hz
        # (Beside semantic tokens the only wave is the codec's.)
        is_codecs = given.get("semantic_token_ids") is not None and given.get("raw_wave_for_codec") is None
        hearer = self.codec if self.wav2vec is None or (is_codecs and self.codec is not None) else self.wav2vec
        return "raw_wave", None if hearer is None else hearer.sample_hz

    def said(
        self,
        text: Sequence[str] | None,
        text_embeds: Float[Tensor, "#b m e"] | None = None,
        condition_ids: Int[Tensor, "#b q"] | None = None,
        **texts: Any,
    ) -> dict[str, Any]:
        """What is said, as the keywords of `TextConditioned.text_of`: an audio_conditioner reads the texts, where there is one."""
        if isinstance(text, str):
            raise ValueError(f"text takes a list of texts, not one: write [{text!r}]")
        given = {"text_embeds": text_embeds, "condition_ids": condition_ids, **texts}
        if text is None or self.audio_conditioner is None or not self.transformer.has_condition:
            return {"texts": text, **given}
        others = [name for name, value in given.items() if value is not None]
        if others:
            raise ValueError(f"give one of text and {' and '.join(others)}, not both")
        with _used(self.audio_conditioner, self.device):
            if self.code_conditioner is not None:
                return {"condition_ids": self.code_conditioner.codes(texts=list(text))}
            return {"text_embeds": self.audio_conditioner(texts=list(text), namespace=self.condition_name)}

    def _condition(
        self,
        text: Sequence[str] | None,
        text_embeds: Float[Tensor, "b m e"] | None,
        options: Mapping[str, Any],
        **given: Any,
    ) -> dict[str, Any]:
        """The keywords of the transformer that say what tokens are conditioned on: what is said, or else the sound itself."""
        ids = options.get("condition_ids")
        if text is None and text_embeds is None and ids is None:
            name, rate = self._heard(given)
            return {**self.condition_of(given.get(name), None, rate), **options}
        said = self.said(text, text_embeds, ids)
        return {"text": said.pop("texts", None), **options, **said}

    def guidance(self, cond_scale: float | None) -> float:
        """How much, where nothing is said: codes stand for a whole sound, and sounds are more often right without (docs/log.md)."""
        if cond_scale is not None:
            return cond_scale
        return 3.0 if self.transformer.code_table is None else 1.0

    def embed_text(self, text: Sequence[str]) -> Float[Tensor, "b m e"]:
        """Texts, to give as `text_embeds`."""
        return self.transformer.encode_text(text)

    def tokens(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The tokens of a batch of waves or of cached tokens, as `forward` takes them."""
        raise NotImplementedError

    def _given_ids(self, ids: Int[Tensor, "b n"] | None, wave: Wave | None) -> Int[Tensor, "b n"]:
        if ids is None:
            return self.semantic_ids(needed(wave, "semantic_token_ids"))
        return self.deduplicated(ids.long())

    def _semantic_of(self, batch: Mapping[str, Any]) -> Int[Tensor, "b n"]:
        name = "semantic_token_ids"
        if name in batch:
            return self.deduplicated(without_padding(batch[name].long(), batch.get(f"{name}_lengths")))
        return self.semantic_ids(batch["raw_wave"], batch.get("raw_wave_lengths"))

    def _codes_of(self, batch: Mapping[str, Any]) -> Int[Tensor, "b t q"]:
        if "token_ids" in batch:
            return without_padding(batch["token_ids"].long(), batch.get("token_ids_lengths"))
        name = "raw_wave_for_codec" if "raw_wave_for_codec" in batch else "raw_wave"
        if name == "raw_wave" and "semantic_token_ids" not in batch:
            self._check_one_wave()
        return self.codes(batch[name], batch.get(f"{name}_lengths"))

    def _given_codes(
        self,
        codes: Int[Tensor, "b ..."] | None,
        ids: Int[Tensor, "b n"] | None,
        wave: Wave | None,
        wave_for_codec: Wave | None,
        name: str,
    ) -> Int[Tensor, "b ..."]:
        """The codes, or those of the codec's own wave, or of the one that the semantic tokens are of (where they are not given)."""
        if codes is not None:
            return codes.long()
        if wave_for_codec is None and ids is None:
            self._check_one_wave()
        return self.codes(needed(wave if wave_for_codec is None else wave_for_codec, name))

    def _check_one_wave(self) -> None:
        if self.wav2vec is not None and self.codec is not None and self.wav2vec.sample_hz != self.codec.sample_hz:
            raise ValueError(
                f"the wav2vec hears raw_wave at {self.wav2vec.sample_hz} Hz, and the codec has {self.codec.sample_hz} Hz: "
                "give it raw_wave_for_codec"
            )

    # ------------------------------------------------------------------ learning

    def num_labels(self, **tokens: Any) -> Int[Tensor, ""]:
        return torch.stack([(label >= 0).sum() for label in self.labels(**tokens).values()]).sum()

    @property
    def forget_prob(self) -> float:
        return self.mask_prob if self.training else 0.0

    def losses(self, logits: Mapping[str, Tensor | None], weights: Mapping[str, float], **tokens: Any) -> Losses:
        """The mean over all tokens of the cross-entropy, of which each kind has its weight."""
        labels = self.labels(**tokens)
        counts = {name: (label >= 0).sum() for name, label in labels.items()}
        # What has no weight still takes part, for distributed training waits for the gradient of every weight.
        total = sum(0.0 * said.sum() for name, said in logits.items() if said is not None and name not in labels)
        parts = {}
        for name, label in labels.items():
            said = logits[name]
            assert said is not None
            entropy = F.cross_entropy(said.flatten(0, 1).float(), label.flatten(), ignore_index=PAD, reduction="sum")
            total = total + weights.get(name, 1.0) * entropy
            parts[f"{name}_cross_entropy"] = (entropy / counts[name].clamp(min=1)).detach()
        return Losses(total / torch.stack([*counts.values()]).sum().clamp(min=1), parts)

    def _answer(
        self,
        logits: Mapping[str, Tensor | None],
        weights: Mapping[str, float],
        tokens: Mapping[str, Any],
        return_loss: bool,
        return_losses: bool,
    ) -> Any:
        if not (return_loss or return_losses):
            found = tuple(logits.values())
            return found[0] if len(found) == 1 else found
        losses = self.losses(logits, weights, **tokens)
        return losses if return_losses else losses.total


def with_end(ids: Int[Tensor, "b n"], is_end: Bool[Tensor, "b"] | None, eos_id: int) -> Int[Tensor, "b _"]:
    """The labels of a row and of what follows it: the end, for a sound that truly ends."""
    longer = F.pad(ids, (0, 1), value=PAD)
    if is_end is None:
        return longer
    lengths = (ids >= 0).sum(dim=1)
    place = torch.arange(longer.shape[1], device=ids.device) == lengths[:, None]
    return longer.masked_fill(place & is_end.bool()[:, None], eos_id)


def without_padding(ids: Int[Tensor, "b n ..."], lengths: Lengths | None) -> Int[Tensor, "b n ..."]:
    """-1 past the lengths."""
    if lengths is None:
        return ids
    is_past = torch.arange(ids.shape[1], device=ids.device) >= lengths[:, None]
    return ids.masked_fill(is_past.reshape(*is_past.shape, *[1] * (ids.ndim - 2)), PAD)


def whole_frames(network: Any, wave: Wave, lengths: Lengths | None, input_sample_hz: int | None) -> Lengths:
    """How many frames of a codec or tokenizer are filled by prompts, once those are seen to be sounds."""
    if lengths is None:
        lengths = torch.full((len(wave),), wave.shape[-1], device=wave.device)
    frames = lengths * network.sample_hz // ((input_sample_hz or network.sample_hz) * network.downsample_factor)
    if bool((frames < 1).any()):
        raise ValueError(
            f"a prompt of {int(lengths.min())} samples is shorter than a frame of the {type(network).__name__}, "
            f"{network.downsample_factor} samples at {network.sample_hz} Hz: give a longer one"
        )
    is_past = torch.arange(wave.shape[-1], device=wave.device) >= lengths[:, None]
    if not bool((torch.isfinite(wave.reshape(len(wave), -1, wave.shape[-1])).all(dim=1) | is_past).all()):
        raise ValueError("a prompt holds values that are infinite or not numbers: give a sound without them")
    return frames


def by_frame(codes: Int[Tensor, "b ..."], num_quantizers: int) -> Int[Tensor, "b t q"]:
    """Codes `[b, t, q]`, also where they come flat."""
    if codes.ndim == 3 and codes.shape[2] == num_quantizers:
        return codes
    if codes.ndim != 2 or codes.shape[1] % num_quantizers:
        raise ValueError(
            f"codes of shape {list(codes.shape)} are not those of {num_quantizers} quantizers: "
            f"give [b, t, {num_quantizers}], or [b, n] with n a multiple of {num_quantizers}"
        )
    return codes.unflatten(1, (-1, num_quantizers))


def needed(wave: Tensor | None, name: str) -> Tensor:
    if wave is None:
        raise ValueError(f"there is nothing to learn from: give a raw_wave or {name}")
    return wave


def check_pad(pad_id: int) -> None:
    if pad_id != PAD:
        raise ValueError(f"pad_id={pad_id}: past the end of a row stands -1")


def check_sizes(**sizes: int) -> None:
    (first, a), (second, b) = sizes.items()
    if a != b:
        raise ValueError(f"the {first} has {a} different tokens and the transformer {second}={b}: make the two equal")


def check_stages(transformer: Any, codec: Any, wav2vec: Any, num_quantizers: int) -> None:
    if codec is not None:
        check_sizes(codec=codec.codebook_size, codebook_size=transformer.codebook_size)
        if codec.num_quantizers < num_quantizers:
            raise ValueError(
                f"the codec has {codec.num_quantizers} quantizers, and the transformer is built for {num_quantizers}"
            )
    if wav2vec is not None:
        check_sizes(wav2vec=wav2vec.codebook_size, num_semantic_tokens=transformer.num_semantic_tokens)
