"""Sounds and sound files for the tests of data."""

import io
from pathlib import Path

import numpy as np
import soundfile
import torch

from helicon.data.recording import SoundFile

KINDS = [
    ("wav", "PCM_16"),
    ("wav", "PCM_24"),
    ("wav", "FLOAT"),
    ("flac", "PCM_16"),
    ("ogg", "VORBIS"),
    ("opus", "OPUS"),
    ("mp3", "MPEG_LAYER_III"),
]


def noise(seconds: float, hz: int, channels: int = 1, seed: int = 0) -> np.ndarray:
    """Rather low noise, as what is above the highest frequency of a lower rate must not matter much."""
    wave = np.random.default_rng(seed).standard_normal((round(seconds * hz), channels)) * 0.3
    wave = sum(np.roll(wave, shift, axis=0) for shift in range(4)) / 4
    return wave[:, 0] if channels == 1 else wave


def encoded(wave: np.ndarray, hz: int, extension: str, subtype: str | None = None) -> bytes:
    buffer = io.BytesIO()
    # Few bits, of which each block of an mp3 borrows from those before it: seeking in it is the harder.
    options = {"bitrate_mode": "VARIABLE", "compression_level": 0.9} if extension == "mp3" else {}
    soundfile.write(buffer, wave, hz, format="ogg" if extension == "opus" else extension, subtype=subtype, **options)
    return buffer.getvalue()


def write(path: Path, wave: np.ndarray, hz: int = 16000, subtype: str | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(wave, hz, path.suffix[1:], subtype))
    return path


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def opened(path: Path, *part: float) -> SoundFile:
    return SoundFile(path, str(path), *part)


def ramp(seconds: float, hz: int = 8000) -> np.ndarray:
    """Tells where a crop comes from."""
    return np.linspace(0.1, 1, round(seconds * hz), endpoint=False)
