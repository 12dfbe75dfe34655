"""How a vocoder is trained: on sounds alone, from their own log-mel frames back to them, against discriminators.

Letters: b batch, n samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from helicon.data.audio import audio_data
from helicon.data.fields import route
from helicon.engine.task import Batch, Loss
from helicon.engine.trainer import Trainer
from helicon.metrics.audio import log_mel_distance, stft_distance
from helicon.models.soundstream.losses import without_padding
from helicon.models.soundstream.task import AdversarialSoundTask, Reconstructed
from helicon.models.soundstream.trainers import BATCH_FIELDS, READY, at_rate, check_length
from helicon.models.voicebox.vocoder import Vocoder

SECONDS = 1.0  # of a sound at a time


@dataclass(frozen=True)
class Vocoded:
    audio: Tensor  # [b, 1, n], float32


class VocoderTask(AdversarialSoundTask):
    """Batches are `{"audio": [b, n] or [b, 1, n]}` at the vocoder's rate, with "audio_lengths" `[b]` where they are padded."""

    model: Vocoder

    def __init__(self, vocoder: Vocoder, *, discr_start_step: int = 0):
        """
        Args:
            discr_start_step: the first step with an adversary; before it the vocoder learns from the spectra alone.
        """
        super().__init__(vocoder, vocoder.generator, discr_start_step=discr_start_step, apply_grad_penalty_every=0)
        self.compiled = {"generator": (vocoder.generator.backbone,)}

    def forward(self, batch: Batch) -> Reconstructed:
        audio, lengths = batch["audio"].float(), batch.get("audio_lengths")
        audio = audio[:, None] if audio.ndim == 2 else audio
        if audio.shape[1] != 1:
            raise ValueError(f"a vocoder learns from sounds of one channel, not {audio.shape[1]}: mix them first")
        audio = without_padding(audio, lengths)
        mel = self.model.mel
        with torch.no_grad():
            log_mel = mel.log_mel(audio[:, 0])
        made = self.networks["generator"](log_mel, None if lengths is None else mel.frame_lengths(lengths))
        return Reconstructed(audio, lengths, Vocoded(made[:, None, : audio.shape[-1]]))

    def validate(self, batch: Batch) -> Loss:
        """The distance of log-mel spectra, with no adversary in it and nothing random: comparable from step to step."""
        outputs = self.forward(batch)
        audio, target, lengths = outputs.reconstruction.audio, outputs.target, outputs.lengths
        distance = log_mel_distance(audio, target, self.model.sample_hz, lengths).mean()
        return Loss(
            distance,
            {"log_mel_distance": distance, "stft_distance": stft_distance(audio, target, lengths).mean()},
        )


class VocoderTrainer(Trainer):
    """Trains a `Vocoder` on a folder or manifest of sounds, or any dataset of them; their texts are not needed."""

    name = "vocoder"
    defaults: ClassVar = {
        "lr": 5e-4,
        "betas": (0.8, 0.9),
        "scheduler": "cosine",
        "max_grad_norm": 1.0,
        "ema_beta": 0.999,
    }

    def __init__(
        self,
        vocoder: Vocoder,
        *,
        folder: str | Path | None = None,
        dataset: Any = None,
        val_dataset: Any = None,
        train_dataloader: Any = None,
        val_dataloader: Any = None,
        data_max_length_seconds: float | None = None,
        discr_start_step: int = 0,
        ds_fields: Sequence[str] | None = None,
        **options: Any,
    ):
        """
        Args:
            folder: sounds to learn from, in it and below (or a manifest of them).
            dataset: anything else that holds sounds (a SoundDataset, a torch or Hugging Face dataset), in place of the folder.
            data_max_length_seconds: how much of a sound is heard at a time; 1 second where nothing is said.
            discr_start_step: the first step at which the discriminators take part.
            ds_fields: names for the entries of a dataset's tuples, where their types do not tell.
        """
        if folder is not None and dataset is not None:
            raise ValueError("give a folder or a dataset of sounds, not both")
        self.ds_fields = ds_fields
        find = lambda source: _sounds(source, vocoder.sample_hz, data_max_length_seconds, ds_fields)
        super().__init__(
            VocoderTask(vocoder, discr_start_step=discr_start_step),
            dataset=find(folder if folder is not None else dataset),
            val_dataset=find(val_dataset),
            train_dataloader=train_dataloader,
            val_dataloader=val_dataloader,
            **options,
        )

    def prepare(self, batch: Any) -> Batch:
        return route(batch, BATCH_FIELDS, self.ds_fields)


def _sounds(source: Any, sample_hz: int, seconds: float | None, ds_fields: Sequence[str] | None) -> Any:
    """Samples {"audio"} at the vocoder's rate."""
    if source is None:
        return None
    if not isinstance(source, READY):
        seconds = SECONDS if seconds is None else seconds
        check_length(None, seconds, sample_hz)
        return audio_data(source, sample_hz, max_length_seconds=seconds, ds_fields=ds_fields)
    if seconds is not None:
        raise ValueError(
            "the sounds of this dataset are cut already: leave out data_max_length_seconds, or give it there"
        )
    return at_rate(source, sample_hz, "vocoder")
