"""The codec's trainer: how its data is found, and the defaults it trains with. The loop is the engine's."""

import copy
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn

import torch
from jaxtyping import Int
from torch import Tensor

from helicon.config import check, signature_without
from helicon.data.audio import AudioTransform, Recordings, TensorAudio, audio_data
from helicon.data.dataset import refuse_choices
from helicon.data.fields import TEXT, Field, are_flags, is_tensor, route
from helicon.data.paired import CaptionSource
from helicon.data.synthetic_sounds import SHORTEST, SyntheticSounds
from helicon.engine.task import Batch
from helicon.engine.trainer import Trainer
from helicon.models.soundstream.model import Audio, SoundStream
from helicon.models.soundstream.task import SoundStreamTask

logger = logging.getLogger(__name__)

WAVES = Field(is_tensor(True, 2, 3), "a float tensor [b, n] or [b, c, n]")
WHOLE = Field(is_tensor(False, 1), "an integer tensor [b]", is_required=False)
FLAGS = Field(are_flags, "a bool tensor [b]", is_required=False)
BATCH_FIELDS = {
    "audio": WAVES,
    "target": replace(WAVES, is_required=False),
    "audio_lengths": WHOLE,
    "target_lengths": WHOLE,
    "is_denoising": FLAGS,
    "is_end": FLAGS,
    "texts": replace(TEXT, is_required=False),
}
READY = (Recordings, TensorAudio, SyntheticSounds)  # whose samples are as the task takes them


def training_sounds(
    source: str | Path | Literal["synthetic"],
    *,
    sample_hz: int = 16000,
    data_max_length: int | None = None,
    data_max_length_seconds: float | None = None,
    captions: CaptionSource | None = None,
    text_column: str = "text",
    num_samples: int = 10_000,
    seed: int = 0,
    sounds: Mapping[str, Any] | None = None,
) -> Any:
    """The `data` section of a recipe: a folder or manifest of sounds, or the made-up ones of `synthetic`. A codec hears as many
    channels of them as it has.

    Args:
        sample_hz: their rate, which must be the network's own.
        data_max_length, data_max_length_seconds: how much of a sound is heard at a time, in samples or in seconds.
        captions, text_column: where the texts are, for families that learn from them too.
        num_samples, seed: how many made-up sounds there are, and which.
        sounds: what they are chosen from, keywords of `SyntheticSounds`.
    """
    choices = sound_choices(source, sounds)
    if source == "synthetic":
        check_length(data_max_length, data_max_length_seconds, sample_hz, SHORTEST)
        if data_max_length is not None:
            data_max_length_seconds = data_max_length / sample_hz
        return SyntheticSounds(num_samples, sample_hz, data_max_length_seconds or 1.0, seed, **choices)
    check_length(data_max_length, data_max_length_seconds, sample_hz)
    return audio_data(
        source,
        sample_hz,
        max_length=data_max_length,
        max_length_seconds=data_max_length_seconds,
        captions=captions,
        text_column=text_column,
    )


def sound_choices(source: Any, sounds: Mapping[str, Any] | None) -> dict[str, Any]:
    """What made-up sounds are chosen from, once it is seen that there are such choices, and that the sounds are made up."""
    if sounds is None:
        return {}
    if source != "synthetic":
        refuse_choices("sounds", "sounds", source)
    return check(
        signature_without(SyntheticSounds, "num_samples", "sample_hz", "seconds", "seed"), sounds, "data.sounds"
    )


