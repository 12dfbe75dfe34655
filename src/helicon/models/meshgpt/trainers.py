"""Trainers of the mesh family: how their data is found, and the defaults they train with. The loop is the engine's.

Letters: b batch, v vertices, f faces, n corners of a face, t tokens, q codes of a vertex.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from helicon.config import check, signature_without
from helicon.data.mesh_data import collate_meshes
from helicon.data.paired import CaptionSource
from helicon.engine.checkpoint import load_stage
from helicon.engine.task import Batch
from helicon.engine.trainer import Trainer
from helicon.models.meshgpt.autoencoder import MeshAutoencoder
from helicon.models.meshgpt.compact import CompactMeshTokenizer
from helicon.models.meshgpt.data import (
    LENGTHS,
    Fields,
    MeshesOrCodes,
    MeshSource,
    MeshTokenizerNetwork,
    TokensFor,
    lengthened,
    tokens_of,
)
from helicon.models.meshgpt.task import MeshAutoencoderTask, MeshTransformerTask
from helicon.models.meshgpt.transformer import MeshTransformer
from helicon.nn.network import Network

# The names another package has for the options of averaged weights; those that are None have no effect here.
EMA_OPTIONS = {
    "beta": "ema_beta",
    "update_after_step": "ema_update_after_step",
    "update_every": "ema_update_every",
    "use_foreach": None,
}


# ---------------------------------------------------------------------- the `model` section of recipes


def build_mesh_transformer(
    transformer: Mapping[str, Any],
    *,
    autoencoder: str | Path | Mapping[str, Any] | None = None,
    compact: Mapping[str, Any] | None = None,
) -> MeshTransformer:
    """
    Args:
        transformer: keywords of `MeshTransformer`; what tokens there are follows from the tokenizer.
        autoencoder: the tokenizer: a run, checkpoint or saved folder; or the keywords of an untrained `MeshAutoencoder`, to see that
            everything runs.
        compact: in its place, the keywords of a `CompactMeshTokenizer`, which has nothing to learn; {} for the usual ones.
    """
    if autoencoder is not None and compact is not None:
        raise ValueError("give model.autoencoder or model.compact, not both")
    keywords = check(signature_without(MeshTransformer, "autoencoder"), transformer, "model.transformer")
    if compact is not None:
        return MeshTransformer(
            CompactMeshTokenizer(**check(CompactMeshTokenizer, compact, "model.compact")), **keywords
        )
    return MeshTransformer(_loaded(autoencoder), **keywords)


def _loaded(source: str | Path | Mapping[str, Any] | None) -> Network | None:
    if source is None:
        return None
    if isinstance(source, Mapping):
        return MeshAutoencoder(**check(MeshAutoencoder, source, "model.autoencoder"))
    network = load_stage(source, "model.autoencoder", "helicon train meshgpt/autoencoder")
    if not isinstance(network, MeshTokenizerNetwork):
        raise ValueError(
            f"model.autoencoder={str(source)!r} holds a {type(network).__name__}, not a MeshAutoencoder or a "
            "CompactMeshTokenizer"
        )
    return network


# ---------------------------------------------------------------------- the trainers


class MeshTrainer(Trainer):
    """What both trainers share: meshes from a folder, a dataset or a user's own batches, padded as they must be."""

    lengths: Mapping[str, int] = {"faces": LENGTHS, "vertices": LENGTHS, "face_edges": 4 * LENGTHS}
    longest: Mapping[str, int] = {}  # where the network has room for no more

    def __init__(
        self,
        model: Any,
        dataset: Any = None,
        num_train_steps: int | None = None,
        batch_size: int | None = None,
        grad_accum_every: int = 1,
        *,
        folder: str | Path | None = None,
        val_dataset: Any = None,
        train_dataloader: Any = None,
        val_dataloader: Any = None,
        captions: CaptionSource | None = None,
        text_column: str = "text",
        augment: bool | None = None,
        min_faces: int = 1,
        max_faces: int | None = None,
        ds_fields: Sequence[str] | None = None,
        data_kwargs: Sequence[str] | None = None,
        ema_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ):
        """
        Args:
            dataset: a dataset of vertices and faces, which are put in order (`MeshTransform`); what `mesh_data` and `SyntheticMeshes` give
                is taken as it is. Or what `training_meshes` returns.
            folder: in its place, mesh files in a folder and below (or a manifest of them, or a token cache made by `helicon tokenize`).
            captions: where the text of a mesh is: in the "column" `text_column`, in a file "beside" it, or the name of its "folder".
            augment: meshes are stretched at random, each axis by its own factor. Left out, those of files are, and a user's own dataset is not.
            min_faces, max_faces: meshes with fewer or more are left out.
            ds_fields: names for the entries of a dataset's tuples, where their types do not tell.
            data_kwargs: another name of ds_fields. A dataset's own `data_kwargs` serve, too.
            ema_kwargs: `beta`, `update_after_step` and `update_every` of the averaged weights, also options by their own names.
        """
        for one, other, names in (
            (folder, dataset, "folder or dataset"),
            (ds_fields, data_kwargs, "ds_fields or data_kwargs"),
        ):
            if one is not None and other is not None:
                raise ValueError(f"give {names}, not both")
        self.ds_fields = data_kwargs if ds_fields is None else ds_fields
        counts = {"num_train_steps": num_train_steps, "batch_size": batch_size, "grad_accum_every": grad_accum_every}
        options |= {name: value for name, value in counts.items() if value is not None}

        def find(source: Any) -> Any:
            if source is None:
                return None
            if not isinstance(source, MeshSource):
                named = self.ds_fields or getattr(source, "data_kwargs", None)
                source = MeshSource(source, captions, augment, text_column, min_faces, max_faces, ds_fields=named)
            return self.found(model, source)

        self.fields = Fields.of(model, of_batches=True)
        super().__init__(
            self.task_of(model),
            dataset=find(folder if folder is not None else dataset),
            val_dataset=find(val_dataset),
            train_dataloader=train_dataloader,
            val_dataloader=val_dataloader,
            collate=collate_meshes,
            **options,
            **_ema_options(ema_kwargs or {}),
        )

    def task_of(self, model: Any) -> Any:
        raise NotImplementedError

    def found(self, model: Any, source: MeshSource) -> Any:
        """The dataset of a source, as this model reads it."""
        raise NotImplementedError

    def prepare(self, batch: Any) -> Batch:
        named = self.fields.route(batch, self.ds_fields)
        if "codes" in named:
            named["codes"] = named["codes"].flatten(1)
        if not self.runtime.compiles:
            return named
        return {
            name: lengthened(value, self.lengths.get(name, 1), self.longest.get(name)) for name, value in named.items()
        }

    def next_data_to_forward_kwargs(self, data: Any) -> Batch:
        """A batch of a user's own DataLoader by the names its entries have here."""
        return self.prepare(data)

    forward = Trainer.train


