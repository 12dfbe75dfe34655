"""SoundStream: a neural audio codec. Waves to a few discrete codes a frame and back (Zeghidour et al. 2021, arXiv:2107.03312).

`soundstream.autoencoder` holds encoder, quantizer and decoder, `soundstream.discriminators` what it is trained against. Audio
of n samples becomes n / downsample_factor frames (the last one filled up with silence) of num_quantizers codes each.

The defaults are those of the recipe soundstream/soundstream: the paper's codec with what was found since. The recipe
soundstream/reference has the architecture and the loss weights of audiolm-pytorch.

Letters: b batch, c audio channels, n samples, t frames, d features of a frame, q codes of a frame, g groups.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

import helicon
from helicon.models.soundstream.autoencoder import SoundStreamAutoencoder
from helicon.models.soundstream.codecs import check_finite, check_floats
from helicon.models.soundstream.discriminators import (
    BandDiscriminator,
    ComplexSTFTDiscriminator,
    Discriminators,
    PeriodDiscriminator,
    WaveDiscriminator,
)
from helicon.models.soundstream.layers import Activation
from helicon.models.soundstream.losses import (
    AdversarialKind,
    CodecLoss,
    MelLoss,
    total_of_discriminators,
    without_padding,
)
from helicon.models.soundstream.stream import CodecStream
from helicon.nn.conv import PadMode
from helicon.nn.lengths import check_lengths
from helicon.nn.network import Network
from helicon.nn.numbers import check_counts
from helicon.nn.resample import resample
from helicon.quantize import (
    GroupedResidual,
    GroupedResidualFSQ,
    GroupedResidualLFQ,
    GroupedResidualVQ,
    Quantized,
)

CODEBOOK_SIZE = 1024
VQ_DEFAULTS: Mapping[str, Any] = {"kmeans_init": True, "threshold_ema_dead_code": 0.2}

Audio = Float[Tensor, " n"] | Float[Tensor, "b n"] | Float[Tensor, "b c n"]
Lengths = Int[Tensor, " b"]
IsDenoising = bool | Bool[Tensor, " b"] | None


class LossBreakdown(NamedTuple):
    """The terms of the loss, before they are weighted; 0 for one that is left out."""

    recon: Tensor
    multi_spectral_recon: Tensor
    adversarial: Tensor
    feature: Tensor
    commitment: Tensor


class CoarseFirst(nn.Module):
    """Groups of stacks whose codes are in the order of levels: the first of every group, then the second, and so on.

    So the first few codes of a frame are the coarse ones of the whole frame, and decode to all of it.
    """

    def __init__(self, stacks: GroupedResidual):
        super().__init__()
        self.stacks = stacks
        self.dim, self.groups, self.codebook_size = stacks.dim, stacks.groups, stacks.codebook_size
        self.num_codes = stacks.groups * stacks.num_quantizers

    def forward(self, features: Float[Tensor, "b t d"], mask: Bool[Tensor, "b t"] | None = None) -> Quantized:
        quantized = self.stacks(features, mask)
        return Quantized(quantized.values, self._by_level(quantized.codes), quantized.loss, quantized.parts)

    def encode(self, features: Float[Tensor, "b t d"]) -> Int[Tensor, "b t q"]:
        return self._by_level(self.stacks.encode(features))

    def decode(self, codes: Int[Tensor, "b t q"]) -> Float[Tensor, "b t d"]:
        if codes.shape[-1] % self.groups:
            raise ValueError(f"{codes.shape[-1]} codes a frame cannot be shared out to {self.groups} groups")
        return self.stacks.decode(rearrange(codes, "b t (q g) -> b t (g q)", g=self.groups))

    def _by_level(self, codes: Int[Tensor, "b t q"]) -> Int[Tensor, "b t q"]:
        return rearrange(codes, "b t (g q) -> b t (q g)", g=self.groups)


class SoundStream(Network):
    """Has the contract of `codecs.Codec`; called, it gives losses, codes or the reconstruction (`forward`)."""

    parts: ClassVar[tuple[str, ...]] = ("stft_discriminator",)

    discriminators: Discriminators | None

    def __init__(
        self,
        *,
        channels: int = 32,
        strides: Sequence[int] = (2, 4, 5, 8),
        channel_mults: Sequence[int] = (2, 4, 8, 16),
        codebook_dim: int = 512,
        codebook_size: int | None = None,
        finite_scalar_quantizer_levels: Sequence[int] | None = None,
        rq_num_quantizers: int = 8,
        rq_commitment_weight: float = 0.25,
        rq_ema_decay: float = 0.95,
        rq_quantize_dropout_multiple_of: int = 1,
        rq_groups: int = 1,
        rq_stochastic_sample_codes: bool = False,
        rq_rotation_trick: bool = True,
        rq_kwargs: Mapping[str, Any] = {},
        use_lookup_free_quantizer: bool = False,
        use_finite_scalar_quantizer: bool = False,
        input_channels: int = 1,
        discr_multi_scales: Sequence[float] = (),
        stft_normalized: bool = False,
        enc_cycle_dilations: Sequence[int] = (1, 3, 9),
        dec_cycle_dilations: Sequence[int] = (1, 3, 9),
        multi_spectral_window_powers_of_two: Sequence[int] = (5, 6, 7, 8, 9, 10, 11),
        multi_spectral_n_ffts: int | Sequence[int] = 32,
        multi_spectral_n_mels: int | Sequence[int] = (5, 10, 20, 40, 80, 160, 320),
        recon_loss_weight: float = 0.1,
        multi_spectral_recon_loss_weight: float = 1.0,
        adversarial_loss_weight: float = 0.5,
        feature_loss_weight: float = 0.5,
        quantize_dropout_cutoff_index: int = 2,
        target_sample_hz: int = 16000,
        use_local_attn: bool = True,
        attn_window_size: int = 32,
        attn_dim_head: int = 64,
        attn_heads: int = 8,
        attn_depth: int = 1,
        attn_xpos_scale_base: float | None = None,
        attn_dynamic_pos_bias: bool = False,
        use_gate_loop_layers: bool = False,
        squeeze_excite: bool = False,
        complex_stft_discr_logits_abs: bool = False,
        pad_mode: PadMode = "constant",
        stft_discriminator: nn.Module | None = None,
        complex_stft_discr_kwargs: Mapping[str, Any] | None = None,
        activation: Activation = "snake",
        denoise_conditioning: bool = False,
        discr_periods: Sequence[int] = (2, 3, 5, 7, 11),
        discr_windows: Sequence[int] = (2048, 1024, 512),
        discr_channels: int = 32,
        mel_loss: Literal["log", "soundstream"] = "log",
        adversarial_loss: AdversarialKind = "hinge",
        relative_feature_loss: bool = True,
        balance_losses: bool = True,
    ):
        """
        Args:
            channels, strides, channel_mults, enc_cycle_dilations, dec_cycle_dilations, squeeze_excite, pad_mode, use_local_attn,
                attn_window_size, attn_dim_head, attn_heads, attn_depth, activation, denoise_conditioning, input_channels: of the
                networks, see SoundStreamAutoencoder.
            codebook_dim: features of a frame.
            codebook_size: codes of each quantizer; 1024 where nothing is said.
            rq_num_quantizers: levels in the stack of quantizers; with `rq_groups`, each group of features has such a stack.
            rq_commitment_weight, rq_ema_decay, rq_stochastic_sample_codes, rq_rotation_trick: of the vector quantizers.
            rq_kwargs: more of them (helicon.quantize.ResidualVQ), or of the quantizers in their place.
            quantize_dropout_cutoff_index, rq_quantize_dropout_multiple_of: in training the number of levels is random: more than
                the one, and a multiple of the other. So one codec serves several bit rates.
            use_lookup_free_quantizer: codes from signs in place of learned vectors.
            use_finite_scalar_quantizer: codes from rounding, to `finite_scalar_quantizer_levels`, in place of learned vectors.
            target_sample_hz: the rate of the audio that is coded.
            discr_periods, discr_windows, discr_channels: discriminators of the wave folded at these periods, and of its spectrum
                through these windows, all of this width.
            discr_multi_scales: discriminators of the wave at these parts of its rate.
            complex_stft_discr_kwargs: if given, even empty, a ComplexSTFTDiscriminator with these; `stft_normalized` is its alone.
            stft_discriminator: a discriminator of your own, a Network that makes a Judgement of audio `[b, c, n]`.
            recon_loss_weight: of the squared error of samples.
            multi_spectral_recon_loss_weight, mel_loss: of the distance of mel spectra: of their logarithms ("log"), or
                SoundStream's (see losses.MelLoss). With windows of powers of two, transforms of at least
                multi_spectral_n_ffts, and multi_spectral_n_mels bands for each or for all.
            adversarial_loss_weight, adversarial_loss: of what the discriminators say: "hinge" or "least_squares".
            feature_loss_weight, relative_feature_loss: of what their layers see; relative to the size of it.
            balance_losses: these four weights are shares of the gradient, whatever the size of the losses (losses.Balancer).
        """
        super().__init__()
        _refuse(attn_xpos_scale_base, attn_dynamic_pos_bias, use_gate_loop_layers, complex_stft_discr_logits_abs)
        _check_choices(mel_loss=mel_loss, adversarial_loss=adversarial_loss)
        _check_discriminators(stft_discriminator, complex_stft_discr_kwargs, stft_normalized)
        check_counts(
            codebook_size=codebook_size,
            rq_num_quantizers=rq_num_quantizers,
            rq_quantize_dropout_multiple_of=rq_quantize_dropout_multiple_of,
            rq_groups=rq_groups,
            target_sample_hz=target_sample_hz,
            discr_periods=discr_periods,
        )
        if use_lookup_free_quantizer and use_finite_scalar_quantizer:
            raise ValueError("use_lookup_free_quantizer and use_finite_scalar_quantizer exclude each other: choose one")
        stacks = {
            "groups": rq_groups,
            "num_quantizers": rq_num_quantizers,
            "quantize_dropout": True,
            "quantize_dropout_cutoff_index": min(quantize_dropout_cutoff_index, rq_num_quantizers - 1),
            "quantize_dropout_multiple_of": rq_quantize_dropout_multiple_of,
        }
        vectors = {
            **VQ_DEFAULTS,
            "commitment_weight": rq_commitment_weight,
            "decay": rq_ema_decay,
            "stochastic_sample_codes": rq_stochastic_sample_codes,
            "rotation_trick": rq_rotation_trick,
        }
        if use_finite_scalar_quantizer:
            levels = _finite_levels(finite_scalar_quantizer_levels, codebook_size)
            quantizer: GroupedResidual = GroupedResidualFSQ(codebook_dim, levels=levels, **{**stacks, **rq_kwargs})
        elif use_lookup_free_quantizer:
            size = codebook_size or CODEBOOK_SIZE
            quantizer = GroupedResidualLFQ(codebook_dim, codebook_size=size, **{**stacks, **rq_kwargs})
        else:
            size = codebook_size or CODEBOOK_SIZE
            quantizer = GroupedResidualVQ(codebook_dim, codebook_size=size, **{**stacks, **vectors, **rq_kwargs})

        self.target_sample_hz = target_sample_hz
        self.channels, self.latent_dim, self.denoises = input_channels, codebook_dim, denoise_conditioning
        self.downsample_factor: int = math.prod(strides)
        self.codebook_size: int = quantizer.codebook_size
        self.num_quantizers: int = rq_num_quantizers * rq_groups
        self.autoencoder = SoundStreamAutoencoder(
            quantizer=CoarseFirst(quantizer),
            channels=channels,
            strides=strides,
            channel_mults=channel_mults,
            codebook_dim=codebook_dim,
            input_channels=input_channels,
            enc_cycle_dilations=enc_cycle_dilations,
            dec_cycle_dilations=dec_cycle_dilations,
            activation=activation,
            squeeze_excite=squeeze_excite,
            pad_mode=pad_mode,
            use_local_attn=use_local_attn,
            attn_window_size=attn_window_size,
            attn_dim_head=attn_dim_head,
            attn_heads=attn_heads,
            attn_depth=attn_depth,
            denoise_conditioning=denoise_conditioning,
        )
        members: dict[str, nn.Module] = {}
        for period in discr_periods:
            members[f"period_{period}"] = PeriodDiscriminator(period, input_channels, discr_channels)
        for window in discr_windows:
            members[f"window_{window}"] = BandDiscriminator(window, input_channels, discr_channels)
        for scale in discr_multi_scales:
            members[f"scale_{round(1 / scale)}"] = WaveDiscriminator(scale, input_channels)
        if complex_stft_discr_kwargs is not None:
            options = {"stft_normalized": stft_normalized, **complex_stft_discr_kwargs}
            members["complex_stft"] = ComplexSTFTDiscriminator(input_channels=input_channels, **options)
        if stft_discriminator is not None:
            members["own"] = stft_discriminator
        self.discriminators = Discriminators(members) if members else None
        self.loss = CodecLoss(
            _mel_loss(
                target_sample_hz,
                multi_spectral_window_powers_of_two,
                multi_spectral_n_mels,
                multi_spectral_n_ffts,
                mel_loss == "log",
            ),
            {
                "wave": recon_loss_weight,
                "mel": multi_spectral_recon_loss_weight,
                "adversarial": adversarial_loss_weight if members else 0.0,
                "feature": feature_loss_weight if members else 0.0,
            },
            adversarial=adversarial_loss,
            relative_features=relative_feature_loss,
            balanced=balance_losses,
        )

    # ------------------------------------------------------------------ what it is

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def sample_hz(self) -> int:
        return self.target_sample_hz

    @property
    def seq_len_multiple_of(self) -> int:
        return self.downsample_factor

    @property
    def configs(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return self.arguments

    def non_discr_parameters(self) -> Iterator[nn.Parameter]:
        return self.autoencoder.parameters()

    def code_lengths(self, lengths: Lengths) -> Lengths:
        """Frames of clips of so many samples."""
        return -(-lengths // self.downsample_factor)

    def frame_mask(self, num_samples: int, lengths: Lengths | None) -> Bool[Tensor, "b t"] | None:
        """Which frames of padded clips are not padding alone."""
        if lengths is None:
            return None
        frames = torch.arange(self.autoencoder.num_frames(num_samples), device=lengths.device)
        return frames < self.code_lengths(lengths)[:, None]

    # ------------------------------------------------------------------ codes and audio

    def process_input(
        self, x: Audio, input_sample_hz: int | None = None, curtail_from_left: bool = False
    ) -> Float[Tensor, "b c m"]:
        """Audio as the autoencoder takes it, at its rate. `curtail_from_left` cuts off the beginning so that it ends with a whole
        frame; otherwise nothing is cut, and the last frame is filled up."""
        shaped = x[None, None] if x.ndim == 1 else x[:, None] if x.ndim == 2 else x
        if shaped.ndim != 3 or shaped.shape[1] != self.channels:
            wanted = "[n], [b, n] or [b, 1, n]" if self.channels == 1 else f"[b, {self.channels}, n]"
            raise ValueError(f"this codec takes audio {wanted}, not {list(x.shape)}: mix or repeat the channels first")
        check_floats(x)
        audio = resample(shaped.float(), input_sample_hz or self.sample_hz, self.sample_hz)
        return audio[..., audio.shape[-1] % self.downsample_factor :] if curtail_from_left else audio

    def encode(
        self, audio: Audio, lengths: Lengths | None = None, input_sample_hz: int | None = None
    ) -> Int[Tensor, "b t q"]:
        """Codes, the coarse ones first; -1 past the end of a clip of `lengths` samples. No gradient."""
        return self._per_frame(self.autoencoder.tokenize, audio, lengths, input_sample_hz, -1)

    tokenize = encode

    def encode_latents(
        self, audio: Audio, lengths: Lengths | None = None, input_sample_hz: int | None = None
    ) -> Float[Tensor, "b t d"]:
        """What is quantized: continuous frames; 0 past the end of a clip of `lengths` samples. No gradient."""
        return self._per_frame(self.autoencoder.encode, audio, lengths, input_sample_hz, 0)

    def decode(
        self, codes: Int[Tensor, "b t q"] | Float[Tensor, "b t d"], quantize: bool = False
    ) -> Float[Tensor, "b c n"]:
        """Audio of codes, or of the first few of every frame; or of latents, which `quantize` quantizes first."""
        if not codes.is_floating_point():
            return self.decode_from_codebook_indices(codes)
        with self._evaluating():  # with all levels, and without teaching the codebooks
            return self.autoencoder.decode(self.autoencoder.quantize(codes).values if quantize else codes)

    @torch.no_grad()
    def decode_latents(self, latents: Float[Tensor, "b t d"], lengths: Lengths | None = None) -> Float[Tensor, "b c n"]:
        """Audio of latents, of which the first `lengths` of each clip count."""
        check_lengths(lengths, latents.shape[1])
        with self._evaluating():
            audio = self.autoencoder.decode(latents)
        return without_padding(audio, None if lengths is None else lengths * self.downsample_factor)

    @torch.no_grad()
    def decode_from_codebook_indices(
        self, codes: Int[Tensor, "b t q"] | Int[Tensor, "g b t q"]
    ) -> Float[Tensor, "b c n"]:
        """Audio of codes; silence where they are -1. Also of codes by groups, as other packages have them."""
        codes = rearrange(codes, "g b t q -> b t (q g)") if codes.ndim == 4 else codes
        with self._evaluating():
            audio = self.autoencoder.decode_codes(codes)
        return without_padding(audio, (codes >= 0).any(dim=-1).sum(dim=-1) * self.downsample_factor)

    def stream(self, is_denoising: IsDenoising = None) -> CodecStream:
        """Codes a signal chunk by chunk, as in one piece."""
        return self.autoencoder.stream(is_denoising)

    def _per_frame(
        self,
        function: Callable[[Tensor], Tensor],
        audio: Audio,
        lengths: Lengths | None,
        input_sample_hz: int | None,
        fill: int,
    ) -> Tensor:
        count = 1 if audio.ndim == 1 else len(audio)
        if lengths is not None and lengths.shape != (count,):
            raise ValueError(f"lengths of shape {list(lengths.shape)} do not fit {count} clips: give one for each")
        check_lengths(lengths, audio.shape[-1])
        if lengths is not None and input_sample_hz is not None:
            audio = without_padding(self.process_input(audio), lengths)  # before its neighbours can hear it
            lengths = -(-lengths * self.sample_hz // input_sample_hz)  # as `resample` makes them
        clips = without_padding(self.process_input(audio, input_sample_hz), lengths)
        check_finite(clips)
        with self._evaluating(), torch.no_grad():
            frames = function(clips)
        mask = self.frame_mask(clips.shape[-1], lengths)
        return frames if mask is None else torch.where(mask[..., None], frames, fill)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Evaluation mode inside; after it every module has the mode it had."""
        before = [(module, module.training) for module in self.autoencoder.modules()]
        self.autoencoder.eval()
        try:
            yield
        finally:
            for module, was_training in before:
                module.training = was_training

    # ------------------------------------------------------------------ losses

    def forward(
        self,
        x: Audio,
        target: Tensor | None = None,
        is_denoising: IsDenoising = None,
        return_encoded: bool = False,
        return_codes_only: bool = False,
        return_discr_loss: bool = False,
        return_discr_losses_separately: bool = False,
        return_loss_breakdown: bool = False,
        return_recons_only: bool = False,
        input_sample_hz: int | None = None,
        apply_grad_penalty: bool = False,
        curtail_from_left: bool = False,
    ) -> Any:
        """The autoencoder's loss for audio x (and, with `return_loss_breakdown`, its terms); or, by what is asked for:

        `return_encoded`: quantized latents `[b, t, d]`, codes `[b, t, q]` and the quantizer's loss; `return_codes_only`: the codes;
        `return_recons_only`: the audio again `[b, c, n]`; `return_discr_loss`: that of the discriminators, or with
        `return_discr_losses_separately` a list of each one's name and loss, with the penalty where it is applied.

        The losses compare with `target` (clean audio, say, of noisy x) in place of x itself.
        """
        prepare = lambda given: self.process_input(given, input_sample_hz, curtail_from_left)
        audio = prepare(x)
        if return_codes_only:
            return self.autoencoder.tokenize(audio, is_denoising)
        if return_encoded:
            quantized = self.autoencoder.quantize(self.autoencoder.encode(audio, is_denoising))
            return quantized.values, quantized.codes, quantized.loss
        if return_recons_only:
            return self.autoencoder(audio, is_denoising=is_denoising).audio
        wanted = self._wanted(audio, None if target is None else prepare(target), is_denoising)
        if return_discr_loss or return_discr_losses_separately:
            terms = self._discr_losses(audio, wanted, is_denoising, apply_grad_penalty)
            return list(terms.items()) if return_discr_losses_separately else total_of_discriminators(terms)
        reconstruction = self.autoencoder(audio, is_denoising=is_denoising)
        loss, terms = self.loss.of_autoencoder(reconstruction.audio, wanted, judge=self.discriminators)
        loss = loss + reconstruction.quantized.loss
        if not return_loss_breakdown:
            return loss
        wave, mel, adversarial, feature = (
            terms.get(name, torch.zeros_like(loss)).detach() for name in ("wave", "mel", "adversarial", "feature")
        )
        return loss, LossBreakdown(wave, mel, adversarial, feature, reconstruction.quantized.loss.detach())

    def _wanted(self, audio: Tensor, target: Tensor | None, is_denoising: IsDenoising) -> Float[Tensor, "b c n"]:
        """What the reconstruction should be."""
        if target is None:
            if is_denoising is not None and is_denoising is not False:
                raise ValueError("is_denoising needs the clean audio to compare with: give it as target=...")
            return audio
        if target.shape != audio.shape:
            raise ValueError(f"target has the shape {list(target.shape)}, x {list(audio.shape)}: make them equal")
        return target

    def _discr_losses(
        self, audio: Tensor, target: Tensor, is_denoising: IsDenoising, with_penalty: bool
    ) -> dict[str, Tensor]:
        if self.discriminators is None:
            raise ValueError("this SoundStream was built without discriminators: give discr_periods or discr_windows")
        with torch.no_grad(), self._evaluating():  # the codebooks learn in the autoencoder's turn, and once
            reconstructed = self.autoencoder(audio, is_denoising=is_denoising).audio
        return self.loss.of_discriminators(reconstructed, target, self.discriminators, with_penalty)[0]

    # ------------------------------------------------------------------ other packages' names

    @classmethod
    def init_and_load_from(cls, path: str | Path) -> Any:
        """`from_pretrained`."""
        return cls.from_pretrained(path)

    def load_from_trainer_saved_obj(self, path: str | Path) -> None:
        """`load` of a checkpoint, or of the newest whole one of a run."""
        found = helicon.load(path)
        assert found.source is not None
        self.load(found.source)


