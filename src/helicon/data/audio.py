"""Sound of any kind to float tensors [n] (mono) or [2, n] (stereo) in [-1, 1], at one sample rate or several.

Only the crop is read from disk, with a margin around it, so that a crop of a resampled file equals the resampled file's
crop. While training its place is random, and drawn anew a few times where it holds digital silence; otherwise it is the
middle. What is shorter is padded with zeros. Sources: a folder, a manifest, a Hugging Face dataset, or any torch Dataset.

    {"audio": [n], "audio_lengths": how many of the n are sound and not padding,
     "is_end": whether the crop reaches the end of its recording, "texts": the caption, where there is one}

`sample_hz={"audio": 16000, "audio_for_codec": 24000}` gives the same moment at each rate, from one read, each with its
lengths. A file that was cut off gives what is left of it; where its header tells, that is no end (`is_end` is False).

Letters: n samples (or frames: one sample of each channel), c channels.
"""

import copy
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import soxr
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from helicon.data.dataset import BadFile, View
from helicon.data.fields import LABEL, TEXT, Field, Routed, is_flag
from helicon.data.files import Files, find_files, read_manifest
from helicon.data.paired import Captions, CaptionSource, ColumnCaptions, captions_of, check_columns
from helicon.data.recording import FOREIGN_EXTENSIONS, WAVE, Recording, SoundFile, Wave, is_wave, remedy
from helicon.data.split import Subset, unwrapped

AUDIO_EXTENSIONS = ("flac", "wav", "mp3", "ogg", "opus")

# What other packages call the entries of a sample.
OTHER_NAMES = {"raw_wave": "audio", "raw_wave_for_codec": "audio_for_codec", "text": "texts"}

MARGIN = 128  # samples of the lower rate, on each side of a crop, that resampling it depends on (to 1e-6)
SILENCE = 1e-4  # what stays below is silent: three steps of 16 bits
LOUDEST = 8.0  # a peak above it is no loud sound, but one in other units
NUM_REDRAWS = 4

Rates = int | Mapping[str, int]
Sample = dict[str, Any]

AUDIO = Field(is_wave, WAVE)
IS_END = Field(is_flag, "a bool")


