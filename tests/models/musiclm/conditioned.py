"""A quantizer of a tiny MuLaN's latents, fitted to made-up sounds, and stages of AudioLM that are conditioned on its codes."""

import functools
from typing import Any

import torch
from torch import Tensor

from helicon.data.synthetic_sounds import SyntheticSounds
from helicon.models.musiclm.conditioning import MuLaNEmbedQuantizer
from models.audiolm.tiny import codec, stage_with_codec
from models.musiclm.tiny import HZ, mulan

QUANTIZERS, CODES = 3, 5
DIMS = (16, 16, 9)  # of the fine stage not what its transformer has
CODEC = codec()


@functools.lru_cache
def sounds() -> Tensor:
    """24 of half a second."""
    made_up = SyntheticSounds(24, HZ, 0.5)
    return torch.stack([made_up[index]["audio"] for index in range(24)])


def unfitted(**options: Any) -> MuLaNEmbedQuantizer:
    sizes = {"conditioning_dims": DIMS, "rq_num_quantizers": QUANTIZERS, "codebook_size": CODES}
    return MuLaNEmbedQuantizer(mulan().eval(), **{**sizes, **options})


def quantizer(seed: int = 0, **options: Any) -> MuLaNEmbedQuantizer:
    network = unfitted(**options)
    network.fit([(sounds(), None)], seed=seed)
    return network


def conditioned(name: str, conditioner: Any, **options: Any) -> Any:
    """A stage in evaluation mode."""
    return stage_with_codec(name, CODEC, {"audio_text_condition": True, **options}, audio_conditioner=conditioner)
