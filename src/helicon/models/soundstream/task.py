"""How the codec is trained: the autoencoder against the discriminators, both from one reconstruction of each batch.

`AdversarialSoundTask` is what it has in common with other networks that make sound again (a vocoder).

Letters: b batch, c audio channels, n samples.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from helicon.engine.task import Batch, Loss, Task, Update, without_texts
from helicon.metrics.audio import is_silent, log_mel_distance, si_sdr, spectrogram_image
from helicon.metrics.codes import code_counts, usage
from helicon.models.soundstream.layers import LocalAttention, Snake
from helicon.models.soundstream.losses import PENALTY, Judgements, total_of_discriminators, without_padding
from helicon.models.soundstream.model import CoarseFirst, SoundStream
from helicon.nn.network import Network

MAX_SHOWN = 4


@dataclass
class Reconstructed:
    """A batch's audio and what the network made of it: shared by both updates."""

    target: Tensor  # [b, c, n] what the reconstruction should be, silent where it is padding
    lengths: Tensor | None  # [b] samples that are not padding
    reconstruction: Any  # its audio [b, c, n], float32, and what else the network tells
    # What the discriminators said of the target in their own update, for the generator's, in which they are the same yet.
    real: Judgements | None = None


class AdversarialSoundTask(Task):
    """A network that makes sound again, against discriminators that tell it from the real one.

    Its model has a `loss` (a CodecLoss), `discriminators` (or None), and a rate `sample_hz`; `forward` is the family's.
    """

    model: Any
    unit = "audio_seconds"

    def __init__(self, model: Network, generator: nn.Module, *, discr_start_step: int, apply_grad_penalty_every: int):
        if discr_start_step < 0 or apply_grad_penalty_every < 0:
            raise ValueError(f"{discr_start_step=} and {apply_grad_penalty_every=} must not be negative")
        networks: dict[str, nn.Module] = {"generator": generator}
        if model.discriminators is not None:
            networks["discriminator"] = model.discriminators  # type: ignore[assignment]
        super().__init__(model, networks, averaged=("generator",))
        self.discr_start_step = discr_start_step
        self.apply_grad_penalty_every = apply_grad_penalty_every

    def weight(self, batch: Batch) -> Tensor | float:
        """Samples that are not padding: the losses are means over them."""
        lengths = batch.get("audio_lengths")
        return float(batch["audio"].shape[0] * batch["audio"].shape[-1]) if lengths is None else lengths.sum()

    def units(self, batch: Batch) -> int:
        return max(1, round(batch["audio"].shape[0] * batch["audio"].shape[-1] / self.model.sample_hz))

    def read(self, batch: Batch) -> Batch:
        return without_texts(batch)

    def forward(self, batch: Batch) -> Reconstructed:
        raise NotImplementedError

    def updates(self, step: int) -> Sequence[Update]:
        """The discriminators' update, then the generator's against the discriminators as they were before this step."""
        if "discriminator" not in self.networks or step < self.discr_start_step:
            return [Update("generator", partial(self.generator_loss, is_adversarial=False), kind="alone")]
        every = self.apply_grad_penalty_every
        with_penalty = every > 0 and step % every == 0
        return [
            Update("discriminator", partial(self.discriminator_loss, with_penalty=with_penalty), kind=with_penalty),
            Update("generator", partial(self.generator_loss, is_adversarial=True)),
        ]

    def discriminator_loss(self, outputs: Reconstructed, with_penalty: bool) -> Loss:
        fake = without_padding(outputs.reconstruction.audio.detach(), outputs.lengths)
        terms, outputs.real = self.model.loss.of_discriminators(
            fake, outputs.target, self.networks["discriminator"], with_penalty
        )
        total = total_of_discriminators(terms)
        penalty = {PENALTY: terms[PENALTY].detach()} if with_penalty else {}
        return Loss(total, {"discriminator": (total - terms.get(PENALTY, 0.0)).detach(), **penalty})

    def generator_loss(self, outputs: Reconstructed, is_adversarial: bool) -> Loss:
        return Loss(
            *self.model.loss.of_autoencoder(
                outputs.reconstruction.audio,
                outputs.target,
                outputs.lengths,
                judge=self.networks["discriminator"] if is_adversarial else None,
                real=outputs.real,
                across_ranks=True,
            )
        )

    @torch.no_grad()
    def sample(self, batch: Batch, seed: int) -> Tensor:
        """The first sounds of the batch, made again; nothing about them is random."""
        shown = {name: value[:MAX_SHOWN] for name, value in batch.items()}
        return self.forward(shown).reconstruction.audio

    def present(self, batch: Batch, samples: Mapping[str, Any]) -> Mapping[str, Callable[[Path], object]]:
        """Each sound and its reconstructions as numbered files, and the spectrograms of them all as one picture."""
        given = ("audio", "target") if "target" in batch else ("audio",)
        waves = {"original" if name == "audio" else name: batch[name] for name in given} | dict(samples)
        waves = {name: wave[:, None] if wave.ndim == 2 else wave for name, wave in waves.items()}
        lengths = batch.get("audio_lengths", [None] * MAX_SHOWN)
        rows = []
        for number in range(len(next(iter(samples.values())))):
            cut = lambda wave, number=number: wave[number, :, : lengths[number]].float().cpu()
            rows.append({name: cut(wave) for name, wave in waves.items()})
        return sound_files(rows, self.model.sample_hz)


