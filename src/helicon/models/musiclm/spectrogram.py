"""What the audio tower of MuLaN sees: log-mel spectra, changed a little in training, in patches.

Levels are logarithms of magnitude, shifted and scaled so that music and speech lie about 0 with a spread of about 1, whatever the
sizes of the transform: the loudest tone has about 2, silence (100 dB below) -1.8. (Of a power spectrum without a logarithm the loudest few
numbers are all that a network sees.) Silence is also what stands after the end of a clip: a clip in a padded batch has the levels of
the clip alone.

Letters: b batch, n samples, t frames, m mel bands, r rows and c columns of patches, p numbers in a patch.
"""

import math
from dataclasses import dataclass
from typing import TypeVar

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from helicon.metrics.audio import LOG_FLOOR, mel_filterbank, mel_spectrogram
from helicon.nn.devices import drawn_by
from helicon.nn.lengths import before

CENTRE, SPREAD = -6.0, 3.0  # of the logarithm of a magnitude, which is about 0 for the loudest tone
SILENCE = (math.log(LOG_FLOOR) - CENTRE) / SPREAD
LARGEST_MASK = 0.5  # of the bands, and of the frames of a clip: a quarter of every spectrum stays, whatever is drawn

Count = TypeVar("Count", int, Tensor)
Lengths = Int[Tensor, " b"]


