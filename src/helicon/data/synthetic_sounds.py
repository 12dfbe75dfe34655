"""Seeded sounds with true captions: something to learn with nothing downloaded.

    "a loud rising chirp, low pitch"    "a soft steady tone, high pitch"    "a loud noise burst, middle pitch"

Each sound is a function of (seed, index) alone and the same on every machine: choices come from a hash, waves are made
with operations that round exactly (so no sine or exponential of a maths library), and the result has 16 bits, like a file.
`helicon.metrics.audio.describe_sound` finds the words again by listening.
"""

import hashlib
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int16
from torch.utils.data import Dataset

Array = np.ndarray
Pair = tuple[str, str]  # a kind, as it is or with words before it ("rising chirp"), and a pitch

KINDS = ("tone", "chirp", "pluck", "noise burst")
PITCHES = {"low": (200.0, 270.0), "middle": (600.0, 810.0), "high": (1800.0, 2430.0)}  # Hz
DIRECTIONS = ("rising", "falling")  # of chirps; everything else is steady
LOUDNESSES = {"soft": (0.04, 0.07), "loud": (0.4, 0.7)}  # the peak
LENGTHS = {"tone": (0.7, 0.9), "chirp": (0.7, 0.9), "pluck": (0.75, 0.95), "noise burst": (0.3, 0.45)}  # of the clip
DURATIONS = {"short": (0.4, 0.5), "medium": (0.6, 0.7), "long": (0.8, 0.9)}  # the same, where the caption tells
SPREAD = math.sqrt(2)  # a chirp begins and ends half an octave from its middle
NUM_HARMONICS = 6  # of a pluck
DECAY = 0.18  # of the clip, in which a pluck falls to 1 / e
FADE = 0.01  # seconds
LOWEST_RATE, SHORTEST = 8000, 0.5  # the highest chirp, and the fastest, that can still be told


@dataclass(frozen=True)
class SoundAttributes:
    """What is to be heard: the words of the caption, and the numbers behind them."""

    kind: str
    pitch: str
    direction: str  # rising, falling, steady
    loudness: str
    hz: float  # the fundamental; of a chirp the (geometric) mean of its ends, of noise the middle of its band
    peak: float
    begin: float  # as a part of the clip
    length: float
    duration: str = ""  # short, medium, long; empty where the caption does not tell

    @property
    def caption(self) -> str:
        direction = self.direction if self.kind in ("tone", "chirp") else ""
        words = (self.loudness, self.duration, direction, self.kind)
        return f"a {' '.join(word for word in words if word)}, {self.pitch} pitch"


class SyntheticSounds(Dataset[dict[str, Any]]):
    """`num_samples` sounds {"audio": [n], "texts": caption}, each in a clip of `seconds` with silence around it.

    (kind, pitch) pairs in `held_out` are never drawn; another dataset with `only` those tests what was made of them. A pair may
    say more: ("rising chirp", "low"), ("short tone", "high"), ("long falling chirp", "middle").
    `kinds`, `loudnesses` and `durations` are the words to choose from; without durations, captions tell none. Loud tones and chirps
    are the quickest to learn.
    """

    def __init__(
        self,
        num_samples: int,
        sample_hz: int = 16000,
        seconds: float = 1.0,
        seed: int = 0,
        *,
        held_out: Sequence[Pair] = (),
        only: Sequence[Pair] = (),
        kinds: Sequence[str] = KINDS,
        loudnesses: Sequence[str] = tuple(LOUDNESSES),
        durations: Sequence[str] = (),
    ):
        if num_samples < 1:
            raise ValueError(f"num_samples={num_samples}: it must be at least 1")
        if sample_hz < LOWEST_RATE or seconds < SHORTEST:
            raise ValueError(
                f"sample_hz={sample_hz}, seconds={seconds}: these sounds need {LOWEST_RATE} Hz and {SHORTEST} s or more"
            )
        check_words("kinds", kinds, KINDS)
        check_words("loudnesses", loudnesses, LOUDNESSES)
        if durations:
            check_words("durations", durations, DURATIONS)
        self.variants = _left(kinds, tuple(durations) or ("",), held_out, only)
        self.pairs, self.loudnesses = list(self.variants), list(loudnesses)
        self.num_samples, self.sample_hz, self.seconds, self.seed = num_samples, sample_hz, seconds, seed

    def __len__(self) -> int:
        return self.num_samples

    def attributes(self, index: int) -> SoundAttributes:
        """What sound `index` is, without making it."""
        if not 0 <= index < self.num_samples:
            raise IndexError(f"there is no sound {index} among {self.num_samples}")
        digest = hashlib.blake2b(f"sounds {self.seed} {index}".encode(), digest_size=64).digest()
        draws = iter((np.frombuffer(digest, dtype="<u4") / 2**32).tolist())
        kind, pitch = choose(self.pairs, draws)
        loudness, (duration, direction) = choose(self.loudnesses, draws), choose(self.variants[kind, pitch], draws)
        hz, peak = between(PITCHES[pitch], draws), between(LOUDNESSES[loudness], draws)
        length = between(DURATIONS[duration] if duration else LENGTHS[kind], draws)
        begin = (1 - length) * next(draws)
        return SoundAttributes(kind, pitch, direction, loudness, hz, peak, begin, length, duration)

    def fetch(self, index: int, generator: torch.Generator | None = None) -> dict[str, Any]:
        """The generator goes unused: these sounds are not augmented, as a quieter one would belie its caption."""
        attributes = self.attributes(index)
        audio = torch.from_numpy(self._samples(attributes, index)).to(torch.float32).div_(2**15)
        return {"audio": audio, "texts": attributes.caption}

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.fetch(index)

    def _samples(self, attributes: SoundAttributes, index: int) -> Int16[Array, "n"]:
        clip = np.zeros(round(self.seconds * self.sample_hz))
        start = int(attributes.begin * len(clip))
        count = int(attributes.length * len(clip))
        time = np.arange(count) / self.sample_hz
        if attributes.kind == "noise burst":
            sound = noise(time, attributes.hz, f"noise {self.seed} {index}")
        elif attributes.kind == "pluck":
            sound = _pluck(time, attributes.hz, DECAY * self.seconds, self.sample_hz)
        else:
            sound = sine(_cycles(attributes, time))
        sound = sound * _fades(time)
        clip[start : start + count] = sound * (attributes.peak / np.abs(sound).max())
        return np.floor(clip * 2**15 + 0.5).astype(np.int16)


