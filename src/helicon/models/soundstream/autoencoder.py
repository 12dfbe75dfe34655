"""The SoundStream autoencoder: waveform to discrete codes and back (Zeghidour et al. 2021, arXiv:2107.03312).

Convolutions at falling rates turn audio `[b, c, n]` into one latent for every `hop` = prod(strides) samples, a quantizer
into codes, and the mirror image back into audio. Around the quantizer frames may attend to the last `attn_window_size`
ones. With the defaults everything is causal: `stream()` codes audio as it arrives, and gives what the whole would have given.

Letters: b batch, c audio channels, n samples, t frames, d features of a frame, q codes of a frame.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from helicon.models.soundstream.layers import (
    Activation,
    ConvOptions,
    Decoder,
    DenoiseFilm,
    Encoder,
    LocalAttention,
    Stack,
)
from helicon.models.soundstream.stream import CodecStream
from helicon.nn.conv import PadMode, StreamState
from helicon.nn.numbers import check_counts
from helicon.quantize.base import Quantized, Quantizer

IsDenoising = bool | Bool[Tensor, " b"] | None


@dataclass(frozen=True)
class Reconstruction:
    """What the autoencoder makes of audio `[b, c, n]`."""

    audio: Tensor  # [b, c, n], float32
    quantized: Quantized  # values [b, t, d] and codes [b, t, q]


class SoundStreamAutoencoder(nn.Module):
    """Encoder, quantizer and decoder: what is trained, averaged and used. Called, it reconstructs audio."""

    def __init__(
        self,
        *,
        quantizer: Quantizer,
        channels: int = 32,
        strides: Sequence[int] = (2, 4, 5, 8),
        channel_mults: Sequence[int] = (2, 4, 8, 16),
        codebook_dim: int = 512,
        input_channels: int = 1,
        enc_cycle_dilations: Sequence[int] = (1, 3, 9),
        dec_cycle_dilations: Sequence[int] = (1, 3, 9),
        activation: Activation = "snake",
        squeeze_excite: bool = False,
        pad_mode: PadMode = "constant",
        use_local_attn: bool = True,
        attn_window_size: int = 32,
        attn_dim_head: int = 64,
        attn_heads: int = 8,
        attn_depth: int = 1,
        denoise_conditioning: bool = False,
    ):
        """
        Args:
            quantizer: of features `[b, t, codebook_dim]`, a stack: its codes are `[b, t, q]` (helicon.quantize).
            channels: at the rate of the audio; after stride i there are channels * channel_mults[i].
            strides: how many samples become one, step by step; their product is the length of a frame.
            input_channels: 1 for mono, 2 for stereo.
            enc_cycle_dilations, dec_cycle_dilations: of the residual units at each rate, one unit for each number.
            activation: "snake" (periodic, learned) or "elu".
            squeeze_excite: a gate on the channels of each residual unit, from their means over the past.
            pad_mode: what stands before the first sample at each layer: zeros ("constant"), or the beginning mirrored
                ("reflect"), which looks ahead and so cannot be streamed.
            use_local_attn: attention before and after the quantizer, of `attn_depth` layers.
            attn_window_size: how many frames a frame sees, itself among them. Fewer than a training crop has, or what is
                longer than a crop becomes worse and worse.
            denoise_conditioning: the features are scaled and shifted by `is_denoising`, so that one network learns both to
                keep noise and to take it out.
        """
        super().__init__()
        check_counts(
            channels=channels,
            input_channels=input_channels,
            enc_cycle_dilations=enc_cycle_dilations,
            dec_cycle_dilations=dec_cycle_dilations,
        )
        _check(quantizer, codebook_dim, strides, channel_mults, activation)
        self.hop = math.prod(strides)
        self.codebook_dim, self.input_channels, self.pad_mode = codebook_dim, input_channels, pad_mode
        widths = [channels, *(channels * mult for mult in channel_mults)]
        options = ConvOptions(widths, strides, activation, squeeze_excite, pad_mode)

        def attention() -> LocalAttention | None:
            if not use_local_attn:
                return None
            return LocalAttention(
                codebook_dim, window_size=attn_window_size, depth=attn_depth, heads=attn_heads, dim_head=attn_dim_head
            )

        self.encoder = Encoder(input_channels, codebook_dim, enc_cycle_dilations, options)
        self.encoder_attention = attention()
        self.encoder_film = DenoiseFilm(codebook_dim) if denoise_conditioning else None
        self.quantizer = quantizer
        self.decoder_film = DenoiseFilm(codebook_dim) if denoise_conditioning else None
        self.decoder_attention = attention()
        self.decoder = Decoder(input_channels, codebook_dim, dec_cycle_dilations, options)

    def num_frames(self, num_samples: int) -> int:
        """Frames that audio of so many samples becomes: silence fills up the last one."""
        return -(-num_samples // self.hop)

    def encode(self, audio: Float[Tensor, "b c n"], is_denoising: IsDenoising = None) -> Float[Tensor, "b t d"]:
        """Latents of any audio of at least one sample; silence fills up the last frame."""
        if not audio.shape[-1]:
            raise ValueError(f"audio of shape {tuple(audio.shape)} has no samples: give at least one")
        return self.encode_frames(F.pad(audio, (0, -audio.shape[-1] % self.hop)), is_denoising)

    def quantize(self, latents: Float[Tensor, "b t d"], mask: Bool[Tensor, "b t"] | None = None) -> Quantized:
        """`values` go to the decoder, `codes` are `[b, t, q]`, `loss` is the quantizer's own."""
        return self.quantizer(latents, mask)

    def decode(
        self, latents: Float[Tensor, "b t d"], num_samples: int | None = None, is_denoising: IsDenoising = None
    ) -> Float[Tensor, "b c n"]:
        """Audio of t * hop samples, or of the first `num_samples` of them; float32."""
        available = latents.shape[1] * self.hop
        if num_samples is not None and num_samples > available:
            raise ValueError(f"num_samples={num_samples} are more than the {available} of {latents.shape[1]} frames")
        if not available:
            return latents.new_zeros(len(latents), self.input_channels, 0).float()
        return self.decode_frames(latents, is_denoising)[..., :num_samples]

    @torch.no_grad()
    def tokenize(self, audio: Float[Tensor, "b c n"], is_denoising: IsDenoising = None) -> Int64[Tensor, "b t q"]:
        """Codes alone: no gradient, no loss, all levels, and no change of the quantizer's statistics."""
        return self.quantizer.encode(self.encode(audio, is_denoising))

    def decode_codes(
        self, codes: Int[Tensor, "b t q"], num_samples: int | None = None, is_denoising: IsDenoising = None
    ) -> Float[Tensor, "b c n"]:
        """Audio from the codes of all levels, or of the first few."""
        return self.decode(self.dequantize(codes), num_samples, is_denoising)

    def dequantize(self, codes: Int[Tensor, "b t q"]) -> Float[Tensor, "b t d"]:
        """The latents that codes stand for; -1 stands for nothing."""
        if codes.ndim != 3 or codes.is_floating_point():
            kind = str(codes.dtype).removeprefix("torch.")
            raise ValueError(f"codes are whole numbers [b, t, q], not {kind} {list(codes.shape)}")
        if codes.device.type == "cpu" and codes.numel():  # (a device would have to be waited for)
            least, most, size = int(codes.min()), int(codes.max()), self.quantizer.codebook_size
            if least < -1 or most >= size:
                raise ValueError(
                    f"the codes hold {most if most >= size else least}, and this codec's go from 0 to {size - 1}: give those of this codec, "
                    f"and -1 past the end of a clip"
                )
        return self.quantizer.decode(codes.long())

    def stream(self, is_denoising: IsDenoising = None) -> CodecStream:
        """Codes a signal chunk by chunk, exactly as in one piece; needs pad_mode="constant"."""
        if self.pad_mode == "reflect":
            raise ValueError(
                'pad_mode="reflect" mirrors samples from after the start: only a codec with pad_mode="constant" can be streamed'
            )
        return CodecStream(self, is_denoising)

    def forward(
        self,
        audio: Float[Tensor, "b c n"],
        mask: Bool[Tensor, "b t"] | None = None,
        is_denoising: IsDenoising = None,
    ) -> Reconstruction:
        """The audio again, as long as it came. `mask` (True = keep) tells the quantizer which frames are not padding."""
        quantized = self.quantize(self.encode(audio, is_denoising), mask)
        return Reconstruction(self.decode(quantized.values, audio.shape[-1], is_denoising), quantized)

    def check_channels(self, audio: Float[Tensor, "b c n"]) -> None:
        if audio.shape[1] != self.input_channels:
            raise ValueError(f"this codec takes audio of input_channels={self.input_channels}, got {audio.shape[1]}")

    def encode_frames(
        self, audio: Float[Tensor, "b c n"], is_denoising: IsDenoising = None, state: StreamState | None = None
    ) -> Float[Tensor, "b t d"]:
        """Latents of a whole number of frames, which follow those that the state remembers."""
        self.check_channels(audio)
        latents = _run(self.encoder, rearrange(audio, "b c n -> b n c"), state)
        if self.encoder_attention is not None:
            latents = self.encoder_attention(latents, state)
        return _condition(self.encoder_film, latents, is_denoising)

    def decode_frames(
        self, latents: Float[Tensor, "b t d"], is_denoising: IsDenoising = None, state: StreamState | None = None
    ) -> Float[Tensor, "b c n"]:
        """Audio of frames, which follow those that the state remembers."""
        latents = _condition(self.decoder_film, latents, is_denoising)
        if self.decoder_attention is not None:
            latents = self.decoder_attention(latents, state)
        return rearrange(_run(self.decoder, latents, state), "b n c -> b c n").float()


