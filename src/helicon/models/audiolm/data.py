"""What AudioLM's stages learn from: sounds, or the tokens that frozen networks made of them (`helicon tokenize`).

A sample has, of these, what its stage reads:

    raw_wave              [n]        at the rate of the semantic tokenizer, with raw_wave_lengths
    raw_wave_for_codec    [n]        the same moment at the rate of the codec ([c, n] of one with channels), with its lengths
    semantic_token_ids    [t]        in place of the first
    token_ids             [t, q]     in place of the second, the coarsest quantizer first
    texts, is_end                    the caption; whether the sound ends where its recording does
    raw_wave_for_conditioner [n]     the same moment at the rate of the audio_conditioner, with its lengths
    condition_ids         [q]        in place of that: its codes, which may stand for a caption

Which rates there are depends on the networks of the model, and a recipe's `data` section is read without it. So that section
gives an `AudioSource`, which a trainer asks for the rates it needs.

Letters: b batch, n samples, c channels, t tokens, q quantizers.
"""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F

from helicon.data.audio import (
    AUDIO,
    IS_END,
    AudioTransform,
    Recordings,
    Sample,
    SoundDataset,
    TensorAudio,
    audio_data,
)
from helicon.data.collate import Batch
from helicon.data.dataset import BadFile, View
from helicon.data.fields import LABEL, TEXT, Field, is_tensor, route
from helicon.data.paired import CaptionSource
from helicon.data.synthetic_sounds import SyntheticSounds
from helicon.data.tokens import TokenCache, Tokenizer, is_token_cache
from helicon.models.audiolm.stage import FOR_CONDITIONER, CodeConditioner
from helicon.models.semantic.tokenizer import SemanticTokenizer
from helicon.models.soundstream.codecs import Codec
from helicon.models.soundstream.model import SoundStream
from helicon.models.soundstream.trainers import sound_choices
from helicon.nn.network import Network
from helicon.nn.numbers import check_probabilities

logger = logging.getLogger(__name__)

SHORTEST_SEGMENT = 0.01  # seconds: shorter ones are meant otherwise
LOOKED_AT = 4  # sounds of a dataset, to see whether they are crops
END_PROB = 0.1  # hardly any crop of a long recording is its end otherwise, and a model would never learn to stop

WAVES = ("raw_wave", "raw_wave_for_codec")  # in the order in which they are in a tuple without names
TOKENS = {
    "semantic_token_ids": Field(is_tensor(False, 1), "an integer tensor [t]", is_required=False),
    "token_ids": Field(is_tensor(False, 2), "an integer tensor [t, q]", is_required=False),
}
# (It looks like the first of those.)
NAMED = {"condition_ids": Field(is_tensor(False, 1), "an integer tensor [q]", is_required=False)}
BESIDE = {
    "sample_hz": replace(LABEL, is_required=False),
    "texts": replace(TEXT, is_required=False),
    "is_end": replace(IS_END, is_required=False),
    "text_embeds": Field(is_tensor(True, 2), "a float tensor [t, e]", is_required=False),
}


def training_audio(
    source: str | Path | Literal["synthetic"],
    *,
    data_max_length: int | None = None,
    data_max_length_seconds: float | None = None,
    captions: CaptionSource | None = None,
    text_column: str = "text",
    end_prob: float = END_PROB,
    num_samples: int = 10_000,
    seed: int = 0,
    sounds: Mapping[str, Any] | None = None,
) -> "AudioSource | TokenCache":
    """The `data` section of a recipe: a folder or manifest of sounds, the made-up ones of `synthetic`, or the token cache of either
    (`helicon tokenize`), which is read as it is.

    Args:
        data_max_length, data_max_length_seconds: how much of a sound is heard at a time, in samples of the highest rate or in seconds.
        captions, text_column: where the texts are.
        end_prob: how often a crop is the last of its recording.
        num_samples, seed: how many made-up sounds there are, and which.
        sounds: what they are chosen from, keywords of `SyntheticSounds`. (A cache was made with those.)
    """
    found = AudioSource(
        source,
        data_max_length,
        data_max_length_seconds,
        captions,
        text_column,
        end_prob,
        num_samples,
        seed,
        sounds=sounds,
    )
    cache = found.cache()
    if cache is not None:
        return cache
    return replace(found, sounds=sound_choices(source, sounds))


