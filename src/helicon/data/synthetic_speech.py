"""Seeded speech-like sounds with their texts, phonemes and durations: something to learn to speak with nothing downloaded.

    "sake fo kusi"    said by "alto"    _ s a k e _ f o _ k u s i _    each phoneme with its seconds

A syllable is a voiceless consonant (noise: `s` high, `f` low, `k` a silence and a burst) and a vowel (harmonics of a pitch under the
formants of that vowel), words are apart by a pause, and a voice has a pitch and a length of its vocal tract. The melody of each vowel
(see `helicon.metrics.speech.MELODIES`) is part of how it sounds: `read_contour` there reads the vowels back from the wave.

Each utterance is a function of (seed, index) alone and the same on every machine: choices come from a hash, waves are made with
operations that round exactly, and the result has 16 bits, like a file.

Letters: n samples, m phonemes.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int16
from torch.utils.data import Dataset

from helicon.data.synthetic_sounds import between, check_words, choose, decay, noise, sine
from helicon.metrics.speech import MELODIES

Array = np.ndarray

PAUSE = "_"
CONSONANTS = {"s": 2600.0, "f": 1100.0, "k": 1700.0}  # Hz, the middle of the noise
VOWELS = tuple(MELODIES)
PHONEMES = (PAUSE, *CONSONANTS, *VOWELS)
FORMANTS = {"a": (750, 1250), "e": (480, 1900), "i": (300, 2250), "o": (480, 850), "u": (320, 700)}  # Hz
THIRD_FORMANT, BANDWIDTHS, LEVELS = 2800, (90, 130, 200), (1.0, 0.6, 0.25)
VOICES = {  # pitch in Hz, and the factor of all formants
    "bass": (112.0, 0.88),
    "baritone": (135.0, 0.94),
    "tenor": (162.0, 1.0),
    "alto": (196.0, 1.08),
    "soprano": (238.0, 1.16),
}
LOW, HIGH = 0.7846, 1.2746  # of the pitch: 0.7 octaves, half of them below
CONSONANT, VOWEL, GAP, EDGE = (70, 130), (150, 260), (90, 170), (30, 110)  # milliseconds; a gap is between words
LOUDNESSES, CONSONANT_LEVEL = (0.3, 0.6), 0.35  # the peak of an utterance, and of a consonant beside a vowel's
LOWEST_RATE = 8000
FADE = 12  # milliseconds, of a vowel
MOST_SYLLABLES = 12  # choices come from a hash of limited length


@dataclass(frozen=True)
class Utterance:
    """What is said, by whom, and how long each phoneme takes."""

    voice: str
    text: str
    phonemes: tuple[str, ...]
    milliseconds: tuple[int, ...]
    hz: float  # the mean pitch
    peak: float


class SyntheticSpeech(Dataset[dict[str, Any]]):
    """`num_samples` utterances of 1 to 3 s, no two of them alike:

        {"audio": [n], "texts": "sake fo", "phonemes": "_ s a k e _ f o _", "durations": [m] seconds, which sum to the audio's}

    `voices` are those to choose from, and `syllables` the fewest and the most of an utterance. A voice that is left out here, and is
    all that another dataset has, is one that a model never heard.
    """

    def __init__(
        self,
        num_samples: int,
        sample_hz: int = 16000,
        seed: int = 0,
        *,
        voices: Sequence[str] = tuple(VOICES),
        syllables: Sequence[int] = (3, 7),
    ):
        if num_samples < 1:
            raise ValueError(f"num_samples={num_samples}: it must be at least 1")
        if sample_hz < LOWEST_RATE:
            raise ValueError(f"sample_hz={sample_hz}: this speech needs {LOWEST_RATE} Hz or more")
        check_words("voices", voices, VOICES)
        if len(syllables) != 2 or not 1 <= syllables[0] <= syllables[1] <= MOST_SYLLABLES:
            raise ValueError(
                f"syllables={list(syllables)}: give the fewest and the most of an utterance, from 1 to {MOST_SYLLABLES}"
            )
        self.num_samples, self.sample_hz, self.seed = num_samples, sample_hz, seed
        self.voices, self.syllables = list(voices), tuple(syllables)

    def __len__(self) -> int:
        return self.num_samples

    def utterance(self, index: int) -> Utterance:
        """What is said in utterance `index`, without saying it."""
        if not 0 <= index < self.num_samples:
            raise IndexError(f"there is no utterance {index} among {self.num_samples}")
        digest = hashlib.shake_256(f"speech {self.seed} {index}".encode()).digest(4 * (8 + 6 * MOST_SYLLABLES))
        draws = iter((np.frombuffer(digest, dtype="<u4") / 2**32).tolist())
        voice = choose(self.voices, draws)
        hz, peak = VOICES[voice][0] * between((0.96, 1.04), draws), between(LOUDNESSES, draws)
        count = self.syllables[0] + int(next(draws) * (self.syllables[1] - self.syllables[0] + 1))
        phonemes, lengths = [PAUSE], [between(EDGE, draws)]
        for number in range(count):
            if number and next(draws) < 0.4:
                phonemes.append(PAUSE)
                lengths.append(between(GAP, draws))
            phonemes += [choose(tuple(CONSONANTS), draws), choose(VOWELS, draws)]
            lengths += [between(CONSONANT, draws), between(VOWEL, draws)]
        phonemes.append(PAUSE)
        lengths.append(between(EDGE, draws))
        text = "".join(phonemes[1:-1]).replace(PAUSE, " ")
        return Utterance(voice, text, tuple(phonemes), tuple(map(int, lengths)), hz, peak)

    def fetch(self, index: int, generator: torch.Generator | None = None) -> dict[str, Any]:
        """The generator goes unused: this speech is not augmented."""
        said = self.utterance(index)
        ends = np.cumsum(said.milliseconds) * self.sample_hz // 1000
        lengths = np.diff(ends, prepend=0)
        audio = torch.from_numpy(self._samples(said, ends, index)).to(torch.float32).div_(2**15)
        durations = torch.from_numpy(lengths / self.sample_hz).to(torch.float32)
        return {"audio": audio, "texts": said.text, "phonemes": " ".join(said.phonemes), "durations": durations}

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.fetch(index)

    def _samples(self, said: Utterance, ends: Array, index: int) -> Int16[Array, "n"]:
        wave = np.zeros(int(ends[-1]))
        for number, phoneme in enumerate(said.phonemes):
            start, end = int(ends[number - 1]) if number else 0, int(ends[number])
            time = np.arange(end - start) / self.sample_hz
            if phoneme in CONSONANTS:
                wave[start:end] = _consonant(phoneme, time, f"speech {self.seed} {index} {number}")
            elif phoneme in VOWELS:
                wave[start:end] = _vowel(phoneme, time, said.hz, VOICES[said.voice][1], self.sample_hz)
        return np.floor(wave * (said.peak / np.abs(wave).max()) * 2**15 + 0.5).astype(np.int16)


def _consonant(phoneme: str, time: Float[Array, "n"], key: str) -> Float[Array, "n"]:
    """A hiss that swells and fades; of a `k`, half of the time silence, and then a burst that dies away."""
    hiss = noise(time, CONSONANTS[phoneme], key)
    way = time / time[-1]
    if phoneme == "k":
        after = np.clip(way - 0.5, 0, None)
        swell = np.clip(after * 40, 0, 1) * decay(after * 8)
    else:
        swell = np.clip(4 * np.minimum(way, 1 - way), 0, 1)
    sound = hiss * swell
    return sound * (CONSONANT_LEVEL / np.abs(sound).max())


def _vowel(phoneme: str, time: Float[Array, "n"], hz: float, tract: float, sample_hz: int) -> Float[Array, "n"]:
    """The harmonics of a moving pitch, each as strong as the resonances are at its frequency, and weaker the higher it is.

    sin((k + 1) x) = 2 cos(x) sin(k x) - sin((k - 1) x) gives one from the two before.
    """
    way = time / time[-1]
    pitch, cycles = _melody(MELODIES[phoneme], way)
    pitch, cycles = hz * pitch, hz * time[-1] * cycles
    before, harmonic, double_cosine = np.zeros_like(time), sine(cycles), 2 * sine(cycles + 0.25)
    centres = [tract * formant for formant in (*FORMANTS[phoneme], THIRD_FORMANT)]
    sound = np.zeros_like(time)
    for number in range(1, int(min(4500.0, 0.45 * sample_hz) / (hz * HIGH)) + 1):
        sound += harmonic * _resonance(number * pitch, centres) / number
        before, harmonic = harmonic, double_cosine * harmonic - before
    edge = np.clip(np.minimum(time, time[-1] - time) * (1000 / FADE), 0, 1)
    sound = sound * edge * edge * (3 - 2 * edge)
    return sound / np.abs(sound).max()


def _melody(melody: str, way: Float[Array, "n"]) -> tuple[Float[Array, "n"], Float[Array, "n"]]:
    """The pitch, as a part of the voice's own, from begin (0) to end (1), and its integral."""
    span = HIGH - LOW
    if melody == "rising":
        return LOW + span * way, way * (LOW + span * 0.5 * way)
    if melody == "falling":
        return HIGH - span * way, way * (HIGH - span * 0.5 * way)
    arch, area = 4 * way * (1 - way), way * way * (2 - way * (4 / 3))
    if melody == "peak":
        return LOW + span * arch, LOW * way + span * area
    if melody == "dip":
        return HIGH - span * arch, HIGH * way - span * area
    return np.ones_like(way), way


def _resonance(frequency: Float[Array, "n"], centres: Sequence[float]) -> Float[Array, "n"]:
    """How much of a frequency passes the formants."""
    passed = np.full_like(frequency, 0.02)
    for centre, bandwidth, level in zip(centres, BANDWIDTHS, LEVELS, strict=True):
        away = (frequency - centre) / bandwidth
        passed += level / (1 + away * away)
    return passed
