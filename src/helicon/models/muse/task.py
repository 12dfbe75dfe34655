"""How the image tokenizer is trained: the autoencoder against the discriminator, both from one reconstruction of each batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from helicon.engine.task import Batch, Loss, Task, Update
from helicon.metrics.image import codebook_use, image_grid, perplexity, psnr
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

    def forward(self, batch: Batch) -> Reconstructed:
        return Reconstructed(batch["images"], self.networks["generator"](batch["images"]))

    def updates(self, step: int) -> Sequence[Update]:
        """The discriminator's update, then the generator's against the discriminator as it was before this step."""
        if "discriminator" not in self.networks or step < self.discr_start_step:
            return [Update("generator", partial(self.generator_loss, is_adversarial=False))]
        every = self.apply_grad_penalty_every
        with_penalty = every > 0 and step % every == 0
        return [
            Update("discriminator", partial(self.discriminator_loss, with_penalty=with_penalty)),
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
        quality = {
            "psnr": psnr(reconstructed, images).mean(),
            "codebook_use": codebook_use(codes, codebook_size),
            "perplexity": perplexity(codes, codebook_size),
        }
        return Loss(total, {**parts, **quality})

    @torch.no_grad()
    def sample(self, batch: Batch, seed: int) -> Tensor:
        """Reconstructions of the first images of the batch; nothing about them is random."""
        return self.networks["generator"](batch["images"]).images[:MAX_SHOWN]

    def present(self, batch: Batch, samples: Mapping[str, Any]) -> Mapping[str, Callable[[Path], object]]:
        """One grid: the originals, below them the reconstructions of the online and of the averaged weights."""
        return {"reconstructions.png": image_grid([batch["images"][:MAX_SHOWN], *samples.values()]).save}
