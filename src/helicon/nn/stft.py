"""A short-time Fourier transform whose frames tile the sound, its inverse, and sound from magnitudes alone (Griffin-Lim).

Frame i is centred on the samples from i * hop to (i + 1) * hop, with silence beyond both ends: n samples have n / hop frames
(rounded up), and t frames become t * hop samples again. The window is a periodic Hann window. Always float32, outside
autocast.

Letters: b batch, n samples, f frequencies, t frames, m bands.
"""

import functools
import math

import torch
from einops import rearrange
from jaxtyping import Complex, Float, Int
from torch import Tensor
from torch.nn import functional as F

from helicon.nn.lengths import before


def check_framing(n_fft: int, hop: int, win_length: int) -> None:
    """Whether frames of these sizes can be put together to sound again."""
    if n_fft % 2 or not 0 < win_length <= n_fft:
        raise ValueError(f"n_fft={n_fft} must be even, and at least the window's length, {win_length}")
    if not 0 < 2 * hop <= win_length:
        raise ValueError(
            f"a hop of {hop} samples is too long for a window of {win_length}: frames must overlap by half or more, "
            f"so use at most {win_length // 2}"
        )


@torch.compiler.disable  # complex numbers are not what the compiler is good at
def stft(audio: Float[Tensor, "*b n"], n_fft: int, hop: int, win_length: int) -> Complex[Tensor, "*b f t"]:
    before, size = (n_fft - hop) // 2, audio.shape[-1]
    with torch.autocast(audio.device.type, enabled=False):
        padded = F.pad(audio.float(), (before, n_fft - hop - before + -size % hop))
        frames = padded.unfold(-1, n_fft, hop) * _window(n_fft, win_length, audio.device)
        return torch.fft.rfft(frames).transpose(-1, -2)


@torch.compiler.disable
def istft(
    spectrum: Complex[Tensor, "b f t"], hop: int, win_length: int, lengths: Int[Tensor, " b"] | None = None
) -> Float[Tensor, "b n"]:
    """The sound whose frames come nearest to those given (least squares), t * hop samples.

    Of each clip the first `lengths` frames count: they sound as they would alone, and after them there is silence.
    """
    n_fft, count = 2 * (spectrum.shape[1] - 1), spectrum.shape[2]
    window = _window(n_fft, win_length, spectrum.device)
    with torch.autocast(spectrum.device.type, enabled=False):
        frames = torch.fft.irfft(spectrum.transpose(1, 2), n_fft) * window  # [b, t, n_fft]
        weights = window.square().expand(1, count, n_fft)
        if lengths is not None:
            is_frame = before(lengths, count)[..., None]
            frames, weights = torch.where(is_frame, frames, 0.0), weights * is_frame
        audio, weight = _added(frames, hop), _added(weights, hop)
        if lengths is None:
            return audio / weight
        # (Past the end there is nothing to divide by.)
        is_sound = before(lengths * hop, audio.shape[-1])
        return torch.where(is_sound, audio / torch.where(is_sound, weight, 1.0), 0.0)


def _added(frames: Float[Tensor, "b t k"], hop: int) -> Float[Tensor, "b n"]:
    """Overlapping frames added up, without what sticks out at both ends."""
    count, n_fft = frames.shape[1:]
    size = (count - 1) * hop + n_fft
    added = F.fold(rearrange(frames, "b t k -> b k t"), (1, size), (1, n_fft), stride=(1, hop))[:, 0, 0]
    before = (n_fft - hop) // 2
    return added[:, before : before + count * hop]


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # an inference tensor in the cache could never take part in training
def _window(n_fft: int, win_length: int, device: torch.device) -> Float[Tensor, " n_fft"]:
    before = (n_fft - win_length) // 2
    return F.pad(torch.hann_window(win_length), (before, n_fft - win_length - before)).to(device)


@torch.no_grad()
def griffin_lim(
    magnitude: Float[Tensor, "b f t"],
    hop: int,
    win_length: int,
    lengths: Int[Tensor, " b"] | None = None,
    *,
    iterations: int = 64,
    momentum: float = 0.99,
    seed: int = 0,
) -> Float[Tensor, "b n"]:
    """A sound whose spectrogram is near to `magnitude`, by the fast Griffin-Lim algorithm (Perraudin et al., 2013).

    From random phases (the same for every clip, from `seed`) each round keeps the phases of the nearest sound, and goes
    `momentum` beyond them. Of each clip the first `lengths` frames count: it sounds as it would alone.
    """
    n_fft, count = 2 * (magnitude.shape[1] - 1), magnitude.shape[2]
    # Frames first: those of a short clip begin with the same phases as in a long one. On the CPU: the same on every device.
    angles = 2 * math.pi * torch.rand(count, n_fft // 2 + 1, generator=torch.Generator().manual_seed(seed))
    phases = torch.polar(torch.ones_like(angles), angles).T.to(magnitude.device).expand(magnitude.shape)
    magnitude, previous = magnitude.float(), torch.zeros_like(phases)
    for _ in range(iterations):
        nearest = stft(istft(magnitude * phases, hop, win_length, lengths), n_fft, hop, win_length)
        phases = nearest - momentum / (1 + momentum) * previous
        phases = phases / phases.abs().clamp(min=1e-16)
        previous = nearest
    return istft(magnitude * phases, hop, win_length, lengths)


@torch.no_grad()
def nonnegative_inverse(
    mixed: Float[Tensor, "b m t"], filters: Float[Tensor, "m f"], inverse: Float[Tensor, "f m"], iterations: int = 32
) -> Float[Tensor, "b f t"]:
    """Magnitudes x >= 0 for which `filters @ x` comes near to `mixed`, as from bands of a mel spectrogram.

    The pseudo-`inverse` of the filters gives the smallest x, which is negative in places. What is left of it after those are
    cut off is improved by multiplicative steps, which keep x from getting negative and never make it worse (Lee and Seung,
    2000).
    """
    with torch.autocast(mixed.device.type, enabled=False):
        mixed = mixed.float()
        x = (inverse @ mixed).clamp(min=1e-8)
        wanted = filters.T @ mixed
        for _ in range(iterations):
            x = x * wanted / (filters.T @ (filters @ x)).clamp(min=1e-16)
        return x