@dataclass(frozen=True)
class LogMel:
    """From waves to levels: n / hop_length frames (rounded up), each centred on its own hop_length samples."""

    sample_hz: int
    n_mels: int
    n_fft: int
    win_length: int
    hop_length: int
    f_min: float
    f_max: float
    power: float  # of the magnitudes whose mean is taken over a band

    def __post_init__(self) -> None:
        if not 0 < self.hop_length <= self.win_length <= self.n_fft:
            raise ValueError(
                f"spec_hop_length={self.hop_length}, spec_win_length={self.win_length}, spec_n_fft={self.n_fft}: they must not "
                f"fall in this order, and the hop is at least 1"
            )
        if self.power <= 0:
            raise ValueError(f"spec_power={self.power} must be more than 0: 1 for magnitudes, 2 for powers")
        try:
            mel_filterbank(self.sample_hz, self.n_fft, self.n_mels, self.f_min, self.f_max)
        except ValueError as error:
            told = str(error).replace("n_fft", "spec_n_fft")
            if "spec_n_fft" in told:  # of empty bands, as the sizes of musiclm-pytorch leave
                told += "; or leave out spec_n_fft, spec_win_length and spec_hop_length, which then fit the sample_hz"
            raise ValueError(told) from error

    @property
    def scale(self) -> float:
        """Makes bands the mean of what lies in them, where a tone of amplitude 1 is 1."""
        return (self.win_length / 4) ** -self.power * self.sample_hz / self.n_fft

    def num_frames(self, length: Count) -> Count:
        return -(-length // self.hop_length)

    @torch.no_grad()
    def __call__(self, waves: Float[Tensor, "b n"], lengths: Lengths | None = None) -> Float[Tensor, "b t m"]:
        """Of each clip the first `lengths` samples count."""
        if lengths is not None:
            waves = torch.where(before(lengths, waves.shape[1]), waves, 0.0)
        hop = self.hop_length
        # Frames centred on multiples of the hop, of which the first is not needed, of the sound moved by half of it.
        moved = F.pad(waves, (hop // 2, -waves.shape[-1] % hop))
        bands = mel_spectrogram(
            moved,
            self.sample_hz,
            self.n_fft,
            hop,
            self.n_mels,
            win_length=self.win_length,
            f_min=self.f_min,
            f_max=self.f_max,
            power=self.power,
        )
        bands = bands * self.scale
        logarithms = bands.clamp(min=LOG_FLOOR**self.power).log() / self.power
        levels = rearrange((logarithms - CENTRE) / SPREAD, "b m t -> b t m")[:, 1:]
        # (The last frames of a sound reach beyond its end.)
        return levels if lengths is None else silent_after(levels, self.num_frames(lengths))


def silent_after(levels: Float[Tensor, "b t m"], lengths: Lengths) -> Float[Tensor, "b t m"]:
    return torch.where(before(lengths, levels.shape[1])[..., None], levels, SILENCE)


@dataclass(frozen=True)
class Augmentation:
    """Changes to levels in training, drawn for each clip of its own (SpecAugment, Park et al. 2019).

    stretch    a clip is played at a speed between this and 1, from a random moment on, and keeps its length
    freq_mask  up to so many neighbouring bands are hidden, half of them at most
    time_mask  up to so many neighbouring frames are hidden, half of the clip's at most
    noise      white noise is added to a wave, up to this part of the clip's own level

    What is hidden has level 0. At least a quarter of every spectrum stays.
    """

    stretch: float
    freq_mask: int
    time_mask: int
    n_mels: int
    noise: float = 0.0

    def __post_init__(self) -> None:
        if not LARGEST_MASK <= self.stretch <= 1:
            raise ValueError(
                f"spec_aug_stretch_factor={self.stretch} is the lowest speed of a stretched clip: give {LARGEST_MASK} to 1 (not stretched)"
            )
        if not 0 <= self.freq_mask <= self.n_mels * LARGEST_MASK:
            raise ValueError(
                f"spec_aug_freq_mask={self.freq_mask} may hide at most half of n_mels={self.n_mels} bands: "
                f"give 0 to {int(self.n_mels * LARGEST_MASK)}"
            )
        if self.time_mask < 0:
            raise ValueError(f"spec_aug_time_mask={self.time_mask} cannot be negative: give 0 for no mask")
        if not 0 <= self.noise <= 1:
            raise ValueError(
                f"spec_aug_noise={self.noise} is the loudest noise, as a part of a clip's own level: give 0 (none) to 1"
            )

    def noisy(
        self, waves: Float[Tensor, "b n"], lengths: Lengths | None = None, generator: torch.Generator | None = None
    ) -> Float[Tensor, "b n"]:
        """Waves with their noise, of which the first `lengths` samples count; before their levels are taken."""
        if not self.noise:
            return waves
        if lengths is not None:
            waves = torch.where(before(lengths, waves.shape[1]), waves, 0.0)
        own = waves.shape[1] if lengths is None else lengths[:, None].clamp(min=1)
        level = (waves.square().sum(dim=1, keepdim=True) / own).sqrt()
        part = self.noise * torch.rand(len(waves), 1, device=waves.device, **drawn_by(generator))
        return waves + part * level * torch.randn(waves.shape, device=waves.device, **drawn_by(generator))

    def __call__(
        self,
        levels: Float[Tensor, "b t m"],
        lengths: Lengths | None = None,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "b t m"]:
        """`lengths` are in frames; frames after them stay silent."""
        batch, frames, bands = levels.shape
        draws = torch.rand(6, batch, 1, device=levels.device, **drawn_by(generator))
        own = lengths[:, None] if lengths is not None else torch.full((batch, 1), frames, device=levels.device)
        changed = self._stretched(levels, own, draws[0], draws[1]) if self.stretch < 1 else levels
        widest = (own * LARGEST_MASK).clamp(max=self.time_mask)
        hidden_frames = _span(draws[2], draws[3], widest.long(), own, frames)
        hidden_bands = _span(draws[4], draws[5], torch.full_like(own, self.freq_mask), bands, bands)
        changed = changed.masked_fill(hidden_frames[:, :, None] | hidden_bands[:, None, :], 0.0)
        return changed if lengths is None else silent_after(changed, lengths)

    def _stretched(self, levels: Tensor, own: Tensor, speed: Tensor, moment: Tensor) -> Float[Tensor, "b t m"]:
        """Each frame from between the two that lie nearest to its place in the clip."""
        speed = self.stretch + (1 - self.stretch) * speed
        last = (own - 1).clamp(min=0)
        begin = moment * last * (1 - speed)
        place = torch.minimum(begin + speed * torch.arange(levels.shape[1], device=levels.device), last)
        left = place.floor()
        right = torch.minimum(left + 1, last)
        earlier, later = (levels.gather(1, x.long()[..., None].expand_as(levels)) for x in (left, right))
        return torch.lerp(earlier, later, (place - left)[..., None].to(levels.dtype))


def _span(
    width: Float[Tensor, "b 1"], begin: Float[Tensor, "b 1"], widest: Int[Tensor, "b 1"], own: Tensor | int, size: int
) -> Bool[Tensor, "b size"]:
    """Neighbouring places, 0 to `widest` of them, within the first `own`: from two numbers between 0 and 1."""
    count = (width * (widest + 1)).floor()
    first = (begin * (own - count + 1)).floor()
    place = torch.arange(size, device=width.device)
    return (place >= first) & (place < first + count)


def patched(levels: Float[Tensor, "b t m"], height: int, width: int) -> Float[Tensor, "b r c p"]:
    """Patches of `height` bands and `width` frames, the last of them filled up with silence."""
    filled = F.pad(levels, (0, 0, 0, -levels.shape[1] % width), value=SILENCE)
    return rearrange(filled, "b (c w) (r h) -> b r c (h w)", h=height, w=width)
