"""Chunk by chunk is the whole: codes the same, audio to rounding, and a state that does not grow."""

import inspect
import itertools

import pytest
import torch

from helicon.models.soundstream.autoencoder import SoundStreamAutoencoder
from helicon.models.soundstream.stream import CodecStream
from helicon.nn.attention import KVCache
from helicon.quantize import GroupedResidualFSQ, GroupedResidualLFQ, GroupedResidualVQ, ResidualVQ

DIM, HOP, LENGTH = 12, 6, 103  # 18 frames, the last of which has one sample

CODECS = {
    "plain": {},
    "stereo": {"input_channels": 2},
    "elu": {"activation": "elu"},
    "no attention": {"use_local_attn": False},
    "deep attention": {"attn_depth": 2, "attn_window_size": 5},
    "window of one": {"attn_window_size": 1},
    "squeeze_excite": {"squeeze_excite": True},
    "grouped": {"quantizer": GroupedResidualVQ(DIM, groups=2, num_quantizers=2, codebook_size=16)},
    "lookup-free": {"quantizer": GroupedResidualLFQ(DIM, groups=2, num_quantizers=2, codebook_size=16)},
    "finite scalar": {"quantizer": GroupedResidualFSQ(DIM, groups=2, num_quantizers=2, levels=[5, 3])},
}
each_codec = pytest.mark.parametrize("options", CODECS.values(), ids=CODECS.keys())

CHUNKS = {
    "samples": [1] * LENGTH,
    "frames": [HOP] * (LENGTH // HOP) + [1],
    "random": [3, 0, 17, 1, 1, 38, 5, 13, 0, 2, 23],
    "longer than everything": [LENGTH],
    "almost all": [LENGTH - 1, 1],
}


def build(**options) -> SoundStreamAutoencoder:
    """Every weight random: what starts at zero would hide mistakes."""
    torch.manual_seed(0)
    sizes = dict(channels=4, strides=(2, 3), channel_mults=(2, 3), codebook_dim=DIM, attn_window_size=4, attn_heads=2)
    given = {"quantizer": ResidualVQ(DIM, 3, 16), "attn_dim_head": 6, **sizes, **options}
    codec = SoundStreamAutoencoder(**given).eval()
    with torch.no_grad():
        for parameter in codec.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return codec


def signal(codec, batch=2, length=LENGTH):
    return torch.randn(batch, codec.input_channels, length, generator=torch.Generator().manual_seed(1))


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-5 * expected.abs().max().item(), rtol=1e-5)


