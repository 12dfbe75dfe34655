"""Parity with a plain implementation, any length, causality, quantizers, options."""

import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from helicon.models.soundstream.autoencoder import SoundStreamAutoencoder
from helicon.models.soundstream.layers import ResidualUnit, Snake
from helicon.nn import conv
from helicon.nn.conv import CausalConv1d, CausalUpsample1d
from helicon.quantize import (
    FiniteScalarQuantizer,
    GroupedResidualFSQ,
    GroupedResidualLFQ,
    GroupedResidualVQ,
    ResidualFSQ,
    ResidualLFQ,
    ResidualVQ,
    VectorQuantizer,
)

DIM, HOP = 12, 6

QUANTIZERS = {
    "residual": lambda: ResidualVQ(DIM, 3, 16),
    "grouped": lambda: GroupedResidualVQ(DIM, groups=2, num_quantizers=2, codebook_size=16),
    "lookup-free": lambda: GroupedResidualLFQ(DIM, groups=2, num_quantizers=2, codebook_size=16),
    "finite scalar": lambda: GroupedResidualFSQ(DIM, groups=2, num_quantizers=2, levels=[5, 3]),
    "one lookup-free": lambda: ResidualLFQ(DIM, 2, 16),
    "one finite scalar": lambda: ResidualFSQ(DIM, 1, [5, 3]),
}
OPTIONS = {
    "plain": {},
    "stereo": {"input_channels": 2},
    "elu": {"activation": "elu"},
    "no attention": {"use_local_attn": False},
    "squeeze_excite": {"squeeze_excite": True},
    "denoise": {"denoise_conditioning": True},
    "reflect": {"pad_mode": "reflect"},
    "one stride": {"strides": (5,), "channel_mults": (3,)},
}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
each_quantizer = pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS.keys())


def build(quantizer=QUANTIZERS["residual"], seed=0, **options) -> SoundStreamAutoencoder:
    """Every weight random: what starts at zero would hide mistakes."""
    torch.manual_seed(seed)
    sizes = dict(channels=4, strides=(2, 3), channel_mults=(2, 3), codebook_dim=DIM, attn_window_size=4, attn_heads=2)
    codec = SoundStreamAutoencoder(quantizer=quantizer(), **{**sizes, "attn_dim_head": 6, **options}).eval()
    with torch.no_grad():
        for parameter in codec.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return codec


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-5 * expected.abs().max().item(), rtol=1e-5)


# A plain implementation: channels first, every layer a call of torch with zeros put before the signal by hand.


def plain_activation(module, x):
    if isinstance(module, Snake):
        a = module.log_frequency.exp()[:, None]
        return x + torch.sin(a * x) ** 2 / a
    return F.elu(x)


def plain_layer(module, x):
    if isinstance(module, CausalUpsample1d):
        stride = module.factor
        before, now = module.weight.unflatten(0, (stride, -1)).permute(2, 3, 1, 0)
        return F.conv_transpose1d(x, torch.cat((now, before), -1), module.bias, stride)[..., :-stride]
    if isinstance(module, CausalConv1d):
        weight = module.weight.unflatten(2, (module.stride, -1)).permute(0, 3, 1, 2).flatten(2)
        zeros = module.dilation * (weight.shape[-1] - 1) + 1 - module.stride
        return F.conv1d(F.pad(x, (zeros, 0)), weight, module.bias, module.stride, dilation=module.dilation)
    if isinstance(module, ResidualUnit):
        hidden = plain_layer(module.conv, plain_activation(module.first_activation, x))
        hidden = plain_activation(module.second_activation, hidden)
        return x + F.conv1d(hidden, module.mix.weight[..., None], module.mix.bias)
    return plain_activation(module, x)


def plain(stack, x):
    for module in stack.layers:
        x = plain_layer(module, x)
    return x


@pytest.mark.parametrize("activation", ["elu", "snake"])
@torch.no_grad()
def test_is_the_plain_implementation(activation):
    codec, audio = build(activation=activation, use_local_attn=False, input_channels=2), torch.randn(2, 2, 60)
    latents = codec.encode(audio)
    close(latents, plain(codec.encoder, audio).transpose(1, 2))
    close(codec.decode(latents), plain(codec.decoder, latents.transpose(1, 2)))


