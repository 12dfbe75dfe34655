"""How good sounds are, as pure functions of tensors; what is to be heard in one; and a spectrogram to look at.

Spectra are short-time Fourier transforms with a periodic Hann window, centred on multiples of the hop, with zeros beyond
both ends: so any length will do, and a padded sound has the frames of the sound alone. Always float32, outside autocast.

Letters: b batch, c channels, n samples, f frequencies, m mel bands, t frames.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional as F

LOG_FLOOR = 1e-5  # spectra are no lower before a logarithm is taken
STFT_RESOLUTIONS = (
    (512, 50, 240),
    (1024, 120, 600),
    (2048, 240, 1200),
)  # transform, hop, window (Yamamoto et al. 2020)


def spectrogram(
    audio: Float[Tensor, "*b n"], n_fft: int, hop: int, win_length: int | None = None, power: float = 1.0
) -> Float[Tensor, "*b f t"]:
    """|STFT|^power, with 1 + n_fft / 2 frequencies and 1 + n / hop frames (rounded down)."""
    win_length = n_fft if win_length is None else win_length
    with torch.autocast(audio.device.type, enabled=False):
        spectrum = torch.stft(
            audio.float().reshape(-1, audio.shape[-1]),
            n_fft,
            hop,
            win_length,
            window=_constant(torch.hann_window, audio.device, win_length),
            pad_mode="constant",
            return_complex=True,
        )
        magnitude = spectrum.abs()  # its gradient at zero is zero
        return (magnitude if power == 1 else magnitude**power).reshape(*audio.shape[:-1], *spectrum.shape[-2:])


def mel_spectrogram(
    audio: Float[Tensor, "*b n"],
    sample_hz: int,
    n_fft: int = 1024,
    hop: int = 256,
    n_mels: int = 80,
    *,
    win_length: int | None = None,
    f_min: float = 0.0,
    f_max: float | None = None,
    power: float = 1.0,
) -> Float[Tensor, "*b m t"]:
    """The spectrogram in the bands of `mel_filterbank`."""
    spectrum = spectrogram(audio, n_fft, hop, win_length, power)
    f_max = sample_hz / 2 if f_max is None else f_max
    filters = _constant(mel_filterbank, audio.device, sample_hz, n_fft, n_mels, f_min, f_max)
    with torch.autocast(audio.device.type, enabled=False):
        return filters @ spectrum


def mel_filterbank(
    sample_hz: int, n_fft: int, n_mels: int, f_min: float = 0.0, f_max: float | None = None
) -> Float[Tensor, "m f"]:
    """Triangular bands, equally wide and half overlapping on Slaney's mel scale (linear to 1 kHz, logarithmic above), of
    equal area: what librosa, and the vocoders trained with it, use by default."""
    f_max = sample_hz / 2 if f_max is None else f_max
    if not 0 <= f_min < f_max <= sample_hz / 2:
        raise ValueError(f"f_min={f_min}, f_max={f_max}: they must rise, from 0 to half of sample_hz={sample_hz}")
    edges = _mel_to_hz(np.linspace(_hz_to_mel(f_min), _hz_to_mel(f_max), n_mels + 2))
    frequencies = np.linspace(0, sample_hz / 2, 1 + n_fft // 2)
    lower, centre, upper = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising, falling = (frequencies - lower) / (centre - lower), (upper - frequencies) / (upper - centre)
    filters = np.maximum(0, np.minimum(rising, falling)) * 2 / (upper - lower)
    if not filters.any(axis=1).all():
        raise ValueError(
            f"n_mels={n_mels}: the lowest bands are narrower than the {sample_hz / n_fft:.1f} Hz between two frequencies and "
            f"stay empty; use fewer bands or n_fft more than {n_fft}"
        )
    return torch.from_numpy(filters.astype(np.float32))


def _hz_to_mel(hz: float) -> float:
    return hz * 3 / 200 if hz < 1000 else 15 + 27 * math.log(hz / 1000) / math.log(6.4)


def _mel_to_hz(mel: Float[np.ndarray, "k"]) -> Float[np.ndarray, "k"]:
    return np.where(mel < 15, mel * 200 / 3, 1000 * np.exp((mel - 15) * math.log(6.4) / 27))


_constants: dict[Any, Tensor] = {}


def _constant(make: Callable[..., Tensor], device: torch.device, *arguments: float) -> Tensor:
    """make(*arguments) on the device, made once."""
    key = (make, device, *arguments)
    if key not in _constants:
        _keep(key, make, device, *arguments)
    return _constants[key]


@torch.compiler.disable  # or the compiler would have them computed at every call
def _keep(key: Any, make: Callable[..., Tensor], device: torch.device, *arguments: float) -> None:
    with torch.inference_mode(False):  # a tensor of inference mode could not take part in training later on
        _constants[key] = make(*arguments).to(device)


def log_mel_distance(
    audio: Float[Tensor, "b *c n"],
    targets: Float[Tensor, "b *c n"],
    sample_hz: int,
    lengths: Int[Tensor, "b"] | None = None,
) -> Float[Tensor, "b"]:
    """The mean of |ln mel(audio) - ln mel(targets)| over bands and frames: 80 bands up to half of sample_hz of the
    magnitude spectrogram, windows of 1024, hop 256, no lower than 1e-5. `lengths` tells how much of each is not padding."""
    audio, targets = _without_padding(audio, lengths), _without_padding(targets, lengths)
    a, b = (mel_spectrogram(x, sample_hz).clamp(min=LOG_FLOOR).log() for x in (audio, targets))
    return _frame_mean((a - b).abs(), 256, lengths)


def stft_distance(
    audio: Float[Tensor, "b *c n"],
    targets: Float[Tensor, "b *c n"],
    lengths: Int[Tensor, "b"] | None = None,
    resolutions: Sequence[tuple[int, int, int]] = STFT_RESOLUTIONS,
) -> Float[Tensor, "b"]:
    """The multi-resolution STFT distance (Yamamoto et al. 2020, arXiv:1910.11480), for magnitudes A and B (of the target):

    mean over resolutions of  ||A - B|| / ||B||  +  mean |ln A - ln B|
    """
    audio, targets = _without_padding(audio, lengths), _without_padding(targets, lengths)
    distances = []
    for n_fft, hop, win_length in resolutions:
        a, b = (spectrogram(x, n_fft, hop, win_length).clamp(min=LOG_FLOOR) for x in (audio, targets))
        error, energy = (_frame_mean(x.square(), hop, lengths) for x in (a - b, b))
        # (The root of 0 has an infinite slope, which equal spectra would meet.)
        convergence = (error / energy).clamp(min=1e-12).sqrt()
        distances.append(convergence + _frame_mean((a.log() - b.log()).abs(), hop, lengths))
    return torch.stack(distances).mean(dim=0)


def si_sdr(
    audio: Float[Tensor, "b *c n"], targets: Float[Tensor, "b *c n"], lengths: Int[Tensor, "b"] | None = None
) -> Float[Tensor, "b"]:
    """Scale-invariant signal-to-distortion ratio in decibels (Le Roux et al. 2019, arXiv:1811.02508), from -100 to 100.

    Of a target that is silent it is -100, which says nothing: leave such sounds out of a mean (`is_silent`).

    With both made zero-mean: 10 log10(|a target|^2 / |a target - audio|^2), a = <audio, target> / |target|^2.
    """
    a, b = (_centred(x, lengths).flatten(1) for x in (audio, targets))
    tiny = torch.finfo(b.dtype).tiny
    projection = b * ((a * b).sum(dim=1) / b.square().sum(dim=1).clamp(min=tiny))[:, None]
    signal, distortion = projection.square().sum(dim=1), (projection - a).square().sum(dim=1)
    return (10 * torch.log10(signal.clamp(min=tiny) / distortion.clamp(min=tiny))).clamp(-100, 100).float()


def is_silent(audio: Float[Tensor, "b *c n"], lengths: Int[Tensor, "b"] | None = None) -> Bool[Tensor, "b"]:
    """Whether a sound never leaves its mean by half a step of 16 bits: then there is no signal, and no SI-SDR to be had."""
    return (_centred(audio, lengths).abs() < 2**-16).flatten(1).all(dim=1)


def _centred(audio: Float[Tensor, "b *c n"], lengths: Int[Tensor, "b"] | None) -> Float[Tensor, "b *c n"]:
    """With a mean of zero, in float64; zeros where there is padding."""
    count = audio.shape[-1] if lengths is None else lengths.reshape(-1, *[1] * (audio.ndim - 1))
    wide = _without_padding(audio.double(), lengths)
    return _without_padding(wide - wide.sum(dim=-1, keepdim=True) / count, lengths)


def _without_padding(audio: Float[Tensor, "b *c n"], lengths: Int[Tensor, "b"] | None) -> Float[Tensor, "b *c n"]:
    """Zeros where there is padding, whatever it holds."""
    if lengths is None:
        return audio
    is_sound = torch.arange(audio.shape[-1], device=audio.device) < lengths.reshape(-1, *[1] * (audio.ndim - 1))
    return torch.where(is_sound, audio, 0)


def _frame_mean(values: Float[Tensor, "b *c f t"], hop: int, lengths: Int[Tensor, "b"] | None) -> Float[Tensor, "b"]:
    """The mean over all but the batch, of those frames that the sound alone would have."""
    frames = values.flatten(1, -2).mean(dim=1)
    if lengths is None:
        return frames.mean(dim=-1)
    is_sound = torch.arange(frames.shape[-1], device=frames.device) <= lengths[:, None] // hop
    return (frames * is_sound).sum(dim=-1) / is_sound.sum(dim=-1)


# Where one word ends and the next begins, between the values that `helicon.data.synthetic_sounds` draws.
LOWEST_MIDDLE, LOWEST_HIGH = 403.0, 1207.0  # Hz
QUIETEST_LOUD = 0.06  # root mean square of the loudest frame
SILENCE = 1e-3
LEAST_ACTIVE = 0.3  # of the loudest frame; quieter ones are not listened to
LEAST_CHANGE = 0.35  # octaves, from which on a sound rises or falls
LEAST_TONAL = 0.7  # of a frame's energy at one pitch and its harmonics, from which on it is no noise
LEAST_SUSTAINED = 0.7  # the median frame, of the loudest: a pluck has less


@dataclass(frozen=True)
class SoundDescription:
    """What was heard in a sound, in words and in the numbers they come from."""

    kind: str  # tone, chirp, pluck, noise burst; or silence, whose other words are empty
    pitch: str  # low, middle, high
    direction: str  # rising, falling, steady
    loudness: str  # soft, loud
    hz: float  # of the pitch, or the middle of the noise
    octaves: float  # that the pitch rises from begin to end
    level: float  # root mean square of the loudest frame


def describe_sound(wave: Float[Tensor, "n"], sample_hz: int) -> SoundDescription:
    """The words of `helicon.data.synthetic_sounds`, by rule: loudness from the loudest frame (of 64 ms), pitch from the
    strongest frequency of each frame, direction from its trend, kind from how pure, how steady and how sustained it is.

    On those sounds each word is right for at least 99 of 100, also in noise 20 dB below them.
    """
    size = round(0.064 * sample_hz)
    wave = wave.detach().float().cpu()
    if not wave.isfinite().all():
        raise ValueError("a sound whose values are infinite or not numbers cannot be described")
    wave = F.pad(wave, (0, max(0, size - len(wave))))
    frames = wave.unfold(0, size, size // 4)
    levels = _levels(frames)
    level = levels.max().item()
    if level < SILENCE:
        return SoundDescription("silence", "", "", "", 0.0, 0.0, level)
    loudness = "loud" if level >= QUIETEST_LOUD else "soft"
    is_active = levels > LEAST_ACTIVE * level
    power = torch.fft.rfft(frames[is_active] * torch.hann_window(size), n=4 * size).abs().square()
    frequencies = torch.linspace(0, sample_hz / 2, power.shape[1])
    pitches = frequencies[power.argmax(dim=1)].clamp(min=frequencies[1])
    if _tonality(power, frequencies, pitches, sample_hz / size).median() < LEAST_TONAL:
        below = power.sum(dim=0).cumsum(dim=0)
        hz = frequencies[(below < below[-1] / 2).sum()].item()  # half of the energy is lower, half is higher
        return SoundDescription("noise burst", _pitch_word(hz), "steady", loudness, hz, 0.0, level)
    times = is_active.nonzero().flatten().float()
    hz, octaves = pitches.median().item(), _trend(times, pitches.log2())
    kind, direction = "tone" if _is_sustained(wave, sample_hz) else "pluck", "steady"
    if abs(octaves) >= LEAST_CHANGE:
        kind, direction = "chirp", "rising" if octaves > 0 else "falling"
    return SoundDescription(kind, _pitch_word(hz), direction, loudness, hz, octaves, level)


def _levels(frames: Float[Tensor, "t n"]) -> Float[Tensor, "t"]:
    return frames.square().mean(dim=1).sqrt()


def _is_sustained(wave: Float[Tensor, "n"], sample_hz: int) -> bool:
    """In frames of 20 ms, which a short pluck has enough of."""
    levels = _levels(wave.unfold(0, sample_hz // 50, sample_hz // 100))
    active = levels[levels > LEAST_ACTIVE * levels.max()]
    return bool(active.median() >= LEAST_SUSTAINED * levels.max())


def _pitch_word(hz: float) -> str:
    return "low" if hz < LOWEST_MIDDLE else "middle" if hz < LOWEST_HIGH else "high"


def _tonality(
    power: Float[Tensor, "t f"], frequencies: Float[Tensor, "f"], pitches: Float[Tensor, "t"], bin_width: float
) -> Float[Tensor, "t"]:
    """The part of each frame's energy that lies within the window's main lobe of a harmonic; wider by what a chirp moves."""
    harmonic = (frequencies / pitches[:, None]).round().clamp(min=1)
    distance = (frequencies - harmonic * pitches[:, None]).abs()
    is_near = (distance < 2 * bin_width + 0.05 * pitches[:, None]) & (harmonic <= 6)
    return (power * is_near).sum(dim=1) / power.sum(dim=1)


def _trend(times: Float[Tensor, "t"], values: Float[Tensor, "t"]) -> float:
    """How far a line rises from the first time to the last: its slope is the median of those between any two points
    (Theil and Sen), which a few wrong ones do not move."""
    if len(times) < 2:
        return 0.0
    first, second = torch.triu_indices(len(times), len(times), 1)
    slope = ((values[second] - values[first]) / (times[second] - times[first])).median()
    return (slope * (times[-1] - times[0])).item()


# Black over violet, red and orange to a light yellow, evenly brighter: colours of the levels from the lowest to the highest.
COLOURS = ((0, 0, 4), (40, 17, 89), (114, 31, 129), (183, 55, 121), (241, 96, 93), (254, 176, 120), (252, 253, 191))
LEVELS = (-90, 0)  # decibels; 0 is a sine of full scale
PLOT, MARGINS = (760, 300), (52, 34, 70, 44)  # width and height; left, top, right, bottom
INK, PAPER = (40, 40, 48), (255, 255, 255)


def spectrogram_image(wave: Float[Tensor, "n"], sample_hz: int, title: str = "") -> Image.Image:
    """What a sound looks like: time to the right, frequency upwards on the mel scale, level as colour."""
    if len(wave) < 1:
        raise ValueError("a sound of no samples has no spectrogram")
    (width, height), (left, top, right, bottom) = PLOT, MARGINS
    picture = Image.new("RGB", (left + width + right, top + height + bottom), PAPER)
    picture.paste(
        _coloured(_decibels(wave.detach().cpu(), sample_hz)).resize(PLOT, Image.Resampling.BICUBIC), (left, top)
    )
    scale = np.linspace(LEVELS[1], LEVELS[0], height)[:, None]
    picture.paste(_coloured(scale).resize((12, height)), (left + width + 12, top))

    draw = ImageDraw.Draw(picture)
    draw.font = ImageFont.load_default(13)
    draw.text((left + width / 2, top / 2), title, INK, anchor="mm")
    draw.text((left + width / 2, top + height + 34), "seconds", INK, anchor="mm")
    draw.text((left - 8, top / 2), "kHz", INK, anchor="rm")
    draw.text((left + width + 28, top / 2), "dB", INK, anchor="lm")
    for seconds in _ticks(len(wave) / sample_hz):
        x = left + seconds * sample_hz / len(wave) * (width - 1)
        draw.line((x, top + height, x, top + height + 4), INK)
        draw.text((x, top + height + 14), f"{seconds:g}", INK, anchor="mm")
    for hz in (hz for hz in (0, 250, 500, 1000, 2000, 4000, 8000, 16000) if hz <= sample_hz / 2):
        y = top + (height - 1) * (1 - _hz_to_mel(hz) / _hz_to_mel(sample_hz / 2))
        draw.line((left - 5, y, left - 1, y), INK)
        draw.text((left - 8, y), f"{hz / 1000:g}", INK, anchor="rm")
    for level in range(LEVELS[0], LEVELS[1] + 1, 30):
        y = top + (height - 1) * (LEVELS[1] - level) / (LEVELS[1] - LEVELS[0])
        draw.text((left + width + 28, y), f"{level}", INK, anchor="lm")
    return picture


def _decibels(wave: Float[Tensor, "n"], sample_hz: int) -> Float[np.ndarray, "h t"]:
    """Levels at the heights of the plot, the highest frequency first."""
    size = max(2, 2 * round(0.02 * sample_hz))
    magnitude = spectrogram(wave, 4 * size, max(1, len(wave) // PLOT[0]), size) * 4 / size  # a sine of full scale is 1
    mels = np.linspace(_hz_to_mel(sample_hz / 2), 0, PLOT[1])
    places = torch.from_numpy(_mel_to_hz(mels) / (sample_hz / 2)).float() * (len(magnitude) - 1)
    below = places.long().clamp(max=len(magnitude) - 2)
    way = (places - below)[:, None]
    rows = magnitude[below] * (1 - way) + magnitude[below + 1] * way
    return (20 * rows.clamp(min=1e-9).log10()).numpy()


def _coloured(levels: Float[np.ndarray, "h t"]) -> Image.Image:
    places = np.clip((levels - LEVELS[0]) / (LEVELS[1] - LEVELS[0]), 0, 1) * (len(COLOURS) - 1)
    channels = [np.interp(places, range(len(COLOURS)), channel) for channel in zip(*COLOURS, strict=True)]
    return Image.fromarray(np.stack(channels, axis=-1).round().astype(np.uint8))


def _ticks(length: float) -> list[float]:
    """Round numbers from 0 to `length`, four to ten of them."""
    step = 10.0 ** math.floor(math.log10(length))
    step = next(part for part in (step / 10, step / 5, step / 2, step, 2 * step) if length / part <= 10)
    return [round(number * step, 9) for number in range(int(length / step + 1e-9) + 1)]
