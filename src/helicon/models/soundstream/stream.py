"""Coding audio as it arrives: chunks in, chunks out, and what the whole signal would have given.

Every causal layer remembers the few inputs (or keys) that its next output sees, and nothing else: the state of a stream
does not grow. A frame of `hop` samples is coded as soon as it is complete, and decoded as soon as its codes are there.

Letters: b batch, c audio channels, n samples, t frames, q codes of a frame.
"""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor
from torch.nn import functional as F

from helicon.models.soundstream.codecs import check_finite, check_floats
from helicon.nn.conv import StreamState

if TYPE_CHECKING:
    from helicon.models.soundstream.autoencoder import SoundStreamAutoencoder


class CodecStream:
    """One signal (or a batch of signals side by side) on its way through a codec.

        stream = codec.stream()
        for chunk in microphone:             # [b, c, n], or [b, n] of one channel, of any length
            codes = stream.encode(chunk)     # [b, t, q] of the frames that are complete now, t = 0 for none
            audio = stream.decode(codes)     # [b, c, t * hop]
        audio = stream.decode(stream.flush())

    Put together, codes and audio are those of the whole signal. Both directions stand alone as well: `decode` takes codes
    from anywhere, a language model for one.
    """

    def __init__(self, codec: "SoundStreamAutoencoder", is_denoising: bool | Bool[Tensor, " b"] | None = None):
        self.codec = codec
        self.is_denoising = is_denoising
        self.state: StreamState = {}
        self._batch: int | None = None
        self._rest: Tensor | None = None  # [b, c, n], samples of a frame that is not complete
        self._num_encoded = 0  # samples
        self._num_decoded = 0
        self._is_flushed = False

    @torch.no_grad()
    def encode(self, audio: Float[Tensor, "b n"] | Float[Tensor, "b c n"]) -> Int64[Tensor, "b t q"]:
        """Codes of the frames that this chunk completes."""
        if self._is_flushed:
            raise ValueError("this stream was flushed, its last frame is coded: start another with stream()")
        if audio.ndim not in (2, 3):
            raise ValueError(f"a chunk is [b, n] or [b, c, n], not {list(audio.shape)}: one signal is a batch of one")
        check_floats(audio)
        check_finite(audio)
        audio = (audio[:, None] if audio.ndim == 2 else audio).float()
        self.codec.check_channels(audio)
        self._check_batch(audio)
        pending = audio if self._rest is None else torch.cat((self._rest, audio), dim=-1)
        self._num_encoded += audio.shape[-1]
        whole = pending.shape[-1] // self.codec.hop * self.codec.hop
        self._rest = pending[..., whole:].clone()
        return self._codes(pending[..., :whole])

    @torch.no_grad()
    def flush(self) -> Int64[Tensor, "b t q"]:
        """Ends the audio: the codes of the last frame, filled up with silence, if one was begun.

        From here on `decode` stops where the audio stopped.
        """
        if self._rest is None:
            raise ValueError("flush ends a stream of audio, and none was encoded")
        rest, self._rest = self._rest, self._rest[..., :0]
        self._is_flushed = True
        return self._codes(F.pad(rest, (0, -rest.shape[-1] % self.codec.hop)))

    @torch.no_grad()
    def decode(self, codes: Int[Tensor, "b t q"]) -> Float[Tensor, "b c n"]:
        """The audio of these frames, which follow those decoded before."""
        latents = self.codec.dequantize(codes)
        self._check_batch(codes)
        if not codes.shape[1]:
            return latents.new_zeros(len(codes), self.codec.input_channels, 0)
        audio = self.codec.decode_frames(latents, self.is_denoising, self.state)
        if self._is_flushed:
            audio = audio[..., : max(self._num_encoded - self._num_decoded, 0)]
        self._num_decoded += audio.shape[-1]
        return audio

    def _codes(self, audio: Float[Tensor, "b c n"]) -> Int64[Tensor, "b t q"]:
        if audio.shape[-1]:
            latents = self.codec.encode_frames(audio, self.is_denoising, self.state)
        else:
            latents = audio.new_zeros(len(audio), 0, self.codec.codebook_dim)
        return self.codec.quantizer.encode(latents)

    def _check_batch(self, chunk: Tensor) -> None:
        if self._batch not in (None, len(chunk)):
            raise ValueError(
                f"this stream carries {self._batch} signals side by side, got a chunk of {len(chunk)}: start another"
            )
        self._batch = len(chunk)