def _run(stack: Stack, x: Float[Tensor, "b n c"], state: StreamState | None) -> Float[Tensor, "b m e"]:
    """A stream never runs what `stack.compile()` made: that would be compiled anew for every size of a chunk."""
    return stack(x) if state is None else stack.forward(x, state)


def _condition(film: DenoiseFilm | None, latents: Tensor, is_denoising: IsDenoising) -> Tensor:
    if film is None:
        if is_denoising is not None:
            raise ValueError(f"is_denoising={is_denoising} belongs to a codec with denoise_conditioning=True")
        return latents
    if not isinstance(is_denoising, Tensor):
        is_denoising = torch.full((len(latents),), bool(is_denoising), device=latents.device)
    return film(latents, is_denoising.to(latents.device))


def _check(
    quantizer: Quantizer, codebook_dim: int, strides: Sequence[int], channel_mults: Sequence[int], activation: str
) -> None:
    if activation not in ("elu", "snake"):
        raise ValueError(f'activation={activation!r} is neither "elu" nor "snake"')
    if not strides or len(strides) != len(channel_mults) or min(*strides, *channel_mults) < 1:
        raise ValueError(
            f"strides={tuple(strides)} and channel_mults={tuple(channel_mults)} must be as many, and at least 1 each"
        )
    if getattr(quantizer, "num_codes", 1) is None:
        raise ValueError(
            f"{type(quantizer).__name__} gives one code a frame: a codec takes a stack, be it ResidualQuantizer(dim, [it])"
        )
    dim = getattr(quantizer, "dim", codebook_dim)
    if dim != codebook_dim:
        raise ValueError(f"codebook_dim={codebook_dim} but the quantizer is for dim={dim}: make them equal")