class MeshAutoencoderTrainer(MeshTrainer):
    """Trains a `MeshAutoencoder` on a folder or manifest of meshes, or any dataset of them."""

    name = "mesh-autoencoder"
    defaults: ClassVar = {
        "lr": 1e-4,
        "max_grad_norm": None,
        "warmup_steps": 1000,
        "val_every": 100,
        "val_num_batches": 5,
        "save_results_every": 1000,
        "ema_beta": 0.999,
    }

    def task_of(self, model: MeshAutoencoder) -> MeshAutoencoderTask:
        return MeshAutoencoderTask(model)

    def found(self, model: MeshAutoencoder, source: MeshSource) -> Any:
        if (cache := source.cache) is not None:
            raise ValueError(
                f"{cache.folder} is a token cache, and a MeshAutoencoder learns from meshes: name their folder"
            )
        return source.at(model)

    def tokenize(self, *meshes: Any, **named: Any) -> Int[Tensor, "*b p q"]:
        """Codes of meshes (`MeshAutoencoder.tokenize`) with the averaged weights where there are some; in float32, as after loading."""
        move = lambda value: value.to(self.device) if isinstance(value, Tensor) else value
        with self.inference(), torch.autocast(self.device.type, enabled=False):
            return self.task.model.tokenize(  # type: ignore[operator]
                *map(move, meshes), **{name: move(value) for name, value in named.items()}
            )

    @property
    def ema_tokenizer(self) -> MeshAutoencoder:
        """A frozen copy of the network, with the averaged weights of this moment: what a `MeshTransformer` stands on."""
        if self.ema is None:
            raise ValueError("this trainer keeps no averaged weights: build it with use_ema=True")
        model: Any = self.unwrapped_model
        with self.inference():
            return copy.deepcopy(model).requires_grad_(False)


class MeshTransformerTrainer(MeshTrainer):
    """Trains a `MeshTransformer` on meshes, which its frozen tokenizer reads, or on the tokens that were made of them."""

    name = "mesh-transformer"
    defaults: ClassVar = {
        "lr": 2e-4,
        "max_grad_norm": 0.5,
        "warmup_steps": 1000,
        "val_every": 100,
        "val_num_batches": 5,
        "save_results_every": 1000,
        "ema_beta": 0.999,
    }

    def task_of(self, model: MeshTransformer) -> MeshTransformerTask:
        self.lengths = {**self.lengths, "codes": LENGTHS * model.tokens_per_face}
        self.longest = {"codes": model.max_seq_len, **({} if model.is_flat else {"faces": model.max_faces})}
        return MeshTransformerTask(model)

    def found(self, model: MeshTransformer, source: MeshSource) -> Any:
        cache = source.cache
        if cache is not None:
            return TokensFor(model, tokens_of(model, cache))
        if source.is_own:
            return TokensFor(model, MeshesOrCodes(model, source))
        if model.autoencoder is None:
            raise ValueError(
                "this MeshTransformer has no autoencoder to read meshes with: build it with one, or name a token cache"
            )
        return TokensFor(model, source.at(model.autoencoder))

    def prepare(self, batch: Any) -> Batch:
        named = super().prepare(batch)
        model: Any = self.task.model
        if model.text_proj is not None and not named.keys() & {"texts", "text_embeds"}:
            raise ValueError(
                'this MeshTransformer reads texts, and the samples have none: say where they are with captions="column", '
                '"beside" or "folder", or train one without condition_on_text'
            )
        return named


def _ema_options(given: Mapping[str, Any]) -> dict[str, Any]:
    unknown = [name for name in given if name not in EMA_OPTIONS]
    if unknown:
        raise ValueError(
            f"ema_kwargs: {unknown[0]} is not known here, leave it out; known are {', '.join(EMA_OPTIONS)}"
        )
    return {EMA_OPTIONS[name]: value for name, value in given.items() if EMA_OPTIONS[name] is not None}  # type: ignore[misc]
