import math

import pytest
import torch

from helicon.data.synthetic_speech import SyntheticSpeech
from helicon.metrics.audio import mel_filterbank
from helicon.metrics.speech import CHANCE, contour_accuracy, edit_distance, read_contour, vowels_of


def symbols_right(waves, texts, hz):
    """Of all symbols of all texts."""
    counts = [len(vowels_of(text)) for text in texts]
    rates = [contour_accuracy(wave, hz, text) for wave, text in zip(waves, texts, strict=True)]
    return sum(rate * count for rate, count in zip(rates, counts, strict=True)) / sum(counts)


def speech(count, hz, seed):
    data = SyntheticSpeech(count, hz, seed=seed)
    samples = [data[index] for index in range(count)]
    return [sample["audio"] for sample in samples], [sample["texts"] for sample in samples]


@pytest.mark.parametrize("hz", [8000, 16000, 24000])
def test_clean_speech_is_read(hz):
    assert symbols_right(*speech(25, hz, seed=hz), hz) >= 0.99


def test_speech_in_noise_is_read():
    waves, texts = speech(20, 16000, seed=1)
    generator = torch.Generator().manual_seed(0)
    noisy = [wave + 0.1 * wave.std() * torch.randn(len(wave), generator=generator) for wave in waves]  # 20 dB
    assert symbols_right(noisy, texts, 16000) >= 0.98


def griffin_lim(wave, hz, n_fft=1024, hop=160, rounds=24):
    """The wave made again from its 80 mel bands: no phase, and little but the outline of the spectrum, is left."""
    window, filters = torch.hann_window(n_fft), mel_filterbank(hz, n_fft, 80)
    transform = lambda x: torch.stft(x, n_fft, hop, window=window, pad_mode="constant", return_complex=True)
    magnitude = (torch.linalg.pinv(filters) @ (filters @ transform(wave).abs())).clamp(min=0)
    phase = torch.exp(2j * math.pi * torch.rand(magnitude.shape, generator=torch.Generator().manual_seed(0)))
    for _ in range(rounds):
        again = torch.istft(magnitude * phase, n_fft, hop, window=window, length=len(wave))
        phase = torch.exp(1j * transform(again).angle())
    return torch.istft(magnitude * phase, n_fft, hop, window=window, length=len(wave))


@pytest.mark.slow
def test_speech_made_again_from_its_spectra_is_read():
    waves, texts = speech(12, 16000, seed=2)
    assert symbols_right([griffin_lim(wave, 16000) for wave in waves], texts, 16000) >= 0.95


def test_another_text_is_not_what_was_said():
    """Place by place, as many symbols of another text are right as chance would have it."""
    waves, texts = speech(40, 8000, seed=4)
    heard = [read_contour(wave, 8000).symbols for wave in waves]
    expected = [vowels_of(text) for text in texts[1:] + texts[:1]]
    pairs = [pair for one, other in zip(heard, expected, strict=True) for pair in zip(one, other, strict=False)]
    assert sum(a == b for a, b in pairs) / len(pairs) == pytest.approx(CHANCE, abs=0.08)


def test_a_backwards_melody_is_another():
    """What is read is the pitch, not the formants."""
    data = SyntheticSpeech(10, 16000, seed=7)
    turned = {"e": "o", "o": "e"}
    expected = ["".join(turned.get(one, one) for one in reversed(vowels_of(data[i]["texts"]))) for i in range(10)]
    heard = [read_contour(data[i]["audio"].flip(0), 16000).symbols for i in range(10)]
    assert sum(map(edit_distance, expected, heard)) <= 1


def test_syllables_stand_where_they_were_spoken():
    data = SyntheticSpeech(10, 16000, seed=9)
    for index in range(10):
        sample, said = data[index], data.utterance(index)
        contour = read_contour(sample["audio"], 16000)
        ends = sample["durations"].cumsum(0).tolist()
        vowels = [place for place, phoneme in enumerate(said.phonemes) if phoneme in vowels_of(phoneme)]
        assert contour.begins == pytest.approx([ends[place - 1] for place in vowels], abs=0.035)
        assert contour.ends == pytest.approx([ends[place] for place in vowels], abs=0.035)
        assert contour.hz == pytest.approx(said.hz, rel=0.06)


def test_silence_noise_and_short_sounds():
    assert read_contour(torch.zeros(4000), 16000).symbols == ""
    assert read_contour(torch.zeros(0), 16000).symbols == "" and read_contour(torch.ones(3), 16000).symbols == ""
    noise = torch.randn(16000, generator=torch.Generator().manual_seed(0))
    assert read_contour(0.1 * noise, 16000).symbols == ""
    assert read_contour(torch.sin(2 * math.pi * 180 * torch.arange(8000) / 16000), 16000).symbols == "a"
    with pytest.raises(ValueError, match="infinite or not numbers"):
        read_contour(torch.tensor([0.0, torch.nan]), 16000)


def test_accuracy_counts_what_is_missing_and_what_is_too_much():
    data = SyntheticSpeech(1, 8000, syllables=(4, 4))
    audio, text = data[0]["audio"], data[0]["texts"]
    assert contour_accuracy(audio, 8000, text) == 1.0
    assert contour_accuracy(torch.zeros(8000), 8000, text) == 0.0
    assert contour_accuracy(torch.cat([audio, audio, audio]), 8000, text) == 0.0  # not less
    assert contour_accuracy(audio, 8000, text + text[-2:]) == pytest.approx(4 / 5)
    with pytest.raises(ValueError, match="none of the vowels"):
        contour_accuracy(audio, 8000, "xyz")


@pytest.mark.parametrize(
    ("a", "b", "distance"), [("", "", 0), ("aeo", "", 3), ("", "ab", 2), ("aeoi", "aoi", 1), ("kitten", "sitting", 3)]
)
def test_edit_distance(a, b, distance):
    assert edit_distance(a, b) == distance
