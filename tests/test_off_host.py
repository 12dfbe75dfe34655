"""What is recorded as a CUDA graph asks the host for nothing: training steps of every family, and steps of the token loops."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from helicon import registry
from helicon.models.meshgpt import autoencoder as mesh_autoencoder
from helicon.models.meshgpt import transformer as mesh_transformer
from helicon.models.muse import maskgit
from helicon.models.muse.generate import _Session as PictureSession
from helicon.models.musiclm.towers import TextTransformer
from helicon.nn.decode import _Session as TokenSession
from models.audiolm.tiny import KINDS, TEXTS
from models.meshgpt.tiny import autoencoder, compact, transformer
from models.muse.small_maskgit import SAMPLERS, build
from off_host import OffHost, watched
from test_registry import build as build_trainer

# Of numbers that are on the host anyway: there are none of these checks where they are on a device.
CHECKS_ON_THE_HOST = [
    (mesh_autoencoder, "_check_values"),
    (mesh_transformer, "check_codes"),
    (TextTransformer, "check_ids"),
    (maskgit, "check_ids"),
]
STEPS = 5  # the debug recipe of the codec has its penalty, and its adversary, within so many
BYTES = {"name": "bytes", "dim": 12, "depth": 1, "heads": 2, "dim_head": 6}
READS: dict[str, Any] = {"has_condition": True, "t5_name": BYTES}


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.sum().item(),
        lambda x: x.sum() > 0 or None,
        lambda x: x[x > 0],
        lambda x: x.masked_fill_(x > 0, 0).nonzero(),
        lambda x: torch.where(x > 0),
        lambda x: x.unique(),
        lambda x: x.repeat_interleave(torch.tensor([1, 2])),
        lambda x: x + torch.tensor([1.0, 2.0]),
    ],
)
def test_what_needs_the_host_is_noticed(work: Callable[[torch.Tensor], object]) -> None:
    with OffHost(), pytest.raises(AssertionError):
        assert not work(torch.ones(2))


@pytest.mark.parametrize("name", registry.entries)
def test_a_training_step_needs_no_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the batch that `Task.read` gives to the optimizer; constants that are made once are made before."""
    for owner, check in CHECKS_ON_THE_HOST:
        monkeypatch.setattr(owner, check, lambda *_: None)
    never = dict.fromkeys(("num_train_steps", "save_results_every", "save_model_every"), 1000)
    trainer = build_trainer(name, "run", **never)
    for _ in range(STEPS):
        trainer.train_step()
    steps = watched(monkeypatch, trainer, "_accumulate_and_step")
    for _ in range(STEPS):
        trainer.train_step()
    assert len(steps) == STEPS and float(trainer.bad_steps) == 0


@pytest.mark.parametrize(
    "options", [{}, READS, {**READS, "cond_as_self_attn_prefix": True}], ids=["", "text", "prefix"]
)
@pytest.mark.parametrize("name", KINDS)
def test_a_step_of_every_stage_of_audiolm_needs_no_host(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, steps = KINDS[name], watched(monkeypatch, TokenSession, "_step")
    given = {key: ids for key, ids in kind.tokens.items() if key in ("semantic_token_ids", "coarse_token_ids")}
    if name != "fine":
        given = {key: ids for key, ids in given.items() if key == "semantic_token_ids"}
    sizes = {"max_length": 12} if name == "semantic" else {"max_time_steps": 4} if name != "fine" else {}
    renamed = {"prime_ids": given["semantic_token_ids"]} if name == "semantic" else given
    text = {"text": TEXTS, "cond_scale": 2.0} if options else {}
    kind.stage(kind.build(**options)).generate(**renamed, **sizes, **text)
    assert steps


@pytest.mark.parametrize("tokenizer", [autoencoder, compact])
def test_a_step_of_making_meshes_needs_no_host(tokenizer: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    steps = watched(monkeypatch, TokenSession, "_step")
    transformer(tokenizer()).eval().generate(batch_size=2, max_seq_len=24, temperature=0.9)
    assert steps


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_step_of_making_pictures_needs_no_host(sampler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = watched(monkeypatch, PictureSession, "step")
    build().eval().generate(texts=["a red circle"], sampler=sampler, timesteps=3, cond_scale=2.0, return_ids=True)
    assert len(steps) == 3
