"""MuLaN's trainer: how its data is found, and the defaults it trains with; and the `model` section of its recipes. The loop is the
engine's."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from helicon.config import check, signature_without
from helicon.data.fields import TEXT, Field, is_tensor, route
from helicon.data.paired import CaptionSource
from helicon.engine.feed import steps_of_epochs
from helicon.engine.options import TrainerOptions
from helicon.engine.task import Batch
from helicon.engine.trainer import Trainer
from helicon.metrics.retrieval import Retrieval
from helicon.models.musiclm.data import NAMES, CaptionedSource, check_captions, collate_captioned
from helicon.models.musiclm.mulan import MuLaN
from helicon.models.musiclm.pretrained import (
    PretrainedAudioTransformer,
    PretrainedSpectrogramEncoder,
    PretrainedTextTransformer,
)
from helicon.models.musiclm.task import MuLaNTask
from helicon.models.musiclm.towers import AudioSpectrogramTransformer, TextTransformer
from helicon.models.text.pretrained import PretrainedTextEncoder

BATCH_FIELDS = {
    "audio": Field(is_tensor(True, 2), "a float tensor [b, n]"),
    "texts": replace(TEXT, is_required=False),
    "text_token_ids": Field(
        is_tensor(False, 2), "an integer tensor [b, t], -1 (or the network's pad_id) past the end", is_required=False
    ),
    "audio_lengths": Field(is_tensor(False, 1), "an integer tensor [b]", is_required=False),
}


class MuLaNTrainer(Trainer):
    """Trains a `MuLaN` on sounds with texts."""

    name = "mulan"
    defaults: ClassVar = {
        "lr": 3e-4,
        "betas": (0.9, 0.99),
        "max_grad_norm": 0.5,
        "ema_beta": 0.999,
        "save_results_every": 1000,
        "val_num_batches": None,
    }

    task: MuLaNTask

    def __init__(
        self,
        mulan: MuLaN,
        dataset: Any = None,
        *,
        folder: str | Path | None = None,
        val_dataset: Any = None,
        train_dataloader: Any = None,
        val_dataloader: Any = None,
        num_train_steps: int | None = None,
        data_max_length: float | None = None,
        data_max_length_seconds: float | None = None,
        captions: CaptionSource | None = None,
        text_column: str = "text",
        chunk_size: int | None = None,
        use_lion: bool = False,
        ds_fields: Sequence[str] | None = None,
        **options: Any,
    ):
        """
        Args:
            dataset: what `training_captioned` returns, or anything else that holds sounds with texts, such as a torch Dataset of
                (wave, text).
            folder: in its place, sounds to learn from, in it and below (or a manifest of them); `captions` tells where the texts are.
            num_train_steps: one epoch where nothing is said.
            data_max_length, data_max_length_seconds: how much of a sound is heard at a time, in samples or in seconds; from which
                moment on is drawn anew in every epoch. The network keeps it (`clip_seconds`), also of a train_dataloader's sounds.
            captions: where the text of a sound is: in the "column" `text_column`, in a file "beside" it, or the name of its "folder".
            chunk_size: pairs that pass the towers at a time; the batch is compared as a whole. This is how a large batch fits in
                memory: what a pair is told from are the others of its batch, so a larger one is a harder and better lesson.
                (grad_accum_every makes no larger one: pairs of different micro-batches are never compared.)
            use_lion: another way to say optimizer="lion".
            ds_fields: names for the entries of a dataset's tuples, where their types do not tell.
        """
        if getattr(mulan.audio, "accept_spec", False):
            raise ValueError(
                "this MuLaN takes spectra (accept_spec=True), and its trainer reads sounds: build it without, and it makes their spectra"
            )
        if folder is not None and dataset is not None:
            raise ValueError("give a folder or a dataset of sounds, not both")
        if chunk_size is not None and options.get("compile") == "graphs":
            raise ValueError(
                'compile="graphs" cannot record steps in which chunks are passed twice: use compile=True, or no chunk_size'
            )
        if use_lion and options.setdefault("optimizer", "lion") != "lion":
            raise ValueError(f"use_lion=True and optimizer={options['optimizer']!r} are two optimizers: give one")
        self.ds_fields = None if ds_fields is None else [NAMES.get(name, name) for name in ds_fields]
        keywords: dict[str, Any] = {
            "data_max_length": data_max_length,
            "data_max_length_seconds": data_max_length_seconds,
            "captions": captions,
            "text_column": text_column,
            "ds_fields": ds_fields,
        }

        def captioned(source: Any) -> CaptionedSource:
            return source if isinstance(source, CaptionedSource) else CaptionedSource(source, **keywords)

        def find(source: Any) -> Any:
            return None if source is None else captioned(source).at(mulan.sample_hz)

        source = folder if folder is not None else dataset
        found, held_out = find(source), find(val_dataset)
        if (seconds := captioned(source).clip_seconds(mulan.sample_hz)) is not None:
            mulan.learns_from(seconds)
        if found is not None:
            check_captions(found)
        if num_train_steps is None:
            if found is None:
                raise ValueError("how long shall it learn? Of a train_dataloader give num_train_steps")
            chosen = TrainerOptions.from_keywords({**options, "num_train_steps": 0}, self.defaults, "MuLaNTrainer")
            is_split = held_out is None and val_dataloader is None
            num_train_steps = steps_of_epochs(1, found, is_split, chosen)
        super().__init__(
            MuLaNTask(mulan, chunk_size=chunk_size),
            dataset=found,
            val_dataset=held_out,
            train_dataloader=train_dataloader,
            val_dataloader=val_dataloader,
            collate=collate_captioned,
            num_train_steps=num_train_steps,
            **options,
        )
        if found is not None and self.feed.batch_size * self.runtime.world_size < 2:
            raise ValueError("batch_size=1 leaves a pair nothing to be told from: give 2 or more")
        held_out = self.feed.val_dataset
        if held_out is not None and len(held_out) < 2:
            raise ValueError(
                "one sound alone is held out to validate on, and sounds are told from each other: hold out more with "
                f"valid_frac={2 / (len(self.feed.dataset) + 1):.2g} (it is {self.options.valid_frac}), or none with 0"
            )

    def prepare(self, batch: Any) -> Batch:
        if isinstance(batch, Mapping):
            batch = {NAMES.get(name, name): value for name, value in batch.items()}
        named = route(batch, BATCH_FIELDS, self.ds_fields)
        reader = self.unwrapped_mulan.text
        if "text_token_ids" in named and isinstance(reader, TextTransformer):
            reader.check_ids(
                named["text_token_ids"].clamp(min=0)
            )  # (On the host, which the network itself cannot look at.)
        return named

    def data_tuple_to_kwargs(self, data: Any) -> Batch:
        """A batch of a user's own DataLoader by the names its entries have here."""
        return self.prepare(data)

    def validate(self) -> dict[str, float]:
        """The validation loss, a mean over batches; and how well all of their sounds and texts find each other (`Retrieval`)."""
        with self.task.keeping() as kept:
            result = super().validate()
        # (Where networks are sharded every process has gone through all batches.)
        shares = [kept] if self.runtime.shards else self.runtime.gather(kept)
        pairs = [pairs for share in shares for pairs in share]
        audio, text = (torch.cat(latents) for latents in ([p.audio for p in pairs], [p.text for p in pairs]))
        found = Retrieval.of(audio, text, [caption for p in pairs for caption in p.captions])
        return result | {f"valid_{name}": value for name, value in found.numbers().items()}

    @property
    def unwrapped_mulan(self) -> MuLaN:
        return self.task.model


