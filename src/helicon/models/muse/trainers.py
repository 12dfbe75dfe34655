"""Trainers of the image family: how their data is found, and the defaults they train with. The loop is the engine's."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from helicon.config import check, signature_without
from helicon.data.dataset import View, refuse_choices
from helicon.data.fields import LABEL, TEXT, Field, Routed, is_tensor, route
from helicon.data.image import IMAGE, ImageTransform, TensorImages, image_data
from helicon.data.paired import CaptionSource, FolderClasses
from helicon.data.synthetic import SyntheticShapes
from helicon.data.tokens import TokenCache, Tokenizer, is_token_cache
from helicon.engine.checkpoint import load_stage
from helicon.engine.task import Batch
from helicon.engine.trainer import Trainer
from helicon.models.muse.maskgit import MaskGit, token_ids
from helicon.models.muse.task import MaskGitTask, VQGanVAETask
from helicon.models.muse.transformer import MaskGitTransformer
from helicon.models.muse.vqgan import VQGanVAE

# Batches of a user's own DataLoader.
IMAGES = Field(is_tensor(True, 4), "a float tensor [b, c, h, w] in [0, 1]")
BATCH_FIELDS = {"images": IMAGES, "texts": replace(TEXT, is_required=False)}


def training_images(
    source: str | Path | Literal["synthetic"],
    image_size: int,
    *,
    captions: CaptionSource | None = None,
    classes: Literal["folder"] | None = None,
    channels: int = 3,
    augment: bool | None = None,
    random_crop: bool = False,
    text_column: str = "text",
    num_samples: int = 10_000,
    seed: int = 0,
    shapes: Mapping[str, Any] | None = None,
) -> Any:
    """The `data` section of a recipe: a folder or manifest of pictures, the made-up shapes of `synthetic`, or the token cache of
    either (`helicon tokenize`), which is read as it is: neither mirrored nor cropped at random.

    `augment` mirrors pictures at random; by default those without captions, which may tell left from right. `classes: folder`
    takes the folders that pictures are in for their classes.
    """
    if source == "synthetic":
        if classes is not None:
            raise ValueError(
                "made-up pictures are in no folders: leave data.classes out, or name a folder as data.source"
            )
        choices = signature_without(SyntheticShapes, "num_samples", "image_size", "seed")
        return SyntheticShapes(num_samples, image_size, seed, **check(choices, shapes or {}, "data.shapes"))
    if shapes is not None:
        refuse_choices("shapes", "pictures", source)
    if is_token_cache(source):
        if random_crop:
            raise ValueError(
                f"{source} is a token cache, whose pictures cannot be cropped any more: leave random_crop out"
            )
        found: Any = cached_images(source, image_size, captions)
    else:
        found = image_data(
            source,
            image_size,
            captions=captions,
            channels=channels,
            augment=captions is None if augment is None else augment,
            random_crop=random_crop,
            text_column=text_column,
        )
    return found if classes is None else FolderClasses(found)


def cached_images(
    source: str | Path | TokenCache, image_size: int, captions: CaptionSource | None = None
) -> TokenCache:
    """A token cache, once it is seen to be of pictures of this size, with the captions asked for."""
    cache = source if isinstance(source, TokenCache) else TokenCache(source)
    recorded = cache.index.arguments
    for name, value in {"image_size": image_size, "captions": captions}.items():
        if value is not None and recorded.get(name) != value:
            raise ValueError(
                f"{cache.folder} was made with {name}={recorded.get(name)}, not {value}: "
                f"run `helicon tokenize` with {name}={value}, into another folder"
            )
    return cache


class ImageTokenizer(Tokenizer):
    """Makes the tokens of pictures with a `VQGanVAE`, or with those that a `MaskGit` stands on: for super-resolution also "cond_ids",
    those of the pictures made small. The texts come along."""

    def __init__(self, network: VQGanVAE | MaskGit):
        self.path = network.source
        self._encoders: dict[str, Callable[[Tensor], Tensor]]
        if isinstance(network, VQGanVAE):
            vae = network.copy_for_eval()  # what a MaskGit would stand on
            self.networks, self.sizes = {"vae": vae}, {"ids": vae.codebook_size}
            self.arguments, self._encoders = {"channels": vae.channels}, {"ids": partial(token_ids, vae)}
            return
        self.networks, self.sizes = {}, {"ids": network.transformer.num_tokens}
        self.arguments, self._encoders = {"image_size": network.image_size}, {"ids": network.tokenize}
        if network.vae is not None:
            self.networks, self.arguments = {"vae": network.vae}, {**self.arguments, "channels": network.vae.channels}
        if network.cond_image_size is not None:
            self._add_low_resolution(network)
        elif self.path is None and network.vae is not None:
            self.path = network.vae.source  # makes the same tokens

    def _add_low_resolution(self, maskgit: MaskGit) -> None:
        low = maskgit.cond_vae
        self.settings = {"cond_image_size": maskgit.cond_image_size}
        self.sizes = {**self.sizes, "cond_ids": _known(maskgit)["cond_ids"] if low is None else low.codebook_size}
        self._encoders["cond_ids"] = maskgit.tokenize_low_resolution
        if low is not None:
            self.networks = {**self.networks, "cond_vae": low}

    def __call__(self, batch: Batch) -> Mapping[str, Any]:
        images = batch["images"].to(next(iter(self.networks.values())).device)
        found: dict[str, Any] = {name: encode(images) for name, encode in self._encoders.items()}
        return {**found, "texts": batch["texts"]} if "texts" in batch else found


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
    if isinstance(source, TokenCache) or is_token_cache(source):
        name = source.folder if isinstance(source, TokenCache) else source
        raise ValueError(f"{name} is a token cache, and a VQGanVAE learns from pictures: name their folder")
    if source is None or isinstance(source, (SyntheticShapes, View)):  # samples are {"images": [c, h, w]} already
        return source
    if image_size is None:
        raise ValueError("image_size is needed: how many pixels a side the pictures shall have")
    return image_data(source, image_size, channels=channels, ds_fields=ds_fields)


def build_maskgit(
    image_size: int,
    transformer: Mapping[str, Any],
    *,
    vae: str | Path | Mapping[str, Any] | None = None,
    cond_vae: str | Path | Mapping[str, Any] | None = None,
    cond_image_size: int | None = None,
    self_token_critic: bool = False,
    cond_drop_prob: float = 0.5,
    self_cond_prob: float = 0.9,
    no_mask_token_prob: float = 0.0,
    critic_loss_weight: float = 1.0,
) -> MaskGit:
    """The `model` section of a recipe.

    Args:
        transformer: keywords of `MaskGitTransformer`; num_tokens and seq_len follow from the tokenizer.
        vae: the tokenizer: a run, checkpoint or saved folder; or the keywords of an untrained one, to see that everything runs.
        cond_vae: likewise, of the low-resolution pictures; by default the same.
    """
    tokenizer, low_tokenizer = (_tokenizer(source, name) for source, name in ((vae, "vae"), (cond_vae, "cond_vae")))
    sizes = {}
    if tokenizer is not None:
        sizes = {"num_tokens": tokenizer.codebook_size, "seq_len": tokenizer.get_encoded_fmap_size(image_size) ** 2}
    keywords = check(MaskGitTransformer, {**sizes, **transformer}, "model.transformer")
    return MaskGit(
        image_size,
        MaskGitTransformer(**keywords),
        vae=tokenizer,
        cond_vae=low_tokenizer,
        cond_image_size=cond_image_size,
        self_token_critic=self_token_critic,
        cond_drop_prob=cond_drop_prob,
        self_cond_prob=self_cond_prob,
        no_mask_token_prob=no_mask_token_prob,
        critic_loss_weight=critic_loss_weight,
    )


def _tokenizer(source: str | Path | Mapping[str, Any] | None, name: str) -> VQGanVAE | None:
    if source is None:
        return None
    if isinstance(source, Mapping):
        return VQGanVAE(**check(VQGanVAE, source, f"model.{name}"))
    network = load_stage(source, f"model.{name}", "helicon train muse/vqgan")
    if not isinstance(network, VQGanVAE):
        raise ValueError(f"model.{name}={str(source)!r} holds a {type(network).__name__}, not a VQGanVAE")
    return network


class MaskGitTrainer(Trainer):
    """Trains a `MaskGit`, base or super-resolution, on captioned pictures or on token ids."""

    name = "maskgit"
    defaults: ClassVar = {"lr": 3e-4, "max_grad_norm": 1.0, "save_results_every": 500, "save_model_every": 1000}

    def __init__(
        self,
        maskgit: MaskGit,
        *,
        folder: str | Path | None = None,
        dataset: Any = None,
        val_dataset: Any = None,
        train_dataloader: Any = None,
        val_dataloader: Any = None,
        image_size: int | None = None,
        captions: CaptionSource | None = None,
        classes: Literal["folder"] | None = None,
        text_column: str = "text",
        augment: bool = False,
        sample_texts: Sequence[str] | None = None,
        sample_timesteps: int = 18,
        sample_cond_scale: float = 3.0,
        ds_fields: Sequence[str] | None = None,
        **options: Any,
    ):
        """
        Args:
            folder: pictures to learn from, in it and below (or a manifest of them, or a token cache made by `helicon tokenize`).
            dataset: anything else that holds pictures, or samples with token "ids" (see MaskGitTask), in place of the folder.
            image_size: pictures are cut square and scaled to this many pixels a side; by default the MaskGit's own size.
            captions: where the text of a picture is: in the "column" `text_column`, in a file "beside" it, or the name of its "folder".
            classes: the "folder" a picture is in is its class; the names of all folders become the MaskGit's `class_names`.
            augment: mirrors pictures at random; not where captions tell left from right.
            sample_texts: what the samples shall show; by default the captions of the first validation pictures.
            ds_fields: names for the entries of a dataset's tuples, where their types do not tell.
        """
        if folder is not None and dataset is not None:
            raise ValueError("give a folder or a dataset, not both")
        is_captioned = folder is None or captions is not None or is_token_cache(folder)
        if not is_captioned and maskgit.transformer.condition_on_text:
            raise ValueError(
                'this MaskGit reads texts: say where they are with captions="column", "beside" or "folder"'
            )
        self.fields, self.ds_fields = _maskgit_fields(maskgit, of_batches=True), ds_fields
        transform = ImageTransform(image_size or maskgit.image_size, 3 if maskgit.vae is None else maskgit.vae.channels)

        def find(source: Any) -> Any:
            if source is None or isinstance(source, SyntheticShapes):
                return source
            if isinstance(source, TokenCache) or is_token_cache(source):
                if augment:
                    raise ValueError("the pictures of a token cache cannot be mirrored any more: leave augment out")
                return _tokens_for(maskgit, cached_images(source, transform.image_size, captions))
            if isinstance(source, (str, Path)) or hasattr(source, "column_names"):
                pictures = image_data(
                    source,
                    transform.image_size,
                    channels=transform.channels,
                    captions=captions,
                    text_column=text_column,
                    augment=augment,
                )
                if maskgit.transformer.class_emb is None or not hasattr(source, "column_names"):
                    return pictures
                return PicturesOrTokens(Labelled(pictures, source), transform, augment, _known(maskgit))
            fields = _maskgit_fields(maskgit, of_batches=False)
            return PicturesOrTokens(Routed(source, fields, ds_fields), transform, augment, _known(maskgit))

        def with_classes(source: Any) -> Any:
            is_labelled = isinstance(source, FolderClasses)  # that of a recipe
            found = find(source.dataset if is_labelled else source)
            if found is None or not (is_labelled or classes == "folder"):
                return found
            labelled = FolderClasses(found, maskgit.class_names)
            maskgit.name_classes(labelled.names)
            return labelled

        task = MaskGitTask(
            maskgit,
            sample_texts=sample_texts,
            sample_timesteps=sample_timesteps,
            sample_cond_scale=sample_cond_scale,
        )
        super().__init__(
            task,
            dataset=with_classes(folder if folder is not None else dataset),
            val_dataset=with_classes(val_dataset),
            train_dataloader=train_dataloader,
            val_dataloader=val_dataloader,
            **options,
        )

    def prepare(self, batch: Any) -> Batch:
        return route(batch, self.fields, self.ds_fields)


def _tokens_for(maskgit: MaskGit, cache: TokenCache) -> TokenCache:
    """What this network reads of a cache, which must have been made with its tokenizers."""
    chosen = cache.made_by(ImageTokenizer(maskgit))
    if maskgit.transformer.condition_on_text and "texts" not in chosen.fields:
        raise ValueError(
            f"{cache.folder} holds no texts, and this MaskGit reads some: run `helicon tokenize` with captions=..."
        )
    return chosen


def _known(maskgit: MaskGit) -> dict[str, int]:
    """How many tokens and classes there are in the tables of this network."""
    transformer = maskgit.transformer
    low = transformer.token_emb if transformer.cond_emb is None else transformer.cond_emb
    classes = {} if transformer.class_emb is None else {"classes": transformer.class_emb.num_embeddings}
    return {"ids": transformer.num_tokens, "cond_ids": low.num_codes, **classes}


class Labelled(View):
    """The pictures of a Hugging Face dataset with their "classes", from its column `label`."""

    column = "label"

    def __init__(self, pictures: View, source: Any):
        super().__init__(pictures)
        if self.column not in source.column_names:
            raise ValueError(
                f"the dataset has no column {self.column!r}, where classes are: its columns are {', '.join(source.column_names)}; "
                f"rename the one that holds them, as in dataset.rename_column('class', {self.column!r})"
            )
        self.labels = source.select_columns([self.column])

    def change(self, sample: Any, index: int, generator: torch.Generator | None) -> dict[str, Any]:
        return {**sample, "classes": self.labels[index][self.column]}


class PicturesOrTokens(TensorImages):
    """Samples with "images", or with token "ids" in their place; integers must be among the `known` ones, counted from 0."""

    def __init__(self, dataset: Any, transform: ImageTransform, augment: bool, known: Mapping[str, int]):
        super().__init__(dataset, transform, augment)
        self.known = known

    def change(self, sample: Any, index: int, generator: torch.Generator | None) -> dict[str, Any]:
        for name, count in self.known.items():
            values = torch.as_tensor(sample.get(name, ()))
            outside = (values < 0) | (values >= count)
            if outside.any():
                raise ValueError(
                    f"item {index} has {int(values[outside][0])} among its {name}, and this MaskGit knows 0 to {count - 1}"
                )
        if "ids" in sample:
            return sample
        if "images" not in sample:
            raise ValueError(f"item {index} has neither images nor ids; it has {', '.join(sample)}")
        return super().change(sample, index, generator)


def _maskgit_fields(maskgit: MaskGit, of_batches: bool) -> dict[str, Field]:
    """What a sample, or a whole batch of a user's own DataLoader, may hold for this network."""
    more = int(of_batches)
    start = "b, " if of_batches else ""
    fields = {
        "images": IMAGES if of_batches else IMAGE,
        "ids": Field(is_tensor(False, 1 + more, 2 + more), f"an integer tensor [{start}n] or [{start}h, w]"),
        "texts": TEXT,
    }
    transformer = maskgit.transformer
    if maskgit.cond_image_size is not None:
        fields["cond_ids"] = replace(fields["ids"])
    if transformer.condition_on_text:
        fields["text_embeds"] = Field(is_tensor(True, 2 + more), f"a float tensor [{start}t, e]")
        if of_batches:
            fields["text_embeds_lengths"] = Field(is_tensor(False, 1), "an integer tensor [b]")
    if transformer.class_emb is not None:
        fields["classes"] = Field(is_tensor(False, 1), "an integer tensor [b]") if of_batches else LABEL
    return {name: replace(field, is_required=False) for name, field in fields.items()}
