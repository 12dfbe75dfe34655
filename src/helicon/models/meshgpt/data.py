"""Where the meshes and the tokens of this family come from, and what of them each network reads.

Letters: b batch, v vertices, f faces, n corners of a face, t tokens, q codes of a vertex.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F

from helicon.config import check, signature_without
from helicon.data.dataset import BadFile, View, refuse_choices
from helicon.data.fields import TEXT, Field, is_tensor, route
from helicon.data.mesh import CUBE, PADDING, MeshTransform, moved_to_range
from helicon.data.mesh_data import TensorMeshes, mesh_data
from helicon.data.paired import CaptionSource
from helicon.data.synthetic_meshes import SyntheticMeshes
from helicon.data.tokens import TokenCache, Tokenizer, is_token_cache
from helicon.engine.task import Batch
from helicon.models.meshgpt.autoencoder import MeshAutoencoder
from helicon.models.meshgpt.compact import CompactMeshTokenizer
from helicon.models.meshgpt.transformer import MeshTransformer, check_codes
from helicon.nn.lengths import before

LENGTHS = 16  # faces (and vertices) that batches are padded to a multiple of, for a network that is compiled to meet few sizes
MOST_FACES = 2**31 - 1  # of a mesh in a token cache

MeshTokenizerNetwork = MeshAutoencoder | CompactMeshTokenizer


@dataclass(frozen=True)
class MeshSource:
    """Where meshes come from. On how fine a grid they are, in which range, and of how many corners, the tokenizer says: see `at`.

    `augment` None changes files at random, and a user's own dataset not.
    """

    source: Any
    captions: CaptionSource | None = None
    augment: bool | None = None
    text_column: str = "text"
    min_faces: int = 1
    max_faces: int | None = None
    transform: Mapping[str, Any] | None = None
    num_samples: int = 10_000
    seed: int = 0
    meshes: Mapping[str, Any] | None = None
    ds_fields: Sequence[str] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether its samples are {"vertices", "faces"} in order already."""
        return isinstance(self.source, (SyntheticMeshes, View))

    @property
    def is_own(self) -> bool:
        """Whether it is a user's own dataset of tensors, not files or columns of a table."""
        is_read = isinstance(self.source, (str, Path)) or hasattr(self.source, "column_names")
        return not is_read and not self.is_ready

    def at(self, tokenizer: Any) -> Any:
        """Samples {"vertices": [v, 3], "faces": [f, n]}, with "texts" where there are captions, as this tokenizer reads them."""
        data = self._in_cube(tokenizer)
        return data if tokenizer.coor_continuous_range == CUBE else InRange(data, tokenizer.coor_continuous_range)

    def _in_cube(self, tokenizer: Any) -> Any:
        if self.is_ready:
            return self.source
        if self.source == "synthetic":
            grid = {"num_discrete_coors": tokenizer.num_discrete_coors, "quads": tokenizer.num_vertices_per_face == 4}
            choices = signature_without(SyntheticMeshes, "num_samples", "seed", "edges", *grid)
            chosen = check(choices, self.meshes or {}, "data.meshes")
            return SyntheticMeshes(self.num_samples, self.seed, edges=False, **grid, **chosen)
        if self.meshes is not None:
            refuse_choices("meshes", "meshes", self.source)
        return mesh_data(
            self.source,
            self.transform_for(tokenizer),
            captions=self.captions,
            augment=self.augment,
            text_column=self.text_column,
            ds_fields=self.ds_fields,
        )

    def transform_for(self, tokenizer: Any) -> MeshTransform:
        own: dict[str, Any] = {
            "num_discrete_coors": tokenizer.num_discrete_coors,
            "quads": tokenizer.num_vertices_per_face == 4,
            "min_faces": self.min_faces,
            "max_faces": self.max_faces,
            "edges": False,  # the network finds them faster than the host could send them
        }
        changes = check(signature_without(MeshTransform, *own), self.transform or {}, "data.transform")
        return MeshTransform(**own, **changes)

    @property
    def cache(self) -> TokenCache | None:
        """The token cache that the source is, once it is seen to be of the meshes asked for."""
        if not (isinstance(self.source, TokenCache) or is_token_cache(self.source)):
            return None
        cache = self.source if isinstance(self.source, TokenCache) else TokenCache(self.source)
        asked = {name: getattr(self, name) for name in ("captions", "max_faces", "transform", "meshes")}
        asked["min_faces"] = self.min_faces if self.min_faces > 1 else None
        for name, value in asked.items():
            recorded = cache.index.arguments.get(name)
            if value is not None and recorded != value:
                shown = "null" if recorded is None else recorded
                raise ValueError(
                    f"{cache.folder} was made with {name}={shown}, not {value}: write data.{name}={shown}, or run "
                    f"`helicon tokenize` with {name}={value}, into another folder"
                )
        return cache