@dataclass(frozen=True)
class AudioSource:
    """Sounds, or tokens of sounds, of which nobody has yet said at which rates they are needed.

    `source` is whatever holds them: see `sounds_for`. The rest are arguments of `training_audio`.
    """

    source: Any
    data_max_length: float | None = None
    data_max_length_seconds: float | None = None
    captions: CaptionSource | None = None
    text_column: str = "text"
    end_prob: float = END_PROB
    num_samples: int = 10_000
    seed: int = 0
    ds_fields: Sequence[str] | None = None
    sounds: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_probabilities(end_prob=self.end_prob)

    def at(self, rates: Mapping[str, int], channels: int = 1, least: int = 1, segments: bool = False) -> Any:
        """The samples, at the rate of each entry; all of a sample come from one read.

        Args:
            channels: of "raw_wave_for_codec"; the others have one.
            least: samples of "raw_wave" that give a token. A shorter sound is followed by silence.
            segments: recordings are cut end to end, in place of one crop of each.
        """
        cache = self.cache()
        if cache is not None:
            return cache
        sounds = self._sounds(rates, channels, segments) if rates else self._tokens()
        if segments and isinstance(sounds, (Recordings, TensorAudio)):
            _check_whole(sounds)
        return _Fitted(sounds, least)

    def cache(self) -> TokenCache | None:
        """The token cache that this is, if it is one of sounds as they are asked for here."""
        if not isinstance(self.source, TokenCache) and not is_token_cache(self.source):
            return None
        cache = self.source if isinstance(self.source, TokenCache) else TokenCache(self.source)
        recorded = cache.index.arguments
        for name in ("data_max_length", "data_max_length_seconds", "captions", "sounds"):
            value = getattr(self, name)
            if value is not None and recorded.get(name) != value:
                shown = "null" if recorded.get(name) is None else recorded[name]
                raise ValueError(
                    f"{cache.folder} was made with {name}={shown}, not {value}: write data.{name}={shown}, or run "
                    f"`helicon tokenize` with {name}={value}, into another folder"
                )
        return cache

    def _tokens(self) -> Any:
        """(Without rates there is nobody to hear sounds.)"""
        kinds = (str, Path, SoundDataset, SyntheticSounds, Recordings, TensorAudio)
        if isinstance(self.source, kinds) or hasattr(self.source, "column_names"):
            raise ValueError("this model has neither a codec nor a semantic tokenizer to hear sounds with: give tokens")
        return _OwnSamples(self.source, {}, self.ds_fields)

    def _seconds(self, rates: Mapping[str, int]) -> list[float]:
        """How much of a sound is heard at a time, where that is said."""
        by_samples = [] if self.data_max_length is None else [self.data_max_length / max(rates.values())]
        return by_samples + ([] if self.data_max_length_seconds is None else [self.data_max_length_seconds])

    def _sounds(self, rates: Mapping[str, int], channels: int, segments: bool) -> Any:
        source = self._synthetic(max(rates.values())) if self.source == "synthetic" else self.source
        if isinstance(source, SyntheticSounds):
            return TensorAudio(_Named(source, next(iter(rates))), AudioTransform(rates, channels=channels))
        if isinstance(source, (Recordings, TensorAudio)):
            return _cut_again(source, rates, channels)
        length = (self.data_max_length, self.data_max_length_seconds)
        is_files = isinstance(source, (str, Path)) or hasattr(source, "column_names")
        if is_files and length == (None, None):
            raise ValueError(
                "data_max_length or data_max_length_seconds is needed: how much of a sound is heard at a time"
            )
        if segments and is_files and min(self._seconds(rates)) < SHORTEST_SEGMENT:
            raise ValueError(
                f"segments of {min(self._seconds(rates)):.2g} s are too short: data_max_length counts samples, "
                "data_max_length_seconds seconds"
            )
        if not is_files and self.captions is not None:
            raise ValueError(
                f"captions={self.captions!r} is for files and columns: let the dataset itself return the texts"
            )
        if is_files or isinstance(source, SoundDataset):
            return audio_data(
                source,
                rates,
                max_length=length[0],
                max_length_seconds=length[1],
                channels=channels,
                end_prob=self.end_prob,
                segments=segments,
                captions=self.captions,
                text_column=self.text_column,
            )
        transform = AudioTransform(rates, *length, channels=channels, end_prob=self.end_prob)
        samples = _OwnSamples(source, rates, self.ds_fields)
        return _SoundsOrTokens(samples, transform, are_whole=not _are_crops(samples, next(iter(rates))))

    def _synthetic(self, sample_hz: int) -> SyntheticSounds:
        seconds = self.data_max_length_seconds or 1.0
        if self.data_max_length is not None:
            seconds = self.data_max_length / sample_hz
        return SyntheticSounds(self.num_samples, sample_hz, seconds, self.seed, **(self.sounds or {}))


