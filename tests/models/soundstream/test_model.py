import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import helicon
from helicon.models.soundstream.codecs import Codec, check_floats
from helicon.models.soundstream.discriminators import Judgement
from helicon.models.soundstream.losses import PENALTY
from helicon.models.soundstream.model import (
    AudioLMSoundStream,
    LossBreakdown,
    MusicLMSoundStream,
    SoundStream,
    _check_choices,
)
from helicon.nn.network import Network
from helicon.nn.resample import resample
from models.soundstream.tiny import HZ, SIZES, sound, tiny

FSQ = {"use_finite_scalar_quantizer": True, "finite_scalar_quantizer_levels": [5, 3], "codebook_size": None}
QUANTIZERS: dict[str, dict[str, Any]] = {
    "residual vectors": {},
    "groups": {"rq_groups": 2, "rq_num_quantizers": 2},
    "lookup-free": {"use_lookup_free_quantizer": True},
    "finite scalar": FSQ,
    "sampled": {"rq_stochastic_sample_codes": True, "rq_rotation_trick": False, "rq_kwargs": {"codebook_dim": 4}},
}
each_quantizer = pytest.mark.parametrize("options", QUANTIZERS.values(), ids=QUANTIZERS.keys())


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def unchanged(model: nn.Module, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_is_no_sound_is_refused():
    """Whole numbers, and what is no number, but for padding."""
    model, audio = tiny(), sound()
    audio[1, -50:] = torch.nan
    lengths = torch.tensor([audio.shape[-1], audio.shape[-1] - 50])
    for encode in (model.encode, model.encode_latents):
        with pytest.raises(ValueError, match="audio holds values that are infinite or not numbers: give a sound"):
            encode(audio)
        assert encode(audio, lengths).isfinite().all()
    with pytest.raises(ValueError, match=r"audio comes as int16: give floats from -1 to 1, which 16-bit samples are /"):
        check_floats((audio * 3000).short())
    check_floats(audio.double())


@each_quantizer
def test_codes_of_another_codec_are_refused(options: dict[str, Any]):
    """Lookup-free and finite scalar quantizers would make some sound of any number."""
    model = tiny(**options)
    codes = model.encode(sound())
    codes[0, 1, 0] = model.codebook_size
    with pytest.raises(ValueError, match=rf"the codes hold {model.codebook_size}, and this codec's go from 0 to"):
        model.decode(codes)
    codes[0, 1, 0] = -2
    with pytest.raises(ValueError, match="the codes hold -2"):
        model.decode(codes)


def test_codes_as_a_cache_holds_them_and_no_codes_at_all():
    model = tiny()
    codes = model.encode(sound())
    assert model.decode(codes.short()).equal(model.decode(codes))
    assert model.decode(codes[:, :0]).shape == (len(codes), 1, 0)


def test_every_clip_has_a_length():
    unchecked = inspect.unwrap(SoundStream._per_frame)  # as for a user without a type checker
    with pytest.raises(ValueError, match=r"lengths of shape \[1\] do not fit 2 clips"):
        unchecked(tiny(), lambda clips: clips, sound(), torch.tensor([50]), None, -1)
    assert tiny().encode(sound()[0], torch.tensor([50])).shape[0] == 1


@pytest.mark.parametrize("input_sample_hz", [None, 2 * HZ])
def test_no_clip_is_longer_than_the_batch(input_sample_hz: int | None):
    """A length at another rate than that of the audio would pass for padding that is none, or sound that is cut off."""
    model, whole = tiny(), torch.tensor([205, 0])
    for encode in (model.encode, model.encode_latents):
        for length in (206, -1):
            with pytest.raises(ValueError, match=f"row 1 cannot have a length of {length}: the rows have 205; lengths"):
                encode(sound(), torch.tensor([205, length]), input_sample_hz)
        assert len(encode(sound(), whole, input_sample_hz)) == 2
    latents = torch.randn(2, 5, 8)
    with pytest.raises(ValueError, match="row 0 cannot have a length of 6: the rows have 5"):
        model.decode_latents(latents, torch.tensor([6, 5]))
    assert model.decode_latents(latents, torch.tensor([5, 0]))[1].abs().max() == 0


# ---------------------------------------------------------------------------------------------- what forward gives


@each_quantizer
def test_every_kind_of_quantizer_codes_decodes_and_learns(options: dict[str, Any]):
    model, audio = tiny(**options), sound()
    codes = model.tokenize(audio)
    assert codes.shape == (2, 26, model.num_quantizers) and codes.min() >= 0 and codes.max() < model.codebook_size
    assert model.decode(codes).shape == (2, 1, 26 * 8)
    model(audio).backward()
    missing = [name for name, p in model.autoencoder.named_parameters() if p.grad is None]
    assert not missing, "parameters without a gradient would stop a distributed run"
    assert all(p.grad is None for p in model.discriminators.parameters())


def test_the_shapes_of_all_answers():
    model, audio = tiny(), sound()
    loss = model(audio)
    assert loss.shape == () and loss.requires_grad
    loss, breakdown = model(audio, return_loss_breakdown=True)
    *_, commitment = breakdown
    assert isinstance(breakdown, LossBreakdown) and not any(term.requires_grad for term in breakdown)
    shares = dict(zip(("wave", "mel", "adversarial", "feature"), breakdown[:4], strict=True))
    weighted = sum(model.loss.weights[name] * term for name, term in shares.items()) + commitment
    torch.testing.assert_close(loss.detach(), weighted)
    assert model(audio, return_recons_only=True).shape == (2, 1, 205)
    assert model(audio, return_codes_only=True).shape == (2, 26, 3)
    values, codes, commitment = model(audio, return_encoded=True)
    assert values.shape == (2, 26, 8) and codes.shape == (2, 26, 3) and commitment.shape == ()
    assert model(audio, return_discr_loss=True).shape == ()
    named = model(audio, return_discr_losses_separately=True)
    assert [name for name, _ in named] == ["period_2", "window_32"]


def test_one_sound_a_batch_and_channels_are_the_same():
    model, audio = tiny().eval(), sound(1)
    expected = model(audio, return_recons_only=True)
    assert torch.equal(model(audio[0], return_recons_only=True), expected)
    assert torch.equal(model(audio[:, None], return_recons_only=True), expected)
    with pytest.raises(ValueError, match=r"takes audio \[n\], \[b, n\] or \[b, 1, n\], not \[1, 2, 9\]"):
        model(torch.zeros(1, 2, 9))


@pytest.mark.parametrize("pad_mode", ["constant", "reflect"])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 41])
def test_any_length_works_and_comes_back(length: int, pad_mode: str):
    """43: with reflect padding the reference crashes on sounds of up to four frames; others are cut to whole frames."""
    model = tiny(pad_mode=pad_mode)
    audio = sound(length=length)
    model(audio).backward()
    assert model(audio, return_recons_only=True).shape == (2, 1, length)
    assert model.tokenize(audio).shape[1] == -(-length // 8)


def test_stereo():
    """42: the reference folds channels into the batch, and its discriminators take one."""
    model = tiny(input_channels=2, discr_multi_scales=(1, 0.5), complex_stft_discr_kwargs={"n_fft": 64, "channels": 2})
    audio = torch.stack([sound(), sound(seed=5)], dim=1)
    model(audio).backward()
    assert model(audio, return_recons_only=True).shape == audio.shape
    assert model(audio, return_discr_loss=True).requires_grad
    assert model.tokenize(audio).shape == (2, 26, 3)
    with pytest.raises(ValueError, match=r"takes audio \[b, 2, n\], not \[2, 205\]"):
        model(sound())


def test_the_first_codes_are_the_coarse_ones_of_every_group():
    """31: in the reference the first codes of a grouped codec are all levels of the first group alone."""
    model = tiny(rq_groups=2, rq_num_quantizers=3).eval()
    codes = model.tokenize(sound())
    assert codes.shape[-1] == 6 == model.num_quantizers
    latents = model.autoencoder.encode(sound()[:, None])
    first = [
        stack.encode(part)[..., 0]
        for stack, part in zip(model.autoencoder.quantizer.stacks.stacks, latents.chunk(2, -1), strict=True)
    ]
    assert torch.equal(codes[..., 0], first[0]) and torch.equal(codes[..., 1], first[1])
    coarse = model.autoencoder.quantizer.decode(codes[..., :2])
    assert (coarse.chunk(2, dim=-1)[1] != 0).any()
    by_group = torch.stack([codes[..., 0::2], codes[..., 1::2]])
    assert torch.equal(model.decode_from_codebook_indices(by_group), model.decode_from_codebook_indices(codes))
    with pytest.raises(ValueError, match="3 codes a frame cannot be shared out to 2 groups"):
        model.decode(codes[..., :3])


# ---------------------------------------------------------------------------------------------- as a codec


def test_it_is_a_codec():
    model = tiny()
    assert isinstance(model, Codec)
    assert (model.sample_hz, model.target_sample_hz, model.channels, model.latent_dim) == (HZ, HZ, 1, 8)
    assert model.downsample_factor == model.seq_len_multiple_of == 8
    assert (model.num_quantizers, model.codebook_size) == (3, 16)
    assert model.code_lengths(torch.tensor([1, 8, 9])).tolist() == [1, 1, 2]


def test_a_padded_clip_has_the_codes_and_the_sound_of_itself():
    model, audio = tiny().eval(), sound()
    audio[1, 100:] = 9.0  # padding may hold anything
    lengths = torch.tensor([205, 100])
    codes, latents = model.encode(audio, lengths), model.encode_latents(audio, lengths)
    alone = audio[1:, :100]
    assert torch.equal(codes[1, :13], model.encode(alone)[0]) and (codes[1, 13:] == -1).all()
    torch.testing.assert_close(latents[1, :13], model.encode_latents(alone)[0])
    assert not latents[1, 13:].any()
    torch.testing.assert_close(model.decode(codes)[1, :, : 13 * 8], model.decode(codes[1:, :13])[0])
    assert not model.decode(codes)[1, :, 13 * 8 :].any()
    assert not model.decode_latents(latents, model.code_lengths(lengths))[1, :, 13 * 8 :].any()


def test_decode_takes_codes_or_latents():
    model = tiny().eval()
    latents, codes = model.encode_latents(sound()), model.encode(sound())
    torch.testing.assert_close(model.decode(latents), model.decode_latents(latents))
    torch.testing.assert_close(model.decode(latents, quantize=True), model.decode(codes))
    assert not torch.equal(model.decode(codes[..., :1]), model.decode(codes)), "the first level alone is coarser"


@pytest.mark.parametrize("is_training", [True, False])
def test_coding_leaves_mode_and_codebooks_as_they_were(is_training: bool):
    """The reference's tokenize switches to evaluation mode and stays there."""
    model = tiny().train(is_training)
    model.autoencoder.encoder.eval()
    modes, before = [m.training for m in model.modules()], state(model)
    codes = model.tokenize(sound())
    model.decode(codes), model(sound(), return_codes_only=True)
    model.decode(model.encode_latents(sound()), quantize=True)
    assert [m.training for m in model.modules()] == modes and unchanged(model, before)
    assert (codes >= 0).all(), "all levels, though quantize dropout is on while training"
    assert torch.equal(codes, model(sound(), return_codes_only=True))


def test_other_rates_are_resampled():
    model, audio = tiny().eval(), sound(length=300)
    there = resample(audio, 3 * HZ // 2, HZ)
    assert there.shape[-1] == 200
    assert torch.equal(model.tokenize(audio, input_sample_hz=3 * HZ // 2), model.tokenize(there))
    assert torch.equal(
        model(audio, input_sample_hz=3 * HZ // 2, return_recons_only=True), model(there, return_recons_only=True)
    )
    lengths = torch.tensor([300, 150])
    codes = model.tokenize(audio, lengths, input_sample_hz=3 * HZ // 2)
    assert (codes >= 0).all(-1).sum(-1).tolist() == [25, 13]


def test_curtailing_from_the_left_ends_with_a_whole_frame():
    model, audio = tiny().eval(), sound()
    assert torch.equal(
        model(audio, curtail_from_left=True, return_codes_only=True), model(audio[:, 5:], return_codes_only=True)
    )


def test_a_stream_gives_the_codes_of_the_whole():
    model, audio = tiny().eval(), sound()[:, None]
    stream = model.stream()
    parts = [stream.encode(chunk) for chunk in audio.split(50, dim=-1)]
    assert torch.equal(torch.cat([*parts, stream.flush()], dim=1), model.tokenize(audio))


# ---------------------------------------------------------------------------------------------- losses


def test_denoising_compares_with_the_clean_sound_everywhere():
    """41: in the reference the spectral, adversarial and feature losses compare with the noisy input."""
    model = tiny(denoise_conditioning=True).eval()
    noisy, clean = sound(), sound(seed=3)
    reconstructed = model(noisy, is_denoising=True, return_recons_only=True)
    _, terms = model.loss.of_autoencoder(reconstructed, clean[:, None], judge=model.discriminators)
    _, breakdown = model(noisy, target=clean, is_denoising=True, return_loss_breakdown=True)
    names = {"recon": "wave", "multi_spectral_recon": "mel", "adversarial": "adversarial", "feature": "feature"}
    for field, term in names.items():
        torch.testing.assert_close(getattr(breakdown, field), terms[term])
    against_noisy = model(noisy, return_loss_breakdown=True)[1]
    assert all(
        getattr(breakdown, field) != getattr(against_noisy, field) for field in ("recon", "multi_spectral_recon")
    )
    assert breakdown.feature != against_noisy.feature
    of_clean, of_noisy = (
        model(noisy, target=target, is_denoising=True, return_discr_loss=True) for target in (clean, noisy)
    )
    assert of_clean != of_noisy


def test_what_denoising_needs_is_said():
    with pytest.raises(ValueError, match="is_denoising needs the clean audio to compare with"):
        tiny(denoise_conditioning=True)(sound(), is_denoising=True)
    with pytest.raises(ValueError, match="belongs to a codec with denoise_conditioning=True"):
        tiny()(sound(), target=sound(), is_denoising=True)
    with pytest.raises(ValueError, match=r"target has the shape \[2, 1, 100\], x \[2, 1, 205\]"):
        tiny()(sound(), target=sound(length=100))


def test_the_discriminators_loss_leaves_the_codec_alone():
    """16: the reference's discriminator step runs the generator with gradients, and moves the codebooks once more."""
    model = tiny().train()
    model(sound()).backward()
    model.zero_grad()
    before = state(model)
    model(sound(), return_discr_loss=True).backward()
    assert unchanged(model, before) and model.autoencoder.training
    assert all(p.grad is None for p in model.autoencoder.parameters())
    assert all(p.grad is not None for p in model.discriminators.parameters())


def test_the_penalty_is_in_both_forms_of_the_discriminators_loss():
    """40: the reference's list pairs penalties with wrong names and drops three, its sum drops all but one."""
    model = tiny(discr_multi_scales=(1, 0.5))
    kinds = list(model.discriminators.members)
    with torch.no_grad():  # of new discriminators the penalty is next to nothing
        for parameter in model.discriminators.parameters():
            parameter.mul_(3)
    torch.manual_seed(2)
    named = dict(model(sound(), return_discr_losses_separately=True, apply_grad_penalty=True))
    torch.manual_seed(2)
    total = model(sound(), return_discr_loss=True, apply_grad_penalty=True)
    assert list(named) == [*kinds, PENALTY] and len(kinds) == 4
    torch.testing.assert_close(total, sum(named[kind] for kind in kinds) / 4 + named[PENALTY])
    assert named[PENALTY] > 1 and PENALTY not in dict(model(sound(), return_discr_losses_separately=True))


def test_without_discriminators_the_distances_remain():
    model = tiny(discr_periods=(), discr_windows=())
    assert model.discriminators is None
    _, breakdown = model(sound(), return_loss_breakdown=True)
    assert breakdown.adversarial == breakdown.feature == 0 and breakdown.recon > 0
    with pytest.raises(ValueError, match="was built without discriminators"):
        model(sound(), return_discr_loss=True)


CHOICES = {
    "mel_loss": "soundstream",
    "adversarial_loss": "least_squares",
    "relative_feature_loss": False,
}


@pytest.mark.parametrize("name", CHOICES)
def test_every_choice_of_loss_is_another_loss(name: str):
    usual, other = (tiny(**changes)(sound(), return_loss_breakdown=True)[1] for changes in ({}, {name: CHOICES[name]}))
    term = {"mel_loss": 1, "adversarial_loss": 2, "relative_feature_loss": 3}[name]
    assert [i for i in range(5) if usual[i] != other[i]] == [term]


def test_balanced_losses_remember_in_training_what_they_were():
    model = tiny()
    assert [name for name in model.own_state() if "balancer" in name] == ["loss.balancer.sums", "loss.balancer.counts"]
    model(sound()).backward()
    assert (model.loss.balancer.counts == 1).all()
    with torch.no_grad():
        model(sound())
    assert (model.loss.balancer.counts == 1).all()
    assert tiny(balance_losses=False).loss.balancer is None


# ---------------------------------------------------------------------------------------------- building and saving


class Own(Network):
    """A discriminator of a user's own."""

    def __init__(self, width: int = 3):
        super().__init__()
        self.layer = nn.Conv1d(1, width, 5)

    def forward(self, audio: Tensor) -> Judgement:
        features = self.layer(audio)
        return Judgement(features.mean(dim=1), [features])


def test_an_own_discriminator_is_trained_and_saved_with_the_rest():
    model = tiny(stft_discriminator=Own(4), discr_periods=())
    assert list(model.discriminators.members) == ["window_32", "own"]
    model(sound(), return_discr_loss=True).backward()
    assert model.arguments["stft_discriminator"].layer.weight.grad is not None
    model.save("saved")
    loaded = SoundStream.init_and_load_from("saved")
    assert all(torch.equal(value, model.own_state()[name]) for name, value in loaded.own_state().items())


def test_a_normalized_spectrum_is_the_complex_discriminator_s():
    spectra = {"n_fft": 32, "channels": 2, "strides": ((1, 2),), "chan_mults": (1,)}
    for normalized in (True, False):
        model = tiny(complex_stft_discr_kwargs=spectra, stft_normalized=normalized)
        assert model.discriminators.members["complex_stft"].stft_normalized is normalized


@each_quantizer
def test_what_is_saved_is_what_is_loaded(options: dict[str, Any]):
    """38: without pickle."""
    model = tiny(**options).eval()
    model(sound())
    model.save("saved")
    assert {path.suffix for path in Path("saved").iterdir()} <= {".json", ".safetensors", ".md"}
    loaded = helicon.load("saved")
    assert isinstance(loaded, SoundStream) and torch.equal(loaded.tokenize(sound()), model.tokenize(sound()))
    other = tiny(**options)
    other.load_from_trainer_saved_obj("saved")
    assert torch.equal(other.eval()(sound(), return_recons_only=True), model(sound(), return_recons_only=True))


@each_quantizer
def test_a_codec_can_be_sent_to_another_process(options: dict[str, Any]):
    """In a user's dataset, which processes read: where they are spawned, it is pickled. As good as a copy, and it learns on."""
    model = tiny(**options)
    model(sound()).backward()
    torch.manual_seed(3)
    sent = pickle.loads(pickle.dumps(model))  # which draws no random number
    learned = sent(sound(seed=2))
    torch.manual_seed(3)
    assert torch.equal(learned, model(sound(seed=2)))
    assert unchanged(sent, state(model))
    for copied in (sent, model):
        copied.zero_grad()
        copied(sound(), return_discr_loss=True).backward()
    expected = {name: p.grad for name, p in model.discriminators.named_parameters()}
    assert all(torch.equal(p.grad, expected[name]) for name, p in sent.discriminators.named_parameters())
    sent.load_state_dict(tiny(**options).state_dict())
    assert unchanged(sent, state(tiny(**options)))


def test_the_presets():
    small = {
        name: value
        for name, value in SIZES.items()
        if name not in ("strides", "channel_mults", "target_sample_hz", "rq_num_quantizers")
    }
    small |= {"multi_spectral_window_powers_of_two": (9,), "multi_spectral_n_mels": 8}
    for preset, hz, strides in ((AudioLMSoundStream, 16000, (2, 4, 5, 8)), (MusicLMSoundStream, 24000, (3, 4, 5, 8))):
        model = preset(**small)
        assert (model.sample_hz, model.num_quantizers, model.arguments["strides"]) == (hz, 12, strides)
        assert model.sample_hz / model.downsample_factor == 50


REFERENCE = (
    "channels strides channel_mults codebook_dim codebook_size finite_scalar_quantizer_levels rq_num_quantizers "
    "rq_commitment_weight rq_ema_decay rq_quantize_dropout_multiple_of rq_groups rq_stochastic_sample_codes rq_rotation_trick "
    "rq_kwargs use_lookup_free_quantizer use_finite_scalar_quantizer input_channels discr_multi_scales stft_normalized "
    "enc_cycle_dilations dec_cycle_dilations multi_spectral_window_powers_of_two multi_spectral_n_ffts multi_spectral_n_mels "
    "recon_loss_weight multi_spectral_recon_loss_weight adversarial_loss_weight feature_loss_weight quantize_dropout_cutoff_index "
    "target_sample_hz use_local_attn attn_window_size attn_dim_head attn_heads attn_depth attn_xpos_scale_base "
    "attn_dynamic_pos_bias use_gate_loop_layers squeeze_excite complex_stft_discr_logits_abs pad_mode stft_discriminator "
    "complex_stft_discr_kwargs"
)


def test_every_keyword_of_the_reference_is_known():
    assert not set(REFERENCE.split()) - inspect.signature(SoundStream).parameters.keys()


def test_a_loss_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="mel_loss='paper' must be 'log' or 'soundstream'"):
        _check_choices(mel_loss="paper")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"attn_xpos_scale_base": 512}, "attn_xpos_scale_base is not supported: the local attention has rotary"),
        ({"attn_dynamic_pos_bias": True}, "attn_dynamic_pos_bias is not supported"),
        ({"use_gate_loop_layers": True}, "use_gate_loop_layers is not supported"),
        ({"complex_stft_discr_logits_abs": True}, "a modulus is never negative, so no fake could be refused"),
        ({"use_finite_scalar_quantizer": True, "codebook_size": None}, "needs finite_scalar_quantizer_levels, such as"),
        ({**FSQ, "codebook_size": 16}, r"levels=\[5, 3\] make 15 codes, not 16: leave codebook_size out"),
        ({**FSQ, "use_lookup_free_quantizer": True}, "exclude each other"),
        ({"multi_spectral_n_mels": (1, 2, 3)}, "must be one number, or one for each of the 2 windows"),
        ({"adversarial_loss_weight": -1.0}, "none may be negative"),
        ({"codebook_size": 0}, "codebook_size=0 must be at least 1"),
        ({"rq_num_quantizers": 0}, "rq_num_quantizers=0 must be at least 1"),
        ({"rq_groups": 0}, "rq_groups=0 must be at least 1"),
        ({"rq_quantize_dropout_multiple_of": 0}, "rq_quantize_dropout_multiple_of=0 must be at least 1"),
        ({"target_sample_hz": 0}, "target_sample_hz=0 must be at least 1"),
        ({"discr_periods": (2, 0)}, r"discr_periods=\(2, 0\) must be at least 1"),
        (
            {"enc_cycle_dilations": (0,)},
            r"enc_cycle_dilations=\(0,\) must be at least 1",
        ),
        ({"dec_cycle_dilations": (1, -1)}, r"dec_cycle_dilations=\(1, -1\) must be at least 1"),
        ({"discr_multi_scales": (0.3,)}, "must be 1 divided by a whole number"),
        ({"stft_normalized": True}, "there is none: ask for it with complex_stft_discr_kwargs="),
        ({"stft_discriminator": nn.Conv1d(1, 1, 3)}, "a Conv1d, which could not be saved: derive it from helicon.Netw"),
    ],
)
def test_mistakes_are_one_sentence(options: dict[str, Any], sentence: str):
    with pytest.raises(ValueError, match=sentence) as caught:
        tiny(**options)
    assert "\n" not in str(caught.value)