def _left(
    kinds: Sequence[str], durations: Sequence[str], held_out: Sequence[Pair], only: Sequence[Pair]
) -> dict[Pair, list[Pair]]:
    """The pairs of a kind and a pitch that may be drawn, and which durations and directions each may have."""
    every = [
        (kind, pitch, duration, direction)
        for kind in kinds
        for pitch in PITCHES
        for duration in durations
        for direction in (DIRECTIONS if kind == "chirp" else ("steady",))
    ]
    for pair in (*held_out, *only):
        if not any(_is_among(sound, [pair]) for sound in every):
            raise ValueError(
                f"{pair} is no pair of a kind ({', '.join(kinds)}; before it the duration and the direction, where there are some) "
                f"and a pitch ({', '.join(PITCHES)})"
            )
    left: dict[Pair, list[Pair]] = {}
    for sound in every:
        if (not only or _is_among(sound, only)) and not _is_among(sound, held_out):
            left.setdefault(sound[:2], []).append(sound[2:])
    if not left:
        raise ValueError("every pair of a kind and a pitch is held out: leave at least one")
    return left


def _is_among(sound: tuple[str, str, str, str], pairs: Sequence[Pair]) -> bool:
    kind, pitch, duration, direction = sound
    names = (kind, f"{direction} {kind}", f"{duration} {kind}", f"{duration} {direction} {kind}")
    return any((name, pitch) in pairs for name in names)


def check_words(name: str, given: Sequence[str], known: Collection[str]) -> None:
    """Raises unless all that is given is known, and something is."""
    unknown = [word for word in given if word not in known]
    if unknown or not given or isinstance(given, str):
        raise ValueError(f"{name}={given!r}: give a list of at least one of {', '.join(known)}")


def _cycles(attributes: SoundAttributes, time: Float[Array, "n"]) -> Float[Array, "n"]:
    """How often a tone or a chirp has swung; the frequency of a chirp changes linearly."""
    spread = {"rising": SPREAD, "falling": 1 / SPREAD, "steady": 1.0}[attributes.direction]
    first, last = attributes.hz / spread, attributes.hz * spread
    return time * (first + (last - first) * 0.5 * time / time[-1])


def sine(cycles: Float[Array, "n"]) -> Float[Array, "n"]:
    """sin(2 pi cycles) to 1e-8: a polynomial, as libraries differ in the last bit of theirs."""
    half = cycles - np.floor(cycles) - 0.5
    squared = (0.25 - np.abs(half)) * 6.283185307179586
    squared = squared * squared  # cos(x) = 1 - x^2 / 2 (1 - x^2 / 12 (1 - ...)), x within a quarter of a turn
    cosine = np.ones_like(squared)
    for n in (12, 10, 8, 6, 4, 2):
        cosine = 1 - squared / (n * (n - 1)) * cosine
    return np.where(half > 0, -cosine, cosine)


def decay(x: Float[Array, "n"]) -> Float[Array, "n"]:
    """e^-x, nearly: (1 - x / 1024)^1024."""
    power = 1 - x / 1024
    for _ in range(10):
        power = power * power
    return power


def _pluck(time: Float[Array, "n"], hz: float, lasting: float, sample_hz: int) -> Float[Array, "n"]:
    """Harmonics that are weaker and die sooner the higher they are, as on a string."""
    sound = np.zeros_like(time)
    for number in range(1, NUM_HARMONICS + 1):
        if number * hz < 0.45 * sample_hz:
            sound += sine(number * hz * time) * decay(time / lasting * (0.7 + 0.3 * number)) / number
    return sound


def noise(time: Float[Array, "n"], hz: float, key: str) -> Float[Array, "n"]:
    """A band from half of `hz` to one and a half: a carrier times random values, `hz` of them a second, smoothly joined."""
    place = time * hz
    left = np.floor(place).astype(np.int64)
    way = place - left
    way = way * way * (3 - 2 * way)
    count = int(left[-1]) + 2
    values = np.frombuffer(hashlib.shake_256(key.encode()).digest(4 * count), dtype="<u2") / 2**15 - 1
    first, second = (part[left] * (1 - way) + part[left + 1] * way for part in (values[:count], values[count:]))
    return first * sine(place) + second * sine(place + 0.25)


def _fades(time: Float[Array, "n"]) -> Float[Array, "n"]:
    edge = np.clip(np.minimum(time, time[-1] - time) / FADE, 0, 1)
    return edge * edge * (3 - 2 * edge)


def choose(options: Sequence[Any], draws: Iterator[float]) -> Any:
    """One of them; takes one number from 0 to 1."""
    return options[int(next(draws) * len(options))]


def between(bounds: tuple[float, float], draws: Iterator[float]) -> float:
    """A value from the first bound to the second; takes one number from 0 to 1."""
    return bounds[0] + (bounds[1] - bounds[0]) * next(draws)
