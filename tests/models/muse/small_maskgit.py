"""A MaskGit small enough for tests, and what it is asked for."""

from typing import Any

import pytest
import torch

from helicon.models.muse.maskgit import MaskGit
from helicon.models.muse.transformer import MaskGitTransformer
from helicon.models.muse.vqgan import VQGanVAE

BYTES = {"name": "bytes", "dim": 12, "depth": 1, "heads": 2, "dim_head": 6}
SIZES: dict[str, Any] = {"num_tokens": 64, "dim": 20, "seq_len": 16, "depth": 2, "heads": 2, "dim_head": 6}
SAMPLERS = ["confidence", "reference", "halton"]
TEXTS = ["a red circle", "blue"]
each_sampler = pytest.mark.parametrize("sampler", SAMPLERS)


def tokenizer() -> VQGanVAE:
    torch.manual_seed(0)
    return VQGanVAE(dim=8, layers=2, encdec_resnet_groups=4, codebook_size=64)


def build(options: dict[str, Any] | None = None, **maskgit_options: Any) -> MaskGit:
    torch.manual_seed(0)
    transformer = MaskGitTransformer(**{**SIZES, **(options or {"t5_name": BYTES})})
    with torch.no_grad():
        transformer.token_emb.own.weight[-1] = 0  # of the mask: places differ in nothing else than their positions
        transformer.token_emb.own.weight.mul_(5)  # clear preferences, as after training
    return MaskGit(16, transformer, **maskgit_options)


def inputs_of(maskgit: MaskGit) -> list[torch.Tensor]:
    """Filled with what the transformer is given at each step."""
    seen: list[torch.Tensor] = []
    maskgit.transformer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].clone()))
    return seen