def remembered(stream) -> int:
    """How many numbers the state holds, in all the memory it keeps alive."""
    tensors: list[torch.Tensor] = [stream._rest]
    for entry in stream.state.values():
        for value in entry if isinstance(entry, tuple) else (entry,):
            tensors += [*value.keys, *value.values, value.valid] if isinstance(value, KVCache) else [value]
    return sum(t.untyped_storage().nbytes() for t in tensors if isinstance(t, torch.Tensor))


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        *(pytest.param(CODECS["plain"], sizes, id=f"plain, {name}") for name, sizes in CHUNKS.items()),
        *(pytest.param(options, CHUNKS["random"], id=name) for name, options in CODECS.items()),
    ],
)
@torch.no_grad()
def test_chunks_are_the_whole(options, sizes):
    codec = build(**options)
    audio, stream = signal(codec), codec.stream()
    assert sum(sizes) == LENGTH
    codes = [stream.encode(chunk) for chunk in audio.split(sizes, dim=-1)]
    complete = [total // HOP for total in itertools.accumulate(sizes)]
    assert (
        list(itertools.accumulate(len(part[0]) for part in codes)) == complete
    )  # a frame's codes come with its last sample
    codes.append(stream.flush())
    assert codes[-1].shape[1] == 1
    sound = [stream.decode(part) for part in codes]
    expected = codec(audio)
    assert torch.cat(codes, dim=1).equal(expected.quantized.codes)
    assert torch.cat(sound, dim=-1).shape == audio.shape
    close(torch.cat(sound, dim=-1), expected.audio)


@torch.no_grad()
def test_sound_comes_at_once():
    """Encoding and decoding in turn, chunk by chunk: the delay is what is missing of a frame, nothing more."""
    codec = build()
    audio, stream = signal(codec), codec.stream()
    heard, given = [], 0
    for chunk in audio.split(5, dim=-1):
        heard.append(stream.decode(stream.encode(chunk)))
        given += chunk.shape[-1]
        assert sum(part.shape[-1] for part in heard) == given // HOP * HOP
    heard.append(stream.decode(stream.flush()))
    close(torch.cat(heard, dim=-1), codec(audio).audio)


@torch.no_grad()
def test_a_stream_goes_past_compiled_networks(monkeypatch):
    """They would be compiled anew for every size of a chunk."""
    codec = build()
    audio, compiled = signal(codec), []
    expected = codec(audio)
    for network in (codec.encoder, codec.decoder):
        monkeypatch.setattr(
            network, "_compiled_call_impl", lambda *given, run=network.forward: compiled.append(run) or run(*given)
        )
    stream = codec.stream()
    codes = torch.cat([*map(stream.encode, audio.split(40, dim=-1)), stream.flush()], dim=1)
    assert codes.equal(expected.quantized.codes)
    close(stream.decode(codes), expected.audio)
    assert not compiled
    close(codec(audio).audio, expected.audio)
    assert len(compiled) == 2


@each_codec
@torch.no_grad()
def test_codes_from_elsewhere(options):
    """The decoder alone, as behind a language model."""
    codec = build(**options)
    codes = codec.tokenize(signal(codec, length=12 * HOP))
    for sizes in ([1] * 12, [3, 0, 8, 1]):
        stream = codec.stream()
        parts = [stream.decode(part) for part in codes.split(sizes, dim=1)]
        close(torch.cat(parts, dim=-1), codec.decode_codes(codes))


@torch.no_grad()
def test_codes_of_the_first_levels_alone():
    codec = build()
    codes = codec.tokenize(signal(codec, length=9 * HOP))[..., :1]
    stream = codec.stream()
    close(torch.cat([stream.decode(part) for part in codes.split(2, dim=1)], dim=-1), codec.decode_codes(codes))


@each_codec
def test_the_state_does_not_grow(options):
    codec, sizes = build(**options), []
    stream = codec.stream()
    for _ in range(10):
        stream.decode(stream.encode(signal(codec, length=5 * HOP)))
        sizes.append(remembered(stream))
    assert len(set(sizes)) == 1 and sizes[0] > 0
    stream.decode(stream.encode(signal(codec, length=100 * HOP)))
    assert remembered(stream) == sizes[0]


@torch.no_grad()
def test_a_long_stream_is_the_whole():
    codec = build(attn_depth=2)
    audio, stream = signal(codec, 1, 500 * HOP), codec.stream()
    codes = torch.cat([stream.encode(chunk) for chunk in audio.split(997, dim=-1)], dim=1)
    assert codes.equal(codec.tokenize(audio)) and stream.flush().shape == (1, 0, 3)


@torch.no_grad()
def test_an_end_on_a_frame_leaves_nothing_to_flush():
    codec = build()
    stream = codec.stream()
    codes = stream.encode(signal(codec, length=2 * HOP))
    assert stream.flush().shape == (2, 0, 3)
    assert stream.decode(codes).shape == (2, 1, 2 * HOP)


@torch.no_grad()
def test_a_single_sample():
    codec = build()
    audio, stream = signal(codec, length=1), codec.stream()
    assert stream.encode(audio).shape == (2, 0, 3)
    codes = stream.flush()
    assert codes.equal(codec.tokenize(audio))
    close(stream.decode(codes), codec(audio).audio)


@torch.no_grad()
def test_streams_do_not_meet():
    codec = build()
    audio, other = signal(codec), signal(codec) * 2
    one, two = codec.stream(), codec.stream()
    parts = []
    for chunk, second in zip(audio.split(17, dim=-1), other.split(17, dim=-1), strict=True):
        parts.append(one.encode(chunk))
        two.encode(second)
        codec.tokenize(second)
    assert torch.cat([*parts, one.flush()], dim=1).equal(codec.tokenize(audio))


def test_a_codec_in_training_streams_all_levels_and_learns_nothing():
    codec = build(quantizer=ResidualVQ(DIM, 3, 16, quantize_dropout=True)).train()
    before = {name: value.clone() for name, value in codec.state_dict().items()}
    stream = codec.stream()
    codes = stream.encode(signal(codec, length=5 * HOP))
    assert (codes >= 0).all() and not stream.decode(codes).requires_grad
    assert codec.training and all(value.equal(before[name]) for name, value in codec.state_dict().items())


@torch.no_grad()
def test_denoising():
    codec = build(denoise_conditioning=True)
    audio, flags = signal(codec, length=5 * HOP), torch.tensor([True, False])
    stream = codec.stream(is_denoising=flags)
    codes = torch.cat([stream.encode(chunk) for chunk in audio.split(7, dim=-1)], dim=1)
    assert codes.equal(codec.tokenize(audio, flags)) and not codes.equal(codec.tokenize(audio))
    close(stream.decode(codes), codec.decode_codes(codes, is_denoising=flags))


def test_mistakes_are_named():
    with pytest.raises(ValueError, match='only a codec with pad_mode="constant" can be streamed'):
        build(pad_mode="reflect").stream()
    codec = build()
    with pytest.raises(ValueError, match="none was encoded"):
        codec.stream().flush()
    stream = codec.stream()
    stream.encode(signal(codec))
    with pytest.raises(ValueError, match="carries 2 signals side by side, got a chunk of 3"):
        stream.encode(signal(codec, batch=3))
    with pytest.raises(ValueError, match="input_channels=1"):
        stream.encode(torch.randn(2, 2, 50))
    with pytest.raises(ValueError, match="audio holds values that are infinite or not numbers"):
        stream.encode(torch.full((2, 1, 50), torch.nan))
    unchecked = lambda method, chunk: inspect.unwrap(method)(stream, chunk)  # as for a user without a type checker
    with pytest.raises(ValueError, match="audio comes as int16: give floats"):
        unchecked(CodecStream.encode, torch.zeros(2, 50, dtype=torch.int16))
    with pytest.raises(ValueError, match=r"a chunk is \[b, n\] or \[b, c, n\], not \[50\]"):
        unchecked(CodecStream.encode, torch.randn(50))
    with pytest.raises(ValueError, match="the codes hold 16, and this codec's go from 0 to 15"):
        stream.decode(torch.full((2, 1, 3), 16))
    stream.flush()
    with pytest.raises(ValueError, match="was flushed"):
        stream.encode(signal(codec))


def test_chunks_in_double_precision_are_those_in_single():
    codec = build()
    audio = signal(codec)
    assert codec.stream().encode(audio.double()).equal(codec.stream().encode(audio))


def test_one_channel_needs_no_dimension():
    codec = build()
    audio, stream = signal(codec), codec.stream()
    codes = torch.cat((stream.encode(audio[:, 0, :50]), stream.encode(audio[:, 0, 50:]), stream.flush()), dim=1)
    assert torch.equal(codes, codec.tokenize(audio))
    with pytest.raises(ValueError, match="this codec takes audio of input_channels=2, got 1"):
        build(input_channels=2).stream().encode(audio[:, 0])