def training_meshes(
    source: str | Path | Literal["synthetic"],
    *,
    captions: CaptionSource | None = None,
    augment: bool = True,
    text_column: str = "text",
    min_faces: int = 1,
    max_faces: int | None = None,
    transform: Mapping[str, Any] | None = None,
    num_samples: int = 10_000,
    seed: int = 0,
    meshes: Mapping[str, Any] | None = None,
) -> MeshSource:
    """The `data` section of a recipe: a folder or manifest of meshes, the made-up furniture of `synthetic`, or the token cache of either
    (`helicon tokenize`), which is read as it is.

    Args:
        captions: where the text of a mesh is: in the "column" `text_column`, in a file "beside" it, or the name of its "folder".
        augment: meshes are stretched, and changed as `transform` says, at random.
        min_faces, max_faces: meshes with fewer or more are left out.
        transform: how they are changed: scale, scale_per_axis, jitter, rotation, up (`helicon.data.mesh.MeshTransform`).
        meshes: what made-up ones are chosen from: kinds, heights, num_sides, held_out, only (`SyntheticMeshes`).
    """
    return MeshSource(
        source, captions, augment, text_column, min_faces, max_faces, transform, num_samples, seed, meshes
    )


class MeshTokenizer(Tokenizer):
    """Makes the tokens of meshes ("codes", and "num_faces") with a `MeshAutoencoder` or a `CompactMeshTokenizer`, or with the one that a
    `MeshTransformer` stands on. The texts come along."""

    def __init__(self, network: MeshTokenizerNetwork | MeshTransformer):
        tokenizer = network.autoencoder if isinstance(network, MeshTransformer) else network
        self.path = network.source if tokenizer is None or tokenizer.source is None else tokenizer.source
        self.networks = {} if tokenizer is None else {"autoencoder": tokenizer}
        self.sizes = {"codes": network.codebook_size, "num_faces": MOST_FACES}

    def items(self, data: Any) -> Any:
        """(A dataset is taken to be on the tokenizer's grid.)"""
        if not isinstance(data, MeshSource):
            return data
        if data.cache is not None:
            raise ValueError(f"{data.source} is a token cache itself: name the meshes it was made from")
        return data.at(self.networks["autoencoder"])

    def __call__(self, batch: Batch) -> Mapping[str, Any]:
        network: Any = self.networks["autoencoder"]
        device = next(iter(network.own_tensors().values())).device
        faces = _padded_faces(batch).to(device)
        codes = network.tokenize(batch["vertices"].to(device), faces)
        made: dict[str, Any] = {
            "codes": [row[(row.flatten(1) if row.ndim > 1 else row[:, None]).ge(0).all(dim=1)] for row in codes.cpu()],
            "num_faces": list((faces >= 0).all(dim=2).sum(dim=1).cpu()),
        }
        return {**made, "texts": batch["texts"]} if "texts" in batch else made


def _padded_faces(batch: Batch) -> Int[Tensor, "b f n"]:
    """-1 behind the last face of each mesh; the plain collate has zeros there, and the lengths beside them."""
    faces = batch["faces"]
    if "faces_lengths" not in batch:
        return faces
    is_face = before(batch["faces_lengths"], faces.shape[1])
    return faces.masked_fill(~is_face[..., None], PADDING)


@dataclass(frozen=True)
class Fields:
    """What a sample, or a whole batch of a user's own DataLoader, may hold: a mesh, or (of a transformer) its codes in place of it."""

    meshes: Mapping[str, Field]
    codes: Mapping[str, Field] | None

    @classmethod
    def of(cls, model: MeshAutoencoder | MeshTransformer, of_batches: bool) -> "Fields":
        start, more, corners = "b, " * of_batches, int(of_batches), model.num_vertices_per_face
        others = {"texts": replace(TEXT, is_required=False)}
        if isinstance(model, MeshTransformer) and model.text_proj is not None:
            *_, weight = model.text_proj.parameters()
            size = weight.shape[1]
            others["text_embeds"] = Field(
                is_tensor(True, 2 + more, width=size), f"a float tensor [{start}t, {size}]", is_required=False
            )
        meshes = {
            "vertices": Field(is_tensor(True, 2 + more, width=3), f"a float tensor [{start}v, 3]"),
            "faces": Field(is_tensor(False, 2 + more, width=corners), f"an integer tensor [{start}f, {corners}]"),
            "face_edges": Field(
                is_tensor(False, 2 + more, width=2), f"an integer tensor [{start}e, 2]", is_required=False
            ),
            **others,
        }
        if isinstance(model, MeshAutoencoder):
            return cls(meshes, None)
        codes = {
            "codes": Field(is_tensor(False, 1 + more, 2 + more), f"an integer tensor [{start}t] or [{start}t, q]"),
            "num_faces": Field(is_tensor(False, more), f"an integer tensor [{'b' * of_batches}]", is_required=False),
        }
        return cls(meshes, {**codes, **others})

    def route(self, sample: Any, ds_fields: Sequence[str] | None) -> dict[str, Any]:
        """The sample as a dict. Codes look like faces: they are told by their name, or by there being no vertices beside them."""
        names = sample if isinstance(sample, Mapping) else ds_fields
        values = sample if isinstance(sample, (tuple, list)) else [sample]
        has_codes = not any(map(self.meshes["vertices"].fits, values)) if names is None else "codes" in names
        return route(sample, self.codes if has_codes and self.codes is not None else self.meshes, ds_fields)


