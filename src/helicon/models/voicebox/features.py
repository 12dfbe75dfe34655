"""The spaces in which speech is generated: what audio is turned into frames by, and frames into audio.

`MelVoco` is log-mel frames, which a vocoder (or Griffin-Lim, which needs none) makes audible; `CodecLatents` and
`EncodecVoco` are the latents of a codec, which its decoder makes audible. All of them keep the contract `FeatureSpace`.

Letters: b batch, n samples, t frames, d features of a frame, m mel bands, q quantizers.
"""

import functools
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from einops import rearrange
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from helicon.metrics.audio import LOG_FLOOR, mel_filterbank
from helicon.models.soundstream.codecs import Codec, EncodecWrapper
from helicon.models.voicebox.vocoder import MelSettings, Vocoder, mel_settings
from helicon.nn.frozen import pretrained_name, read_pretrained
from helicon.nn.lengths import before
from helicon.nn.network import Network
from helicon.nn.resample import resample
from helicon.nn.stft import griffin_lim, nonnegative_inverse

Lengths = Int[Tensor, " b"]


@runtime_checkable
class FeatureSpace(Protocol):
    """What a model of features asks of whatever makes them from audio, and audio from them.

    Nothing is learned here, and no gradient passes. A clip of a padded batch has the features, and the sound, it has alone.
    """

    sample_hz: int
    downsample_factor: int  # samples a frame
    latent_dim: int  # features of a frame

    def frame_lengths(self, lengths: Lengths) -> Lengths:
        """Frames of clips of so many samples (at `sample_hz`)."""
        ...

    def encode(
        self, audio: Float[Tensor, "b n"], lengths: Lengths | None = None, input_sample_hz: int | None = None
    ) -> Float[Tensor, "b t d"]:
        """Frames of audio, of which the first `lengths` samples of each clip count; 0 past the end. Of another rate than
        `sample_hz` it is resampled, and lengths count its own samples. t is what the whole width n gives."""
        ...

    def decode(self, features: Float[Tensor, "b t d"], lengths: Lengths | None = None) -> Float[Tensor, "b n"]:
        """`downsample_factor` samples a frame; silence after the first `lengths` frames of each clip."""
        ...