def sounds_for(
    source: Any,
    rates: Mapping[str, int],
    *,
    channels: int = 1,
    least: int = 1,
    data_max_length: float | None = None,
    data_max_length_seconds: float | None = None,
    captions: CaptionSource | None = None,
    text_column: str = "text",
    end_prob: float = END_PROB,
    ds_fields: Sequence[str] | None = None,
) -> Any:
    """The samples of whatever a trainer is given, None for None.

    `source` is a folder or manifest, a Hugging Face dataset, a `SoundDataset`, `SyntheticSounds`, what `audio_data` gives, a torch
    Dataset of sounds or of tokens (dicts, or tuples that `ds_fields` names), an `AudioSource`, which brings the arguments that
    follow `least` itself, or a token cache, which is passed through: `cached_audio` says whether it fits.

    `rates`, `channels` and `least` are those of an `AudioTokenizer`; see `AudioSource.at`. Without rates, only tokens will do.
    """
    if source is None:
        return None
    if not isinstance(source, AudioSource):
        source = AudioSource(
            source,
            data_max_length,
            data_max_length_seconds,
            captions,
            text_column,
            end_prob,
            ds_fields=ds_fields,
        )
    return source.at(rates, channels, least)


class _Named(View):
    """Made-up sounds under the name of an entry; the other entries are made from it."""

    def __init__(self, dataset: SyntheticSounds, name: str):
        super().__init__(dataset)
        self.name = name

    def change(self, sample: Any, index: int, generator: torch.Generator | None) -> Sample:
        return {self.name: sample["audio"], "sample_hz": self.dataset.sample_hz, "texts": sample["texts"]}


class _OwnSamples(View):
    """A user's own dataset: dicts of sounds or of tokens, by the names they have here."""

    def __init__(self, dataset: Any, rates: Mapping[str, int], ds_fields: Sequence[str] | None):
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise ValueError(
                f"a {type(dataset).__name__} is no source of sounds: give a folder, a manifest or a dataset"
            )
        super().__init__(dataset)
        self.sounds = {name: replace(AUDIO, is_required=place == 0) for place, name in enumerate(rates)}
        # What other packages, and other families, call them. (The only sound that a stage hears is its raw_wave.)
        self.names = {"audio_for_codec": "raw_wave_for_codec", "text": "texts"}
        self.names |= dict.fromkeys(("audio", "raw_wave"), next(iter(rates), "raw_wave"))
        self.ds_fields = None if ds_fields is None else [self.names.get(name, name) for name in ds_fields]

    def change(self, sample: Any, index: int, generator: torch.Generator | None) -> Sample:
        if isinstance(sample, Mapping):
            sample = {self.names.get(name, name): value for name, value in sample.items()}
        named = route(sample, self._fields(sample), self.ds_fields, in_order=WAVES)
        sounds, tokens = ([name for name in fields if name in named] for fields in (self.sounds, TOKENS))
        if sounds and tokens:
            raise ValueError(
                f"item {index} has {sounds[0]} and {tokens[0]}, and a crop of one would be none of the other: "
                "give sounds alone, or tokens alone"
            )
        if not sounds and not tokens:
            raise ValueError(
                f"item {index} has none of {', '.join([*self.sounds, *TOKENS])}; it has {', '.join(named)}"
            )
        return named

    def _fields(self, sample: Any) -> Mapping[str, Field]:
        """Entries that have a name may be any; of those that have none, the types tell sounds from tokens."""
        if isinstance(sample, Mapping) or self.ds_fields is not None:
            every = {**self.sounds, **TOKENS, **NAMED, **BESIDE}
            return {name: replace(field, is_required=False) for name, field in every.items()}
        values = sample if isinstance(sample, (tuple, list)) else [sample]
        is_tokens = lambda value: not AUDIO.fits(value) and any(field.fits(value) for field in TOKENS.values())
        sounds = {name: field for name, field in self.sounds.items() if field.is_required or name != FOR_CONDITIONER}
        return {**(TOKENS if any(map(is_tokens, values)) else sounds), **BESIDE}


class _SoundsOrTokens(TensorAudio):
    """Cuts and resamples sounds; tokens stay as they are."""

    def change(self, sample: Any, index: int, generator: torch.Generator | None) -> Sample:
        return sample if sample.keys() & TOKENS.keys() else super().change(sample, index, generator)


