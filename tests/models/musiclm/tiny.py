"""Towers of a few thousand parameters, and sounds with captions that tell them apart."""

from typing import Any

import torch
from torch import Tensor

from helicon.data.synthetic_sounds import SyntheticSounds
from helicon.models.musiclm.mulan import MuLaN
from helicon.models.musiclm.towers import AudioSpectrogramTransformer, TextTransformer

HZ = 8000
PLAIN: dict[str, Any] = {
    "spec_aug_stretch_factor": 1.0,
    "spec_aug_freq_mask": 0,
    "spec_aug_time_mask": 0,
    "patch_dropout_prob": 0.0,
}


def audio_tower(depth: int = 1, **options: Any) -> AudioSpectrogramTransformer:
    sizes: dict[str, Any] = {"patch_size": 8, "dim_head": 8, "heads": 2, "sample_hz": HZ, "n_mels": 32}
    return AudioSpectrogramTransformer(16, depth, **{**sizes, **options})


def text_tower(depth: int = 1, **options: Any) -> TextTransformer:
    return TextTransformer(16, depth, **{"dim_head": 8, "heads": 2, **options})


def mulan(depth: int = 1, audio: dict[str, Any] | None = None, **options: Any) -> MuLaN:
    torch.manual_seed(0)
    return MuLaN(audio_tower(depth, **(audio or {})), text_tower(depth), dim_latent=12, **options)


def pairs(count: int) -> tuple[Tensor, list[str]]:
    """Sounds of half a second, no two with the same caption."""
    sounds = SyntheticSounds(20 * count, HZ, 0.5)
    chosen: dict[str, Tensor] = {}
    for index in range(len(sounds)):
        sound = sounds[index]
        chosen.setdefault(sound["texts"], sound["audio"])
    captions = list(chosen)[:count]
    return torch.stack([chosen[caption] for caption in captions]), captions


def padded(clips: Tensor, lengths: Tensor) -> Tensor:
    """Clips of these lengths, with NaN where nobody may look."""
    return torch.where(torch.arange(clips.shape[1]) < lengths[:, None], clips, torch.nan)
