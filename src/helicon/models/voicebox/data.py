"""What this family learns from: whole utterances, with what is said in them; or the features that were made of them (`helicon tokenize`).

A sample has, of these, what there is and what is asked for:

    audio, audio_lengths        [n]       at the rate of the feature space
    features, feature_lengths   [t, d]    in their place, from a cache
    texts                                 what is said
    phonemes                    [m]       the same as ids of a `PhonemeInventory`
    durations                   [m]       seconds of each phoneme
    semantic_token_ids          [k]       of a user's own dataset

A crop would not match its text, so utterances are taken whole, and those that are too long are left out. Which rate there is depends
on the network, and a recipe's `data` section is read without it: that section gives a `SpeechSource`, which a trainer asks.

Letters: b batch, n samples, t frames, d features, m phonemes, k tokens.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from helicon.config import check, signature_without
from helicon.data.audio import (
    AudioColumn,
    AudioFiles,
    AudioTransform,
    Recordings,
    SoundDataset,
    TensorAudio,
    audio_fields,
    sound_files,
)
from helicon.data.collate import Batch, collate
from helicon.data.dataset import BadFile, View, keys_of, refuse_choices
from helicon.data.fields import Field, Routed, by_name_only, is_tensor
from helicon.data.files import Files, seconds_in, words_in
from helicon.data.paired import CaptionSource, ColumnCaptions, captions_of, check_columns
from helicon.data.split import unwrapped
from helicon.data.synthetic_speech import SyntheticSpeech
from helicon.data.tokens import TokenCache, Tokenizer, is_token_cache
from helicon.models.voicebox.features import MelVoco
from helicon.models.voicebox.text import PADDING, PhonemeInventory
from helicon.models.voicebox.vocoder import Vocoder
from helicon.nn.network import Network

logger = logging.getLogger(__name__)

TEXT_COLUMN = "text"
LONGEST = 20.0  # seconds of an utterance, where nothing is said
SLACK = (
    0.1  # seconds that durations may exceed their sound by: phonemes and samples are rarely counted by the same clock
)

Sample = dict[str, Any]
SPOKEN = ("phonemes", "durations")
# (Of a tuple whose entries have no names, a text is the caption, and a float tensor the sound.)
SPOKEN_FIELDS = {
    "phonemes": Field(by_name_only, "names, or an integer tensor [m]; by name only", is_required=False),
    "durations": Field(by_name_only, "a float tensor [m] of seconds; by name only", is_required=False),
    "semantic_token_ids": Field(is_tensor(False, 1), "an integer tensor [k]", is_required=False),
}


def training_speech(
    source: str | Path | Literal["synthetic"],
    *,
    captions: CaptionSource | None = None,
    text_column: str = TEXT_COLUMN,
    max_length_seconds: float = LONGEST,
    num_samples: int = 10_000,
    seed: int = 0,
    speech: Mapping[str, Any] | None = None,
) -> "SpeechSource":
    """The `data` section of a recipe: a folder or manifest of utterances, the made-up ones of `synthetic`, or the cache of either
    (`helicon tokenize`), which is read as it is.

    A manifest may have, beside `path` and the text, the columns `phonemes` (names: a list, or with spaces between them) and `durations`
    (seconds of each phoneme, likewise).

    Args:
        captions, text_column: where the texts are: in the "column" `text_column`, in a file "beside" each sound, in the "folder"'s name.
        max_length_seconds: longer utterances are left out.
        num_samples, seed: how many made-up utterances there are, and which.
        speech: what they are chosen from, keywords of `SyntheticSpeech`: voices, syllables.
    """
    if speech is not None and source != "synthetic" and not is_token_cache(source):
        refuse_choices("speech", "utterances", source)
    choices = signature_without(SyntheticSpeech, "num_samples", "sample_hz", "seed")
    chosen = None if speech is None else check(choices, speech, "data.speech")
    return SpeechSource(source, captions, text_column, max_length_seconds, num_samples, seed, chosen)


@dataclass(frozen=True)
class Spoken:
    """The phonemes of an utterance, with spaces between them, and how many seconds each lasts; empty where that is not known."""

    phonemes: str
    durations: Sequence[float]

    @classmethod
    def of(cls, row: Mapping[str, Any], name: str) -> "Spoken":
        phonemes, durations = words_in(row, "phonemes", name) or [], seconds_in(row, "durations", name) or []
        if durations and len(durations) != len(phonemes):
            raise ValueError(f"{name} has {len(phonemes)} phonemes and {len(durations)} durations: give one for each")
        return cls(" ".join(phonemes), durations)

    @property
    def entries(self) -> Sample:
        return {"phonemes": self.phonemes, "durations": torch.tensor(self.durations, dtype=torch.float32)}


@dataclass(frozen=True)
class SpeechSource:
    """Utterances of which nobody has yet said at which rate, and with what beside them, they are needed.

    `source` is whatever holds them: a folder, a manifest, a cache, "synthetic", a `SyntheticSpeech`, a Hugging Face dataset (columns
    `audio`, `text_column`, `phonemes`, `durations`) or any torch Dataset of dicts (or tuples that `ds_fields` names). The rest are
    arguments of `training_speech`.
    """

    source: Any
    captions: CaptionSource | None = None
    text_column: str = TEXT_COLUMN
    max_length_seconds: float = LONGEST
    num_samples: int = 10_000
    seed: int = 0
    speech: Mapping[str, Any] | None = None
    ds_fields: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if not self.max_length_seconds > 0:
            raise ValueError(f"max_length_seconds={self.max_length_seconds}: it must be more than 0")

    def at(self, space: Any, inventory: PhonemeInventory | None = None, names: Sequence[str] | None = None) -> Any:
        """The samples, for a feature space (or for a network without one, which takes features alone). `names` says which of "phonemes" and
        "durations" they have; utterances of which these are not known are left out. By default phonemes, if there is an inventory, whose
        ids these are, and else whatever is given as ids."""
        names = ("phonemes",) if names is None and inventory is not None else names
        cache = self.cache()
        if cache is not None:
            tokenizer = SpeechTokenizer(space)
            _check_settings(cache, tokenizer)
            return _Read(FeatureSamples(cache.made_by(tokenizer)), inventory, names)
        if self._has_features:
            return _Read(FeatureSamples(self.source), inventory, names)
        if not hasattr(space, "sample_hz"):
            raise ValueError(
                "this VoiceBox has no audio_enc_dec to turn sounds into features: build it with one, or give features"
            )
        is_timed = names is None or "durations" in names
        return _Read(self.spoken(space.sample_hz, names or (), is_timed), inventory, names)

    def durations(self, inventory: PhonemeInventory | None) -> Any:
        """Phonemes and durations alone, without a look at the sounds; utterances of which these are not known are left out."""
        return _Read(self.transcripts(SPOKEN), inventory, SPOKEN, is_alone=True)

    def spoken(self, sample_hz: int, names: Sequence[str] = (), is_timed: bool = True) -> View:
        """Samples at a rate, with phonemes by their names: what caches are made of. Those of which one of `names` is not known are left
        out; and where it `is_timed` those whose durations cannot be, with a note."""
        transform, longest = AudioTransform(sample_hz), self.max_length_seconds
        if self.source == "synthetic":
            made_up = SyntheticSpeech(self.num_samples, sample_hz, self.seed, **(self.speech or {}))
            return Utterances(TensorAudio(made_up, transform, augment=False), longest, is_timed)
        if isinstance(self._whole, SyntheticSpeech):
            with_rate = _WithRate(self.source, self._whole.sample_hz)
            return Utterances(TensorAudio(with_rate, transform, augment=False), longest, is_timed)
        if not self._is_listed:
            routed = Routed(self.source, {**audio_fields(transform.rates), **SPOKEN_FIELDS}, self.ds_fields)
            return Utterances(TensorAudio(routed, transform, augment=False), longest, is_timed)
        listing = self._listing().with_known(names)
        recordings = listing.recordings(transform)
        kept = [index for index in range(len(recordings)) if _seconds(recordings, index) <= longest]
        if len(kept) < len(recordings):
            listing = listing.kept(kept, f"are longer than {longest:g} s (max_length_seconds)", "allow for longer ones")
            recordings = listing.recordings(transform)
        return Utterances(recordings, longest, is_timed, listing.spoken)

    def transcripts(self, names: Sequence[str] = ("phonemes",)) -> Any:
        """The same without a look at the sounds."""
        cache = self.cache()
        if cache is not None:
            return cache
        if self.source == "synthetic" or isinstance(self.source, SyntheticSpeech):
            made_up = self.source
            if self.source == "synthetic":
                made_up = SyntheticSpeech(self.num_samples, seed=self.seed, **(self.speech or {}))
            said = [made_up.utterance(index) for index in range(len(made_up))]
            return Transcripts([Spoken(" ".join(one.phonemes), [t / 1000 for t in one.milliseconds]) for one in said])
        if not self._is_listed:
            fields = {name: replace(field, is_required=False) for name, field in audio_fields({"audio": 1}).items()}
            return Routed(self.source, {**fields, **SPOKEN_FIELDS}, self.ds_fields)
        listing = self._listing().with_known(names)
        return Transcripts(listing.spoken, listing.keys)

    def phonemes(self) -> list[str]:
        """The names of the phonemes of each utterance, to fit a `PhonemeInventory` to."""
        found = self.transcripts()
        samples = [found[index] for index in range(len(found))]
        if not any("phonemes" in sample for sample in samples):
            name = self.source if isinstance(self.source, (str, Path)) else f"this {type(self.source).__name__}"
            raise ValueError(f"{name} has no phonemes: name a source whose utterances have some")
        return [_names(sample["phonemes"]) for sample in samples if "phonemes" in sample]

    def cache(self) -> TokenCache | None:
        """The cache that this is, if it is one of utterances as they are asked for here."""
        if not isinstance(self.source, TokenCache) and not is_token_cache(self.source):
            return None
        cache = self.source if isinstance(self.source, TokenCache) else TokenCache(self.source)
        asked: dict[str, Any] = {"captions": self.captions, "speech": self.speech}
        usual = {"max_length_seconds": LONGEST, "text_column": TEXT_COLUMN}
        asked |= {name: getattr(self, name) for name, value in usual.items() if getattr(self, name) != value}
        known = {**usual, **cache.index.arguments}  # which has no defaults
        for name, value in asked.items():
            recorded = known.get(name)
            if value is not None and recorded != value:
                shown = "null" if recorded is None else recorded
                raise ValueError(
                    f"{cache.folder} was made with {name}={shown}, not {value}: write data.{name}={shown}, or run "
                    f"`helicon tokenize` with {name}={value}, into another folder"
                )
        return cache

    @property
    def _whole(self) -> Any:
        """What the source is a part of, where it is one (what torch's random_split gives)."""
        return unwrapped(self.source)[0]

    @property
    def _is_listed(self) -> bool:
        """Whether it is files or columns of a table, not a user's own dataset."""
        is_files = isinstance(self.source, (str, Path)) or isinstance(self._whole, SoundDataset)
        return is_files or hasattr(self.source, "column_names")

    @property
    def _has_features(self) -> bool:
        """Whether it is a user's own dataset of features."""
        if self._is_listed or isinstance(self.source, SyntheticSpeech) or not len(self.source):
            return False
        first = self.source[0]
        return isinstance(first, Mapping) and "features" in first

    def _listing(self) -> "_Listing":
        if hasattr(self.source, "column_names"):
            check_columns(self.source, "audio", self.text_column, self.captions)
            columns = [name for name in SPOKEN if name in self.source.column_names]
            rows = self.source.select_columns(columns) if columns else [{}] * len(self.source)
            return _Listing(self.source, self.captions, self.text_column, _spoken(rows, "the dataset"))
        whole, places = unwrapped(self.source)
        if isinstance(whole, SoundDataset):
            files = whole.samples.dataset
        else:
            files = sound_files(whole, text_column=self.text_column if self.captions == "column" else None)
        said = _spoken(files.rows or [{}] * len(files), "the manifest")
        listing = _Listing(files, self.captions, self.text_column, said)
        return listing if places is None else listing.chosen(places)


def _spoken(rows: Any, name: str) -> list[Spoken]:
    return [Spoken.of(rows[index], f"row {index + 1} of {name}") for index in range(len(rows))]


@dataclass(frozen=True)
class _Listing:
    """Sounds in files, or in a table with columns, and what is said in each."""

    sounds: Any
    captions: CaptionSource | None
    text_column: str
    spoken: list[Spoken]

    @property
    def keys(self) -> Sequence[str] | None:
        return keys_of(self.sounds)

    def recordings(self, transform: AudioTransform) -> Recordings:
        if isinstance(self.sounds, Files):
            texts = captions_of(self.sounds, self.captions, self.text_column) if self.captions else None
            return AudioFiles(self.sounds, transform, False, texts)
        column = self.sounds.select_columns([self.text_column]) if self.captions else None
        texts = None if column is None else ColumnCaptions(column, self.text_column)
        return AudioColumn(self.sounds, "audio", transform, False, texts)

    def with_known(self, names: Sequence[str]) -> "_Listing":
        """Those of which these are known."""
        places = [place for place, one in enumerate(self.spoken) if all(getattr(one, name) for name in names)]
        if len(places) == len(self.spoken):
            return self
        columns = f"name a manifest with the column{'s' * (len(names) > 1)} {' and '.join(names)}"
        return self.kept(places, f"have no {' or no '.join(names)}", columns)

    def kept(self, places: Sequence[int], others: str, remedy: str) -> "_Listing":
        """These alone; the log says how many others there were, and that they `are too long`, say. None are an error, with a remedy."""
        total = len(self.spoken)
        if not places:
            raise ValueError(f"all of the {total} utterances {others}, and there is nothing to learn from: {remedy}")
        logger.warning("%d of %d utterances %s, and are left out", total - len(places), total, others)
        return self.chosen(places)

    def chosen(self, places: Sequence[int]) -> "_Listing":
        spoken = [self.spoken[place] for place in places]
        if not isinstance(self.sounds, Files):
            return replace(self, sounds=self.sounds.select(places), spoken=spoken)
        files: Files = self.sounds
        those = lambda column: [column[place] for place in places] if column else []
        sounds = Files(those(files.paths), those(files.keys), those(files.rows))
        return replace(self, sounds=sounds, spoken=spoken)


def _seconds(recordings: Recordings, index: int) -> float:
    """(One that cannot be opened stays, so that whoever reads it notes it down as bad.)"""
    try:
        recording = recordings.open(index)
    except BadFile:
        return 0.0
    return recording.num_frames / recording.hz


class _WithRate(View):
    """Made-up utterances of another rate than is asked for."""

    def __init__(self, dataset: Any, sample_hz: int):
        super().__init__(dataset)
        self.sample_hz = sample_hz

    def change(self, sample: Any, index: int, generator: torch.Generator | None) -> Sample:
        return {**sample, "sample_hz": self.sample_hz}


class Utterances(View):
    """Whole utterances: {"audio", "audio_lengths"} and, where there are some, "texts", "phonemes" (names, with spaces between them, or
    ids) and "durations"."""

    def __init__(self, dataset: Any, max_length_seconds: float, is_timed: bool, spoken: Sequence[Spoken] = ()):
        super().__init__(dataset)
        self.max_length_seconds, self.is_timed = max_length_seconds, is_timed
        self.spoken = spoken if any(one.phonemes for one in spoken) else ()

    def change(self, sample: Any, index: int, generator: torch.Generator | None) -> Sample:
        found = {name: value for name, value in sample.items() if name != "is_end"}
        found |= self.spoken[index].entries if self.spoken else {}
        if "durations" in found:
            found["durations"] = torch.as_tensor(found["durations"], dtype=torch.float32)
        seconds = found["audio_lengths"] / self.dataset.transform.rates["audio"]
        if seconds > self.max_length_seconds:
            limit = f"max_length_seconds={self.max_length_seconds:g}"
            raise BadFile(_name(self, index), f"it lasts {seconds:.2f} s, longer than {limit}")
        total = float(found["durations"].sum()) if "durations" in found else 0.0
        if self.is_timed and total > seconds + SLACK:
            raise BadFile(_name(self, index), f"its durations sum to {total:.2f} s, and it lasts {seconds:.2f} s")
        return found


class FeatureSamples(View):
    """Features [t, d] in place of the sounds, with what else a cache or a user's own dataset tells."""

    def change(self, sample: Any, index: int, generator: torch.Generator | None) -> Sample:
        return {**sample, "feature_lengths": len(sample["features"])}


class Transcripts(Dataset[Sample]):
    """What is said, without the sounds."""

    def __init__(self, spoken: Sequence[Spoken], keys: Sequence[str] | None = None):
        self.spoken, self.keys = spoken, keys

    def __len__(self) -> int:
        return len(self.spoken)

    def fetch(self, index: int, generator: torch.Generator | None = None) -> Sample:
        return self.spoken[index].entries

    def __getitem__(self, index: int) -> Sample:
        return self.fetch(index)


class _Read(View):
    """Samples as a network reads them: of phonemes, as ids of its inventory, and durations those of `names` (None: such as are given as
    ids); where it `is_alone`, nothing else."""

    def __init__(
        self, dataset: Any, inventory: PhonemeInventory | None, names: Sequence[str] | None, is_alone: bool = False
    ):
        super().__init__(dataset)
        # Of its own, as the network's may be on a device that the processes that read data have no access to.
        self.inventory = None if inventory is None else PhonemeInventory(list(inventory.ids))
        self.names, self.is_alone = names, is_alone

    def change(self, sample: Any, index: int, generator: torch.Generator | None) -> Sample:
        names = self.names
        if names is None:
            names = [name for name in SPOKEN if name in sample and isinstance(sample.get("phonemes"), Tensor)]
        missing = [name for name in names if name not in sample or len(sample[name]) == 0]
        if missing:
            raise BadFile(_name(self, index), f"it has no {' and no '.join(missing)}")
        others = () if self.is_alone else [name for name in sample if name not in SPOKEN]
        found = {name: sample[name] for name in (*others, *names)}
        if "phonemes" in found:
            found["phonemes"] = self._ids(found["phonemes"])
        if "durations" in found:
            found["durations"] = torch.as_tensor(found["durations"], dtype=torch.float32)
        counts = [len(found[name]) for name in SPOKEN if name in found]
        if len(set(counts)) > 1:
            raise BadFile(_name(self, index), f"it has {counts[0]} phonemes and {counts[1]} durations")
        return found

    def _ids(self, phonemes: str | Sequence[str] | Tensor) -> Int[Tensor, " m"]:
        if isinstance(phonemes, Tensor):
            return phonemes
        if self.inventory is None:
            raise ValueError(
                "the phonemes of this data have names, and the network does not know them: build it with "
                "tokenizer=PhonemeInventory.fitted(...), or give ids"
            )
        return self.inventory([_names(phonemes)])[0]


def _names(phonemes: str | Sequence[str]) -> str:
    return phonemes if isinstance(phonemes, str) else " ".join(phonemes)


def _name(data: View, index: int) -> str:
    return str(data.keys[index]) if data.keys is not None else f"utterance {index}"


def collate_speech(samples: Sequence[Sample]) -> Batch:
    """Samples to a batch: ids are padded with -1, all else with 0."""
    ids = [
        name for name in ("phonemes", "semantic_token_ids") if all(isinstance(one.get(name), Tensor) for one in samples)
    ]
    batch = collate([{name: value for name, value in one.items() if name not in ids} for one in samples])
    for name in ("durations_lengths", "features_lengths"):
        batch.pop(name, None)
    for name in ids:
        batch[name] = pad_sequence([one[name] for one in samples], batch_first=True, padding_value=PADDING)
    return batch


# ---------------------------------------------------------------------- features, made once


class SpeechTokenizer(Tokenizer):
    """Makes the features of utterances ("features") with a feature space, or with the one that a network stands on (of a vocoder, the
    frames that it makes audible); texts, phonemes (by their names) and durations come along. The loss on them is the loss on the sounds:
    they are kept in full precision."""

    def __init__(self, network: Any):
        if isinstance(network, Vocoder):
            space = MelVoco.of(network)
        else:
            space = network if hasattr(network, "frame_lengths") else network.audio_enc_dec
        self.path = network.source if space is None or space.source is None else space.source
        self.networks = {} if space is None else {"audio_enc_dec": _plain(space)}
        self.settings = {"log": space.log, **asdict(space.mel)} if isinstance(space, MelVoco) else {}
        self.sizes = {"features": 0, "durations": 0}

    def items(self, data: Any) -> Any:
        if not isinstance(data, SpeechSource):
            return data
        if data.cache() is not None:
            raise ValueError(f"{data.source} is a cache itself: name the utterances it was made from")
        if not self.networks:
            raise ValueError("this VoiceBox has no audio_enc_dec to make features with: tokenize with one that has")
        space: Any = self.networks["audio_enc_dec"]
        return data.spoken(space.sample_hz)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Mapping[str, Any]:
        space: Any = self.networks["audio_enc_dec"]
        device = next((value.device for value in space.state_dict().values()), torch.device("cpu"))
        if isinstance(batch.get("phonemes"), Tensor):
            raise ValueError(
                "a cache keeps phonemes by their names, and these are ids: give names with spaces between them"
            )
        lengths = batch["audio_lengths"]
        features = space.encode(batch["audio"].to(device), lengths.to(device)).float().cpu()
        counts = space.frame_lengths(lengths).tolist()
        made: dict[str, Any] = {"features": [row[:count] for row, count in zip(features, counts, strict=True)]}
        if "durations" in batch:
            sizes = batch.get("durations_lengths", torch.full_like(lengths, batch["durations"].shape[1])).tolist()
            made["durations"] = [row[:size] for row, size in zip(batch["durations"], sizes, strict=True)]
        return {**made, **{name: batch[name] for name in ("texts", "phonemes") if name in batch}}


def _check_settings(cache: TokenCache, tokenizer: SpeechTokenizer) -> None:
    """Raises if the frames of a cache are mel frames, and so are the model's, and they differ."""
    known, own = cache.index.settings, tokenizer.settings
    names = [name for name in own if name in known and known[name] != own[name]]
    if not names:
        return
    theirs, ours = (" and ".join(f"{name}={these[name]}" for name in names) for these in (known, own))
    run = "" if tokenizer.path else f", where RUN is a vocoder or a VoiceBox with {ours}"
    raise ValueError(
        f"the frames in {cache.folder} have {theirs}, and those of this model {ours}: give model.audio_enc_dec the former, or make others "
        f"with {cache.index.command(cache.folder, tokenizer)}{run}"
    )


def _plain(space: Any) -> Network:
    """Mel frames by their settings alone: what makes them audible has no part in them (a cache outlives the vocoder), nor has how these
    settings were written."""
    if not isinstance(space, MelVoco):
        return space
    alone = MelVoco(log=space.log, **asdict(space.mel))
    alone.source = space.source
    return alone
