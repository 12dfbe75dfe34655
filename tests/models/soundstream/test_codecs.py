"""Codecs of transformers on tiny random models written to disk: equal to transformers' own output, clip by clip."""

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from helicon.models.soundstream.codecs import (
    Codec,
    DacCodec,
    EncodecWrapper,
    MimiCodec,
    PretrainedCodec,
    pretrained_codec,
)
from helicon.nn.network import Network, load_network
from helicon.nn.resample import resample

LENGTHS = torch.tensor([301, 96, 301, 7, 250])


@torch.no_grad()
def fill_codebooks(layers: Iterable[Any], latents: Tensor) -> None:
    """Takes the codes of a residual stack from what it has to code: a fresh model's all lie at the same place."""
    residual = latents
    for layer in layers:
        codebook = layer.codebook
        vectors = residual.transpose(1, 2).flatten(0, 1)[torch.randperm(residual.shape[0] * residual.shape[2])]
        getattr(codebook, "embed_sum" if hasattr(codebook, "embed_sum") else "embed").copy_(
            vectors[: codebook.codebook_size]
        )
        residual = residual - layer.decode(layer.encode(residual))


def encodec(**options: Any) -> nn.Module:
    settings = {
        "target_bandwidths": [1.1, 2.2],
        "sampling_rate": 800,
        "hidden_size": 12,
        "num_filters": 4,
        "upsampling_ratios": [3, 2],
        "num_lstm_layers": 1,
        "codebook_size": 16,
    }
    model = transformers.EncodecModel(transformers.EncodecConfig(**{**settings, **options})).eval()
    fill_codebooks(model.quantizer.layers, model.encoder(torch.randn(4, model.config.audio_channels, 90)))
    return model


def encodec_chunks() -> nn.Module:
    """As the 48 kHz model: stereo, in overlapping chunks of equal loudness."""
    chunks = {"chunk_length_s": 0.15, "overlap": 0.1, "normalize": True}
    return encodec(audio_channels=2, use_causal_conv=False, norm_type="time_group_norm", **chunks)


def dac() -> nn.Module:
    config = transformers.DacConfig(
        encoder_hidden_size=4,
        downsampling_ratios=[2, 3],
        decoder_hidden_size=16,
        n_codebooks=3,
        codebook_size=16,
        codebook_dim=4,
        sampling_rate=700,
    )
    model = transformers.DacModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # fresh weights are so small that every clip sounds the same
            if parameter.ndim > 1:
                parameter.mul_(8)
        residual = model.encoder(torch.randn(4, 1, 90))
        for layer in model.quantizer.quantizers:
            vectors = layer.in_proj(residual).transpose(1, 2).flatten(0, 1)
            layer.codebook.weight.copy_(vectors[torch.randperm(len(vectors))[:16]])
            residual = residual - layer(residual)[0]
    return model


def mimi() -> nn.Module:
    config = transformers.MimiConfig(
        sampling_rate=1200,
        hidden_size=16,
        num_filters=4,
        upsampling_ratios=[3, 2],
        codebook_size=16,
        codebook_dim=8,
        vector_quantization_hidden_dimension=8,
        num_quantizers=4,
        upsample_groups=16,
        num_hidden_layers=2,
        intermediate_size=20,
        num_attention_heads=2,
        num_key_value_heads=2,
        sliding_window=5,
        layer_scale_initial_scale=0.5,
    )
    model = transformers.MimiModel(config).eval()
    with torch.no_grad():
        latents = model.encoder(torch.randn(4, 1, 300)).latents
        for stack in (
            model.quantizer.semantic_residual_vector_quantizer,
            model.quantizer.acoustic_residual_vector_quantizer,
        ):
            fill_codebooks(stack.layers, stack.input_proj(latents))
    return model


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "encodec": encodec,
    "encodec_chunks": encodec_chunks,
    "dac": dac,
    "mimi": mimi,
}
OPTIONS: dict[str, dict[str, Any]] = {"encodec": {"bandwidth": 1.1}, "dac": {"num_quantizers": 2}, "mimi": {}}


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name, build in BUILDERS.items():
        folders[name] = tmp_path_factory.mktemp("codecs") / name
        torch.manual_seed(3)
        build().save_pretrained(folders[name])
    return folders


