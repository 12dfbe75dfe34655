"""Spaces of features: frames by a plain formula, padded clips as alone, and sound again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from helicon.data.synthetic_sounds import SyntheticSounds
from helicon.metrics.audio import describe_sound, log_mel_distance, mel_filterbank
from helicon.models.soundstream.codecs import EncodecWrapper
from helicon.models.voicebox.features import CodecLatents, EncodecVoco, FeatureSpace, MelVoco
from helicon.models.voicebox.vocoder import Vocoder
from helicon.nn.network import Network, load_network
from helicon.nn.resample import resample
from helicon.nn.stft import istft, stft
from models.soundstream.test_codecs import dac, encodec
from models.soundstream.tiny import tiny as soundstream

HZ = 8000
MEL: dict[str, Any] = {"n_mels": 20, "sampling_rate": HZ, "n_fft": 256, "win_length": 200, "hop_length": 64}


def vocoder(**changes: Any) -> Vocoder:
    torch.manual_seed(0)
    sizes = {"dim": 12, "depth": 2, "discr_periods": (), "discr_windows": ()}
    return Vocoder(**{**MEL, **sizes, **changes})


def sounds(count: int = 3, seconds: float = 0.5) -> Tensor:
    waves = SyntheticSounds(count, HZ, seconds, seed=3, loudnesses=["loud"], kinds=["tone", "chirp"])
    return torch.stack([torch.as_tensor(waves[index]["audio"]).float() for index in range(count)])


def saved(model: Any, name: str = "codec") -> Path:
    model.save_pretrained(name)
    extractor = (
        transformers.EncodecFeatureExtractor if "Encodec" in type(model).__name__ else transformers.DacFeatureExtractor
    )
    extractor(sampling_rate=model.config.sampling_rate).save_pretrained(name)
    return Path(name)


def encodec_voco() -> EncodecVoco:
    torch.manual_seed(0)
    return EncodecVoco(sampling_rate=800, bandwidth_id=1, model=saved(encodec()))


def encodec_latents() -> CodecLatents:
    torch.manual_seed(0)
    return CodecLatents(EncodecWrapper(model=saved(encodec()), num_quantizers=2))


SPACES: dict[str, Callable[[], Any]] = {
    "mel": lambda: MelVoco(**MEL),
    "mel magnitudes": lambda: MelVoco(**MEL, log=False),
    "mel with a vocoder": lambda: MelVoco(**MEL, vocoder=vocoder()),
    "soundstream": lambda: CodecLatents(soundstream()),
    "encodec latents": encodec_latents,
    "encodec": encodec_voco,
}
each_space = pytest.mark.parametrize("space", SPACES)


def noise(batch: int, length: int) -> Tensor:
    return 0.3 * torch.randn(batch, length, generator=torch.Generator().manual_seed(length))


# ------------------------------------------------------------------------------------------------------- the contract


@each_space
def test_the_contract(space: str):
    features = SPACES[space]()
    assert isinstance(features, FeatureSpace) and isinstance(features, Network)
    factor, audio = features.downsample_factor, noise(2, 331)
    frames = features.encode(audio)
    assert frames.shape == (2, -(-331 // factor), features.latent_dim) and frames.dtype == torch.float32
    assert features.frame_lengths(torch.tensor([1, factor, factor + 1])).tolist() == [1, 1, 2]
    decoded = features.decode(frames)
    assert decoded.shape == (2, frames.shape[1] * factor) and decoded.isfinite().all()
    assert decoded.std() > 1e-4


@each_space
def test_a_padded_clip_has_the_features_and_the_sound_it_has_alone(space: str):
    features = SPACES[space]()
    audio, lengths = noise(3, 331), torch.tensor([331, 1, 170])
    for row, length in enumerate(lengths.tolist()):
        audio[row, length:] = 7.0  # padding of which nothing may be heard
    frames, counts = features.encode(audio, lengths), features.frame_lengths(lengths)
    garbled = frames.clone()
    for row, count in enumerate(counts.tolist()):
        assert not frames[row, count:].any()
        garbled[row, count:] = 5.0
    decoded = features.decode(garbled, counts)
    for row, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
        alone = features.encode(audio[row : row + 1, :length])
        torch.testing.assert_close(frames[row : row + 1, :count], alone, rtol=1e-3, atol=1e-3)
        size = count * features.downsample_factor
        heard = features.decode(frames[row : row + 1, :count])
        torch.testing.assert_close(decoded[row : row + 1, :size], heard, rtol=1e-2, atol=2e-3)
        assert not decoded[row, size:].any()


@each_space
def test_audio_of_another_rate_is_resampled(space: str):
    features = SPACES[space]()
    hz = features.sample_hz
    audio, lengths = noise(2, 300), torch.tensor([300, 120])
    whole = features.encode(resample(audio, hz // 2, hz))
    frames = features.encode(audio, lengths, hz // 2)
    assert frames.shape == whole.shape
    torch.testing.assert_close(frames[0], whole[0], rtol=1e-3, atol=1e-3)
    count = int(features.frame_lengths(torch.tensor([240])))
    alone = features.encode(resample(audio[1:, :120], hz // 2, hz))
    torch.testing.assert_close(frames[1, :count], alone[0], rtol=1e-3, atol=1e-3)
    assert not frames[1, count:].any()


@each_space
def test_silence_is_silence(space: str):
    features = SPACES[space]()
    frames = features.encode(torch.zeros(1, 200))
    assert frames.isfinite().all() and features.decode(frames).isfinite().all()


@each_space
def test_no_gradient_passes_and_autocast_changes_nothing(space: str):
    features = SPACES[space]()
    audio = noise(1, 200).requires_grad_()
    frames = features.encode(audio)
    decoded = features.decode(frames.detach().requires_grad_())
    assert not frames.requires_grad and not decoded.requires_grad
    if "soundstream" not in space and "vocoder" not in space:  # whose networks may run in half precision
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(features.encode(audio), frames)
            assert torch.equal(features.decode(frames), decoded)


@each_space
def test_saved_and_loaded_it_is_the_same(space: str):
    features = SPACES[space]().eval()
    features.save("space")
    again = load_network(Path("space"))
    audio = noise(2, 300)
    frames = features.encode(audio)
    assert torch.equal(again.encode(audio), frames)
    assert torch.equal(again.decode(frames), features.decode(frames))


# ------------------------------------------------------------------------------------------------------------- mel


def test_log_mel_is_its_formula():
    """54: natural logarithms of magnitudes, frame by frame; the frame is centred on its own samples."""
    features, audio = MelVoco(**MEL, f_max=3000), noise(1, 331)
    wave = np.pad(
        audio[0].double().numpy(), (96, 96 + 53)
    )  # (n_fft - hop) / 2 before and after; 331 filled up to 6 hops
    window = np.zeros(256)
    window[28:228] = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(200) / 200)
    filters = mel_filterbank(HZ, 256, 20, 0.0, 3000.0).double().numpy()
    rows = []
    for frame in range(6):
        magnitude = np.abs(np.fft.rfft(wave[frame * 64 : frame * 64 + 256] * window))
        rows.append(np.log(np.maximum(filters @ magnitude, 1e-5)))
    found = features.encode(audio)
    torch.testing.assert_close(found[0].double(), torch.from_numpy(np.stack(rows)), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(MelVoco(**MEL, f_max=3000, log=False).encode(audio).log(), found, rtol=1e-4, atol=1e-4)


def test_the_defaults_are_those_of_speech_at_24_khz():
    """54: in the reference package latent_dim and downsample_factor are missing."""
    features = MelVoco()
    assert (features.sample_hz, features.downsample_factor, features.latent_dim) == (24000, 256, 100)
    assert features.mel == Vocoder(discr_periods=(), discr_windows=()).mel
    assert features.encode(noise(1, 24000)).shape == (1, 94, 100)
    assert MelVoco(sampling_rate=16000).mel.f_max == 8000


def test_griffin_lim_makes_the_same_sound_audible():
    audio = sounds(6)
    features = MelVoco(sampling_rate=HZ, n_mels=64, n_fft=512, hop_length=128)
    frames = features.encode(audio)
    decoded = features.decode(frames)[:, : audio.shape[1]]
    spectrum = stft(audio, 512, 128, 512)
    angles = 6.28 * torch.rand(spectrum.shape, generator=torch.Generator().manual_seed(0))
    random_phase = istft(torch.polar(spectrum.abs(), angles), 128, 512)[:, : audio.shape[1]]
    distance, random_distance = (log_mel_distance(x, audio, HZ).mean() for x in (decoded, random_phase))
    assert distance < 0.7 * random_distance
    for original, again in zip(audio, decoded, strict=True):
        wanted, heard = describe_sound(original, HZ), describe_sound(again, HZ)
        assert (heard.pitch, heard.direction, heard.loudness) == (wanted.pitch, wanted.direction, wanted.loudness)


def test_a_vocoder_decodes_where_there_is_one():
    voice = vocoder()
    frames = MelVoco(**MEL).encode(noise(2, 331))
    features = MelVoco(**MEL, vocoder=voice)
    assert torch.equal(features.decode(frames), voice(frames))
    magnitudes = MelVoco(**MEL, vocoder=voice, log=False)
    torch.testing.assert_close(magnitudes.decode(frames.exp()), voice(frames), rtol=1e-3, atol=1e-5)


def test_a_vocoder_of_other_frames_is_refused():
    with pytest.raises(
        ValueError, match="made for frames of hop_length=32, and these have hop_length=64: make them equal"
    ):
        MelVoco(**MEL, vocoder=vocoder(hop_length=32))


def test_the_filters_are_inverted_once(monkeypatch: pytest.MonkeyPatch):
    calls, invert = [], torch.linalg.pinv
    monkeypatch.setattr(torch.linalg, "pinv", lambda filters: calls.append(1) or invert(filters))
    features = MelVoco(**{**MEL, "n_mels": 19})
    for _ in range(3):
        features.decode(torch.zeros(1, 2, 19))
    assert len(calls) == 1


def test_the_bands_are_made_once(monkeypatch: pytest.MonkeyPatch):
    """54: in the reference package at every call, and on the CPU."""
    calls, make = [], mel_filterbank
    monkeypatch.setattr(
        "helicon.metrics.audio.mel_filterbank", lambda *settings: calls.append(settings) or make(*settings)
    )
    features = MelVoco(**MEL)
    for _ in range(3):
        features.encode(noise(1, 200))
    assert len(calls) == 1


@pytest.mark.parametrize("kind", [MelVoco, EncodecVoco])
def test_weights_of_vocos_are_refused(kind: Any):
    with pytest.raises(ValueError, match="pretrained_vocos_path='charactr/vocos-mel-24khz' is not supported"):
        kind(pretrained_vocos_path="charactr/vocos-mel-24khz")


# ----------------------------------------------------------------------------------------------------------- codecs


def test_codec_latents_are_the_codecs_own():
    codec = soundstream()
    features, audio = CodecLatents(codec), noise(2, 331)
    frames = features.encode(audio)
    assert torch.equal(frames, codec.encode_latents(audio))
    assert torch.equal(features.decode(frames), codec.decode_latents(frames)[:, 0])


def test_what_is_no_codec_of_one_channel_is_refused():
    with pytest.raises(ValueError, match="a Vocoder is no codec"):
        CodecLatents(vocoder())
    with pytest.raises(ValueError, match="has 2 channels"):
        CodecLatents(soundstream(input_channels=2))


def test_encodec_frames_are_what_the_codes_stand_for():
    features, audio = encodec_voco(), noise(2, 331)
    codes = features.codec.encode(audio)
    assert codes.shape[-1] == features.codec.num_quantizers == 4
    frames = features.encode(audio)
    assert torch.equal(frames, features.codec.dequantize(codes))


def test_encodec_decodes_a_batch_at_once_and_as_the_nearest_codes(monkeypatch: pytest.MonkeyPatch):
    """58: in the reference package one clip after another."""
    features, calls = encodec_voco(), []
    decoder = features.codec.backbone.model.decoder
    decoder.register_forward_hook(lambda module, inputs, _: calls.append(len(inputs[0])))
    frames = torch.randn(3, 9, features.latent_dim, generator=torch.Generator().manual_seed(0))
    audio = features.decode(frames)
    assert calls == [3]
    codes = features.decode_to_codes(frames)
    assert codes.shape == (3, 9, 4) and codes.min() >= 0
    torch.testing.assert_close(audio, features.codec.decode(codes)[:, 0])
    assert features.decode_to_codes(frames, torch.tensor([9, 2, 0]))[:, :, 0].ge(0).sum(dim=1).tolist() == [9, 2, 0]


def test_what_encodec_cannot_be_is_refused():
    folder = saved(encodec())
    with pytest.raises(ValueError, match=r"bandwidth_id=2 must be from 0 to 1, for 1.1, 2.2 kbit/s"):
        EncodecVoco(sampling_rate=800, bandwidth_id=2, model=folder)
    with pytest.raises(ValueError, match=r"sampling_rate=24000 is not that of .*: give sampling_rate=800"):
        EncodecVoco(bandwidth_id=1, model=folder)
    with pytest.raises(ValueError, match="build it with DacCodec"):
        EncodecVoco(sampling_rate=700, model=saved(dac(), "dac"))


def test_another_encodec_in_the_same_place_is_refused():
    features = encodec_voco()
    features.save("space")
    saved(encodec())  # with other weights
    with pytest.raises(ValueError, match="is not the one this was saved with"):
        load_network(Path("space"))
