import hashlib
import math

import numpy as np
import pytest
import scipy.signal
import torch

from helicon.data.loader import Loader
from helicon.data.synthetic_sounds import (
    DIRECTIONS,
    DURATIONS,
    KINDS,
    LOUDNESSES,
    PITCHES,
    SyntheticSounds,
    decay,
    sine,
)


def test_the_same_sound_on_every_machine():
    waves = torch.stack([SyntheticSounds(40, 8000, 0.5, seed=3)[i]["audio"] for i in range(40)])
    content = (waves * 2**15).round().to(torch.int16).numpy().tobytes()
    assert hashlib.sha256(content).hexdigest()[:16] == "12090bd236b81c0c"


def test_samples_are_sounds_with_captions():
    data = SyntheticSounds(60, 11025, 0.7)
    for index in range(60):
        sample, words = data[index], data.attributes(index)
        audio = sample["audio"]
        assert audio.shape == (round(0.7 * 11025),) and audio.dtype == torch.float32
        assert torch.equal((audio * 2**15).round() / 2**15, audio)  # 16 bits, like a file
        assert audio.abs().max().item() == pytest.approx(words.peak, abs=2**-15)
        direction = {"tone": "steady ", "chirp": f"{words.direction} "}.get(words.kind, "")
        assert sample["texts"] == f"a {words.loudness} {direction}{words.kind}, {words.pitch} pitch"
        assert (words.direction != "steady") == (words.kind == "chirp")
    assert not torch.equal(data[0]["audio"], SyntheticSounds(60, 11025, 0.7, seed=1)[0]["audio"])
    assert data.attributes(4) == SyntheticSounds(99).attributes(4)  # nor rate nor length change what is drawn


def test_sound_stands_where_it_should_and_silence_around_it():
    data = SyntheticSounds(40, 16000, 1.0)
    for index in range(40):
        audio, words = data[index]["audio"], data.attributes(index)
        heard = audio.abs().gt(0.01 * words.peak).nonzero().flatten() / 16000
        assert heard[0].item() == pytest.approx(words.begin, abs=0.01)
        if words.kind != "pluck":
            assert heard[-1].item() == pytest.approx(words.begin + words.length, abs=0.01)
        end = int((words.begin + words.length) * 16000) + 1
        assert audio[end:].eq(0).all() and audio[: int(words.begin * 16000)].eq(0).all()


def test_every_word_appears_about_equally_often():
    data = SyntheticSounds(3000)
    seen = [data.attributes(index) for index in range(3000)]
    for name, options in {"kind": KINDS, "pitch": PITCHES, "loudness": LOUDNESSES}.items():
        counts = [sum(getattr(words, name) == option for words in seen) for option in options]
        assert sum(counts) == 3000
        assert all(0.85 < count * len(options) / 3000 < 1.15 for count in counts), name
    chirps = [words.direction for words in seen if words.kind == "chirp"]
    assert all(0.4 < chirps.count(direction) / len(chirps) < 0.6 for direction in DIRECTIONS)


def strongest(wave: np.ndarray, hz: int) -> float:
    spectrum = np.abs(np.fft.rfft(wave * np.hanning(len(wave)), 4 * len(wave)))
    return float(spectrum.argmax() * hz / (4 * len(wave)))