class SoundStreamTrainer(Trainer):
    """Trains a `SoundStream` on a folder or manifest of sounds, or any dataset of them."""

    name = "soundstream"
    defaults: ClassVar = {
        "lr": 2e-4,
        "grad_accum_every": 4,
        "warmup_steps": 1000,
        "ema_update_after_step": 500,
        "ema_update_every": 10,
    }

    def __init__(
        self,
        soundstream: SoundStream,
        *,
        folder: str | Path | None = None,
        dataset: Any = None,
        val_dataset: Any = None,
        train_dataloader: Any = None,
        val_dataloader: Any = None,
        data_max_length: float | None = None,
        data_max_length_seconds: float | None = None,
        apply_grad_penalty_every: int = 4,
        discr_start_step: int = 0,
        with_target: bool = False,
        ds_fields: Sequence[str] | None = None,
        **options: Any,
    ):
        """
        Args:
            folder: sounds to learn from, in it and below (or a manifest of them).
            dataset: anything else that holds sounds (a SoundDataset, a torch or Hugging Face dataset), in place of the folder.
            data_max_length, data_max_length_seconds: how much of a sound is heard at a time, in samples or in seconds.
            apply_grad_penalty_every: the discriminators pay the gradient penalty every so many steps; 0 for never.
            discr_start_step: the first step at which the discriminators take part.
            with_target: samples of the datasets have, beside "audio", the "target" that it should become: clean sound, say.
            ds_fields: names for the entries of a dataset's tuples, where their types do not tell.
        """
        if folder is not None and dataset is not None:
            raise ValueError("give a folder or a dataset of sounds, not both")
        length = (data_max_length, data_max_length_seconds)
        if isinstance(dataset, READY) and length != (None, None):
            raise ValueError("the sounds of this dataset are cut already: leave out data_max_length, or give it there")
        self.ds_fields, self._has_seen_length = ds_fields, False
        find = lambda source: _sounds(source, soundstream, length, with_target, ds_fields)
        super().__init__(
            SoundStreamTask(
                soundstream, discr_start_step=discr_start_step, apply_grad_penalty_every=apply_grad_penalty_every
            ),
            dataset=find(folder if folder is not None else dataset),
            val_dataset=find(val_dataset),
            train_dataloader=train_dataloader,
            val_dataloader=val_dataloader,
            **options,
        )

    def prepare(self, batch: Any) -> Batch:
        named = route(batch, BATCH_FIELDS, self.ds_fields)
        if not self._has_seen_length:
            _check_window(self.unwrapped_soundstream, named["audio"].shape[-1])
        self._has_seen_length = True
        return named

    @property
    def unwrapped_soundstream(self) -> SoundStream:
        return self.task.model  # type: ignore[return-value]

    def tokenize(self, audio: Audio) -> Int[Tensor, "b t q"]:
        """Codes of audio, with the averaged weights where there are some; in float32, as after loading."""
        with self.inference(), torch.autocast(self.device.type, enabled=False):
            return self.unwrapped_soundstream.tokenize(audio.to(self.device))

    @property
    def ema_tokenizer(self) -> SoundStream:
        """A frozen copy of the codec, with the averaged weights of this moment."""
        if self.ema is None:
            raise ValueError("this trainer keeps no averaged weights: build it with use_ema=True")
        with self.inference():
            return copy.deepcopy(self.unwrapped_soundstream).requires_grad_(False).eval()

    @property
    def multiscale_discriminator_iter(self) -> NoReturn:
        raise AttributeError(
            "the discriminators are one network: in place of multiscale_discriminator_iter loop over "
            'trainer.raw["discriminator"].members.values()'
        )

    @property
    def multiscale_discriminator_optim_iter(self) -> NoReturn:
        raise AttributeError(
            "the discriminators have one optimizer: in place of multiscale_discriminator_optim_iter use "
            'trainer.optimizers["discriminator"]'
        )


def _check_window(codec: SoundStream, num_samples: int) -> None:
    attention, frames = codec.autoencoder.encoder_attention, codec.autoencoder.num_frames(num_samples)
    if attention is not None and attention.window_size > frames:
        seconds = attention.window_size * codec.downsample_factor / codec.sample_hz
        logger.warning(
            "a frame sees attn_window_size=%d frames, and these sounds have %d: what is longer will be coded worse; give "
            "data_max_length_seconds=%.2f or more, or a smaller window",
            attention.window_size,
            frames,
            seconds,
        )


def check_length(samples: float | None, seconds: float | None, hz: int, shortest: float = 0.0) -> None:
    """How much of a sound is heard at a time, in the words in which a user says it: a sample, and `shortest` seconds, or more."""
    if samples is not None and seconds is not None:
        raise ValueError("give data_max_length or data_max_length_seconds, not both")
    if samples is not None:
        given, is_short = f"data_max_length={samples}", samples < max(1, shortest * hz)
    elif seconds is not None:
        given, is_short = f"data_max_length_seconds={seconds}", seconds < shortest or round(seconds * hz) < 1
    else:
        return
    if is_short:
        least = max(1, math.ceil(shortest * hz))
        in_seconds = f" ({shortest} s)" if shortest else ""
        raise ValueError(f"{given} is too short: the number of samples must be at least {least} at {hz} Hz{in_seconds}")


def at_rate(source: Any, hz: int, network: str) -> Any:
    """Sounds that are `READY`, once it is seen that they have the rate of a network."""
    own = source.sample_hz if isinstance(source, SyntheticSounds) else source.transform.rates["audio"]
    if own != hz:
        raise ValueError(f"the sounds have {own} samples a second and the {network} {hz}: make the two rates equal")
    return source


def _with_channels(source: Any, channels: int) -> Any:
    """Sounds that are `READY`, with so many channels."""
    if isinstance(source, SyntheticSounds):
        return source if channels == 1 else TensorAudio(source, AudioTransform(source.sample_hz, channels=channels))
    changed = copy.copy(source)
    changed.transform = replace(source.transform, channels=channels)
    return changed


def _sounds(
    source: Any,
    soundstream: SoundStream,
    length: tuple[float | None, float | None],  # in samples, or in seconds
    with_target: bool,
    ds_fields: Sequence[str] | None,
) -> Any:
    """Samples {"audio"} at the codec's rate, with its channels."""
    if source is None:
        return None
    hz = soundstream.sample_hz
    if isinstance(source, READY):
        return _with_channels(at_rate(source, hz, "codec"), soundstream.channels)
    check_length(*length, hz)
    is_files = isinstance(source, (str, Path)) or hasattr(source, "column_names")
    if is_files and length == (None, None):
        raise ValueError("data_max_length or data_max_length_seconds is needed: how much of a sound is heard at a time")
    if is_files and with_target:
        raise ValueError("with_target=True needs a dataset whose samples have an audio and a target: files have one")
    rates = {"audio": hz, "target": hz} if with_target else hz
    return audio_data(
        source,
        rates,
        max_length=length[0],
        max_length_seconds=length[1],
        channels=soundstream.channels,
        ds_fields=ds_fields,
    )