@pytest.mark.parametrize("pad_mode", ["constant", "reflect"])
@torch.no_grad()
def test_the_convolutions_of_a_gpu_give_the_same(pad_mode, monkeypatch):
    codec, audio = build(pad_mode=pad_mode, input_channels=2), torch.randn(2, 2, 61)
    expected = codec.encode(audio), codec.decode(codec.encode(audio))

    def as_on_a_gpu(x, weight, bias, dilation=1, num_zeros=0):
        return conv.convolve_folded(*conv.in_eights(x, weight, bias), dilation, num_zeros)[..., : len(weight)]

    monkeypatch.setattr(conv, "convolve", as_on_a_gpu)
    close(codec.encode(audio), expected[0])
    close(codec.decode(codec.encode(audio)), expected[1])


def test_the_layers_are_those_of_the_paper():
    codec = build(strides=(2, 4, 5), channel_mults=(2, 4, 8), activation="elu", dec_cycle_dilations=(1, 5))
    convs = [module for module in codec.encoder.modules() if isinstance(module, CausalConv1d)]
    kernels = [conv.weight.shape[1] * conv.stride for conv in convs]
    shapes = [(c.in_channels, c.out_channels, k, c.stride, c.dilation) for c, k in zip(convs, kernels, strict=True)]
    units = lambda width: [(width, width, 7, 1, dilation) for dilation in (1, 3, 9)]
    strided = [(4, 8, 4, 2, 1), (8, 16, 8, 4, 1), (16, 32, 10, 5, 1)]
    middle = [layer for width, stride in zip((4, 8, 16), strided, strict=True) for layer in (*units(width), stride)]
    assert shapes == [(1, 4, 7, 1, 1), *middle, (32, DIM, 3, 1, 1)]
    ups = [m for m in codec.decoder.modules() if isinstance(m, CausalUpsample1d)]
    assert [(m.in_channels, m.out_channels // m.factor, m.factor) for m in ups] == [(32, 16, 5), (16, 8, 4), (8, 4, 2)]
    dilations = [m.conv.dilation for m in codec.decoder.modules() if isinstance(m, ResidualUnit)]
    assert dilations == [1, 5] * 3


@pytest.mark.parametrize("pad_mode", ["constant", "reflect"])
@pytest.mark.parametrize("channels", [1, 2])
@torch.no_grad()
def test_any_length_comes_back(pad_mode, channels):
    codec = build(pad_mode=pad_mode, input_channels=channels)
    for length in (1, 2, HOP - 1, HOP, HOP + 1, 2 * HOP, 50, 97):
        made = codec(torch.randn(2, channels, length))
        assert made.audio.shape == (2, channels, length) and made.audio.isfinite().all()
        assert made.quantized.codes.shape == (2, codec.num_frames(length), 3)
    assert codec.num_frames(1) == codec.num_frames(HOP) == 1 and codec.num_frames(HOP + 1) == 2


@torch.no_grad()
def test_silence_after_the_end_changes_no_latent():
    codec, audio = build(), torch.randn(1, 1, 4 * HOP + 1)
    close(codec.encode(F.pad(audio, (0, 20)))[:, :5], codec.encode(audio))


@each_option
@torch.no_grad()
def test_batch_of_two_is_two_of_one(options):
    codec = build(**options)
    audio = torch.randn(2, codec.input_channels, 61)
    made = codec(audio)
    for i in range(2):
        alone = codec(audio[i : i + 1])
        close(made.audio[i : i + 1], alone.audio)
        assert made.quantized.codes[i : i + 1].equal(alone.quantized.codes)


@pytest.mark.parametrize("options", [v for k, v in OPTIONS.items() if k != "reflect"])
@torch.no_grad()
def test_a_sample_changes_nothing_before_its_frame(options):
    codec = build(**options)
    audio = torch.randn(1, codec.input_channels, 20 * codec.hop)
    latents, sound = codec.encode(audio), codec.decode(codec.encode(audio))
    for frame, place in ((0, 0), (7, codec.hop - 1), (7, 0), (19, 1)):
        changed = audio.clone()
        changed[..., frame * codec.hop + place] += 1
        other = codec.encode(changed)
        assert other[:, :frame].equal(latents[:, :frame]) and not other[:, frame].equal(latents[:, frame])
        start = frame * codec.hop
        heard = codec.decode(other)
        assert heard[..., :start].equal(sound[..., :start])
        assert not heard[..., start : start + codec.hop].equal(sound[..., start : start + codec.hop])


@torch.no_grad()
def test_a_mirrored_beginning_looks_ahead():
    codec, audio = build(pad_mode="reflect"), torch.randn(1, 1, 20 * HOP)
    changed = audio.clone()
    changed[..., HOP] += 1
    assert not codec.encode(changed)[:, 0].equal(codec.encode(audio)[:, 0])


@torch.no_grad()
def test_attention_reaches_beyond_the_convolutions_and_not_beyond_its_window():
    """Without dilation a latent sees 6 + 3 * 6 + 2 samples back at the audio's rate, and so on: less than 20 frames."""
    audio = torch.randn(1, 1, 60 * HOP)
    changed = audio.clone()
    changed[..., 0] += 1
    reach = {}
    for name, options in {"no": {"use_local_attn": False}, "yes": {}, "wide": {"attn_window_size": 30}}.items():
        codec = build(enc_cycle_dilations=(1,), **options)
        seen = (codec.encode(changed) - codec.encode(audio)).abs().amax(dim=(0, 2)).nonzero()
        reach[name] = seen.max().item()
    assert 0 < reach["no"] < 20
    assert reach["yes"] == reach["no"] + 3  # one layer, a window of 4
    assert reach["wide"] == reach["no"] + 29


@each_quantizer
@torch.no_grad()
def test_codes_alone_make_the_reconstruction(quantizer):
    codec, audio = build(quantizer), torch.randn(2, 1, 47)
    made, codes = codec(audio), codec.tokenize(audio)
    assert codes.equal(made.quantized.codes) and codes.shape[:2] == (2, 8) and codes.ndim == 3
    close(codec.decode_codes(codes, 47), made.audio)
    assert codec.decode_codes(codes).shape == (2, 1, 48)


@each_quantizer
def test_the_loss_reaches_every_weight_of_the_encoder(quantizer):
    codec = build(quantizer).train()
    made = codec(torch.randn(2, 1, 47))
    (made.audio.square().mean() + made.quantized.loss).backward()
    assert all(weight.grad.abs().max() > 0 for weight in codec.encoder.parameters())


@each_option
def test_every_weight_is_used(options):
    """A weight without a gradient stops distributed training."""
    codec = build(**options).train()
    made = codec(torch.randn(2, codec.input_channels, 47))
    (made.audio.square().mean() + made.quantized.loss).backward()
    assert not [name for name, weight in codec.named_parameters() if weight.grad is None]


@torch.no_grad()
def test_fewer_levels_make_a_coarser_sound():
    codec, audio = build(), torch.randn(2, 1, 5 * HOP)
    codes = codec.tokenize(audio)
    coarse = codec.decode_codes(codes[..., :1])
    assert coarse.shape == audio.shape and not torch.allclose(coarse, codec.decode_codes(codes))


def test_tokenizing_leaves_the_codec_as_it_is():
    codec = build(lambda: ResidualVQ(DIM, 3, 16, quantize_dropout=True, kmeans_init=True)).train()
    before = {name: value.clone() for name, value in codec.state_dict().items()}
    codes = codec.tokenize(torch.randn(2, 1, 50))
    assert codec.training and (codes >= 0).all()  # in training, forward would drop levels
    assert all(value.equal(before[name]) for name, value in codec.state_dict().items())


@torch.no_grad()
def test_masked_frames_have_no_codes():
    codec = build()
    mask = torch.tensor([[True] * 5, [True] * 2 + [False] * 3])
    made = codec(torch.randn(2, 1, 5 * HOP), mask)
    assert ((made.quantized.codes >= 0).all(-1) == mask).all()


@torch.no_grad()
def test_denoising_is_told_apart_row_by_row():
    codec, audio = build(denoise_conditioning=True), torch.randn(2, 1, 5 * HOP)
    keep, clean = codec(audio, is_denoising=False), codec(audio, is_denoising=True)
    mixed = codec(audio, is_denoising=torch.tensor([True, False]))
    close(codec(audio).audio, keep.audio)
    close(mixed.audio, torch.stack((clean.audio[0], keep.audio[1])))
    assert not torch.allclose(keep.audio, clean.audio)
    flag = codec.tokenize(audio, is_denoising=True)
    close(codec.decode_codes(flag, is_denoising=True), clean.audio)


def test_reconstructions_start_quiet():
    """Speech has a root mean square of about 0.1: the first steps need not turn a roar down. (To begin low does no harm.)"""
    torch.manual_seed(0)
    for activation in ("snake", "elu"):
        codec = SoundStreamAutoencoder(
            quantizer=ResidualVQ(64, 2, 16), channels=8, codebook_dim=64, activation=activation
        )
        with torch.no_grad():
            made = codec.decode(codec.encode(0.1 * torch.randn(2, 1, 6400)))
        assert 1e-5 < made.std() < 0.1


def test_half_precision_stays_outside():
    codec, audio = build(), 0.1 * torch.randn(2, 1, 61)
    with torch.autocast("cpu", torch.bfloat16):
        made = codec.train()(audio)
    assert made.audio.dtype == torch.float32 and made.audio.isfinite().all()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        rough = codec.decode(codec.encode(audio))
    exact = codec.decode(codec.encode(audio))
    assert (rough - exact).norm() < 0.15 * exact.norm()


def test_mistakes_are_named():
    codec = build()
    with pytest.raises(ValueError, match="input_channels=1, got 2"):
        codec(torch.randn(1, 2, 50))
    with pytest.raises(ValueError, match="has no samples"):
        codec(torch.randn(1, 1, 0))
    with pytest.raises(ValueError, match="num_samples=13 are more than the 12"):
        codec.decode(torch.randn(1, 2, DIM), 13)
    with pytest.raises(ValueError, match="channels=0"):
        build(channels=0)
    with pytest.raises(ValueError, match="denoise_conditioning=True"):
        codec(torch.randn(1, 1, 50), is_denoising=False)
    with pytest.raises(ValueError, match="a codec takes a stack"):
        build(lambda: VectorQuantizer(DIM, 16))
    with pytest.raises(ValueError, match="a codec takes a stack"):
        build(lambda: FiniteScalarQuantizer(DIM, [5, 3]))
    with pytest.raises(ValueError, match="dim=13"):
        build(lambda: ResidualVQ(13, 2, 16))
    with pytest.raises(ValueError, match="strides=\\(2, 3\\)"):
        build(channel_mults=(2, 3, 4))
    with pytest.raises(ValueError, match="strides=\\(2, 0\\)"):
        build(strides=(2, 0))


def test_an_unknown_activation_is_refused():
    """As for a user without a type checker; under test the annotations would refuse it first."""
    constructor = SoundStreamAutoencoder.__init__
    unchecked = getattr(constructor, "__wrapped__", constructor)
    with pytest.raises(ValueError, match="activation='relu' is neither"):
        unchecked(
            SoundStreamAutoencoder.__new__(SoundStreamAutoencoder), quantizer=ResidualVQ(512, 2, 16), activation="relu"
        )


COMPILED = """
import torch
from helicon.models.soundstream.autoencoder import SoundStreamAutoencoder
from helicon.quantize import ResidualVQ

torch.manual_seed(0)
codec = SoundStreamAutoencoder(
    quantizer=ResidualVQ(12, 3, 16), channels=4, strides=(2, 3), channel_mults=(2, 3), codebook_dim=12,
    attn_window_size=4, attn_heads=2, attn_dim_head=6, squeeze_excite=True, denoise_conditioning=True,
)
audio = torch.randn(2, 1, 61)
expected = codec.eval()(audio)
compiled = torch.compile(codec, backend="aot_eager", fullgraph=True)
torch.testing.assert_close(compiled(audio).audio, expected.audio, atol=1e-4, rtol=1e-4)
codec.train()
compiled(audio).audio.sum().backward()
assert all(weight.grad is not None for weight in codec.parameters())
"""


@pytest.mark.slow
def test_compiles_without_a_break():
    """In a process of its own, where no type checker wraps every function."""
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", COMPILED], check=True, timeout=600)
