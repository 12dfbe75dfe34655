import hashlib

import numpy as np
import pytest
import torch

from helicon.data.loader import Loader
from helicon.data.synthetic_speech import CONSONANTS, PAUSE, PHONEMES, VOICES, VOWELS, SyntheticSpeech
from helicon.metrics.audio import spectrogram
from helicon.metrics.speech import read_contour


def test_the_same_speech_on_every_machine():
    data = SyntheticSpeech(6, 8000, seed=3)
    content = b"".join((data[i]["audio"] * 2**15).round().to(torch.int16).numpy().tobytes() for i in range(6))
    assert hashlib.sha256(content).hexdigest()[:16] == "a82836fcc75f1cd1"


@pytest.mark.parametrize("hz", [8000, 11025, 16000])
def test_durations_are_exact(hz):
    data = SyntheticSpeech(20, hz)
    for index in range(20):
        sample, said = data[index], data.utterance(index)
        assert sample["audio"].dtype == torch.float32
        assert torch.equal((sample["audio"] * 2**15).round() / 2**15, sample["audio"])  # 16 bits, like a file
        assert sample["audio"].abs().max().item() == pytest.approx(said.peak, abs=2**-15)
        lengths = (sample["durations"].double() * hz).round().long()
        assert int(lengths.sum()) == len(sample["audio"])
        assert sample["durations"].tolist() == pytest.approx([one / 1000 for one in said.milliseconds], abs=1 / hz)
        pieces = sample["audio"].split(lengths.tolist())
        for phoneme, piece in zip(said.phonemes, pieces, strict=True):
            assert piece.eq(0).all() == (phoneme == PAUSE)


def test_the_text_spells_the_phonemes():
    data = SyntheticSpeech(300)
    for index in range(300):
        said = data.utterance(index)
        words = "".join(said.phonemes).strip(PAUSE).split(PAUSE)
        assert said.text == " ".join(words)
        assert all(word[::2].strip("".join(CONSONANTS)) == "" for word in words)
        assert all(word[1::2].strip("".join(VOWELS)) == "" and len(word) % 2 == 0 for word in words)
        assert 3 <= sum(phoneme in VOWELS for phoneme in said.phonemes) <= 7
        assert 0.7 < sum(said.milliseconds) / 1000 < 4
    sample = data[0]
    assert sample["texts"] == data.utterance(0).text and sample["phonemes"].split() == list(data.utterance(0).phonemes)


def test_no_two_are_alike_and_every_choice_comes_up():
    data = SyntheticSpeech(2000, seed=5)
    said = [data.utterance(index) for index in range(2000)]
    assert len({(one.text, one.milliseconds) for one in said}) == 2000
    counts = {voice: sum(one.voice == voice for one in said) for voice in VOICES}
    assert all(0.8 < count * len(VOICES) / 2000 < 1.2 for count in counts.values())
    heard = [phoneme for one in said for phoneme in one.phonemes if phoneme in VOWELS]
    assert all(0.9 < heard.count(vowel) * len(VOWELS) / len(heard) < 1.1 for vowel in VOWELS)
    assert {phoneme for one in said for phoneme in one.phonemes} == set(PHONEMES)
    assert said[4] == SyntheticSpeech(9, 8000, seed=5).utterance(4)  # nor rate nor number change what is said
    assert said[4] != SyntheticSpeech(9, 8000, seed=6).utterance(4)


@pytest.mark.parametrize("voice", VOICES)
def test_a_voice_has_its_pitch(voice):
    data = SyntheticSpeech(8, 16000, voices=[voice])
    for index in range(8):
        assert data.utterance(index).voice == voice
        heard = read_contour(data[index]["audio"], 16000).hz
        assert heard == pytest.approx(VOICES[voice][0], rel=0.08)


def test_consonants_hiss_where_they_should():
    data = SyntheticSpeech(12, 16000)
    middles: dict[str, list[float]] = {name: [] for name in CONSONANTS}
    for index in range(12):
        sample, said = data[index], data.utterance(index)
        pieces = sample["audio"].split((sample["durations"] * 16000).round().long().tolist())
        for phoneme, piece in zip(said.phonemes, pieces, strict=True):
            if phoneme in CONSONANTS:
                power = spectrogram(piece, 512, 128, power=2.0).sum(dim=-1)
                middles[phoneme].append(float((power * torch.linspace(0, 8000, 257)).sum() / power.sum()))
    for phoneme, hz in CONSONANTS.items():
        assert np.mean(middles[phoneme]) == pytest.approx(hz, rel=0.15)


def test_what_cannot_be_made_is_refused():
    with pytest.raises(ValueError, match="num_samples=0"):
        SyntheticSpeech(0)
    with pytest.raises(ValueError, match="8000 Hz or more"):
        SyntheticSpeech(1, 4000)
    with pytest.raises(ValueError, match="at least one of bass, "):
        SyntheticSpeech(1, voices=["robot"])
    for syllables in ([3], [0, 2], [5, 3], [3, 13]):
        with pytest.raises(ValueError, match="give the fewest and the most of an utterance, from 1 to 12"):
            SyntheticSpeech(1, syllables=syllables)
    with pytest.raises(IndexError):
        SyntheticSpeech(3)[3]
    assert SyntheticSpeech(1, syllables=(12, 12))[0]["texts"]  # the draws suffice


def test_loads_in_batches():
    batch = next(Loader(SyntheticSpeech(5, 8000), batch_size=3).steps())[0]
    assert batch["audio"].shape == (3, int(batch["audio_lengths"].max())) and len(batch["texts"]) == 3
    assert batch["durations"].shape == (3, int(batch["durations_lengths"].max()))