def test_the_sound_is_what_the_numbers_say():
    data = SyntheticSounds(60, 16000, 1.0)
    for index in range(60):
        words = data.attributes(index)
        first, count = int(words.begin * 16000), int(words.length * 16000)
        wave = data[index]["audio"].numpy()[first : first + count].astype(np.float64)
        if words.kind in ("tone", "pluck"):
            assert strongest(wave, 16000) == pytest.approx(words.hz, abs=1.5)
        elif words.kind == "chirp":
            early, late = strongest(wave[: count // 8], 16000), strongest(wave[-count // 8 :], 16000)
            expected = {"rising": 1, "falling": -1}[words.direction] * (1 - 1 / 8)
            assert math.log2(late / early) == pytest.approx(expected, abs=0.12)
            assert math.sqrt(early * late) == pytest.approx(words.hz, rel=0.06)
        else:
            frequencies, power = scipy.signal.welch(wave, 16000, nperseg=1024)
            inside = power[(frequencies > 0.4 * words.hz) & (frequencies < 1.6 * words.hz)].sum() / power.sum()
            assert inside > 0.8 and power.max() / power.sum() < 0.25  # in its band, and no tone
        halves = [np.square(half).mean() for half in np.array_split(wave, 2)]
        assert (halves[1] < 0.2 * halves[0]) == (words.kind == "pluck")


def test_sines_and_decays_of_exact_operations_are_near_the_true_ones():
    turns = np.linspace(0, 3000, 70001)
    np.testing.assert_allclose(sine(turns), np.sin(2 * np.pi * turns), atol=1e-8)
    np.testing.assert_allclose(decay(np.linspace(0, 10, 99)), np.exp(-np.linspace(0, 10, 99)), atol=5e-4)


def test_held_out_pairs_never_appear_and_can_be_asked_for():
    held_out = [("tone", "low"), ("noise burst", "high")]
    train, test = SyntheticSounds(1000, held_out=held_out), SyntheticSounds(100, only=held_out)
    seen = {(words.kind, words.pitch) for words in map(train.attributes, range(1000))}
    assert len(seen) == 10 and not seen & set(held_out)
    assert {(words.kind, words.pitch) for words in map(test.attributes, range(100))} == set(held_out)


def test_a_pair_may_name_a_direction_and_a_duration():
    words = {"kinds": ["tone", "chirp"], "loudnesses": ["loud"], "durations": ["short", "long"]}
    held_out = [("rising chirp", "low"), ("short tone", "high"), ("long falling chirp", "middle"), ("chirp", "high")]
    train, test = SyntheticSounds(1000, held_out=held_out, **words), SyntheticSounds(500, only=held_out, **words)
    seen, unseen = ({data.attributes(index).caption for index in range(len(data))} for data in (train, test))
    assert unseen == {
        "a loud short rising chirp, low pitch",
        "a loud long rising chirp, low pitch",
        "a loud short steady tone, high pitch",
        "a loud long falling chirp, middle pitch",
        *(f"a loud {words}, high pitch" for words in ("short rising chirp", "long rising chirp")),
        *(f"a loud {words}, high pitch" for words in ("short falling chirp", "long falling chirp")),
    }
    assert len(seen) == 18 - len(unseen) and not seen & unseen


def test_sounds_last_as_long_as_their_captions_say():
    data = SyntheticSounds(60, 8000, 0.5, durations=list(DURATIONS))
    for index in range(60):
        words = data.attributes(index)
        shortest, longest = DURATIONS[words.duration]
        assert shortest <= words.length <= longest and f" {words.duration} " in words.caption
        heard = data[index]["audio"].nonzero().flatten()
        assert (heard[-1] - heard[0]).item() / 4000 == pytest.approx(words.length, abs=0.03)


def test_what_cannot_be_made_is_refused():
    with pytest.raises(ValueError, match=r"\('tone', 'deep'\) is no pair of a kind \(tone, .*low"):
        SyntheticSounds(3, held_out=[("tone", "deep")])
    for pair in (("short tone", "low"), ("rising tone", "low"), ("pluck", "low")):
        with pytest.raises(ValueError, match=r"is no pair of a kind \(tone, chirp; "):
            SyntheticSounds(3, held_out=[pair], kinds=["tone", "chirp"])
    for options in ({"kinds": ["bell"]}, {"kinds": []}, {"loudnesses": ["quiet"]}, {"durations": ["brief"]}):
        with pytest.raises(ValueError, match=r"give a list of at least one of (tone|soft|short)"):
            SyntheticSounds(3, **options)
    with pytest.raises(ValueError, match="leave at least one"):
        SyntheticSounds(3, held_out=[("tone", "low")], only=[("tone", "low")])
    with pytest.raises(ValueError, match="num_samples=0"):
        SyntheticSounds(0)
    for options in ({"sample_hz": 4000}, {"seconds": 0.1}):
        with pytest.raises(ValueError, match=r"need 8000 Hz and 0.5 s or more"):
            SyntheticSounds(3, **options)
    with pytest.raises(IndexError):
        SyntheticSounds(3)[3]


def test_loads_in_batches():
    batch = next(Loader(SyntheticSounds(5, 8000, 0.5), batch_size=3).steps())[0]
    assert batch["audio"].shape == (3, 4000) and len(batch["texts"]) == 3
