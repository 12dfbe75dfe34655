"""Pretrained codecs (EnCodec, DAC, Mimi, through `transformers`) behind the contract that SoundStream keeps too.

Each clip of a padded batch gets the codes that `transformers` gives it alone, prepared by the model's own feature extractor:
clips are cut to their lengths, and those of one length encoded together. (A padded batch given to `transformers` itself
lets convolutions that look ahead, as DAC's do, see the padding of the shorter clips.)

Letters: b clips, g clips of one length, c channels, n samples, t frames, q quantizers, d latent features, m chunks.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from helicon.nn.frozen import Frozen, by_length, cut_by_length, joined, pretrained_name, read_model, read_pretrained
from helicon.nn.network import Network
from helicon.nn.resample import resample, resampled_length

Audio = Float[Tensor, "b n"] | Float[Tensor, "b c n"]
Lengths = Int[Tensor, " b"]


@runtime_checkable
class Codec(Protocol):
    """What a model asks of whatever turns audio into codes and back.

    Codes are `[b, t, q]`, the coarsest quantizer first, and -1 past the end of a clip; latents are `[b, t, d]`, the
    continuous frames that `decode_latents` takes, and 0 past the end. Lengths count samples at the rate of the audio given,
    and do not change shapes: t is what the whole width n of a batch gives.
    """

    sample_hz: int
    channels: int
    downsample_factor: int  # samples a frame
    num_quantizers: int
    codebook_size: int
    latent_dim: int

    def code_lengths(self, lengths: Lengths) -> Lengths:
        """Frames of clips of so many samples (at `sample_hz`)."""
        ...

    def encode(
        self, audio: Audio, lengths: Lengths | None = None, input_sample_hz: int | None = None
    ) -> Int[Tensor, "b t q"]: ...

    def decode(self, codes: Int[Tensor, "b t q"]) -> Float[Tensor, "b c n"]:
        """`downsample_factor` samples a frame; silence past the end of a clip. Fewer quantizers decode more coarsely."""
        ...

    def encode_latents(
        self, audio: Audio, lengths: Lengths | None = None, input_sample_hz: int | None = None
    ) -> Float[Tensor, "b t d"]: ...

    def decode_latents(self, latents: Float[Tensor, "b t d"], lengths: Lengths | None = None) -> Float[Tensor, "b c n"]:
        """The audio of latents, of which the first `lengths` of each clip count."""
        ...


def check_floats(audio: Tensor) -> None:
    if not audio.is_floating_point():
        kind = str(audio.dtype).removeprefix("torch.")
        raise ValueError(f"audio comes as {kind}: give floats from -1 to 1, which 16-bit samples are / 32768")


def check_finite(audio: Tensor) -> None:
    """(Looks at what is on the host alone: a device would have to be waited for, in training too.)"""
    if audio.device.type == "cpu" and not bool(torch.isfinite(audio).all()):
        raise ValueError("audio holds values that are infinite or not numbers: give a sound without them")


class PretrainedCodec(Network):
    """A frozen codec. Saved by name and fingerprint: loading reads the model again from where it was.

    Arguments of all of them: `model`, a hub name or the folder of a downloaded model, and `num_quantizers`, how many of
    its quantizers to use (all by default).
    """

    model_type: ClassVar[str]  # as the model's own configuration calls it

    backbone: Frozen
    sample_hz: int
    channels: int
    downsample_factor: int
    num_quantizers: int
    codebook_size: int
    latent_dim: int

    def _hold(self, model: str | Path) -> Any:
        """Reads the model, and returns its configuration."""
        from transformers import AutoModel

        name = pretrained_name(model)
        found = _model_type(name)
        if found != self.model_type:
            instead = next((kind.__name__ for kind in CODECS if kind.model_type == found), "another class")
            raise ValueError(f"{name} is a model of type {found!r}, not {self.model_type!r}: build it with {instead}")
        self.arguments["model"] = name  # a relative path would be lost in another working directory
        self.backbone = Frozen(read_model(AutoModel, name, f"{self.model_type} codec"), name, {})
        config = self.backbone.model.config
        self.sample_hz, self.codebook_size = config.sampling_rate, config.codebook_size
        self.channels = getattr(config, "audio_channels", 1)
        return config

    def _choose_quantizers(self, wanted: int | None, least: int, most: int) -> None:
        self.num_quantizers = most if wanted is None else wanted
        if not least <= self.num_quantizers <= most:
            raise ValueError(f"num_quantizers={wanted} must lie between {least} and {most} for {self.backbone.name}")

    @property
    def seq_len_multiple_of(self) -> int:
        return self.downsample_factor

    def code_lengths(self, lengths: Lengths) -> Lengths:
        return self._num_frames(lengths)

    def _num_frames(self, length: Any) -> Any:
        return -(-length // self.downsample_factor)

    def _num_samples(self, frames: int) -> int:
        return frames * self.downsample_factor

    @torch.compiler.disable
    def encode(
        self, audio: Audio, lengths: Lengths | None = None, input_sample_hz: int | None = None
    ) -> Int[Tensor, "b t q"]:
        return rearrange(self._from_audio(audio, lengths, input_sample_hz, self._to_codes, -1), "b q t -> b t q")

    @torch.compiler.disable
    def encode_latents(
        self, audio: Audio, lengths: Lengths | None = None, input_sample_hz: int | None = None
    ) -> Float[Tensor, "b t d"]:
        return rearrange(self._from_audio(audio, lengths, input_sample_hz, self._to_latents, 0), "b d t -> b t d")

    @torch.compiler.disable
    def decode(self, codes: Int[Tensor, "b t q"] | Float[Tensor, "b t d"]) -> Float[Tensor, "b c n"]:
        """Audio of codes; or of latents, where those are given (which is what `decode` takes in other packages)."""
        if codes.is_floating_point():
            return self.decode_latents(codes)
        with self.backbone.undisturbed():
            rows, size = rearrange(codes, "b t q -> b q t"), self._num_samples(codes.shape[1])
            return by_length(rows, self._checked(codes), self._from_codes, size=size, fill=0)

    @torch.compiler.disable
    def decode_latents(self, latents: Float[Tensor, "b t d"], lengths: Lengths | None = None) -> Float[Tensor, "b c n"]:
        with self.backbone.undisturbed():
            rows, size = rearrange(latents.float(), "b t d -> b d t"), self._num_samples(latents.shape[1])
            return by_length(rows, lengths, self._from_latents, size=size, fill=0)

    @torch.compiler.disable
    def quantize(self, latents: Float[Tensor, "b t d"]) -> Int[Tensor, "b t q"]:
        """The codes of latents, as `encode` would have chosen them."""
        with self.backbone.undisturbed():
            return rearrange(self._quantize(rearrange(latents.float(), "b t d -> b d t")), "b q t -> b t q")

    @torch.compiler.disable
    def dequantize(self, codes: Int[Tensor, "b t q"]) -> Float[Tensor, "b t d"]:
        """The latents that codes stand for; 0 where the codes are -1."""
        self._checked(codes)
        with self.backbone.undisturbed():
            latents = self._dequantize(rearrange(codes.clamp(min=0), "b t q -> b q t"))
        return rearrange(latents, "b d t -> b t d") * (codes >= 0).all(dim=-1, keepdim=True)

    def forward(
        self,
        x: Audio,
        input_sample_hz: int | None = None,
        return_encoded: bool = False,
        lengths: Lengths | None = None,
    ) -> tuple[Float[Tensor, "b t d"] | None, Int[Tensor, "b t q"], None]:
        """(The latents the codes stand for, if `return_encoded`), the codes, and None in the place of a training loss."""
        codes = self.encode(x, lengths, input_sample_hz)
        return (self.dequantize(codes) if return_encoded else None), codes, None

    def decode_from_codebook_indices(self, codes: Int[Tensor, "b t q"]) -> Float[Tensor, "b c n"]:
        return self.decode(codes)

    def get_emb_from_indices(self, codes: Int[Tensor, "b t q"]) -> Float[Tensor, "b t d"]:
        return self.dequantize(codes)

    def load_own_state(self, state: Any) -> None:
        self.backbone.check(state.get("backbone.fingerprint"))

    def _from_audio(
        self,
        audio: Audio,
        lengths: Lengths | None,
        input_sample_hz: int | None,
        function: Callable[[Tensor], Tensor],
        fill: float,
    ) -> Tensor:
        clips = self._with_channels(audio)
        size = self._num_frames(self._resampled(clips.shape[-1], input_sample_hz))
        prepared = lambda cut: function(self._prepared(cut, input_sample_hz))
        with self.backbone.undisturbed():
            return by_length(clips, lengths, prepared, size=size, fill=fill)

    def _resampled(self, length: int, input_sample_hz: int | None) -> int:
        return resampled_length(length, input_sample_hz or self.sample_hz, self.sample_hz)

    def _with_channels(self, audio: Audio) -> Float[Tensor, "b c n"]:
        clips = audio[:, None] if audio.ndim == 2 else audio
        check_floats(audio)
        if clips.ndim != 3 or clips.shape[1] != self.channels:
            wanted = "[b, n] or [b, 1, n]" if self.channels == 1 else f"[b, {self.channels}, n]"
            raise ValueError(
                f"this codec takes audio {wanted}, not {list(audio.shape)}: mix or repeat the channels first"
            )
        return clips.float()

    def _prepared(self, clips: Float[Tensor, "g c n"], input_sample_hz: int | None) -> Float[Tensor, "g c m"]:
        """Clips as the model's feature extractor would hand them over."""
        check_finite(clips)
        return resample(clips, input_sample_hz or self.sample_hz, self.sample_hz)

    def _checked(self, codes: Int[Tensor, "b t q"]) -> Lengths:
        """How many frames each clip has, after a look at whether the codes are this codec's."""
        if codes.numel() and int(codes.max()) >= self.codebook_size:
            raise ValueError(
                f"the codes hold {int(codes.max())}, and this codec's go from 0 to {self.codebook_size - 1}"
            )
        is_code = codes >= 0
        is_frame = is_code.all(dim=-1)
        if not torch.equal(is_code.any(dim=-1), is_frame) or bool((is_frame[:, 1:] > is_frame[:, :-1]).any()):
            raise ValueError(
                "-1 stands past the end of a clip, for all quantizers of a frame: leave out what is missing"
            )
        return is_frame.sum(dim=-1)

    def _to_codes(self, clips: Float[Tensor, "g c n"]) -> Int[Tensor, "g q t"]:
        return self._quantize(self._to_latents(clips))

    def _from_codes(self, codes: Int[Tensor, "g q t"]) -> Float[Tensor, "g c n"]:
        return self._from_latents(self._dequantize(codes))

    def _to_latents(self, clips: Float[Tensor, "g c n"]) -> Float[Tensor, "g d t"]:
        raise NotImplementedError

    def _from_latents(self, latents: Float[Tensor, "g d t"]) -> Float[Tensor, "g c n"]:
        raise NotImplementedError

    def _quantize(self, latents: Float[Tensor, "g d t"]) -> Int[Tensor, "g q t"]:
        raise NotImplementedError

    def _dequantize(self, codes: Int[Tensor, "g q t"]) -> Float[Tensor, "g d t"]:
        raise NotImplementedError


