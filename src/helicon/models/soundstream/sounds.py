"""From a sound file to the sound that a codec makes of it: SoundStream's side of `helicon generate`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from helicon.data.sound import SUFFIXES, Sound, read_prompt, spectrogram_beside
from helicon.metrics.audio import log_mel_distance, si_sdr
from helicon.models.soundstream.model import SoundStream
from helicon.nn.resample import resample

CHUNK = 500  # frames that are coded at a time: so a recording of any length needs no more memory


@dataclass(frozen=True)
class CodedSound:
    """A sound after coding, and how it differs from what it was, in words."""

    sound: Sound
    judgement: str

    def write(self, path: Path) -> str:
        self.sound.write(path)
        return self.judgement


class CodedSoundMaker:
    """Codes a sound and decodes it again, to hear what the codec does to it."""

    suffixes: ClassVar[tuple[str, ...]] = SUFFIXES
    sheet = None  # no file holds several sounds
    beside = staticmethod(spectrogram_beside)

    def __init__(
        self,
        network: SoundStream,
        *,
        texts: Sequence[str] = (),
        prompt: Path | None = None,
        num_quantizers: int | None = None,
        denoise: bool = False,
    ):
        """
        Args:
            network: the codec.
            prompt: the sound file, of any rate and length.
            num_quantizers: how many codes of a frame are used, the coarse ones first; all of them by default.
            denoise: take noise out of the sound, with a codec that learned to.
        """
        if texts:
            raise ValueError("a codec reads no texts: leave --text out")
        if prompt is None:
            raise ValueError("a codec makes a sound from another: name the sound file with --prompt")
        most = network.num_quantizers
        if num_quantizers is not None and not 1 <= num_quantizers <= most:
            raise ValueError(f"num_quantizers={num_quantizers} must lie between 1 and {most}, the codes of a frame")
        if denoise and not network.denoises:
            raise ValueError("denoise=true is for a codec that learned it (denoise_conditioning=True): leave it out")
        self.network, self.num_quantizers = network, num_quantizers or most
        self.is_denoising = True if denoise else None
        wave, hz = read_prompt(prompt, network.channels)
        wave = wave[None] if wave.ndim == 1 else wave
        self.audio = resample(wave.to(network.device), hz, network.sample_hz)[None]
        self.prompts = [f"{prompt.stem} coded"]

    def make(self, which: Sequence[int], seed: int) -> list[CodedSound]:
        """The sound, as often as it is asked for: nothing about it is random."""
        made = self._coded()
        rate = self.network.sample_hz / self.network.downsample_factor
        bits = rate * self.num_quantizers * math.log2(self.network.codebook_size) / 1000
        words = f"{self.num_quantizers} codes a frame, {bits:.2f} kbit/s"
        distances = si_sdr(made, self.audio), log_mel_distance(made, self.audio, self.network.sample_hz)
        judgement = f"{words}; SI-SDR {distances[0].item():.1f} dB, log-mel distance {distances[1].item():.2f}"
        sound = Sound(made[0].cpu(), self.network.sample_hz, f"{self.prompts[0]}, {words}")
        return [CodedSound(sound, judgement)] * len(which)

    @torch.no_grad()
    def _coded(self) -> Float[Tensor, "1 c n"]:
        codec, length = self.network.autoencoder, self.audio.shape[-1]
        if codec.pad_mode == "reflect":  # which cannot be streamed
            codes = codec.tokenize(self.audio, self.is_denoising)
            return codec.decode_codes(codes[..., : self.num_quantizers], length, self.is_denoising)
        stream, parts = codec.stream(self.is_denoising), []
        for chunk in self.audio.split(CHUNK * codec.hop, dim=-1):
            parts.append(stream.decode(stream.encode(chunk)[..., : self.num_quantizers]))
        parts.append(stream.decode(stream.flush()[..., : self.num_quantizers]))
        return torch.cat(parts, dim=-1)