class SoundStreamTask(AdversarialSoundTask):
    """Batches are `{"audio": [b, n] or [b, c, n]}` at the codec's rate, with "audio_lengths" `[b]` where they are padded.

    "target", of the same shape, is what the reconstruction should be in place of the audio itself: clean sound, say, of a
    noisy recording. A codec with denoise_conditioning is then told to denoise; or, where "is_denoising" `[b]` is given
    beside it, those of the batch for which it is True.
    """

    model: SoundStream

    def __init__(self, soundstream: SoundStream, *, discr_start_step: int = 0, apply_grad_penalty_every: int = 4):
        """
        Args:
            discr_start_step: the first step with an adversary; before it the autoencoder learns to reconstruct alone.
            apply_grad_penalty_every: the discriminators pay the gradient penalty at each step this number divides; 0 for never.
        """
        super().__init__(
            soundstream,
            soundstream.autoencoder,
            discr_start_step=discr_start_step,
            apply_grad_penalty_every=apply_grad_penalty_every,
        )
        # Convolutions gain nothing, and as a whole the networks take many minutes to compile.
        worthwhile = (Snake, LocalAttention, CoarseFirst)
        self.compiled = {"generator": tuple(m for m in soundstream.autoencoder.modules() if isinstance(m, worthwhile))}

    def forward(self, batch: Batch) -> Reconstructed:
        audio, lengths = self.model.process_input(batch["audio"]), batch.get("audio_lengths")
        audio = without_padding(audio, lengths)
        mask = self.model.frame_mask(audio.shape[-1], lengths)
        is_denoising = batch.get("is_denoising", "target" in batch) if self.model.denoises else None
        reconstruction = self.networks["generator"](audio, mask, is_denoising)
        target = audio
        if "target" in batch:
            target = without_padding(self.model.process_input(batch["target"]), lengths)
        return Reconstructed(target, lengths, reconstruction)

    def generator_loss(self, outputs: Reconstructed, is_adversarial: bool) -> Loss:
        quantized = outputs.reconstruction.quantized
        loss = super().generator_loss(outputs, is_adversarial)
        parts = {**loss.parts, "quantizer": quantized.loss.detach()}
        for kind in ("perplexity", "codebook_use"):  # the mean over the levels of the stack
            found = [value for name, value in quantized.parts.items() if kind in name]
            parts |= {kind: torch.stack(found).mean()} if found else {}
        return Loss(loss.total + quantized.loss, parts)

    def validate(self, batch: Batch) -> Loss:
        """The error of the wave and of its mel spectra, with no adversary in it: comparable from step to step."""
        outputs = self.forward(batch)
        audio, codes = outputs.reconstruction.audio, outputs.reconstruction.quantized.codes
        terms = self.model.loss.distances(audio, outputs.target, outputs.lengths)
        distance = log_mel_distance(audio, outputs.target, self.model.sample_hz, outputs.lengths).mean()
        is_heard = ~is_silent(outputs.target, outputs.lengths)
        decibels = torch.where(is_heard, si_sdr(audio, outputs.target, outputs.lengths), 0.0)
        counts = {
            "codes": code_counts(codes, self.model.codebook_size),
            "si_sdr": torch.stack([decibels.sum(), is_heard.sum()]),  # of how many sounds: those that are not silent
        }
        return Loss(self.model.loss.total(terms), {**terms, "log_mel_distance": distance}, counts)

    def summary(self, counts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        decibels, num_heard = counts["si_sdr"]
        return usage(counts["codes"]) | ({"si_sdr": decibels / num_heard} if num_heard > 0 else {})


def sound_files(
    rows: Sequence[Mapping[str, Float[Tensor, "c _"]]], sample_hz: int
) -> dict[str, Callable[[Path], object]]:
    """Every wave as a numbered file, one sound a row, and the spectrograms of them all as one picture: what writes each."""
    files: dict[str, Callable[[Path], object]] = {
        f"{number:02d}-{name}.wav": partial(write_wave, wave=wave, sample_hz=sample_hz)
        for number, row in enumerate(rows)
        for name, wave in row.items()
    }
    return files | {"spectrograms.png": lambda path: spectrogram_grid(rows, sample_hz).save(path)}


def write_wave(path: Path, wave: Float[Tensor, "c n"], sample_hz: int) -> None:
    """A wave file of 16 bits; what is louder than it can hold is clipped."""
    import soundfile

    try:
        soundfile.write(path, wave.clamp(-1, 1).numpy().T, sample_hz, subtype="PCM_16")
    except soundfile.SoundFileError as error:
        raise OSError(f"{path} could not be written ({error})") from error


def spectrogram_grid(rows: Sequence[Mapping[str, Float[Tensor, "c _"]]], sample_hz: int) -> Image.Image:
    """The spectrogram of every wave (of its channels' mean), one sound a row, under its name."""
    pictures = [
        [spectrogram_image(wave.mean(dim=0), sample_hz, f"{number:02d} {name}") for name, wave in row.items()]
        for number, row in enumerate(rows)
    ]
    width, height = pictures[0][0].size
    grid = Image.new("RGB", (width * len(pictures[0]), height * len(pictures)))
    for y, row in enumerate(pictures):
        for x, picture in enumerate(row):
            grid.paste(picture, (x * width, y * height))
    return grid