def _are_crops(samples: _OwnSamples, name: str) -> bool:
    """Whether the sounds of a user's own dataset, which says nothing of it, look like crops: equally long, as recordings hardly are. Taken for
    whole, they would teach a model to stop after just that long."""
    lengths: list[int] = []
    for index in range(min(LOOKED_AT, len(samples))):
        try:
            sample = samples.fetch(index, torch.Generator().manual_seed(index))
        except BadFile:
            continue
        if name not in sample or "is_end" in sample:
            return False
        lengths.append(sample[name].shape[-1])
    if len(lengths) < 2 or len(set(lengths)) > 1:
        return False
    logger.warning(
        "the first sounds of the dataset are all %d samples long, and are taken for crops, of which none ends with its recording: return a "
        "bool is_end beside each to say which do",
        lengths[0],
    )
    return True


def _cut_again(source: Recordings | TensorAudio, rates: Mapping[str, int], channels: int) -> Any:
    """What `audio_data` gave, at these rates: crops of as many seconds."""
    own = source.transform
    if isinstance(source, TensorAudio):
        if own.rates != dict(rates):
            raise ValueError(
                f"the sounds are {own.rates} and the model hears {dict(rates)}: make names and rates equal"
            )
        return source
    seconds = None if own.units is None else own.units / own.grid
    cut = copy.copy(source)
    cut.transform = AudioTransform(rates, None, seconds, None, channels, own.pad, own.end_prob)
    return cut


def _check_whole(sounds: Recordings | TensorAudio) -> None:
    is_cut = sounds.transform.units is not None
    if is_cut and not (isinstance(sounds, Recordings) and sounds.segments is not None):
        raise ValueError(
            "crops of a dataset would leave out the rest of its sounds: give a folder or a manifest, or cut them in the dataset "
            "and leave out data_max_length"
        )


class _Fitted(View):
    """Samples whose waves have one channel, but for the codec's, and whose "raw_wave" is long enough for a token."""

    def __init__(self, dataset: Any, least: int):
        super().__init__(dataset)
        self.least = least

    def change(self, sample: Any, index: int, generator: torch.Generator | None) -> Sample:
        mono = {name: sample[name] for name in ("raw_wave", FOR_CONDITIONER) if name in sample}
        sample = {**sample, **{name: wave.mean(dim=0) if wave.ndim == 2 else wave for name, wave in mono.items()}}
        if "raw_wave" not in sample:
            return sample
        wave, length = sample["raw_wave"], max(sample["raw_wave_lengths"], self.least)
        wave = F.pad(wave, (0, max(0, length - len(wave))))
        return {**sample, "raw_wave": wave, "raw_wave_lengths": length}


class AudioTokenizer(Tokenizer):
    """Makes the tokens of sounds with a codec ("token_ids"), with a semantic tokenizer ("semantic_token_ids"), or with both; and the
    codes that stages are conditioned on ("condition_ids"), with an audio_conditioner.

    The texts come along, and whether it is the end. Recordings are cut into segments, end to end, so that nothing of them is lost.
    """

    options: Mapping[str, str] = {"semantic tokenizer": "semantic", "audio_conditioner": "conditioner"}

    def __init__(
        self,
        network: Network | None = None,
        semantic: Network | None = None,
        *,
        conditioner: Network | None = None,
        sizes: Mapping[str, int] | None = None,
    ):
        """
        Args:
            network: a codec, or a semantic tokenizer alone.
            semantic: the semantic tokenizer beside a codec.
            conditioner: an audio_conditioner that makes codes.
            sizes: how many different tokens there are in a field that the model reads and none of these networks makes.
        """
        if semantic is None and isinstance(network, SemanticTokenizer):
            network, semantic = None, network
        _check_kinds(network, semantic, conditioner)
        codec = None if network is None else _for_tokens(network)
        named = {"codec": codec, "semantic tokenizer": semantic, "audio_conditioner": conditioner}
        self.networks = {name: given for name, given in named.items() if given is not None}
        self._encoders = _encoders(codec, semantic, conditioner)
        made = {name: encoder.network.codebook_size for name, encoder in self._encoders.items()}
        self.sizes = {**(sizes or {}), **made}
        self.rates: dict[str, int] = {encoder.wave: encoder.network.sample_hz for encoder in self._encoders.values()}
        self.channels: int = 1 if codec is None else cast(Codec, codec).channels
        self.least: int = 1 if semantic is None else _least(semantic)

    def items(self, data: Any) -> Any:
        """(A dataset is taken to have been made with the rates above.)"""
        is_source = isinstance(data, AudioSource)
        return data.at(self.rates, self.channels, self.least, segments=True) if is_source else data

    def __call__(self, batch: Batch) -> Mapping[str, Any]:
        found = {name: encoder(batch) for name, encoder in self._encoders.items()}
        return {**found, **{name: batch[name] for name in ("texts", "is_end") if name in batch}}


