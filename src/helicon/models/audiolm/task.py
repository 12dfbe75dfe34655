"""How the stages of AudioLM are trained: one loss, from waves that the frozen networks read or from the tokens of a cache.

Letters: b batch, n samples.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from helicon.engine.task import Batch, Loss, Task, Update
from helicon.models.audiolm.generate import waves_of
from helicon.models.audiolm.stage import Losses, Stage
from helicon.models.audiolm.wrappers import (
    CoarseTransformerWrapper,
    DelayedTransformerWrapper,
    FineTransformerWrapper,
)
from helicon.models.soundstream.task import sound_files

MAX_SHOWN = 4
TOKENS = "tokens"  # where a batch keeps what the frozen networks made of it


class StageTask(Task):
    """Batches hold waves or tokens, as `helicon.models.audiolm.data` says, and what the transformer is conditioned on: "texts", or
    "text_embeds" `[b, t, e]` (zero where padded, or with "text_embeds_lengths"), or "condition_ids" `[b, q]`; these two an
    audio_conditioner makes of the waves.

    The loss is a mean over tokens, of which batches have different numbers: each weighs as many as it has.
    """

    model: Stage
    unit = "tokens"

    def __init__(self, stage: Stage):
        super().__init__(stage, frozen=stage.frozen)

    def tokens(self, batch: Batch) -> dict[str, Any]:
        """What the network reads of a batch; made once, and kept in the batch."""
        if TOKENS not in batch:
            batch[TOKENS] = self.model.tokens(batch)
        return batch[TOKENS]

    def read(self, batch: Batch) -> Batch:
        """Tokens and what they are conditioned on. (Waves have more different lengths than their tokens.)"""
        return {TOKENS: self.tokens(batch), **self.model.condition_of_batch(batch)}

    def weight(self, batch: Batch) -> Tensor:
        return self.model.num_labels(**self.tokens(batch))

    def units(self, batch: Batch) -> int:
        """Tokens, padding among them: how many are real only the device knows."""
        return sum(ids.numel() for name, ids in self.tokens(batch).items() if ids is not None and name != "is_end")

    def forward(self, batch: Batch, **options: Any) -> Losses:
        condition = self.model.condition_of_batch(batch)
        return self.networks["model"](**self.tokens(batch), **condition, **options, return_losses=True)

    def updates(self, step: int) -> Sequence[Update]:
        return [Update("model", lambda losses: Loss(losses.total, losses.parts))]

    def validate(self, batch: Batch) -> Loss:
        """The same loss, with the text always there."""
        losses = self.forward(batch, cond_drop_prob=0.0)
        return Loss(losses.total.detach(), losses.parts)

    @torch.no_grad()
    def sample(self, batch: Batch, seed: int) -> list[Tensor] | None:
        """Sounds `[n]` of the first tokens of the batch, whose codes this stage makes; a semantic stage makes none by itself."""
        stage = self.model
        if stage.codec is None:
            return None
        shown: dict[str, Any] = {
            name: None if ids is None else ids[:MAX_SHOWN] for name, ids in self.tokens(batch).items()
        }
        few = {name: value[:MAX_SHOWN] for name, value in batch.items() if name != TOKENS}
        options: dict[str, Any] = {**stage.condition_of_batch(few), "seed": seed, "reconstruct_wave": True}
        if isinstance(stage, FineTransformerWrapper):
            made = stage.generate(coarse_token_ids=shown["coarse_token_ids"], **options)
        elif isinstance(stage, (CoarseTransformerWrapper, DelayedTransformerWrapper)):
            frames = next(ids for ids in shown.values() if ids is not None and ids.ndim == 3).shape[1]
            options["max_time_steps"] = frames
            made = stage.generate(semantic_token_ids=shown["semantic_token_ids"], **options)
        else:
            return None
        return [wave.float().cpu() for wave in made]

    def present(self, batch: Batch, samples: Mapping[str, Any]) -> Mapping[str, Callable[[Path], object]]:
        """Each sound as far as this stage's codes tell it, what was made, and the spectrograms of them all as one picture."""
        made = {name: waves for name, waves in samples.items() if waves is not None}
        if not made:
            return {}
        stage = self.model
        tokens = self.tokens(batch)
        codes = [ids[:MAX_SHOWN] for ids in tokens.values() if ids is not None and ids.ndim == 3]
        given = {"original": [wave.float().cpu() for wave in waves_of(stage.codec, torch.cat(codes, dim=-1))], **made}
        count = min(len(waves) for waves in given.values())
        rows = [{name: _channels(waves[number]) for name, waves in given.items()} for number in range(count)]
        return sound_files(rows, stage.codec.sample_hz)


def _channels(wave: Tensor) -> Tensor:
    return wave[None] if wave.ndim == 1 else wave