class InRange(View):
    """Meshes in the cube from -1 to 1, moved to where a tokenizer has its bins."""

    def __init__(self, dataset: Any, continuous_range: tuple[float, float]):
        super().__init__(dataset)
        self.continuous_range = continuous_range

    def change(self, sample: Any, index: int, generator: torch.Generator | None) -> Any:
        return {**sample, "vertices": moved_to_range(sample["vertices"], CUBE, self.continuous_range)}


class MeshesOrCodes(TensorMeshes):
    """A user's own dataset of vertices and faces, which are put in order, or of codes in their place."""

    def __init__(self, transformer: MeshTransformer, source: MeshSource):
        tokenizer = transformer.autoencoder
        transform = MeshTransform() if tokenizer is None else source.transform_for(tokenizer)
        super().__init__(source.source, transform, bool(source.augment))
        self.fields, self.ds_fields = Fields.of(transformer, of_batches=False), source.ds_fields
        self.can_tokenize = tokenizer is not None
        self.continuous_range = CUBE if tokenizer is None else tokenizer.coor_continuous_range

    def change(self, sample: Any, index: int, generator: torch.Generator | None) -> dict[str, Any]:
        named = self.fields.route(sample, self.ds_fields)
        if "codes" in named:
            return named
        if not self.can_tokenize:
            raise ValueError(
                "this MeshTransformer has no autoencoder to read meshes with: build it with one, or give codes"
            )
        mesh = super().change(named, index, generator)
        mesh["vertices"] = moved_to_range(mesh["vertices"], CUBE, self.continuous_range)
        return mesh | {name: value for name, value in named.items() if name == "text_embeds"}


class TokensFor(View):
    """Meshes or tokens that a transformer has room for, the others being left out. What needs no network is tokenized here, where
    the processes that read the data share the work."""

    def __init__(self, transformer: MeshTransformer, dataset: Any):
        super().__init__(dataset)
        self.tokens_per_face, self.max_seq_len = transformer.tokens_per_face, transformer.max_seq_len
        self.codebook_size = transformer.codebook_size
        tokenizer = transformer.autoencoder
        self.tokenizer = tokenizer if isinstance(tokenizer, CompactMeshTokenizer) else None

    def change(self, sample: Any, index: int, generator: torch.Generator | None) -> Any:
        if self.tokenizer is not None and "codes" not in sample:
            codes = self.tokenizer.tokenize(sample["vertices"], sample["faces"])
            others = {name: value for name, value in sample.items() if name not in ("vertices", "faces")}
            sample = {"codes": codes, "num_faces": torch.tensor(len(sample["faces"])), **others}
        if "codes" in sample:
            check_codes(sample["codes"], self.codebook_size)
        count = sample["codes"].numel() if "codes" in sample else len(sample["faces"]) * self.tokens_per_face
        if count > self.max_seq_len:
            name = str(self.keys[index]) if self.keys is not None else f"mesh {index}"
            raise BadFile(name, f"it has {count} tokens, and this MeshTransformer has room for {self.max_seq_len}")
        return sample


def tokens_of(model: MeshTransformer, cache: TokenCache) -> TokenCache:
    """What this network reads of a cache, which must have been made with its tokenizer."""
    chosen = cache.made_by(MeshTokenizer(model))
    if model.text_proj is not None and "texts" not in chosen.fields:
        raise ValueError(
            f"{cache.folder} holds no texts, and this MeshTransformer reads some: run `helicon tokenize` with captions=..."
        )
    return chosen


def lengthened(value: Any, multiple_of: int, longest: int | None = None) -> Any:
    """A batch whose second dimension is a multiple of this, or the longest; whole numbers are padded with -1, others with 0."""
    if not isinstance(value, Tensor) or value.ndim < 2:
        return value
    length = -(-value.shape[1] // multiple_of) * multiple_of
    missing = max(0, (length if longest is None else min(length, longest)) - value.shape[1])
    padding = 0 if value.is_floating_point() else PADDING
    return F.pad(value, (*(0, 0) * (value.ndim - 2), 0, missing), value=padding)
