"""A vocoder: log-mel frames to sound (Vocos, Siuzdak 2023, arXiv:2306.00814).

Blocks of convolutions at the rate of the frames say the magnitude and the phase of every frame's spectrum, and the inverse
Fourier transform does the rest: nothing is upsampled, which makes it many times faster than vocoders of the wave.

Letters: b batch, n samples, t frames, m mel bands, d features, f frequencies.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from helicon.metrics.audio import LOG_FLOOR, mel_filterbank, mel_spectrogram
from helicon.models.soundstream.discriminators import BandDiscriminator, Discriminators, PeriodDiscriminator
from helicon.models.soundstream.losses import AdversarialKind, CodecLoss, MelLoss
from helicon.nn.convnext import ConvNeXtBlock
from helicon.nn.lengths import before
from helicon.nn.network import Network
from helicon.nn.stft import check_framing, istft

SILENCE = math.log(LOG_FLOOR)  # the lowest log-mel there is


@dataclass(frozen=True)
class MelSettings:
    """What log-mel frames were made with: a vocoder understands those of its own settings, and no others.

    Frames are those of `helicon.nn.stft`: each is centred on its own hop_length samples. Magnitudes, not powers, in
    `metrics.audio.mel_filterbank` from 0 Hz to f_max; natural logarithms, none lower than that of 1e-5.
    """

    sampling_rate: int
    n_mels: int
    n_fft: int
    win_length: int
    hop_length: int
    f_max: float

    def __post_init__(self) -> None:
        check_framing(self.n_fft, self.hop_length, self.win_length)
        mel_filterbank(self.sampling_rate, self.n_fft, self.n_mels, 0.0, self.f_max)  # which refuses empty bands

    def unlike(self, other: "MelSettings") -> str:
        """Those of these settings that are not the other's, as "n_mels=40, hop_length=64"."""
        theirs = vars(other)
        return ", ".join(f"{name}={value}" for name, value in vars(self).items() if value != theirs[name])

    def frame_lengths(self, lengths: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
        return -(-lengths // self.hop_length)

    def mel(self, audio: Float[Tensor, "b n"]) -> Float[Tensor, "b t m"]:
        """Magnitudes in bands; n / hop_length frames, rounded up."""
        hop = self.hop_length
        # Frames centred on multiples of the hop, of which the first is not needed, of the sound moved by half of it.
        moved = F.pad(audio, (hop // 2, -audio.shape[-1] % hop))
        bands = mel_spectrogram(
            moved, self.sampling_rate, self.n_fft, hop, self.n_mels, win_length=self.win_length, f_max=self.f_max
        )
        return rearrange(bands[..., 1:], "b m t -> b t m")

    def log_mel(self, audio: Float[Tensor, "b n"]) -> Float[Tensor, "b t m"]:
        return self.mel(audio).clamp(min=LOG_FLOOR).log()


class MelToWave(nn.Module):
    """The network of the vocoder: log-mel frames to as many hops of sound.

    The bands say the magnitudes of a frame already, if only roughly (each frequency as loud as the mean of its bands). The
    network says what to multiply them by, and the phases: so it is near the sound's spectrum before it has learned anything.
    """

    spread: Tensor

    def __init__(self, mel: MelSettings, dim: int, depth: int, kernel_size: int, mult: float):
        super().__init__()
        self.hop_length, self.win_length = mel.hop_length, mel.win_length
        # No spectrum of sound between -1 and 1 has more than the sum of the window.
        self.highest = mel.win_length / 2
        self.embed = nn.Conv1d(mel.n_mels, dim, kernel_size, padding=kernel_size // 2)
        self.backbone = Backbone(dim, depth, kernel_size, mult)
        self.to_spectrum = nn.Linear(dim, mel.n_fft + 2)
        self.register_buffer("spread", _spread(mel), persistent=False)

    def forward(
        self, log_mel: Float[Tensor, "b t m"], lengths: Int[Tensor, " b"] | None = None
    ) -> Float[Tensor, "b n"]:
        mask = None
        if lengths is not None:
            mask = before(lengths, log_mel.shape[1])
            log_mel = torch.where(mask[..., None], log_mel, SILENCE)
        x = log_mel / -SILENCE + 1  # silence is 0, as is what lies beyond the ends
        x = self.embed(rearrange(x, "b t m -> b m t"))
        x = self.to_spectrum(self.backbone(rearrange(x, "b d t -> b t d"), mask))
        change, phase = rearrange(x.float(), "b t (two f) -> two b f t", two=2)
        level = change + self._rough_level(log_mel)
        # About e^level, and no more than the highest, of which it is a sigmoid: a hard limit would have no gradient beyond it.
        magnitude = self.highest * torch.sigmoid(level - math.log(self.highest))
        return istft(torch.polar(magnitude, phase), self.hop_length, self.win_length, lengths)

    def _rough_level(self, log_mel: Float[Tensor, "b t m"]) -> Float[Tensor, "b f t"]:
        with torch.autocast(log_mel.device.type, enabled=False):
            magnitude = log_mel.float().exp() @ self.spread.float()
            return rearrange(magnitude.clamp(min=LOG_FLOOR).log(), "b t f -> b f t")


class Backbone(nn.Module):
    """The blocks between two norms: what is worth compiling of a vocoder."""

    def __init__(self, dim: int, depth: int, kernel_size: int, mult: float):
        super().__init__()
        self.first_norm, self.last_norm = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.blocks = nn.ModuleList(ConvNeXtBlock(dim, kernel_size, mult, 1 / depth) for _ in range(depth))

    def forward(self, x: Float[Tensor, "b t d"], mask: Bool[Tensor, "b t"] | None) -> Float[Tensor, "b t d"]:
        x = self.first_norm(x)
        for block in self.blocks:
            x = block(x, mask)
        return self.last_norm(x)


class Vocoder(Network):
    """Turns the log-mel frames of its `mel` settings into sound; with the discriminators and the loss it is trained with."""

    discriminators: Discriminators | None

    def __init__(
        self,
        *,
        n_mels: int = 100,
        sampling_rate: int = 24000,
        f_max: float | None = None,
        n_fft: int = 1024,
        win_length: int | None = None,
        hop_length: int = 256,
        dim: int = 512,
        depth: int = 8,
        kernel_size: int = 7,
        mult: float = 3,
        discr_periods: Sequence[int] = (2, 3, 5, 7, 11),
        discr_windows: Sequence[int] = (2048, 1024, 512),
        discr_channels: int = 32,
        multi_spectral_window_powers_of_two: Sequence[int] = (5, 6, 7, 8, 9, 10, 11),
        multi_spectral_n_mels: Sequence[int] = (5, 10, 20, 40, 80, 160, 320),
        multi_spectral_recon_loss_weight: float = 45.0,
        adversarial_loss_weight: float = 1.0,
        feature_loss_weight: float = 2.0,
        adversarial_loss: AdversarialKind = "hinge",
    ):
        """
        Args:
            n_mels, sampling_rate, f_max, n_fft, win_length, hop_length: of the log-mel frames; f_max is half of the rate where
                nothing is said, win_length n_fft. Those of the MelVoco it is to decode for must be the same.
            dim, depth, kernel_size, mult: features of a frame, blocks, their reach, and how much wider they are inside.
            discr_periods, discr_windows, discr_channels: discriminators of the wave folded at these periods, and of its spectrum
                through these windows, all of this width.
            multi_spectral_window_powers_of_two, multi_spectral_n_mels: the windows, and the bands of each, through which the mel
                spectra of the sound are compared with those of the original.
            multi_spectral_recon_loss_weight, adversarial_loss_weight, feature_loss_weight: of their distance, of what the
                discriminators say and of what their layers see (relative to its size). Factors of the losses: shares of the
                gradient, as a SoundStream has them, would go to silence alone, where logarithms are steepest.
            adversarial_loss: "hinge" or "least_squares".
        """
        super().__init__()
        if adversarial_loss not in ("hinge", "least_squares"):
            raise ValueError(f"adversarial_loss={adversarial_loss!r} must be 'hinge' or 'least_squares'")
        self.mel = mel_settings(n_mels, sampling_rate, f_max, n_fft, win_length, hop_length)
        self.generator = MelToWave(self.mel, dim, depth, kernel_size, mult)
        members: dict[str, nn.Module] = {}
        for period in discr_periods:
            members[f"period_{period}"] = PeriodDiscriminator(period, channels=discr_channels)
        for window in discr_windows:
            members[f"window_{window}"] = BandDiscriminator(window, channels=discr_channels)
        self.discriminators = Discriminators(members) if members else None
        windows = [2**power for power in multi_spectral_window_powers_of_two]
        if len(multi_spectral_n_mels) != len(windows):
            raise ValueError(
                f"multi_spectral_n_mels={list(multi_spectral_n_mels)} must have one number for each of the {len(windows)} windows"
            )
        self.loss = CodecLoss(
            MelLoss(sampling_rate, windows, multi_spectral_n_mels, windows),
            {
                "mel": multi_spectral_recon_loss_weight,
                "adversarial": adversarial_loss_weight if members else 0.0,
                "feature": feature_loss_weight if members else 0.0,
            },
            adversarial=adversarial_loss,
            balanced=False,
        )

    @property
    def sample_hz(self) -> int:
        return self.mel.sampling_rate

    def forward(
        self, log_mel: Float[Tensor, "b t m"], lengths: Int[Tensor, " b"] | None = None
    ) -> Float[Tensor, "b n"]:
        """hop_length samples for each frame. Of each clip the first `lengths` frames count; after them there is silence."""
        if log_mel.shape[-1] != self.mel.n_mels:
            raise ValueError(f"this vocoder hears {self.mel.n_mels} bands a frame, not {log_mel.shape[-1]}")
        return self.generator(log_mel, lengths)


def mel_settings(
    n_mels: int, sampling_rate: int, f_max: float | None, n_fft: int, win_length: int | None, hop_length: int
) -> MelSettings:
    """The settings that these arguments of a constructor mean."""
    return MelSettings(
        sampling_rate,
        n_mels,
        n_fft,
        n_fft if win_length is None else win_length,
        hop_length,
        sampling_rate / 2 if f_max is None else float(f_max),
    )


def _spread(mel: MelSettings) -> Float[Tensor, "m f"]:
    """What each band adds to the magnitude of each frequency: of a flat spectrum the bands give it back."""
    filters = mel_filterbank(mel.sampling_rate, mel.n_fft, mel.n_mels, 0.0, mel.f_max)
    return filters / (filters.T @ filters.sum(dim=1)).clamp(min=1e-12)