class MelVoco(Network):
    """Log-mel frames, made audible by a vocoder, or where there is none by the Griffin-Lim algorithm."""

    def __init__(
        self,
        *,
        log: bool = True,
        n_mels: int = 100,
        sampling_rate: int = 24000,
        f_max: float | None = None,
        n_fft: int = 1024,
        win_length: int | None = None,
        hop_length: int = 256,
        pretrained_vocos_path: str | None = None,
        vocoder: Vocoder | None = None,
    ):
        """
        Args:
            log: natural logarithms, no lower than that of 1e-5; otherwise the magnitudes themselves.
            n_mels: bands.
            f_max: where the highest of them ends; half of the rate where nothing is said. (8 kHz in
                voicebox-pytorch, which dulls every "s" at this rate.)
            n_fft, win_length, hop_length: of the transform, in samples; the window is n_fft long where nothing is said.
                (640 and a hop of 160 in voicebox-pytorch, 150 frames a second; here 94, as today's vocoders for speech have them.)
            vocoder: makes the frames audible; its mel settings must be the same as these. Without one Griffin-Lim does.
            pretrained_vocos_path: not supported; give a `vocoder`.
        """
        super().__init__()
        _refuse_vocos(pretrained_vocos_path, "vocoder=... (helicon train voicebox/vocoder makes one), or leave it out")
        self.log = log
        self.mel = mel_settings(n_mels, sampling_rate, f_max, n_fft, win_length, hop_length)
        self.sample_hz, self.downsample_factor, self.latent_dim = sampling_rate, hop_length, n_mels
        if vocoder is not None and vocoder.mel != self.mel:
            raise ValueError(
                f"the vocoder was made for frames of {vocoder.mel.unlike(self.mel)}, and these have {self.mel.unlike(vocoder.mel)}: "
                "make them equal"
            )
        self.vocoder = vocoder

    @classmethod
    def of(cls, vocoder: Vocoder) -> "MelVoco":
        """The frames that a vocoder makes audible."""
        return cls(**asdict(vocoder.mel), vocoder=vocoder)

    def frame_lengths(self, lengths: Lengths) -> Lengths:
        return self.mel.frame_lengths(lengths)

    @torch.no_grad()
    def encode(
        self, audio: Float[Tensor, "b n"], lengths: Lengths | None = None, input_sample_hz: int | None = None
    ) -> Float[Tensor, "b t d"]:
        audio = _filled_after(audio, lengths)
        if input_sample_hz is not None:
            audio = resample(audio, input_sample_hz, self.sample_hz)
            if lengths is not None:
                lengths = -(-lengths * self.sample_hz // input_sample_hz)  # as `resample` makes them
                audio = _filled_after(audio, lengths)  # the end rings on in the padding
        frames = self.mel.log_mel(audio) if self.log else self.mel.mel(audio)
        return _filled_after(frames, None if lengths is None else self.frame_lengths(lengths))

    @torch.no_grad()
    def decode(self, features: Float[Tensor, "b t d"], lengths: Lengths | None = None) -> Float[Tensor, "b n"]:
        features = features.float()
        if self.vocoder is not None:
            log_mel = features if self.log else features.clamp(min=LOG_FLOOR).log()
            return self.vocoder(log_mel, lengths)
        mel = features.exp() if self.log else features.clamp(min=0.0)
        bands = rearrange(_filled_after(mel, lengths), "b t m -> b m t")
        magnitude = nonnegative_inverse(bands, *_filters(self.mel, features.device))
        return griffin_lim(magnitude, self.mel.hop_length, self.mel.win_length, lengths)


class CodecLatents(Network):
    """The continuous latents of a codec (SoundStream, EnCodec, DAC, Mimi), made audible by its decoder."""

    def __init__(self, codec: Network):
        super().__init__()
        if not isinstance(codec, Codec):
            raise ValueError(
                f"a {type(codec).__name__} is no codec: give a SoundStream, EncodecWrapper, DacCodec or MimiCodec"
            )
        if codec.channels != 1:
            raise ValueError(f"this codec's sound has {codec.channels} channels: give one of a single channel")
        self.codec = codec
        self.sample_hz, self.downsample_factor = codec.sample_hz, codec.downsample_factor
        self.latent_dim = codec.latent_dim

    def frame_lengths(self, lengths: Lengths) -> Lengths:
        return self.codec.code_lengths(lengths)

    def encode(
        self, audio: Float[Tensor, "b n"], lengths: Lengths | None = None, input_sample_hz: int | None = None
    ) -> Float[Tensor, "b t d"]:
        return self.codec.encode_latents(audio, lengths, input_sample_hz)

    def decode(self, features: Float[Tensor, "b t d"], lengths: Lengths | None = None) -> Float[Tensor, "b n"]:
        return self.codec.decode_latents(_filled_after(features, lengths), lengths)[:, 0]


class EncodecVoco(Network):
    """EnCodec's frames: the latents its codes stand for. Whatever is generated is decoded as the nearest codes.

    (So its decoder only hears what it was trained with. `CodecLatents(EncodecWrapper())` has the latents before codes are
    chosen, and decodes them as they are.)
    """

    def __init__(
        self,
        *,
        sampling_rate: int = 24000,
        pretrained_vocos_path: str | None = None,
        bandwidth_id: int = 2,
        model: str | Path = "facebook/encodec_24khz",
    ):
        """
        Args:
            sampling_rate: checked against the model's.
            pretrained_vocos_path: not supported; EnCodec's own decoder makes the sound.
            bandwidth_id: which of the model's bandwidths (of 1.5, 3, 6, 12 and 24 kbit/s) the codes have.
            model: a hub name or the folder of a downloaded model.
        """
        super().__init__()
        _refuse_vocos(pretrained_vocos_path, "nothing: EnCodec's own decoder makes the sound")
        name = pretrained_name(model)
        self.codec = EncodecWrapper(bandwidth=_bandwidth(name, bandwidth_id), model=name)
        if self.codec.sample_hz != sampling_rate:
            own = self.codec.sample_hz
            raise ValueError(f"sampling_rate={sampling_rate} is not that of {name}: give sampling_rate={own}")
        if self.codec.channels != 1:
            raise ValueError(f"{name} codes {self.codec.channels} channels: give a model of a single channel")
        self.arguments["model"] = name  # a relative path would be lost in another working directory
        self.sample_hz, self.downsample_factor = self.codec.sample_hz, self.codec.downsample_factor
        self.latent_dim = self.codec.latent_dim

    def load_own_state(self, state: Any) -> None:
        self.codec.backbone.check(state.get("codec.backbone.fingerprint"))

    def frame_lengths(self, lengths: Lengths) -> Lengths:
        return self.codec.code_lengths(lengths)

    def encode(
        self, audio: Float[Tensor, "b n"], lengths: Lengths | None = None, input_sample_hz: int | None = None
    ) -> Float[Tensor, "b t d"]:
        return self.codec.dequantize(self.codec.encode(audio, lengths, input_sample_hz))

    def decode_to_codes(self, features: Float[Tensor, "b t d"], lengths: Lengths | None = None) -> Int[Tensor, "b t q"]:
        """The codes nearest to frames, -1 after the first `lengths` of each clip."""
        return _filled_after(self.codec.quantize(_filled_after(features, lengths)), lengths, -1)

    def decode(self, features: Float[Tensor, "b t d"], lengths: Lengths | None = None) -> Float[Tensor, "b n"]:
        return self.codec.decode(self.decode_to_codes(features, lengths))[:, 0]


def _filled_after(
    values: Shaped[Tensor, "b n *d"], lengths: Lengths | None, fill: float = 0
) -> Shaped[Tensor, "b n *d"]:
    """`fill` after the first `lengths` of each row, whatever stands there."""
    if lengths is None:
        return values
    is_real = before(lengths, values.shape[1])
    return torch.where(is_real.reshape(*is_real.shape, *[1] * (values.ndim - 2)), values, fill)


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)  # an inference tensor in the cache could never take part in training
def _filters(mel: MelSettings, device: torch.device) -> tuple[Float[Tensor, "m f"], Float[Tensor, "f m"]]:
    """The bands, and their pseudo-inverse."""
    filters = mel_filterbank(mel.sampling_rate, mel.n_fft, mel.n_mels, 0.0, mel.f_max)
    return filters.to(device), torch.linalg.pinv(filters).to(device)


def _bandwidth(model: str, bandwidth_id: int) -> float | None:
    """In kbit/s; None for a model that has none, which the codec then refuses."""
    from transformers import AutoConfig

    config = read_pretrained(AutoConfig.from_pretrained, model, "codec", trust_remote_code=False)
    known = getattr(config, "target_bandwidths", None)
    if known is None:
        return None
    if not 0 <= bandwidth_id < len(known):
        raise ValueError(
            f"bandwidth_id={bandwidth_id} must be from 0 to {len(known) - 1}, for {', '.join(map(str, known))} kbit/s"
        )
    return known[bandwidth_id]


def _refuse_vocos(path: str | None, instead: str) -> None:
    if path is not None:
        raise ValueError(
            f"pretrained_vocos_path={path!r} is not supported, for its weights are a pickle of another package: give {instead}"
        )
