"""Trainers of the image family: how their data is found, and the defaults they train with. The loop is the engine's."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import Tensor

from helicon.data.fields import TEXT, Field, route
from helicon.data.image import image_data
from helicon.data.paired import CaptionSource
from helicon.data.synthetic import SyntheticShapes
from helicon.engine.task import Batch
from helicon.engine.trainer import Trainer
from helicon.models.muse.task import VQGanVAETask
from helicon.models.muse.vqgan import VQGanVAE

# Batches of a user's own DataLoader.
IMAGES = Field(lambda value: isinstance(value, Tensor) and value.ndim == 4, "a float tensor [b, c, h, w] in [0, 1]")
BATCH_FIELDS = {"images": IMAGES, "texts": replace(TEXT, is_required=False)}


def training_images(
    source: str | Path | Literal["synthetic"],
    image_size: int,
    *,
    captions: CaptionSource | None = None,
    channels: int = 3,
    augment: bool = True,
    random_crop: bool = False,
    text_column: str = "text",
    num_samples: int = 10_000,
    seed: int = 0,
) -> Any:
    """The `data` section of a recipe: a folder or manifest of pictures, or the made-up shapes of `synthetic`."""
    if source == "synthetic":
        return SyntheticShapes(num_samples, image_size, seed)
    return image_data(
        source,
        image_size,
        captions=captions,
        channels=channels,
        augment=augment,
        random_crop=random_crop,
        text_column=text_column,
    )


class VQGanVAETrainer(Trainer):
    """Trains a `VQGanVAE` on a folder or manifest of pictures, or any dataset of them."""

    name = "vqgan"
    defaults: ClassVar = {"lr": 3e-4, "max_grad_norm": None, "save_results_every": 100, "save_model_every": 1000}

    def __init__(
        self,
        vae: VQGanVAE,
        *,
        folder: str | Path | None = None,
        dataset: Any = None,
        val_dataset: Any = None,
        train_dataloader: Any = None,
        val_dataloader: Any = None,
        image_size: int | None = None,
        apply_grad_penalty_every: int = 4,
        discr_start_step: int = 0,
        ds_fields: Sequence[str] | None = None,
        **options: Any,
    ):
        """
        Args:
            folder: pictures to learn from, in it and below (or a manifest of them).
            dataset: anything else that holds pictures (a torch or Hugging Face dataset), in place of the folder.
            image_size: pictures are cut square and scaled to this many pixels a side.
            apply_grad_penalty_every: the discriminator pays the gradient penalty every so many steps; 0 for never.
            discr_start_step: the first step at which the adversary takes part.
            ds_fields: names for the entries of a dataset's tuples, where their types do not tell.
        """
        if folder is not None and dataset is not None:
            raise ValueError("give a folder or a dataset of pictures, not both")
        self.ds_fields = ds_fields
        find = lambda source: _pictures(source, image_size, vae.channels, ds_fields)
        super().__init__(
            VQGanVAETask(vae, discr_start_step=discr_start_step, apply_grad_penalty_every=apply_grad_penalty_every),
            dataset=find(folder if folder is not None else dataset),
            val_dataset=find(val_dataset),
            train_dataloader=train_dataloader,
            val_dataloader=val_dataloader,
            **options,
        )

    def prepare(self, batch: Any) -> Batch:
        return route(batch, BATCH_FIELDS, self.ds_fields)


def _pictures(source: Any, image_size: int | None, channels: int, ds_fields: Sequence[str] | None) -> Any:
    if source is None or isinstance(source, SyntheticShapes):
        return source
    if image_size is None:
        raise ValueError("image_size is needed: how many pixels a side the pictures shall have")
    return image_data(source, image_size, channels=channels, ds_fields=ds_fields)