def AudioLMSoundStream(  # noqa: N802 (a name users know)
    strides: Sequence[int] = (2, 4, 5, 8), target_sample_hz: int = 16000, rq_num_quantizers: int = 12, **kwargs: Any
) -> SoundStream:
    """A SoundStream as AudioLM has it: 50 frames a second of 16 kHz audio, 12 quantizers."""
    return SoundStream(
        strides=strides, target_sample_hz=target_sample_hz, rq_num_quantizers=rq_num_quantizers, **kwargs
    )


def MusicLMSoundStream(  # noqa: N802 (a name users know)
    strides: Sequence[int] = (3, 4, 5, 8), target_sample_hz: int = 24000, rq_num_quantizers: int = 12, **kwargs: Any
) -> SoundStream:
    """A SoundStream as MusicLM has it: 50 frames a second of 24 kHz audio, 12 quantizers."""
    return SoundStream(
        strides=strides, target_sample_hz=target_sample_hz, rq_num_quantizers=rq_num_quantizers, **kwargs
    )


def _refuse(
    attn_xpos_scale_base: float | None,
    attn_dynamic_pos_bias: bool,
    use_gate_loop_layers: bool,
    complex_stft_discr_logits_abs: bool,
) -> None:
    """Keywords of other packages that would change something here, and do not."""
    refused = {
        "attn_xpos_scale_base": (
            attn_xpos_scale_base is not None,
            "the local attention has rotary positions: leave it out",
        ),
        "attn_dynamic_pos_bias": (attn_dynamic_pos_bias, "the local attention has rotary positions: leave it out"),
        "use_gate_loop_layers": (
            use_gate_loop_layers,
            "there are none here: use_local_attn=True with a higher attn_depth",
        ),
        "complex_stft_discr_logits_abs": (
            complex_stft_discr_logits_abs,
            "a modulus is never negative, so no fake could be refused: leave it out",
        ),
    }
    for name, (is_given, sentence) in refused.items():
        if is_given:
            raise ValueError(f"{name} is not supported: {sentence}")