@dataclass(frozen=True)
class _Encoder:
    """One network, the entry it hears, and how it makes tokens of that."""

    wave: str
    network: Any
    encode: Callable[[Tensor, Tensor], Tensor]
    code_lengths: Callable[[Tensor], Tensor]

    def __call__(self, batch: Batch) -> list[Int[Tensor, "_"] | Int[Tensor, "_ q"]]:
        """The tokens of each sound, without those of padding."""
        device = next(iter(self.network.own_tensors().values())).device
        wave, lengths = batch[self.wave].to(device), batch[f"{self.wave}_lengths"].to(device)
        counts = self.code_lengths(lengths).tolist()
        return [ids[:count] for ids, count in zip(self.encode(wave, lengths).cpu(), counts, strict=True)]


def _encoders(codec: Any, semantic: Any, conditioner: Any) -> dict[str, _Encoder]:
    found = {}
    if semantic is not None:
        encode = lambda wave, lengths: semantic(wave, lengths=lengths)
        found["semantic_token_ids"] = _Encoder("raw_wave", semantic, encode, semantic.code_lengths)
    if codec is not None:
        found["token_ids"] = _Encoder("raw_wave_for_codec", codec, codec.encode, codec.code_lengths)
    if conditioner is not None:
        encode = lambda wave, lengths: conditioner.codes(wavs=wave, lengths=lengths)
        all_of_them = lambda lengths: torch.full_like(lengths, conditioner.num_quantizers)
        found["condition_ids"] = _Encoder(FOR_CONDITIONER, conditioner, encode, all_of_them)
    return found


def _check_kinds(codec: Network | None, semantic: Network | None, conditioner: Network | None) -> None:
    if codec is not None and not isinstance(codec, Codec):
        raise ValueError(
            f"a {type(codec).__name__} makes no codes of sounds: give a codec, or a semantic tokenizer alone"
        )
    if semantic is not None and not isinstance(semantic, SemanticTokenizer):
        raise ValueError(f"a {type(semantic).__name__} makes no semantic tokens: give what `helicon fit-kmeans` made")
    if conditioner is not None and not isinstance(conditioner, CodeConditioner):
        raise ValueError(
            f"a {type(conditioner).__name__} makes no codes to condition on: give what `helicon fit-kmeans --model RUN` made of a MuLaN"
        )


WITHOUT_DISCRIMINATORS: dict[str, Any] = {
    "discr_periods": (),
    "discr_windows": (),
    "discr_multi_scales": (),
    "complex_stft_discr_kwargs": None,
    "stft_discriminator": None,
}


def _for_tokens(codec: Network) -> Network:
    """A frozen copy of a `SoundStream`, without what only training needs: a codec makes the same tokens, and has the same hash,
    whether it comes from its run or from a model that stands on it. (The others have nothing of the kind.)"""
    if not isinstance(codec, SoundStream):
        return codec
    copied = copy.deepcopy(codec)
    copied.discriminators = None
    copied._modules.pop("loss", None)  # a copy of a copy has none
    copied.arguments = {**copied.arguments, **WITHOUT_DISCRIMINATORS}
    return copied.requires_grad_(False).eval()


def _least(semantic: Any) -> int:
    """The fewest samples that give a token. (A second of them does.)"""
    counts = semantic.code_lengths(torch.arange(semantic.sample_hz + 1))
    return int(torch.searchsorted(counts, 1))


def cached_audio(source: str | Path | TokenCache, tokenizer: AudioTokenizer) -> TokenCache:
    """A token cache with the tokenizer's fields, texts and ends, once it is seen to be what these networks would make of the source
    now. (It may hold the tokens of a further network.)"""
    cache = source if isinstance(source, TokenCache) else TokenCache(source)
    held = cache.index.sizes
    missing = [name for name in tokenizer.sizes if name not in held]
    if missing:
        raise ValueError(
            f"{cache.folder} holds {', '.join(held)} and no {', '.join(missing)}, which this model learns from: "
            f"make a new one with {cache.index.command(cache.folder, tokenizer)}"
        )
    return cache.made_by(tokenizer)