@dataclass(frozen=True)
class ScaledCodes:
    """What EnCodec's models for loudness-normalised chunks (48 kHz) make of audio: codes alone have lost the loudness."""

    codes: Int[Tensor, "b t q"]
    scales: Float[Tensor, "b m"]  # loudness of each chunk, 1 past the end of a clip


class EncodecWrapper(PretrainedCodec):
    """EnCodec (Défossez et al. 2022, arXiv:2210.13438).

    Arguments:
        target_sample_hz, strides   checked against the model where they are given: the model decides
        num_quantizers              of a frame; or else
        bandwidth                   in kbit/s, from which their number follows (6.0 where neither is given)

    The 48 kHz model cuts stereo audio into overlapping chunks and scales each to the same loudness, which its codes do not
    hold: for it there are `encode_with_scales` and `decode(codes, scales)`, and no latents.
    """

    model_type = "encodec"

    def __init__(
        self,
        target_sample_hz: int | None = None,
        strides: Sequence[int] | None = None,
        num_quantizers: int | None = None,
        bandwidth: float | None = None,
        model: str | Path = "facebook/encodec_24khz",
    ):
        super().__init__()
        config = self._hold(model)
        self.downsample_factor, self.latent_dim = config.hop_length, config.hidden_size
        for name, given, own in (
            ("target_sample_hz", target_sample_hz, self.sample_hz),
            ("strides", strides and sorted(strides), sorted(config.upsampling_ratios)),
        ):
            if given is not None and given != own:
                raise ValueError(
                    f"{name}={given} is not the model's, {own}: leave it out (audio of any rate is resampled, with input_sample_hz=...)"
                )
        self._choose_quantizers(self._wanted_quantizers(num_quantizers, bandwidth), 1, config.num_quantizers)

    def _wanted_quantizers(self, num_quantizers: int | None, bandwidth: float | None) -> int:
        config = self.backbone.model.config
        if bandwidth is None and num_quantizers is not None:
            return num_quantizers
        bandwidth = 6.0 if bandwidth is None else bandwidth
        if bandwidth not in config.target_bandwidths:
            known = ", ".join(map(str, config.target_bandwidths))
            raise ValueError(f"bandwidth={bandwidth} is none of this model's: choose from {known}")
        count = self._quantizers_at(bandwidth)
        if num_quantizers not in (None, count):
            raise ValueError(
                f"bandwidth={bandwidth} means {count} quantizers, not {num_quantizers}: give one of the two"
            )
        return count

    def _quantizers_at(self, bandwidth: float) -> int:
        return self.backbone.model.quantizer.get_num_quantizers_for_bandwidth(bandwidth)

    @property
    def is_scaled(self) -> bool:
        """Whether the codes are of chunks of equal loudness."""
        return bool(self.backbone.model.config.normalize)

    def _num_chunks(self, length: Any) -> Any:
        return -(-length // self.backbone.model.config.chunk_stride)

    def _num_frames(self, length: Any) -> Any:
        is_whole = self.backbone.model.config.chunk_length is None
        return super()._num_frames(length) if is_whole else self._num_chunks(length) * self._chunk_frames

    def _num_samples(self, frames: int) -> int:
        config = self.backbone.model.config
        if config.chunk_length is None:
            return super()._num_samples(frames)
        return (frames // self._chunk_frames - 1) * config.chunk_stride + config.chunk_length

    @property
    def _chunk_frames(self) -> int:
        return math.ceil(self.backbone.model.config.chunk_length / self.downsample_factor)

    def encode(
        self, audio: Audio, lengths: Lengths | None = None, input_sample_hz: int | None = None
    ) -> Int[Tensor, "b t q"]:
        if self.is_scaled:
            raise ValueError(
                f"the codes of {self.backbone.name} do not hold how loud the audio is: use encode_with_scales and "
                f"decode(codes, scales), or a codec whose codes are all there is (facebook/encodec_24khz, DacCodec, MimiCodec)"
            )
        return self.encode_with_scales(audio, lengths, input_sample_hz).codes

    @torch.compiler.disable
    def encode_with_scales(
        self, audio: Audio, lengths: Lengths | None = None, input_sample_hz: int | None = None
    ) -> ScaledCodes:
        """The codes and what the chunks were divided by (1 for a model that divides by nothing)."""
        clips = self._with_channels(audio)
        codes, scales = [], []
        with self.backbone.undisturbed():
            for rows, cut in cut_by_length(clips, lengths):
                some_codes, some_scales = self._encode_chunks(self._prepared(cut, input_sample_hz))
                codes.append((rows, some_codes))
                scales.append((rows, some_scales))
        length, is_whole = (
            self._resampled(clips.shape[-1], input_sample_hz),
            self.backbone.model.config.chunk_length is None,
        )
        return ScaledCodes(
            rearrange(joined(len(clips), codes, self._num_frames(length), -1), "b q t -> b t q"),
            joined(len(clips), scales, 1 if is_whole else self._num_chunks(length), 1),
        )

    def _encode_chunks(self, clips: Float[Tensor, "g c n"]) -> tuple[Int[Tensor, "g q t"], Float[Tensor, "g m"]]:
        model = self.backbone.model
        # The model encodes at its bandwidths only; fewer quantizers are the first ones of more.
        bandwidth = next(
            rate for rate in model.config.target_bandwidths if self._quantizers_at(rate) >= self.num_quantizers
        )
        encoded = model.encode(clips, bandwidth=bandwidth, return_dict=True)
        # Of clips of whole chunks transformers also encodes what the last one would share with a further one.
        config = model.config
        count = 1 if config.chunk_length is None else (clips.shape[-1] - config.chunk_length) // config.chunk_stride + 1
        codes = rearrange(encoded.audio_codes[:count, :, : self.num_quantizers], "m g q t -> g q (m t)")
        if not self.is_scaled:
            return codes, clips.new_ones(len(clips), count)
        return codes, torch.cat(encoded.audio_scales[:count], dim=1)

    @torch.compiler.disable
    def decode(
        self,
        codes: Int[Tensor, "b t q"] | Float[Tensor, "b t d"],
        scales: Float[Tensor, "b m"] | None = None,
    ) -> Float[Tensor, "b c n"]:
        if codes.is_floating_point():
            return self.decode_latents(codes)
        if scales is None and self.is_scaled:
            raise ValueError(
                f"{self.backbone.name} decodes codes with the loudness of each chunk: give the scales of encode_with_scales"
            )
        frames = rearrange(codes, "b t q -> b q t")
        with self.backbone.undisturbed():
            parts = [
                (rows, self._decode_chunks(cut, None if scales is None else scales[rows]))
                for rows, cut in cut_by_length(frames, self._checked(codes))
            ]
        return joined(len(codes), parts, self._num_samples(codes.shape[1]), 0)

    def _decode_chunks(
        self, codes: Int[Tensor, "g q t"], scales: Float[Tensor, "g m"] | None
    ) -> Float[Tensor, "g c n"]:
        model = self.backbone.model
        size = codes.shape[-1] if model.config.chunk_length is None else self._chunk_frames
        if codes.shape[-1] % size:
            raise ValueError(
                f"this model's codes come in chunks of {size} frames, and {codes.shape[-1]} are no whole number of them"
            )
        chunks = rearrange(codes, "g q (m t) -> m g q t", t=size)
        chunk_scales = [None] * len(chunks) if scales is None else list(scales[:, : len(chunks)].T)
        return model.decode(chunks, chunk_scales, return_dict=True).audio_values

    def _prepared(self, clips: Float[Tensor, "g c n"], input_sample_hz: int | None) -> Float[Tensor, "g c m"]:
        clips, config = super()._prepared(clips, input_sample_hz), self.backbone.model.config
        if config.chunk_length is None:
            return clips
        return F.pad(clips, (0, self._num_samples(self._num_frames(clips.shape[-1])) - clips.shape[-1]))

    def _to_latents(self, clips: Float[Tensor, "g c n"]) -> Float[Tensor, "g d t"]:
        self._refuse_latents()
        return self.backbone.model.encoder(clips)

    def _from_latents(self, latents: Float[Tensor, "g d t"]) -> Float[Tensor, "g c n"]:
        self._refuse_latents()
        return self.backbone.model.decoder(latents)

    def _refuse_latents(self) -> None:
        if self.is_scaled or self.backbone.model.config.chunk_length is not None:
            raise ValueError(
                f"{self.backbone.name} works on chunks that overlap, so its latents are no sequence: use another codec"
            )

    def _quantize(self, latents: Float[Tensor, "g d t"]) -> Int[Tensor, "g q t"]:
        codes = self.backbone.model.quantizer.encode(latents, None)[: self.num_quantizers]
        return rearrange(codes, "q g t -> g q t")

    def _dequantize(self, codes: Int[Tensor, "g q t"]) -> Float[Tensor, "g d t"]:
        return self.backbone.model.quantizer.decode(rearrange(codes, "g q t -> q g t"))


class DacCodec(PretrainedCodec):
    """The Descript Audio Codec (Kumar et al. 2023, arXiv:2306.06546), at any of its rates.

    DAC looks codes up in a few dimensions a quantizer, and its decoder knows nothing but what the codes say. So its latents
    are those dimensions, side by side, before the codes are chosen; `decode_latents` chooses them.
    """

    model_type = "dac"

    def __init__(self, model: str | Path = "descript/dac_24khz", num_quantizers: int | None = None):
        super().__init__()
        config = self._hold(model)
        self.downsample_factor = config.hop_length
        self._choose_quantizers(num_quantizers, 1, config.n_codebooks)
        self.latent_dim = self.num_quantizers * config.codebook_dim

    def _prepared(self, clips: Float[Tensor, "g c n"], input_sample_hz: int | None) -> Float[Tensor, "g c m"]:
        clips = super()._prepared(clips, input_sample_hz)
        return F.pad(clips, (0, -clips.shape[-1] % self.downsample_factor))

    def _to_codes(self, clips: Float[Tensor, "g c n"]) -> Int[Tensor, "g q t"]:
        return self.backbone.model.encode(clips, self.num_quantizers, return_dict=True).audio_codes

    def _to_latents(self, clips: Float[Tensor, "g c n"]) -> Float[Tensor, "g d t"]:
        return self.backbone.model.encode(clips, self.num_quantizers, return_dict=True).projected_latents

    def _from_codes(self, codes: Int[Tensor, "g q t"]) -> Float[Tensor, "g c n"]:
        return self._whole(
            self.backbone.model.decode(audio_codes=codes, return_dict=True).audio_values, codes.shape[-1]
        )

    def _from_latents(self, latents: Float[Tensor, "g d t"]) -> Float[Tensor, "g c n"]:
        quantized, _ = self.backbone.model.quantizer.from_latents(latents)
        return self._whole(self.backbone.model.decode(quantized, return_dict=True).audio_values, latents.shape[-1])

    def _whole(self, audio: Float[Tensor, "g n"], frames: int) -> Float[Tensor, "g 1 m"]:
        """The decoder's odd strides leave a few samples out at the end."""
        return F.pad(audio, (0, self._num_samples(frames) - audio.shape[-1]))[:, None]

    def _quantize(self, latents: Float[Tensor, "g d t"]) -> Int[Tensor, "g q t"]:
        quantizers = self.backbone.model.quantizer.quantizers[: self.num_quantizers]
        parts = latents.chunk(self.num_quantizers, dim=1)
        return torch.stack(
            [layer.decode_latents(part)[1] for layer, part in zip(quantizers, parts, strict=True)], dim=1
        )

    def _dequantize(self, codes: Int[Tensor, "g q t"]) -> Float[Tensor, "g d t"]:
        return self.backbone.model.quantizer.from_codes(codes)[1]


class MimiCodec(PretrainedCodec):
    """Mimi (Défossez et al. 2024, arXiv:2410.00037): 12.5 frames a second; the first quantizer(s) carry the meaning of speech."""

    model_type = "mimi"

    def __init__(self, model: str | Path = "kyutai/mimi", num_quantizers: int | None = None):
        super().__init__()
        config = self._hold(model)
        self.downsample_factor = math.prod(config.upsampling_ratios) * config.latent_stride
        self.latent_dim, self.num_semantic_quantizers = config.hidden_size, config.num_semantic_quantizers
        self._choose_quantizers(num_quantizers, self.num_semantic_quantizers, config.num_quantizers)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "MimiCodec":
        super()._apply(fn, recurse)
        for module in self.backbone.model.modules():
            if hasattr(module, "_embed"):  # codebooks that the model has worked out are no buffers, and stay behind
                module._embed = None
        return self

    def _to_latents(self, clips: Float[Tensor, "g c n"]) -> Float[Tensor, "g d t"]:
        return self.backbone.model.encoder(clips).latents

    def _from_latents(self, latents: Float[Tensor, "g d t"]) -> Float[Tensor, "g c n"]:
        return self.backbone.model.decoder(latents).audio_values

    def _quantize(self, latents: Float[Tensor, "g d t"]) -> Int[Tensor, "g q t"]:
        return rearrange(self.backbone.model.quantizer.encode(latents, self.num_quantizers), "q g t -> g q t")

    def _dequantize(self, codes: Int[Tensor, "g q t"]) -> Float[Tensor, "g d t"]:
        return self.backbone.model.quantizer.decode(codes)


CODECS: tuple[type[EncodecWrapper] | type[DacCodec] | type[MimiCodec], ...] = (EncodecWrapper, DacCodec, MimiCodec)


def pretrained_codec(model: str | Path, num_quantizers: int | None = None) -> PretrainedCodec:
    """The codec a hub name or folder holds, whichever of them it is."""
    name = pretrained_name(model)
    found = _model_type(name)
    for kind in CODECS:
        if kind.model_type == found:
            return kind(model=name, num_quantizers=num_quantizers)
    known = ", ".join(kind.model_type for kind in CODECS)
    raise ValueError(f"{name} is a model of type {found!r}, and the codecs known here are {known}")


def _model_type(name: str) -> str:
    from transformers import AutoConfig

    return read_pretrained(AutoConfig.from_pretrained, name, "codec", trust_remote_code=False).model_type
