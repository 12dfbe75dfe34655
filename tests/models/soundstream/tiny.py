"""A SoundStream small enough for tests, and something for it to hear."""

from typing import Any

import torch
from torch import Tensor

from helicon.models.soundstream.model import SoundStream

HZ = 8000
SIZES: dict[str, Any] = {
    "channels": 4,
    "strides": (2, 4),
    "channel_mults": (2, 3),
    "codebook_dim": 8,
    "codebook_size": 16,
    "rq_num_quantizers": 3,
    "enc_cycle_dilations": (1,),
    "dec_cycle_dilations": (1,),
    "attn_heads": 2,
    "attn_dim_head": 4,
    "attn_window_size": 5,
    "target_sample_hz": HZ,
    "multi_spectral_window_powers_of_two": (5, 7),
    "multi_spectral_n_mels": (4, 8),
    "discr_periods": (2,),
    "discr_windows": (32,),
    "discr_channels": 2,
}


def tiny(**changes: Any) -> SoundStream:
    torch.manual_seed(0)
    return SoundStream(**{**SIZES, **changes})


def sound(batch: int = 2, length: int = 205, seed: int = 1) -> Tensor:
    """A tone with noise on it `[b, n]`."""
    generator = torch.Generator().manual_seed(seed)
    time = torch.arange(length) / HZ
    pitches = 300 + 600 * torch.rand(batch, 1, generator=generator)
    return 0.4 * torch.sin(6.283 * pitches * time) + 0.05 * torch.randn(batch, length, generator=generator)