@dataclass(frozen=True)
class AudioTransform:
    """A recording to a sample: the crop, its rates, the channels, the padding.

    Args:
        sample_hz: the rate, or the name and rate of each entry; a bare rate is that of "audio".
        max_length: samples of a crop, at the highest rate; None for whole recordings.
        max_length_seconds: the same in seconds.
        seq_len_multiple_of: lengths are padded up to a multiple of this, in all entries or in each by its name.
        channels: 1 (the mean of all) or 2 (mono twice; of more than two the first two, which are the front).
        pad: recordings shorter than max_length are padded to it; or else they stay shorter.
        end_prob: how often a random crop is the last of its recording, where a model learns to stop. (Of all the places
            a crop can have in a long one, hardly any is the end.)
    """

    sample_hz: Rates
    max_length: float | None = None
    max_length_seconds: float | None = None
    seq_len_multiple_of: int | Mapping[str, int] | None = None
    channels: int = 1
    pad: bool = True
    end_prob: float = 0.0

    def __post_init__(self) -> None:
        if self.channels not in (1, 2):
            raise ValueError(f"channels={self.channels}: it must be 1 (mono) or 2 (stereo)")
        if not self.rates or min(self.rates.values()) < 1:
            raise ValueError(f"sample_hz={self.sample_hz}: it must be at least 1, for each entry")
        if self.max_length is not None and self.max_length_seconds is not None:
            raise ValueError("give max_length or max_length_seconds, not both")
        if self.units is not None and self.units < 1:
            length = f"{self.max_length} samples" if self.max_length is not None else f"{self.max_length_seconds} s"
            raise ValueError(f"a crop of {length} is too short: it must hold a sample of every rate ({self.sample_hz})")
        if not self.multiples.keys() <= self.rates.keys() or min(self.multiples.values(), default=1) < 1:
            raise ValueError(
                f"seq_len_multiple_of={self.seq_len_multiple_of}: it must be at least 1, for entries of {list(self.rates)}"
            )
        if not 0 <= self.end_prob <= 1:
            raise ValueError(f"end_prob={self.end_prob}: it must be from 0 to 1")

    @functools.cached_property
    def rates(self) -> dict[str, int]:
        return {"audio": self.sample_hz} if isinstance(self.sample_hz, int) else dict(self.sample_hz)

    @functools.cached_property
    def multiples(self) -> dict[str, int]:
        multiples = 1 if self.seq_len_multiple_of is None else self.seq_len_multiple_of
        return dict.fromkeys(self.rates, multiples) if isinstance(multiples, int) else dict(multiples)

    @functools.cached_property
    def grid(self) -> int:
        """Crops begin and end at multiples of 1 / grid seconds, which are whole samples at every rate."""
        return math.gcd(*self.rates.values())

    @functools.cached_property
    def units(self) -> int | None:
        """How long a crop is, in units of the grid; None if it has no limit."""
        highest = max(self.rates.values())
        if self.max_length is not None:
            return int(self.max_length) * self.grid // highest
        if self.max_length_seconds is not None:
            return round(self.max_length_seconds * highest) * self.grid // highest
        return None

    @property
    def seconds(self) -> float | None:
        """How long a crop is; None if it has no limit."""
        return None if self.units is None else self.units / self.grid

    def num_segments(self, recording: Recording) -> int:
        """How many crops, end to end, cover the recording."""
        if self.units is None:
            raise ValueError("segments need a length: give max_length or max_length_seconds")
        return max(1, -(-(recording.num_frames * self.grid // recording.hz) // self.units))

    def __call__(
        self,
        recording: Recording,
        augment: bool = False,
        generator: torch.Generator | None = None,
        *,
        segment: int | None = None,
        others: Mapping[str, Recording] = MappingProxyType({}),
    ) -> Sample:
        """A random crop, the middle one, or segment number `segment`; the entries in `others` are cut from those.

        The same for the same generator, whatever was read before. In a recording that turns out to be shorter than it
        said, the place is drawn anew.
        """
        try:
            return self._sample(recording, augment, generator, segment, others)
        except BadFile:
            if not recording.shorten():
                raise
        return self._sample(recording, augment, generator, segment, others)

    def _sample(
        self,
        recording: Recording,
        augment: bool,
        generator: torch.Generator | None,
        segment: int | None,
        others: Mapping[str, Recording],
    ) -> Sample:
        num_units = recording.num_frames * self.grid // recording.hz
        units = num_units if self.units is None else self.units
        last = max(0, num_units - units)
        is_free = augment and segment is None and last > 0
        begin = last // 2 if segment is None else segment * units
        for _ in range(1 + NUM_REDRAWS if is_free else 1):
            begin = self._draw(last, generator) if is_free else begin
            waves, peak = self._cut(recording, begin, [name for name in self.rates if name not in others])
            if peak >= SILENCE:
                break
        for name, other in others.items():
            waves |= self._cut(other, begin, [name])[0]
        return {**waves, "is_end": begin >= last and not recording.is_cut}

    def _draw(self, last: int, generator: torch.Generator | None) -> int:
        if self.end_prob and torch.rand((), generator=generator) < self.end_prob:
            return last
        return int(torch.randint(last + 1, (), generator=generator))

    def _cut(self, recording: Recording, begin: int, names: Sequence[str]) -> tuple[Sample, float]:
        """The entries of the crop that begins after `begin` / grid seconds, all from one read, and its peak."""
        windows = {name: self._window(recording, begin, self.rates[name]) for name in names}
        start, stop = min(w.start for w in windows.values()), max(w.stop for w in windows.values())
        frames = to_channels(recording.read(start, stop), self.channels)
        peak = float(np.abs(frames).max(initial=0.0))
        if peak > LOUDEST:
            raise BadFile(recording.name, f"reaches {peak:g}, and sound is from -1 to 1: divide it by its full scale")
        waves: Sample = {}
        for name, window in windows.items():
            chunk = frames[window.start - start : window.stop - start]
            if recording.hz != self.rates[name]:
                chunk = soxr.resample(chunk, recording.hz, self.rates[name])
            wave = chunk[window.skip : window.skip + window.length]
            waves |= {name: self._padded(wave, name), f"{name}_lengths": window.length}
        return waves, peak

    def _window(self, recording: Recording, begin: int, hz: int) -> "_Window":
        """What to read for a crop at one rate. It starts where a sample of the recording and one of the new rate fall
        together: everything would be shifted by a fraction of a sample otherwise."""
        first = begin * hz // self.grid
        length = (2 * recording.num_frames * hz + recording.hz) // (2 * recording.hz) - first  # rounded as soxr rounds
        if self.units is not None:
            length = min(length, self.units * hz // self.grid)
        if length < 1:
            raise BadFile(recording.name, f"holds no sound from {begin / self.grid:.2f} s on")
        if hz == recording.hz:
            return _Window(first, first + length, 0, length)
        step = recording.hz // math.gcd(hz, recording.hz)
        margin = -(-MARGIN * max(hz, recording.hz) // hz)
        earliest = -(recording.num_before // step) * step
        start = max((first * recording.hz // hz - margin) // step * step, earliest)
        stop = min(-(-(first + length) * recording.hz // hz) + margin, recording.num_frames + recording.num_after)
        return _Window(start, stop, first - start * hz // recording.hz, length)

    def _padded(self, wave: np.ndarray, name: str) -> Float[Tensor, "*c n"]:
        length = len(wave)
        if self.pad and self.units is not None:
            length = self.units * self.rates[name] // self.grid
        multiple = self.multiples.get(name, 1)
        padded = torch.zeros(*wave.shape[1:], -(-length // multiple) * multiple)
        padded[..., : len(wave)] = torch.from_numpy(wave.T)
        return padded


@dataclass(frozen=True)
class _Window:
    """Frames [start, stop) of a recording; of what they become, the `length` samples after the first `skip`."""

    start: int
    stop: int
    skip: int
    length: int


def to_channels(frames: Float[np.ndarray, "n c"], channels: int) -> Float[np.ndarray, "n *two"]:
    """[n] for one channel, [n, 2] for two."""
    if channels == 1:
        return frames[:, 0] if frames.shape[1] == 1 else frames.mean(axis=1)
    return frames.repeat(2, axis=1) if frames.shape[1] == 1 else frames[:, :2]


class Recordings(View):
    """Samples cut from recordings: one from each, or with `segments` as many as cover it."""

    def __init__(
        self,
        source: Any,
        transform: AudioTransform,
        augment: bool = True,
        captions: Captions | None = None,
        segments: bool = False,
    ):
        super().__init__(source)
        self.transform, self.augment, self.captions = transform, augment, captions
        self.segments = [place for index in range(len(source)) for place in self._cover(index)] if segments else None

    def open(self, index: int) -> Recording:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.dataset) if self.segments is None else len(self.segments)

    @property
    def keys(self) -> Sequence[str] | None:
        """The segments of a file share its key, so that a split keeps them together (but for a file at its border)."""
        keys = super().keys
        return keys if keys is None or self.segments is None else [keys[index] for index, _ in self.segments]

    def fetch(self, index: int, generator: torch.Generator | None = None) -> Sample:
        place, segment = (index, None) if self.segments is None else self.segments[index]
        sample = self.transform(self.open(place), self.augment, generator, segment=segment)
        return sample if self.captions is None else {**sample, "texts": self.captions[place]}

    def _cover(self, index: int) -> list[tuple[int, int]]:
        """(One that cannot be opened stays, so that whoever reads it notes it down as bad.)"""
        try:
            return [(index, segment) for segment in range(self.transform.num_segments(self.open(index)))]
        except BadFile:
            return [(index, 0)]


class AudioFiles(Recordings):
    """Sound files, by path; of a manifest's, where it has the columns, `duration` seconds from `start` on."""

    def __init__(self, source: Files, *arguments: Any, **keywords: Any):
        rows = source.rows or [{}] * len(source)
        self.parts = [
            (_seconds(row, "start", number) or 0.0, _seconds(row, "duration", number))
            for number, row in enumerate(rows, start=1)
        ]
        super().__init__(source, *arguments, **keywords)

    def open(self, index: int) -> SoundFile:
        path = self.dataset.paths[index]
        return SoundFile(path, str(path), *self.parts[index])


def _seconds(row: Mapping[str, Any], column: str, number: int) -> float | None:
    value = row.get(column)
    if value is None or value == "":
        return None
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if math.isnan(seconds):  # what a table has where there is nothing
        return None
    if not 0 <= seconds < math.inf or (seconds == 0 and column == "duration"):
        raise ValueError(f"row {number} of the manifest has {column}={value!r}: it must be a number of seconds")
    return seconds


class AudioColumn(Recordings):
    """The sounds in one column of a Hugging Face dataset: encoded (decoded here, and only the crop), or as arrays."""

    def __init__(self, source: Any, column: str, *arguments: Any, **keywords: Any):
        feature = source.features[column]
        if getattr(feature, "decode", False):
            source = source.cast_column(column, dataclasses.replace(feature, decode=False))
        self.column = column
        super().__init__(source.select_columns([column]), *arguments, **keywords)

    def open(self, index: int) -> Recording:
        value = self.dataset[index][self.column]
        if isinstance(value, (str, bytes)):
            value = {"path" if isinstance(value, str) else "bytes": value}
        found = {key: content for key, content in (value or {}).items() if content is not None}
        name = f"row {index} {found.get('path', '')}".strip()
        if "array" in found and "sampling_rate" in found:
            return Wave(np.asarray(found["array"], dtype=np.float32), found["sampling_rate"], name)
        if not found.keys() & {"bytes", "path"}:
            raise BadFile(name, f"its column {self.column} holds no sound, but {value!r}")
        return SoundFile(found["bytes"] if "bytes" in found else Path(found["path"]), name)


class TensorAudio(View):
    """A user's own dataset of dicts with "audio": waves are cropped and resampled, other entries stay.

    "sample_hz" beside a wave is its rate; without it each has the rate of its entry already. Entries that a sample lacks
    are made from its first. `are_whole` says whether a wave ends with its recording where no "is_end" is beside it.
    """

    def __init__(self, dataset: Any, transform: AudioTransform, augment: bool = True, are_whole: bool = True):
        super().__init__(dataset)
        self.transform, self.augment, self.are_whole = transform, augment, are_whole

    def change(self, sample: Any, index: int, generator: torch.Generator | None) -> Sample:
        rates = self.transform.rates
        given = [name for name in rates if name in sample]
        if not given:
            raise ValueError(f"item {index} has no {' or '.join(rates)}; it has {', '.join(map(str, sample))}")
        waves: dict[str, Recording] = {
            name: Wave(sample[name], int(sample.get("sample_hz", rates[name])), f"item {index}") for name in given
        }
        first = waves.pop(given[0])
        cropped = self.transform(first, self.augment, generator, others=waves)
        rest = {name: value for name, value in sample.items() if name not in (*rates, "sample_hz", "is_end")}
        return {**cropped, **rest, "is_end": cropped["is_end"] and sample.get("is_end", self.are_whole)}


def audio_data(
    source: Any,
    sample_hz: Rates,
    *,
    max_length: float | None = None,
    max_length_seconds: float | None = None,
    seq_len_multiple_of: int | Mapping[str, int] | None = None,
    channels: int = 1,
    pad: bool = True,
    end_prob: float = 0.0,
    segments: bool = False,
    augment: bool = True,
    captions: CaptionSource | None = None,
    exts: Sequence[str] = AUDIO_EXTENSIONS,
    audio_column: str | None = None,
    text_column: str = "text",
    ds_fields: Sequence[str] | None = None,
) -> View:
    """Samples {"audio": [n], "audio_lengths", "is_end"}, with "texts" if there are captions, from whatever holds sound.

    `source` is a folder, a manifest (.jsonl, .csv, .parquet with a column `path` and, where only parts of files are
    meant, `start` and `duration` in seconds), a Hugging Face dataset (column `audio`) or a torch Dataset, whose samples
    are routed by `ds_fields` or by type: waves, "sample_hz" if their rate is another, "texts", "is_end". `captions` says
    where the text is: in the "column" `text_column`, in a file "beside" each sound, or in the name of its "folder".
    With `segments` every recording is cut end to end, for which all headers are read at the start; otherwise each gives
    one crop, a random one (`augment`) or the middle one. The other arguments are those of `AudioTransform`.
    """
    transform = AudioTransform(sample_hz, max_length, max_length_seconds, seq_len_multiple_of, channels, pad, end_prob)
    if isinstance(source, SoundDataset):
        return source.at(transform, augment, segments)
    whole, places = unwrapped(source)
    if isinstance(whole, SoundDataset) and places is not None and not segments:
        return Subset(whole.at(transform, augment), places)
    if isinstance(source, (str, Path)):
        text = text_column if captions == "column" else None
        files = sound_files(source, exts, audio_column or "path", text)
        texts = captions_of(files, captions, text_column) if captions else None
        return AudioFiles(files, transform, augment, texts, segments)
    if hasattr(source, "column_names"):
        column = audio_column or "audio"
        return AudioColumn(
            source, column, transform, augment, _captions(source, captions, column, text_column), segments
        )
    if captions is not None or segments:
        asked = f"captions={captions!r}" if captions else "segments=True"
        raise ValueError(f"{asked} is for files and columns: let the dataset itself return the samples so")
    if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
        raise ValueError(f"a {type(source).__name__} is no source of sound: give a folder, a manifest or a dataset")
    names = None if ds_fields is None else [OTHER_NAMES.get(name, name) for name in ds_fields]
    return TensorAudio(Routed(source, audio_fields(transform.rates), names), transform, augment)


def audio_fields(rates: Mapping[str, int]) -> dict[str, Field]:
    """What a sample of a user's own dataset may hold: the first wave it must."""
    first, *others = rates
    fields = dict.fromkeys(others, AUDIO) | {"sample_hz": LABEL, "texts": TEXT, "is_end": IS_END}
    return {first: AUDIO} | {name: dataclasses.replace(field, is_required=False) for name, field in fields.items()}


def sound_files(
    source: str | Path,
    exts: Sequence[str] = AUDIO_EXTENSIONS,
    path_column: str = "path",
    text_column: str | None = None,
) -> Files:
    """Those of a folder or of a manifest, in which these columns must be."""
    path = Path(source).expanduser()
    if path.is_dir() or not path.suffix:
        return find_sounds(path, exts)
    return read_manifest(path, (path_column,) if text_column is None else (path_column, text_column))


def find_sounds(folder: str | Path, exts: Sequence[str] = AUDIO_EXTENSIONS) -> Files:
    """The sound files below a folder, of which some, going by their names, can be read."""
    try:
        files = find_files(folder, exts)
    except ValueError as error:
        try:
            files = find_files(folder, FOREIGN_EXTENSIONS)
        except ValueError:
            raise error from None
    found = sorted({path.suffix.lower().removeprefix(".") for path in files.paths})
    if set(found) <= set(FOREIGN_EXTENSIONS):
        raise ValueError(f"{folder} holds only {', '.join(found)} files, which cannot be read: {remedy(found[0])}")
    return files


def _captions(source: Any, captions: CaptionSource | None, audio_column: str, text_column: str) -> Captions | None:
    """Of a dataset with columns, after a look at whether it has them."""
    check_columns(source, audio_column, text_column, captions)
    return ColumnCaptions(source.select_columns([text_column]), text_column) if captions else None


class SoundDataset(Dataset[Any]):
    """The sounds in a folder and its subfolders: waves [n], or where there are several rates a tuple of them.

    What a bare wave cannot tell, its length before padding and whether it is the end, is in `samples`; a trainer that is
    given such a dataset looks there.
    """

    def __init__(
        self,
        folder: str | Path,
        target_sample_hz: int | Sequence[int],
        exts: Sequence[str] = ("flac", "wav", "mp3", "webm"),
        max_length: float | None = None,
        seq_len_multiple_of: int | Sequence[int] | None = None,
        *,
        channels: int = 1,
        pad: bool = True,
        augment: bool = True,
    ):
        self.target_sample_hz = target_sample_hz
        rates, multiples = (
            value if value is None or isinstance(value, int) else {str(place): one for place, one in enumerate(value)}
            for value in (target_sample_hz, seq_len_multiple_of)
        )
        assert rates is not None
        transform = AudioTransform(rates, max_length, None, multiples, channels, pad)
        self.samples = AudioFiles(find_sounds(folder, exts), transform, augment)

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def keys(self) -> Sequence[str] | None:
        return self.samples.keys

    def fetch(self, index: int, generator: torch.Generator | None = None) -> Tensor | tuple[Tensor, ...]:
        sample = self.samples.fetch(index, generator)
        waves = tuple(sample[name] for name in self.samples.transform.rates)
        return waves[0] if isinstance(self.target_sample_hz, int) else waves

    def __getitem__(self, index: int) -> Tensor | tuple[Tensor, ...]:
        return self.fetch(index)

    def unaugmented(self) -> Self:
        plain = copy.copy(self)
        plain.samples = self.samples.unaugmented()
        return plain

    def at(self, transform: AudioTransform, augment: bool = True, segments: bool = False) -> AudioFiles:
        """The same files through another transform, to which this one's length goes if it has none itself."""
        own = self.samples
        if transform.units is None and own.transform.units is not None:
            transform = dataclasses.replace(transform, max_length_seconds=own.transform.units / own.transform.grid)
        return AudioFiles(own.dataset, transform, augment and own.augment, None, segments)


class AudioDataset(SoundDataset):
    """The files of one kind in a folder, whole, at one rate: by default that of the first one that can be read."""

    def __init__(self, folder: str | Path, audio_extension: str = ".flac", *, sample_hz: int | None = None):
        super().__init__(folder, sample_hz or _first_rate(find_sounds(folder, [audio_extension])), [audio_extension])


def _first_rate(files: Files) -> int:
    for path in files.paths:
        try:
            return SoundFile(path, str(path)).hz
        except BadFile as error:
            bad = error
    raise ValueError(f"none of the {len(files)} files can be read, for example {bad}")


def get_dataloader(
    ds: Any, pad_to_longest: bool = True, *, with_lengths: bool = False, **kwargs: Any
) -> DataLoader[Any]:
    """A DataLoader of tuples with one batch for each entry of a sample: waves [b, n], texts in a list.

    Waves are padded with zeros to the longest of the batch, or cut to the shortest. `with_lengths` adds the length of
    each wave before that, [b] for each entry of waves, at the end of the tuple. The keywords are those of DataLoader.
    """
    collate = functools.partial(_collate_waves, pad_to_longest=pad_to_longest, with_lengths=with_lengths)
    return DataLoader(ds, collate_fn=collate, **kwargs)


def _collate_waves(samples: list[Any], pad_to_longest: bool, with_lengths: bool) -> tuple[Any, ...]:
    columns = zip(*(sample if isinstance(sample, tuple) else (sample,) for sample in samples), strict=True)
    batches: list[Any] = []
    lengths: list[Tensor] = []
    for column in columns:
        if not isinstance(column[0], Tensor):
            batches.append(list(column))
            continue
        sizes = torch.tensor([wave.shape[-1] for wave in column])
        size = int(sizes.max() if pad_to_longest else sizes.min())
        fitted = [F.pad(wave, (0, size - wave.shape[-1])) for wave in column]  # a negative padding cuts
        batches.append(torch.stack(fitted))
        lengths.append(sizes.clamp(max=size))
    return (*batches, *lengths) if with_lengths else tuple(batches)
