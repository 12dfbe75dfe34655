"""How the image family is trained.

The tokenizer: the autoencoder against the discriminator, both from one reconstruction of each batch. MaskGit: one loss, from
pictures that the frozen tokenizer reads or from token ids.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from helicon.engine.task import Batch, Loss, Task, Update
from helicon.metrics.codes import code_counts, usage
from helicon.metrics.contact_sheet import contact_sheet
from helicon.metrics.image import image_grid, psnr
from helicon.models.muse.generate import Decoding, Filler
from helicon.models.muse.maskgit import Losses, MaskGit
from helicon.models.muse.vqgan import Reconstruction, VQGanVAE

MAX_SHOWN = 8


@dataclass(frozen=True)
class Reconstructed:
    """A batch's images and what the autoencoder made of them: shared by both updates."""

    images: Tensor
    reconstruction: Reconstruction


class VQGanVAETask(Task):
    """Batches are `{"images": [b, c, h, w] in [0, 1]}`."""

    model: VQGanVAE
    unit = "images"

    def __init__(self, vae: VQGanVAE, *, discr_start_step: int = 0, apply_grad_penalty_every: int = 4):
        """
        Args:
            discr_start_step: the first step with an adversary; before it the autoencoder learns to reconstruct alone.
            apply_grad_penalty_every: the discriminator pays the gradient penalty at each step this number divides; 0 for never.
        """
        if discr_start_step < 0 or apply_grad_penalty_every < 0:
            raise ValueError(f"{discr_start_step=} and {apply_grad_penalty_every=} must not be negative")
        networks: dict[str, nn.Module] = {"generator": vae.autoencoder}
        if vae.discr is not None:
            networks["discriminator"] = vae.discr
        frozen = {} if vae.perceptual is None else {"perceptual": vae.perceptual}
        super().__init__(vae, networks, frozen, averaged=("generator",))
        self.discr_start_step = discr_start_step
        self.apply_grad_penalty_every = apply_grad_penalty_every

    def weight(self, batch: Batch) -> float:
        """(The batches of a user's own DataLoader need not be equally large.)"""
        return float(len(batch["images"]))

    def forward(self, batch: Batch) -> Reconstructed:
        if self.model.discr is not None:
            self.model.discr.check_size(batch["images"])  # now, not when the adversary starts thousands of steps later
        return Reconstructed(batch["images"], self.networks["generator"](batch["images"]))

    def read(self, batch: Batch) -> Batch:
        return {"images": batch["images"]}

    def updates(self, step: int) -> Sequence[Update]:
        """The discriminator's update, then the generator's against the discriminator as it was before this step."""
        if "discriminator" not in self.networks or step < self.discr_start_step:
            return [Update("generator", partial(self.generator_loss, is_adversarial=False), kind="alone")]
        every = self.apply_grad_penalty_every
        with_penalty = every > 0 and step % every == 0
        return [
            Update("discriminator", partial(self.discriminator_loss, with_penalty=with_penalty), kind=with_penalty),
            Update("generator", partial(self.generator_loss, is_adversarial=True)),
        ]

    def generator_loss(self, outputs: Reconstructed, is_adversarial: bool) -> Loss:
        discriminator = self.networks["discriminator"] if is_adversarial else None
        return Loss(
            *self.model.generator_loss(outputs.images, outputs.reconstruction, discriminator, across_ranks=True)
        )

    def discriminator_loss(self, outputs: Reconstructed, with_penalty: bool) -> Loss:
        discriminator = self.networks["discriminator"]
        return Loss(
            *self.model.discriminator_loss(outputs.images, outputs.reconstruction.images, discriminator, with_penalty)
        )

    def validate(self, batch: Batch) -> Loss:
        """The error of pixels and of perceptual features, with no adversary in it: comparable from step to step."""
        outputs = self.forward(batch)
        images, reconstructed = outputs.images.float(), outputs.reconstruction.images
        total, parts = self.model.image_loss(reconstructed, images)
        codes, codebook_size = outputs.reconstruction.quantized.codes, self.model.codebook_size
        counts = {"codes": code_counts(codes[..., None], codebook_size)}
        return Loss(total, {**parts, "psnr": psnr(reconstructed, images).mean()}, counts)

    def summary(self, counts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return usage(counts["codes"])

    @torch.no_grad()
    def sample(self, batch: Batch, seed: int) -> Tensor:
        """Reconstructions of the first images of the batch; nothing about them is random."""
        return self.networks["generator"](batch["images"]).images[:MAX_SHOWN]

    def present(self, batch: Batch, samples: Mapping[str, Any]) -> Mapping[str, Callable[[Path], object]]:
        """One grid: the originals, below them the reconstructions of the online and of the averaged weights."""
        return {"reconstructions.png": image_grid([batch["images"][:MAX_SHOWN], *samples.values()]).save}


class MaskGitTask(Task):
    """Batches hold "images" `[b, c, h, w]` in [0, 1] or token "ids" `[b, n]` or `[b, h, w]`, and what the transformer is conditioned
    on: "texts", or "text_embeds" `[b, t, e]` (zero where padded, or with "text_embeds_lengths"); "classes" `[b]`; and for
    super-resolution from ids "cond_ids", those of the low-resolution pictures.

    The loss divides by a number of masked tokens that is the same for every row, so a batch weighs as much as it has rows (see
    MaskGit.forward).
    """

    model: MaskGit
    unit = "tokens"

    def __init__(
        self,
        maskgit: MaskGit,
        *,
        sample_texts: Sequence[str] | None = None,
        sample_timesteps: int = 18,
        sample_cond_scale: float = 3.0,
    ):
        """
        Args:
            sample_texts: what the samples shall show; by default the captions of the first validation pictures.
            sample_timesteps, sample_cond_scale: how they are made (`MaskGit.generate`).
        """
        reads_texts = maskgit.transformer.text_encoder is not None and maskgit.cond_image_size is None
        if sample_texts is not None and not reads_texts:
            raise ValueError("sample_texts are for a MaskGit that makes pictures from texts alone: leave them out")
        stages = {"vae": maskgit.vae, "cond_vae": maskgit.cond_vae if maskgit.cond_vae is not maskgit.vae else None}
        frozen = {name: stage for name, stage in stages.items() if stage is not None}
        super().__init__(maskgit, frozen=frozen)
        Decoding(timesteps=sample_timesteps, cond_scale=sample_cond_scale)  # refused now, not at the first samples
        self.sample_texts = None if sample_texts is None else list(sample_texts)
        self.sample_timesteps, self.sample_cond_scale = sample_timesteps, sample_cond_scale

    def weight(self, batch: Batch) -> float:
        return float(len(batch["ids"] if "ids" in batch else batch["images"]))

    def units(self, batch: Batch) -> int:
        if "ids" in batch:
            return batch["ids"].numel()
        rows, _, height, width = batch["images"].shape
        assert self.model.vae is not None
        return rows * self.model.vae.get_encoded_fmap_size(height) * self.model.vae.get_encoded_fmap_size(width)

    def read(self, batch: Batch) -> Batch:
        low = self._low_resolution(batch)
        cond_ids = {} if low is None else {"cond_ids": low}
        return {"ids": self._ids(batch), **cond_ids, **self._condition(batch)}

    def _ids(self, batch: Batch) -> Tensor:
        return batch["ids"] if "ids" in batch else self.model.tokenize(batch["images"])

    def forward(self, batch: Batch, **options: Any) -> Losses:
        ids = self._ids(batch)
        return self.networks["model"](
            ids, cond_token_ids=self._low_resolution(batch), **self._condition(batch), return_losses=True, **options
        )

    def _low_resolution(self, batch: Batch) -> Tensor | None:
        if self.model.cond_image_size is None or "cond_ids" in batch:
            return batch.get("cond_ids")
        return self.model.tokenize_low_resolution(batch["images"]) if "images" in batch else None

    def _conditions(self, batch: Batch) -> list[str]:
        """The entries of a batch that the network is conditioned on; embedded texts go before texts."""
        transformer = self.model.transformer
        texts = [name for name in ("text_embeds", "texts") if transformer.condition_on_text and name in batch]
        classes = ["classes"] if transformer.class_emb is not None and "classes" in batch else []
        return [*texts[:1], *classes]

    def _condition(self, batch: Batch) -> dict[str, Any]:
        """These entries as tensors. One that is missing is an error: the network would learn without it."""
        transformer = self.model.transformer
        texts = transformer.batch_texts(batch)
        if transformer.condition_on_text and not texts:
            raise ValueError(
                "this MaskGit reads texts, and the data has none: say where they are with data.captions=beside, column or folder "
                "in a recipe (captions=... in Python), or let the dataset return texts or text_embeds"
            )
        if transformer.class_emb is None:
            return texts
        if "classes" not in batch:
            raise ValueError(
                "this MaskGit is conditioned on classes, and the data has none: take the folders of pictures for classes with "
                'data.classes=folder in a recipe (classes="folder" in Python), or let the dataset return classes (an integer a picture)'
            )
        return {**texts, "classes": batch["classes"]}

    def updates(self, step: int) -> Sequence[Update]:
        return [Update("model", lambda losses: Loss(losses.total, _parts(losses)))]

    def validate(self, batch: Batch) -> Loss:
        """The cross-entropy of a masked token, with text and class always there; the same tokens are masked each time."""
        losses = self.forward(batch, cond_drop_prob=0.0)
        return Loss(losses.cross_entropy, _parts(losses))

    @torch.no_grad()
    def sample(self, batch: Batch, seed: int) -> Tensor | None:
        """Pictures for the captions of the batch (or `sample_texts`); none where there is nothing to decode tokens with."""
        if self.model.vae is None:
            return None
        options: dict[str, Any] = {
            "timesteps": self.sample_timesteps,
            "cond_scale": self.sample_cond_scale,
            "seed": seed,
        }
        if self.sample_texts is not None:
            return self._generate(texts=self.sample_texts, **options)
        shown = {name: value[:MAX_SHOWN] for name, value in batch.items()}
        return self._generate(
            **{name: shown[name] for name in self._conditions(batch)},
            cond_token_ids=self._low_resolution(shown),
            batch_size=len(next(iter(shown.values()))),
            **options,
        )

    def _generate(self, **options: Any) -> Tensor:
        """Neither compiles nor captures: for a few pictures now and then that takes longer than it saves, and keeps memory."""
        own, self.model.filler = self.model.filler, Filler(capture=False)
        try:
            return self.model.generate(**options)
        finally:
            self.model.filler = own

    def present(self, batch: Batch, samples: Mapping[str, Any]) -> Mapping[str, Callable[[Path], object]]:
        """Each caption under what was made of it: the true pictures, then those of the online and of the averaged weights."""
        made = [pictures for pictures in samples.values() if pictures is not None]
        if not made:
            return {}
        captions = self.sample_texts or self._captions(batch, len(made[0]))
        true = [batch["images"][:MAX_SHOWN]] if self.sample_texts is None and "images" in batch else []
        return {"samples.png": contact_sheet([*true, *made], captions).save}

    def _captions(self, batch: Batch, rows: int) -> list[str]:
        if "texts" in batch and self.model.transformer.condition_on_text:
            return list(batch["texts"][:rows])
        if self.model.transformer.class_emb is not None:
            return [self.model.class_name(number) for number in batch["classes"][:rows].tolist()]
        return [""] * rows


def _parts(losses: Losses) -> dict[str, Tensor]:
    parts = {"cross_entropy": losses.cross_entropy, "accuracy": losses.accuracy}
    return parts if losses.critic is None else {**parts, "critic": losses.critic}