def _check_choices(**chosen: str) -> None:
    known = {
        "mel_loss": ("log", "soundstream"),
        "adversarial_loss": ("hinge", "least_squares"),
    }
    for name, value in chosen.items():
        if value not in known[name]:
            raise ValueError(f"{name}={value!r} must be {' or '.join(map(repr, known[name]))}")


def _check_discriminators(
    own: nn.Module | None, complex_stft_kwargs: Mapping[str, Any] | None, stft_normalized: bool
) -> None:
    if own is not None and not isinstance(own, Network):
        raise ValueError(
            f"stft_discriminator is a {type(own).__name__}, which could not be saved: derive it from helicon.Network"
        )
    if stft_normalized and complex_stft_kwargs is None:
        raise ValueError(
            "stft_normalized=True is for the complex STFT discriminator, and there is none: ask for it with "
            "complex_stft_discr_kwargs={}"
        )


def _finite_levels(levels: Sequence[int] | None, codebook_size: int | None) -> list[int]:
    if levels is None:
        raise ValueError("use_finite_scalar_quantizer=True needs finite_scalar_quantizer_levels, such as [8, 5, 5, 5]")
    size = math.prod(levels)
    if codebook_size not in (None, size):
        raise ValueError(
            f"finite_scalar_quantizer_levels={list(levels)} make {size} codes, not {codebook_size}: leave codebook_size out"
        )
    return list(levels)


def _mel_loss(
    sample_hz: int,
    powers: Sequence[int],
    n_mels: int | Sequence[int],
    n_ffts: int | Sequence[int],
    log_only: bool,
) -> MelLoss:
    windows = [2**power for power in powers]

    def each(name: str, given: int | Sequence[int]) -> list[int]:
        numbers = [given] * len(windows) if isinstance(given, int) else list(given)
        if len(numbers) != len(windows):
            raise ValueError(
                f"multi_spectral_{name}={given} must be one number, or one for each of the {len(windows)} windows"
            )
        return numbers

    transforms = [max(pair) for pair in zip(windows, each("n_ffts", n_ffts), strict=True)]
    return MelLoss(sample_hz, windows, each("n_mels", n_mels), transforms, log_only)
