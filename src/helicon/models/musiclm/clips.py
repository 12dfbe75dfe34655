"""Recordings to be found, and the clips they are cut into: what `SoundIndex` hears.

Letters: n samples.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from helicon.data.audio import AudioFiles, AudioTransform, sound_files
from helicon.data.collate import collate
from helicon.data.dataset import BadFile
from helicon.data.recording import Recording, SoundFile, Wave
from helicon.data.synthetic_sounds import SyntheticSounds
from helicon.models.musiclm.mulan import begins_in


@runtime_checkable
class Part(Protocol):
    """A recording to be found."""

    @property
    def name(self) -> str: ...

    def open(self, begin: float = 0.0, seconds: float | None = None) -> Recording:
        """All of it, or so many seconds from `begin` on."""
        ...


@dataclass(frozen=True)
class FilePart:
    """A file as it was when it was seen; or, of a manifest, `duration` seconds of it from `start` on."""

    path: str  # absolute
    start: float
    duration: float | None
    size: int
    date: int  # in nanoseconds

    @classmethod
    def of(cls, path: Path, start: float = 0.0, duration: float | None = None) -> "FilePart":
        try:
            found = path.stat()
        except OSError as error:
            raise BadFile(path, f"cannot be opened ({error.strerror})") from error
        if not os.access(path, os.R_OK):  # told anew each time: neither its size nor its date changes with its rights
            raise BadFile(path, "cannot be opened (Permission denied)")
        return cls(cls.name_of(path), start, duration, found.st_size, found.st_mtime_ns)

    @staticmethod
    def name_of(path: str | Path) -> str:
        return os.path.abspath(path)  # noqa: PTH100 (links stay)

    @property
    def name(self) -> str:
        return self.path

    def open(self, begin: float = 0.0, seconds: float | None = None) -> SoundFile:
        rest = None if self.duration is None else self.duration - begin
        lengths = [length for length in (rest, seconds) if length is not None]
        return SoundFile(Path(self.path), self.path, self.start + begin, min(lengths, default=None))


@dataclass(frozen=True)
class MadeUpPart:
    """A made-up sound, which is never kept."""

    sounds: SyntheticSounds
    index: int

    @property
    def name(self) -> str:
        return f"{self.sounds.attributes(self.index).caption} ({self.index})"

    def open(self, begin: float = 0.0, seconds: float | None = None) -> Wave:
        hz, wave = self.sounds.sample_hz, self.sounds[self.index]["audio"]
        end = None if seconds is None else round((begin + seconds) * hz)
        return Wave(wave[round(begin * hz) : end], hz, self.name)


def parts_of(source: str | Path | SyntheticSounds) -> tuple[list[Part], dict[str, str]]:
    """The recordings of a folder or manifest, and those that are not there, and why."""
    if isinstance(source, SyntheticSounds):
        return [MadeUpPart(source, index) for index in range(len(source))], {}
    files = sound_files(source)
    parts: dict[Part, None] = {}
    bad: dict[str, str] = {}
    for path, section in zip(files.paths, AudioFiles(files, AudioTransform(1)).parts, strict=True):
        try:
            parts[FilePart.of(path, *section)] = None
        except BadFile as error:
            bad[error.path] = error.reason
    return list(parts), bad


@dataclass
class Clips:
    """The clips of recordings, in order, as processes read them."""

    transform: AudioTransform
    seconds: float
    parts: list[Part] = field(default_factory=list)
    places: list[tuple[int, float]] = field(default_factory=list)  # the number of its recording, and where it begins
    problems: dict[int, str] = field(default_factory=dict)  # the recordings that cannot be opened, and why

    def add(self, part: Part) -> None:
        try:
            recording = part.open()
            begins = begins_in(recording.num_frames / recording.hz, self.seconds)
            self.places += [(len(self.parts), begin) for begin in begins]
        except BadFile as error:
            self.problems[len(self.parts)] = error.reason
        self.parts.append(part)

    def __len__(self) -> int:
        return len(self.places)

    def num_whole(self, num_heard: int) -> int:
        """How many recordings have all their clips among the first so many."""
        return self.places[num_heard][0] if num_heard < len(self) else len(self.parts)

    def read(self, index: int) -> tuple[dict[str, Any], float]:
        """And how many seconds it has. (A file may end before it says.)"""
        number, begin = self.places[index]
        recording = self.parts[number].open(begin, self.seconds)
        sample = self.transform(recording)
        return {name: sample[name] for name in ("audio", "audio_lengths")}, recording.num_frames / recording.hz

    def fetch(self, index: int, generator: torch.Generator) -> tuple["Heard", dict[str, Any] | None]:
        try:
            sample, seconds = self.read(index)
            return Heard(index, seconds), sample
        except BadFile as error:
            return Heard(index, problem=error.reason), None


@dataclass(frozen=True)
class Heard:
    """The number of a clip, and how long it is or why it cannot be read."""

    clip: int
    seconds: float = 0.0
    problem: str | None = None


def gathered(fetched: Sequence[tuple[Heard, Any]]) -> tuple[list[Heard], Any]:
    samples = [sample for _, sample in fetched if sample is not None]
    return [heard for heard, _ in fetched], collate(samples) if samples else None
