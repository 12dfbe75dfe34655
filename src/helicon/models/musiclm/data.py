"""What MuLaN learns from: sounds with texts that tell what is to be heard in them.

A sample is {"audio": [n], "audio_lengths": how many of the n are sound, "texts": the caption}, or has "text_token_ids" `[t]` in place of
the caption. At which rate sounds are needed depends on the network, and a recipe's `data` section is read without it. So that section
gives a `CaptionedSource`, which a trainer asks for the rate it needs.

Letters: b batch, n samples, t tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from helicon.data.audio import AudioTransform, Sample, SoundDataset, TensorAudio, audio_data, audio_fields
from helicon.data.collate import Batch, collate
from helicon.data.dataset import BadFile, View
from helicon.data.fields import Field, route
from helicon.data.paired import CaptionSource
from helicon.data.split import unwrapped
from helicon.data.synthetic_sounds import SyntheticSounds
from helicon.models.soundstream.trainers import READY, at_rate, check_length, sound_choices, training_sounds

TEXTS = ("texts", "text_token_ids")
# What the network, and other families, call them.
NAMES = {"wavs": "audio", "wave": "audio", "raw_wave": "audio", "raw_texts": "texts", "text": "texts"}


def _are_ids(value: Any) -> bool:
    is_whole = isinstance(value, Tensor) and value.ndim == 1 and not value.is_floating_point()
    return is_whole and value.dtype not in (torch.bool, torch.int16)  # the second is a sound


IDS = Field(_are_ids, "an integer tensor [t]", is_required=False)
WHERE = (
    'captions="column" (of a manifest or a dataset with columns), "beside" (x.txt beside x.wav) or "folder" (its name)'
)


def training_captioned(
    source: str | Path | Literal["synthetic"],
    *,
    data_max_length: int | None = None,
    data_max_length_seconds: float | None = None,
    captions: CaptionSource | None = None,
    text_column: str = "text",
    num_samples: int = 10_000,
    seed: int = 0,
    sounds: Mapping[str, Any] | None = None,
) -> "CaptionedSource":
    """The `data` section of a recipe: a folder or manifest of sounds with texts, or the made-up ones of `synthetic`.

    Args:
        data_max_length, data_max_length_seconds: how much of a sound is heard at a time, in samples of the network's rate or in seconds.
        captions, text_column: where the texts are.
        num_samples, seed: how many made-up sounds there are, and which.
        sounds: what they are chosen from, keywords of `SyntheticSounds`.
    """
    found = CaptionedSource(
        source, data_max_length, data_max_length_seconds, captions, text_column, num_samples, seed, sounds
    )
    sound_choices(source, sounds)
    found.check()
    return found


@dataclass(frozen=True)
class CaptionedSource:
    """Sounds with texts, of which nobody has yet said at which rate they are needed.

    `source` is a folder or manifest, "synthetic", a Hugging Face dataset, what `audio_data` gives, `SyntheticSounds`, or a torch Dataset
    of sounds with texts (dicts, or tuples that `ds_fields` names where types do not tell). The rest are arguments of
    `training_captioned`.
    """

    source: Any
    data_max_length: float | None = None
    data_max_length_seconds: float | None = None
    captions: CaptionSource | None = None
    text_column: str = "text"
    num_samples: int = 10_000
    seed: int = 0
    sounds: Mapping[str, Any] | None = None
    ds_fields: Sequence[str] | None = None

    @property
    def _is_listed(self) -> bool:
        """Whether it is files or columns of a table, not a user's own dataset."""
        is_files = isinstance(self.source, (str, Path)) and self.source != "synthetic"
        return is_files or hasattr(self.source, "column_names")

    def check(self) -> None:
        """What can be told without opening anything."""
        if isinstance(unwrapped(self.source)[0], SoundDataset):
            raise ValueError("a SoundDataset has no texts: give its folder, and where they are with captions=...")
        if self._is_listed and self.captions is None:
            name = self.source if isinstance(self.source, (str, Path)) else f"this {type(self.source).__name__}"
            raise ValueError(f"MuLaN learns from sounds with texts: say where those of {name} are, with {WHERE}")
        if not self._is_listed and self.captions is not None:
            raise ValueError(f"captions={self.captions!r} is for files and columns: these sounds bring their own texts")
        if self._is_listed and self.data_max_length is None and self.data_max_length_seconds is None:
            raise ValueError(
                "data_max_length or data_max_length_seconds is needed: how much of a sound is heard at a time"
            )

    def clip_seconds(self, sample_hz: int) -> float | None:
        """How much of a sound is heard at a time, where it is said here or by a dataset that cuts its sounds itself."""
        if self.data_max_length is not None:
            return self.data_max_length / sample_hz
        source = self._sounds(sample_hz) if self.source == "synthetic" else self.source
        if self.data_max_length_seconds is not None or not isinstance(source, READY):
            return self.data_max_length_seconds
        return source.seconds if isinstance(source, SyntheticSounds) else source.transform.seconds

    def at(self, sample_hz: int) -> Any:
        """The samples, at this rate; of each sound another crop in every epoch."""
        self.check()
        return _Captioned(self._sounds(sample_hz))

    def _sounds(self, sample_hz: int) -> Any:
        samples, seconds = self.data_max_length, self.data_max_length_seconds
        if self.source == "synthetic":
            return training_sounds(
                "synthetic",
                sample_hz=sample_hz,
                data_max_length=None if samples is None else int(samples),
                data_max_length_seconds=seconds,
                num_samples=self.num_samples,
                seed=self.seed,
                sounds=self.sounds,
            )
        if isinstance(self.source, READY):
            if samples is not None or seconds is not None:
                raise ValueError(
                    "the sounds of this dataset are cut already: leave out data_max_length, or give it there"
                )
            return at_rate(self.source, sample_hz, "network")
        check_length(samples, seconds, sample_hz)
        if self._is_listed:
            return audio_data(
                self.source,
                sample_hz,
                max_length=samples,
                max_length_seconds=seconds,
                captions=self.captions,
                text_column=self.text_column,
            )
        return TensorAudio(_OwnSamples(self.source, self.ds_fields), AudioTransform(sample_hz, samples, seconds))


