"""How durations are learned: the task, and the trainer, which needs phonemes and their durations, and never hears a sound."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor

from helicon.data.fields import Field, is_tensor, route
from helicon.engine.task import Batch, Loss, Task, Update
from helicon.engine.trainer import Trainer
from helicon.models.voicebox.data import SpeechSource, collate_speech
from helicon.models.voicebox.durations import DurationPredictor
from helicon.models.voicebox.reading import Reading, first_batches
from helicon.models.voicebox.text import PhonemeInventory

MAX_SHOWN = 4
BATCH_FIELDS = {
    "phonemes": Field(is_tensor(False, 2), "an integer tensor [b, m], -1 past the end"),
    "durations": Field(is_tensor(True, 2), "a float tensor [b, m] of seconds"),
}


class DurationTask(Task):
    """Batches are `{"phonemes": [b, m] ids, -1 past the end, "durations": [b, m] seconds}`."""

    model: DurationPredictor
    unit = "phonemes"

    def __init__(self, model: DurationPredictor):
        super().__init__(model)

    def read(self, batch: Batch) -> Batch:
        return {**batch, "hidden": self.model.draw_hidden(batch["phonemes"] >= 0)}

    def weight(self, batch: Batch) -> Tensor:
        """How many are hidden: the loss is the mean over these. (A batch of validation keeps what is drawn for it here.)"""
        if "hidden" not in batch:
            batch["hidden"] = self.read(batch)["hidden"]
        return batch["hidden"].sum()

    def units(self, batch: Batch) -> int:
        return batch["phonemes"].numel()

    def forward(self, batch: Batch) -> Tensor:
        return self.networks["model"](
            phoneme_ids=batch["phonemes"], target=batch["durations"], cond_mask=batch["hidden"]
        )

    def updates(self, step: int) -> Sequence[Update]:
        return [Update("model", Loss)]

    def validate(self, batch: Batch) -> Loss:
        """The error of logarithms where a run is hidden, as in training; in seconds; and the latter where all are hidden."""
        ids, durations = batch["phonemes"], batch["durations"]
        is_phoneme = ids >= 0
        hidden = (batch if "hidden" in batch else self.read(batch))["hidden"]
        network = self.networks["model"]
        filled = network(phoneme_ids=ids, cond=durations, cond_mask=hidden)
        alone = network(phoneme_ids=ids)
        parts = {
            "seconds": _mean((filled - durations).abs(), hidden),
            "seconds_alone": _mean((alone - durations).abs(), is_phoneme),
        }
        return Loss(network(phoneme_ids=ids, target=durations, cond_mask=hidden), parts)

    def sample(self, batch: Batch, seed: int) -> Tensor:
        return self.model.predict_seconds(batch["phonemes"][:MAX_SHOWN])

    def present(self, batch: Batch, samples: Mapping[str, Any]) -> Mapping[str, Callable[[Path], object]]:
        """A table of the first utterances: each phoneme, its true duration and those that were found."""
        names = [] if self.model.tokenizer is None else list(self.model.tokenizer.ids)
        lines = ["\t".join(["utterance", "phoneme", "true", *samples])]
        for number, ids in enumerate(batch["phonemes"][:MAX_SHOWN].tolist()):
            for place, phoneme in enumerate(ids):
                if phoneme < 0:
                    break
                seconds = [batch["durations"], *samples.values()]
                found = [f"{float(values[number, place]):.3f}" for values in seconds]
                lines.append("\t".join([str(number), names[phoneme] if phoneme < len(names) else str(phoneme), *found]))
        return {"durations.tsv": lambda path: path.write_text("\n".join(lines) + "\n", encoding="utf-8")}


def _mean(values: Float[Tensor, "b m"], counted: Tensor) -> Float[Tensor, ""]:
    return values.masked_fill(~counted, 0.0).sum() / counted.sum().clamp(min=1)


class DurationPredictorTrainer(Trainer):
    """Trains a `DurationPredictor` on a manifest with the columns `phonemes` and `durations`, or any dataset of these."""

    name = "durations"
    defaults: ClassVar = {"lr": 3e-4, "warmup_steps": 500, "ema_beta": 0.995, "save_results_every": 1000}

    def __init__(
        self,
        model: DurationPredictor,
        *,
        folder: str | Path | None = None,
        dataset: Any = None,
        val_dataset: Any = None,
        train_dataloader: Any = None,
        val_dataloader: Any = None,
        ds_fields: Sequence[str] | None = None,
        **options: Any,
    ):
        """
        Args:
            folder: the manifest (a folder of sounds has no durations), or a cache that was made of one.
            dataset: in its place, what `training_speech` returns, or samples {"phonemes": names or ids, "durations": seconds}.
            ds_fields: names for the entries of a dataset's tuples, where their types do not tell.
        """
        if folder is not None and dataset is not None:
            raise ValueError("give a folder or a dataset of utterances, not both")
        self.ds_fields = ds_fields

        def find(source: Any) -> Any:
            if source is None:
                return None
            source = source if isinstance(source, SpeechSource) else SpeechSource(source, ds_fields=ds_fields)
            return source.durations(_inventory(model))

        super().__init__(
            DurationTask(model),
            dataset=find(folder if folder is not None else dataset),
            val_dataset=find(val_dataset),
            train_dataloader=train_dataloader,
            val_dataloader=val_dataloader,
            collate=collate_speech,
            **options,
        )
        if self.step == 0:
            reading = Reading(model.tokenizer, model.num_phoneme_tokens)
            for batch in first_batches(self):
                reading.add(self.prepare(batch)["phonemes"])
            reading.check()

    def prepare(self, batch: Any) -> Batch:
        return route(batch, BATCH_FIELDS, self.ds_fields)


def _inventory(model: DurationPredictor) -> PhonemeInventory | None:
    """What knows the names of phonemes; without it a dataset must give ids."""
    return model.tokenizer if isinstance(model.tokenizer, PhonemeInventory) else None