# ---------------------------------------------------------------------- the `model` section of recipes


def build_mulan(
    audio: Mapping[str, Any],
    text: Mapping[str, Any],
    *,
    dim_latent: int = 128,
    decoupled_contrastive_learning: bool = True,
    hierarchical_contrastive_loss: bool = False,
    hierarchical_contrastive_loss_layers: int | None = None,
    sigmoid_contrastive_loss: bool = False,
) -> MuLaN:
    """
    Args:
        audio: keywords of an `AudioSpectrogramTransformer`; or of a `PretrainedAudioTransformer`, with the name or folder of the AST that
            it stands on as `pretrained`.
        text: keywords of a `TextTransformer`; or of a `PretrainedTextTransformer`, with the name or folder of a text encoder as
            `pretrained`.
    """
    return MuLaN(
        _tower(audio, "audio", AudioSpectrogramTransformer, PretrainedAudioTransformer, PretrainedSpectrogramEncoder),
        _tower(text, "text", TextTransformer, PretrainedTextTransformer, PretrainedTextEncoder),
        dim_latent,
        decoupled_contrastive_learning,
        hierarchical_contrastive_loss,
        hierarchical_contrastive_loss_layers,
        sigmoid_contrastive_loss,
    )


def _tower(keywords: Mapping[str, Any], section: str, own: Any, on_top: Any, encoder: Any) -> Any:
    where = f"model.{section}"
    if "pretrained" not in keywords:
        return own(**check(own, keywords, where))
    rest = {name: value for name, value in keywords.items() if name != "pretrained"}
    return on_top(encoder(keywords["pretrained"]), **check(signature_without(on_top, "encoder"), rest, where))