class _OwnSamples(View):
    """A user's own dataset, by the names its entries have here."""

    def __init__(self, dataset: Any, ds_fields: Sequence[str] | None):
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise ValueError(
                f"a {type(dataset).__name__} is no source of sounds: give a folder, a manifest or a dataset"
            )
        super().__init__(dataset)
        self.ds_fields = None if ds_fields is None else [NAMES.get(name, name) for name in ds_fields]
        self.fields = {**audio_fields({"audio": 1}), "text_token_ids": IDS}

    def change(self, sample: Any, index: int, generator: torch.Generator | None) -> Sample:
        if isinstance(sample, Mapping):
            sample = {NAMES.get(name, name): _ids(value) for name, value in sample.items()}
        elif isinstance(sample, tuple):
            sample = tuple(map(_ids, sample))
        named = route(sample, self.fields, self.ds_fields)
        if isinstance(named.get("texts"), Tensor):  # as the network calls ids too
            named["text_token_ids"] = named.pop("texts")
        return named


def _ids(value: Any) -> Any:
    """Ids that come as tokenizers give them, a list or an array, as a tensor; everything else as it is."""
    is_listed = isinstance(value, list) and bool(value) and all(type(one) is int for one in value)
    if not is_listed and not isinstance(value, np.ndarray):
        return value
    ids = torch.as_tensor(value)
    return ids if _are_ids(ids) else value


class _Captioned(View):
    """Samples with what MuLaN reads of them, and nothing else."""

    def change(self, sample: Any, index: int, generator: torch.Generator | None) -> Sample:
        text = next((name for name in TEXTS if name in sample), None)
        if text is None:
            raise ValueError(
                f"item {index} has no text, and MuLaN learns from sounds with texts: it has {', '.join(sample)}"
            )
        wave = sample["audio"]
        if text == "texts":
            _check_text(sample[text], f"item {index}")
        return {"audio": wave, "audio_lengths": sample.get("audio_lengths", wave.shape[-1]), text: sample[text]}


def _check_text(text: Any, name: str) -> None:
    if not isinstance(text, str):
        raise ValueError(f"{name} has a {type(text).__name__} for its text: give one string (of several, choose one)")
    if not text.strip():
        raise BadFile(name, "its text is empty")


def check_captions(dataset: Any) -> None:
    """Raises where all captions of files or columns are equal. (Of other data the second is another, and no more of them is read.)"""
    captions = getattr(dataset.dataset, "captions", None) or ()
    first = None
    for index in range(len(captions)):
        try:
            text = captions[index]
        except BadFile:
            continue
        if first not in (None, text):
            return
        first = text
    if len(captions) > 1 and first is not None:
        raise ValueError(
            f"all {len(captions)} sounds have the caption {first[:60]!r}, and MuLaN learns what tells sounds apart: give each its own"
        )


def collate_captioned(samples: Sequence[Sample]) -> Batch:
    """Samples to a batch, padded: sounds with 0, ids with -1. Lengths that all are the whole are left out: to mask costs time."""
    if "text_token_ids" in samples[0]:
        ids = pad_sequence([one["text_token_ids"] for one in samples], batch_first=True, padding_value=-1)
        batch = {**collate([{**one, "text_token_ids": 0} for one in samples]), "text_token_ids": ids}
    else:
        batch = collate(samples)
    if bool((batch["audio_lengths"] == batch["audio"].shape[-1]).all()):
        del batch["audio_lengths"]
    return batch