def built(name: str, saved: dict[str, Path], **options: Any) -> PretrainedCodec:
    kind = {"encodec": EncodecWrapper, "encodec_chunks": EncodecWrapper, "dac": DacCodec, "mimi": MimiCodec}[name]
    return kind(model=saved[name], **{**OPTIONS.get(name, {}), **options})


@pytest.fixture(params=OPTIONS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def codec(name: str, saved: dict[str, Path]) -> PretrainedCodec:
    return built(name, saved)


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def padded(lengths: Tensor, channels: int | None = None) -> Tensor:
    """Clips of these lengths, with NaN where nobody may look."""
    audio = noise(len(lengths), *([] if channels is None else [channels]), int(lengths.max()))
    for row, length in enumerate(lengths.tolist()):
        audio[row, ..., length:] = torch.nan
    return audio


def test_what_is_no_number_is_no_sound(saved: dict[str, Path]) -> None:
    codec = built("mimi", saved)
    with pytest.raises(ValueError, match="audio holds values that are infinite or not numbers: give a sound"):
        codec.encode(padded(torch.tensor([5000, 4000])))


@torch.no_grad()
def own_codes(model: Any, name: str, clip: Tensor, quantizers: int) -> Tensor:
    """What transformers makes of one clip `[n]`, through its own feature extractor where it has one."""
    if name == "dac":
        extractor = transformers.DacFeatureExtractor(
            sampling_rate=model.config.sampling_rate, hop_length=model.config.hop_length
        )
        ready = extractor(clip.numpy(), sampling_rate=model.config.sampling_rate, return_tensors="pt")
        return model.encode(ready["input_values"], quantizers).audio_codes[0].T
    if name == "encodec":
        return model.encode(clip[None, None], bandwidth=1.1).audio_codes[0, 0].T
    return model.encode(clip[None, None], num_quantizers=quantizers).audio_codes[0].T


@torch.no_grad()
def own_audio(model: Any, name: str, codes: Tensor) -> Tensor:
    rows = codes.T[None]
    if name == "encodec":
        return model.decode(rows[None], [None]).audio_values[0]
    return (model.decode(audio_codes=rows) if name == "dac" else model.decode(rows)).audio_values.reshape(1, -1)


def test_padded_batches_equal_the_models_own_output(name: str, codec: PretrainedCodec, saved: dict[str, Path]) -> None:
    model = transformers.AutoModel.from_pretrained(saved[name]).eval()
    audio = padded(LENGTHS)
    codes = codec.encode(audio, LENGTHS)
    frames = codec.code_lengths(LENGTHS)
    decoded = codec.decode(codes)
    assert isinstance(codec, Codec) and codes.dtype == torch.int64
    assert codes.shape == (5, int(frames.max()), codec.num_quantizers)
    assert decoded.shape == (5, 1, int(frames.max()) * codec.downsample_factor)
    for row, (length, frame) in enumerate(zip(LENGTHS.tolist(), frames.tolist(), strict=True)):
        expected = own_codes(model, name, audio[row, :length], codec.num_quantizers)
        assert torch.equal(codes[row, :frame], expected) and len(expected) == frame == -(
            -length // codec.downsample_factor
        )
        assert (codes[row, frame:] == -1).all()
        sound = own_audio(model, name, expected)
        torch.testing.assert_close(decoded[row, :, : sound.shape[-1]], sound, atol=1e-4, rtol=1e-4)
        assert (decoded[row, :, sound.shape[-1] :] == 0).all()
    assert len(codes[0].unique()) > 4  # else equality would say little


def test_shapes_do_not_depend_on_lengths(codec: PretrainedCodec) -> None:
    audio, lengths = padded(LENGTHS)[1:2], LENGTHS[1:2]  # a clip of 96 samples in a row of 301
    codes = codec.encode(audio, lengths)
    assert codes.shape[1] == codec.encode_latents(audio, lengths).shape[1] == -(-301 // codec.downsample_factor)
    sound = codec.decode(codes)
    assert sound.shape == (1, 1, codes.shape[1] * codec.downsample_factor)
    frames = codec.code_lengths(lengths)
    assert codec.decode_latents(codec.dequantize(codes), frames).shape == sound.shape


@pytest.mark.parametrize("name", ["encodec", "mimi"])
def test_models_that_do_not_look_ahead_equal_their_own_padded_batch(name: str, saved: dict[str, Path]) -> None:
    """Where transformers may be given padding at all (whole frames, more of them than a kernel reflects), it is equal too."""
    codec, model = built(name, saved), transformers.AutoModel.from_pretrained(saved[name]).eval()
    lengths = torch.tensor([20, 25, 9]) * codec.downsample_factor
    audio = padded(lengths)
    mask = torch.arange(audio.shape[1]) < lengths[:, None]
    options = {"bandwidth": 1.1} if name == "encodec" else {"num_quantizers": codec.num_quantizers}
    with torch.no_grad():
        whole = model.encode(audio.nan_to_num()[:, None], mask[:, None], **options).audio_codes
    expected = (whole[0] if name == "encodec" else whole).transpose(1, 2)
    valid = torch.arange(expected.shape[1]) < codec.code_lengths(lengths)[:, None]
    assert torch.equal(codec.encode(audio, lengths)[valid], expected[valid])


def test_chunks_keep_their_loudness(saved: dict[str, Path]) -> None:
    codec = EncodecWrapper(model=saved["encodec_chunks"], num_quantizers=2)
    model = transformers.EncodecModel.from_pretrained(saved["encodec_chunks"]).eval()
    extractor = transformers.EncodecFeatureExtractor(
        feature_size=2, sampling_rate=800, chunk_length_s=0.15, overlap=0.1
    )
    audio = padded(LENGTHS, channels=2) * torch.tensor([1.0, 0.1, 3.0, 0.5, 2.0])[:, None, None]
    scaled = codec.encode_with_scales(audio, LENGTHS)
    decoded = codec.decode(scaled.codes, scaled.scales)
    assert codec.code_lengths(LENGTHS).tolist() == [60, 20, 60, 20, 60]
    for row, (length, frames) in enumerate(zip(LENGTHS.tolist(), codec.code_lengths(LENGTHS).tolist(), strict=True)):
        clip = audio[row, :, :length].numpy()
        ready = extractor(clip, sampling_rate=800, return_tensors="pt")
        with torch.no_grad():
            expected = model(ready["input_values"], ready["padding_mask"], bandwidth=1.1)
        own = expected.audio_codes[: frames // 20, 0]
        assert torch.equal(scaled.codes[row, :frames].T, own.transpose(0, 1).flatten(1))
        assert (scaled.codes[row, frames:] == -1).all() and (scaled.scales[row, frames // 20 :] == 1).all()
        sound = expected.audio_values[0, :, :length]
        torch.testing.assert_close(decoded[row, :, : sound.shape[-1]], sound, atol=1e-4, rtol=1e-4)
    short = codec.encode_with_scales(audio[1:2], LENGTHS[1:2])
    assert short.codes.shape == (1, 60, 2) and short.scales.shape == (1, 3)
    torch.testing.assert_close(codec.decode(short.codes, short.scales)[0], decoded[1], atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="do not hold how loud the audio is: use encode_with_scales"):
        codec.encode(audio)
    with pytest.raises(ValueError, match="give the scales of encode_with_scales"):
        codec.decode(scaled.codes)
    with pytest.raises(ValueError, match="21 are no whole number of them"):
        codec.decode(scaled.codes[:1, :21], scaled.scales[:1])
    with pytest.raises(ValueError, match="its latents are no sequence"):
        codec.encode_latents(noise(1, 2, 200))
    with pytest.raises(ValueError, match="its latents are no sequence"):
        codec.decode(noise(1, 3, 12))


def test_latents(name: str, codec: PretrainedCodec) -> None:
    audio = padded(LENGTHS)
    latents, codes, frames = (
        codec.encode_latents(audio, LENGTHS),
        codec.encode(audio, LENGTHS),
        codec.code_lengths(LENGTHS),
    )
    valid = torch.arange(codes.shape[1]) < frames[:, None]
    assert latents.shape == (*codes.shape[:2], codec.latent_dim) and (latents[~valid] == 0).all()
    assert torch.equal(codec.quantize(latents)[valid], codes[valid])
    for row, length in enumerate(LENGTHS.tolist()):
        torch.testing.assert_close(
            latents[row : row + 1, : frames[row]], codec.encode_latents(audio[row : row + 1, :length])
        )
    embedding = codec.dequantize(codes)
    assert (embedding[~valid] == 0).all() and embedding.shape == latents.shape
    assert torch.equal(codec.get_emb_from_indices(codes), embedding)
    torch.testing.assert_close(codec.decode_latents(embedding, frames), codec.decode(codes))
    assert torch.equal(codec.decode(embedding), codec.decode_latents(embedding))


def test_latents_are_what_the_decoder_was_trained_on(saved: dict[str, Path]) -> None:
    clip = noise(1, 120)
    for name in ("encodec", "mimi"):
        codec = built(name, saved)
        model = codec.backbone.model
        latents = codec.encode_latents(clip)
        with torch.no_grad():
            encoded = model.encoder(clip[:, None])
            encoded = encoded if name == "encodec" else encoded.latents
            sound = model.decoder(encoded)
        torch.testing.assert_close(latents, encoded.transpose(1, 2))
        torch.testing.assert_close(codec.decode_latents(latents), sound if name == "encodec" else sound.audio_values)
    codec = built("dac", saved)
    assert codec.latent_dim == 8
    torch.testing.assert_close(codec.decode_latents(codec.encode_latents(clip)), codec.decode(codec.encode(clip)))


def test_the_wrapper_of_other_packages(saved: dict[str, Path]) -> None:
    codec = EncodecWrapper(
        target_sample_hz=800, strides=(2, 3), num_quantizers=4, bandwidth=2.2, model=saved["encodec"]
    )
    audio = noise(2, 121)
    embedding, codes, loss = codec(audio, return_encoded=True)
    assert (codec.seq_len_multiple_of, codec.downsample_factor, loss) == (6, 6, None)
    assert codes.shape == (2, 21, 4) and embedding is not None and embedding.shape == (2, 21, 12)
    assert torch.equal(codec.decode_from_codebook_indices(codes), codec.decode(codes))
    assert codec(audio)[0] is None
    fewer = EncodecWrapper(num_quantizers=3, model=saved["encodec"])
    assert torch.equal(fewer.encode(audio), codes[..., :3])  # the first three of four
    assert fewer.decode(codes[..., :1]).shape == (2, 1, 126)


def test_mimi_separates_meaning_from_sound(saved: dict[str, Path]) -> None:
    codec, few = built("mimi", saved), built("mimi", saved, num_quantizers=2)
    audio = noise(2, 97)
    assert (codec.num_semantic_quantizers, codec.num_quantizers, codec.downsample_factor) == (1, 4, 12)
    assert torch.equal(few.encode(audio), codec.encode(audio)[..., :2])


def test_audio_of_another_rate_is_resampled(codec: PretrainedCodec) -> None:
    audio, lengths = padded(LENGTHS), LENGTHS
    found = codec.encode(audio, lengths, input_sample_hz=1111)
    for row, length in enumerate(lengths.tolist()):
        alone = codec.encode(resample(audio[row : row + 1, :length], 1111, codec.sample_hz))[0]
        assert torch.equal(found[row, : len(alone)], alone) and (found[row, len(alone) :] == -1).all()


class Listener(Network):
    def __init__(self, codec: PretrainedCodec, dim: int = 3):
        super().__init__()
        self.codec = codec
        self.project = nn.Linear(codec.latent_dim, dim)

    def forward(self, audio: Tensor) -> Tensor:
        return self.project(self.codec.encode_latents(audio))


def test_it_stays_frozen_whatever_its_parent_does(codec: PretrainedCodec) -> None:
    listener, audio = Listener(codec), noise(2, 300)
    before = codec.encode(audio)
    listener.train().requires_grad_(True)
    listener.apply(lambda module: [parameter.data.zero_() for parameter in module.parameters(recurse=False)])
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    listener(audio).sum().backward()
    assert torch.equal(torch.rand(3), expected)  # the caller's random numbers are the caller's
    assert {name for name, _ in listener.named_parameters()} == {"project.weight", "project.bias"}
    assert not codec.backbone.model.training
    assert torch.equal(codec.encode(audio), before)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(codec.encode(audio), before)
    listener.to(torch.bfloat16)
    assert torch.equal(codec.encode(audio), before) and next(codec.backbone.model.parameters()).dtype == torch.float32
    listener.to("meta")
    assert {parameter.device.type for parameter in codec.backbone.model.parameters()} == {"meta"}


@pytest.mark.gpu
def test_on_a_gpu(codec: PretrainedCodec) -> None:
    audio = padded(LENGTHS)
    expected = codec.encode(audio, LENGTHS)  # the model has worked by now, and moves all the same
    moved = Listener(copy.deepcopy(codec)).cuda().codec
    codes = moved.encode(audio.cuda(), LENGTHS.cuda())
    assert codes.is_cuda and (codes.cpu() == expected).float().mean() > 0.9  # near a border rounding decides
    torch.testing.assert_close(moved.decode(expected.cuda()).cpu(), codec.decode(expected), atol=1e-2, rtol=1e-2)


def test_half_precision_audio(codec: PretrainedCodec) -> None:
    audio = noise(1, 100).half()
    assert torch.equal(codec.encode(audio), codec.encode(audio.float()))


def test_copies_stand_alone(codec: PretrainedCodec) -> None:
    audio = noise(1, 100)
    copied = copy.deepcopy(codec)
    assert copied.backbone.model is not codec.backbone.model
    assert torch.equal(copied.encode(audio), codec.encode(audio))


def test_a_parent_saves_the_name_and_not_the_weights(
    name: str, saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(saved[name].parent)
    listener = Listener(built(name, {name: Path(name)}))
    listener.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved/stages/codec/model.safetensors").stat().st_size < 1000
    monkeypatch.chdir(tmp_path)
    loaded, audio = load_network(tmp_path / "saved"), noise(2, 80)
    assert torch.equal(loaded(audio), listener(audio))
    assert torch.equal(loaded.codec.encode(audio), listener.codec.encode(audio))


def test_another_model_in_the_place_of_the_saved_one_is_refused(tmp_path: Path) -> None:
    dac().save_pretrained(tmp_path / "dac")
    DacCodec(tmp_path / "dac").save_pretrained(tmp_path / "saved")
    load_network(tmp_path / "saved")
    dac().save_pretrained(tmp_path / "dac")
    with pytest.raises(ValueError, match="is not the one this was saved with: put the old one back"):
        load_network(tmp_path / "saved")


def test_any_codec_by_its_folder(saved: dict[str, Path]) -> None:
    kinds = {name: type(pretrained_codec(saved[name], num_quantizers=2)).__name__ for name in OPTIONS}
    assert kinds == {"encodec": "EncodecWrapper", "dac": "DacCodec", "mimi": "MimiCodec"}


def test_a_model_without_all_its_weights_is_refused(tmp_path: Path) -> None:
    model = dac()
    state = {key: value for key, value in model.state_dict().items() if "quantizer" not in key}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(
        ValueError, match=r"has no weights for quantizer.* and 14 more: it is not the dac codec it should be"
    ):
        DacCodec(tmp_path)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"target_sample_hz": 16000}, "target_sample_hz=16000 is not the model's, 800: leave it out"),
        ({"strides": (2, 4)}, r"strides=\[2, 4\] is not the model's, \[2, 3\]: leave it out"),
        ({"bandwidth": 6.0}, "bandwidth=6.0 is none of this model's: choose from 1.1, 2.2"),
        ({"bandwidth": 1.1, "num_quantizers": 3}, "bandwidth=1.1 means 2 quantizers, not 3: give one of the two"),
        ({"num_quantizers": 5}, "num_quantizers=5 must lie between 1 and 4"),
    ],
)
def test_settings_the_model_does_not_have(saved: dict[str, Path], options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        EncodecWrapper(model=saved["encodec"], **options)


def test_mistakes_are_told_in_one_sentence(
    saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    codec = built("dac", saved)
    with pytest.raises(ValueError, match=r"this codec takes audio \[b, n\] or \[b, 1, n\], not \[2, 2, 50\]"):
        codec.encode(noise(2, 2, 50))
    with pytest.raises(ValueError, match=r"takes audio \[b, 2, n\], not \[2, 50\]: mix or repeat the channels first"):
        built("encodec_chunks", saved, num_quantizers=2).encode_with_scales(noise(2, 50))
    with pytest.raises(ValueError, match="row 1 cannot have a length of 51: the rows have 50"):
        codec.encode(noise(2, 50), torch.tensor([50, 51]))
    with pytest.raises(ValueError, match="the longest row has a length of 0"):
        codec.encode(noise(2, 50), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="the codes hold 16, and this codec's go from 0 to 15"):
        codec.decode(torch.full((1, 3, 2), 16))
    for holes in ([[0, -1], [0, 0]], [[-1, -1], [0, 0]]):
        with pytest.raises(ValueError, match="-1 stands past the end of a clip, for all quantizers of a frame"):
            codec.decode(torch.tensor([holes]))
    with pytest.raises(ValueError, match="num_quantizers=0 must lie between 1 and 4"):
        built("mimi", saved, num_quantizers=0)
    with pytest.raises(ValueError, match="is a model of type 'dac', not 'mimi': build it with DacCodec"):
        MimiCodec(saved["dac"])
    (tmp_path / "codec.pt").touch()
    with pytest.raises(
        ValueError, match=r"codec.pt is a file, and checkpoints of other packages \(pickles\) are never read"
    ):
        DacCodec(tmp_path / "codec.pt")
    for missing in ("nobody/no-such-model", str(tmp_path)):
        with pytest.raises(ValueError, match=r"could not be read .* give the folder or the hub name") as error:
            pretrained_codec(missing)
        assert "\n" not in str(error.value)


def test_short_and_empty_clips(codec: PretrainedCodec) -> None:
    lengths = torch.tensor([1, 0, 40])
    codes = codec.encode(padded(lengths), lengths)
    assert (
        (codes >= 0).all(-1).sum(1).tolist()
        == codec.code_lengths(lengths).tolist()
        == [1, 0, -(-40 // codec.downsample_factor)]
    )
    assert (codec.decode(codes)[1] == 0).all()


def test_the_tiny_models_tell_clips_apart(codec: PretrainedCodec) -> None:
    """Guards the tests above: codes that never change would be equal to anything."""
    assert not torch.equal(codec.encode(noise(1, 300)), codec.encode(noise(2, 300)[1:]))
    assert np.isfinite(codec.decode(codec.encode(noise(1, 300))).numpy()).all()
