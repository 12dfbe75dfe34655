"""Meshes to train on: files by path, a column of a Hugging Face dataset, or a user's own dataset of vertices and faces.

Each becomes {"vertices": [v, 3], "faces": [f, n]} as `MeshTransform` makes it, with "face_edges" [e, 2] and "texts" where
asked for; `collate_meshes` pads them to batches. v vertices, f faces, n corners, e edges.
"""

import dataclasses
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from helicon.data.collate import Batch, collate
from helicon.data.dataset import BadFile, View
from helicon.data.fields import TEXT, Field, Routed
from helicon.data.files import Files, find_files, read_manifest
from helicon.data.mesh import MESH_EXTENSIONS, PADDING, MeshTransform, checked_mesh, read_mesh
from helicon.data.paired import Captions, CaptionSource, ColumnCaptions, captions_of, check_columns


class MeshFiles(Dataset[dict[str, Tensor]]):
    """Mesh files, by path."""

    def __init__(self, files: Files, transform: MeshTransform, augment: bool = True):
        self.files, self.transform, self.augment = files, transform, augment

    def __len__(self) -> int:
        return len(self.files)

    @property
    def keys(self) -> list[str]:
        return self.files.keys

    def fetch(self, index: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        path = self.files.paths[index]
        mesh = read_mesh(path, path.suffix.lower().removeprefix("."), str(path), self.transform.quads)
        return self.transform(mesh, str(path), self.augment, generator)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.fetch(index)


class MeshColumn(View):
    """The mesh files in one column of a Hugging Face dataset: {"bytes", "path"}, a path, or bytes alone."""

    def __init__(self, dataset: Any, column: str, transform: MeshTransform, augment: bool = True):
        feature = dataset.features[column]
        if getattr(feature, "decode", False):  # read here, so that a damaged one is a BadFile
            dataset = dataset.cast_column(column, dataclasses.replace(feature, decode=False))
        super().__init__(dataset.select_columns([column]))
        self.column, self.transform, self.augment = column, transform, augment

    def change(self, sample: Any, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        value = sample[self.column]
        if not isinstance(value, Mapping):
            value = {"bytes": value} if isinstance(value, bytes) else {"path": value}
        content, path = value.get("bytes"), value.get("path")
        name = f"row {index} {path or ''}".strip()
        if content is None and not isinstance(path, str):
            raise BadFile(name, f"its column {self.column} holds no mesh file")
        kind = Path(path).suffix.lower().removeprefix(".") if path else _kind_of(content)
        mesh = read_mesh(Path(path) if content is None else io.BytesIO(content), kind, name, self.transform.quads)
        return self.transform(mesh, name, self.augment, generator)


def _kind_of(content: bytes) -> str:
    """By how it begins; obj and stl files begin with anything."""
    beginnings = {b"glTF": "glb", b"ply": "ply", b"OFF": "off"}
    return next((kind for beginning, kind in beginnings.items() if content.startswith(beginning)), "")


def is_vertices(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 2 and value.shape[1] == 3


def is_faces(value: Any) -> bool:
    return _is_whole(value) and value.shape[1] in (3, 4)


def is_edges(value: Any) -> bool:
    return _is_whole(value) and value.shape[1] == 2


def _is_whole(value: Any) -> bool:
    is_tensor = isinstance(value, Tensor) and value.ndim == 2
    return is_tensor and not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool


MESH_FIELDS = {
    "vertices": Field(is_vertices, "a float tensor [v, 3]"),
    "faces": Field(is_faces, "an integer tensor [f, 3] or [f, 4]"),
    "face_edges": Field(is_edges, "an integer tensor [e, 2]", is_required=False),
    "texts": dataclasses.replace(TEXT, is_required=False),
}


class TensorMeshes(View):
    """A user's own dataset of vertices and faces. They are put in order like any other, so edges are found anew; only where
    `augment` asks for it are they changed at random."""

    def __init__(self, dataset: Any, transform: MeshTransform, augment: bool = False):
        super().__init__(dataset)
        self.transform, self.augment = transform, augment

    def change(self, sample: Any, index: int, generator: torch.Generator | None) -> dict[str, Any]:
        for name in ("vertices", "faces"):
            if not MESH_FIELDS[name].fits(sample[name]):
                raise ValueError(f"the {name} of item {index} are not {MESH_FIELDS[name].looks_like}")
        mesh = checked_mesh(sample["vertices"], sample["faces"], f"item {index}")
        given = {name: value for name, value in sample.items() if name == "texts"}
        return self.transform(mesh, f"item {index}", self.augment, generator) | given


class CaptionedMeshes(View):
    """Meshes with their captions in "texts"."""

    def __init__(self, dataset: Any, captions: Captions):
        super().__init__(dataset)
        self.captions = captions

    def change(self, sample: Any, index: int, generator: torch.Generator | None) -> dict[str, Any]:
        return {**sample, "texts": self.captions[index]}


def mesh_data(
    source: Any,
    transform: MeshTransform = MeshTransform(),  # noqa: B008 (it is frozen)
    *,
    captions: CaptionSource | None = None,
    augment: bool | None = None,
    exts: Sequence[str] = MESH_EXTENSIONS,
    mesh_column: str | None = None,
    text_column: str = "text",
    ds_fields: Sequence[str] | None = None,
) -> View:
    """Samples {"vertices": [v, 3], "faces": [f, n]}, with "face_edges" [e, 2] and "texts" if asked for.

    `source` is a folder, a manifest (.jsonl, .csv, .parquet with a column `path`), a Hugging Face dataset (column `mesh`)
    or a torch Dataset, whose samples are routed by `ds_fields` or by type. `captions` says where the text is: in the
    "column" `text_column`, in a file "beside" each mesh, or in the name of its "folder". `augment` changes meshes at random;
    left out, those of files, and not those of a torch Dataset. `collate_meshes` makes batches.
    """
    augment_files = augment is not False
    if isinstance(source, (str, Path)):
        path = Path(source).expanduser()
        columns = (mesh_column or "path", *((text_column,) if captions == "column" else ()))
        files = find_files(path, exts) if path.is_dir() or not path.suffix else read_manifest(path, columns)
        meshes = MeshFiles(files, transform, augment_files)
        return CaptionedMeshes(meshes, captions_of(files, captions, text_column)) if captions else View(meshes)
    if hasattr(source, "column_names"):
        return _from_columns(source, transform, augment_files, captions, mesh_column or "mesh", text_column)
    if captions is not None:
        raise ValueError(f"captions={captions!r} is for files and columns: let the dataset itself return the texts")
    if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
        raise ValueError(f"a {type(source).__name__} is no source of meshes: give a folder, a manifest or a dataset")
    return TensorMeshes(Routed(source, MESH_FIELDS, ds_fields), transform, bool(augment))


def _from_columns(
    source: Any,
    transform: MeshTransform,
    augment: bool,
    captions: CaptionSource | None,
    mesh_column: str,
    text_column: str,
) -> View:
    check_columns(source, mesh_column, text_column, captions)
    meshes = MeshColumn(source, mesh_column, transform, augment)
    if captions is None:
        return meshes
    return CaptionedMeshes(meshes, ColumnCaptions(source.select_columns([text_column]), text_column))


class DatasetFromTransforms(Dataset[dict[str, Any]]):
    """The files below a folder, each through the function for its extension: {"obj": path -> (vertices, faces)}.

    What the function returns, after `augment_fn`, is named by `data_kwargs`. (Both may use the global random generators:
    the loader seeds them for each sample.)
    """

    def __init__(
        self,
        folder: str | Path,
        transforms: Mapping[str, Callable[[Path], Any]],
        data_kwargs: Sequence[str] | None = None,
        augment_fn: Callable[[Any], Any] | None = None,
    ):
        self.transforms = {ext.lower().removeprefix("."): transform for ext, transform in transforms.items()}
        self.files = find_files(folder, tuple(self.transforms))
        self.data_kwargs = tuple(data_kwargs or ("vertices", "faces"))
        self.augment_fn, self.augment = augment_fn, augment_fn is not None

    def __len__(self) -> int:
        return len(self.files)

    @property
    def keys(self) -> list[str]:
        return self.files.keys

    def __getitem__(self, index: int) -> dict[str, Any]:
        path = self.files.paths[index]
        try:
            values = self.transforms[path.suffix.lower().removeprefix(".")](path)
        except (OSError, ValueError, EOFError) as error:  # anything else is a mistake in the transform
            raise BadFile(path, f"its transform failed ({type(error).__name__}: {error})") from error
        if self.augment and self.augment_fn is not None:
            values = self.augment_fn(values)
        if len(values) != len(self.data_kwargs):
            raise ValueError(f"the transform of {path} gives {len(values)} values, not {', '.join(self.data_kwargs)}")
        return dict(zip(self.data_kwargs, values, strict=True))


def collate_meshes(samples: Sequence[Mapping[str, Any]], pad_id: int = PADDING) -> Batch:
    """A batch: floats padded with 0, whole numbers (faces, edges) with `pad_id`, everything else as `collate` has it."""
    names = [name for name, value in samples[0].items() if isinstance(value, Tensor) and value.ndim > 0]
    rest = collate([{name: value for name, value in sample.items() if name not in names} for sample in samples])
    for sample in samples:
        missing = [name for name in names if name not in sample]
        if missing:
            raise ValueError(
                f"a sample lacks {', '.join(missing)}, which another of its batch has: give each the same entries"
            )
    return {name: _padded([sample[name] for sample in samples], pad_id) for name in names} | rest


def custom_collate(data: Sequence[Any], pad_id: int = PADDING) -> Batch | tuple[Any, ...]:
    """`collate_meshes` for dicts, and the same for tuples."""
    if isinstance(data[0], Mapping):
        return collate_meshes(data, pad_id)
    batch = collate_meshes([{str(place): value for place, value in enumerate(sample)} for sample in data], pad_id)
    return tuple(batch[str(place)] for place in range(len(data[0])))


def _padded(values: list[Tensor], pad_id: int) -> Tensor:
    if len({value.shape[1:] for value in values}) > 1:
        shapes = sorted(tuple(value.shape) for value in values)
        raise ValueError(
            f"one batch has the shapes {shapes}: only the first dimension may differ (are there triangles and quads?)"
        )
    return pad_sequence(values, batch_first=True, padding_value=0 if values[0].is_floating_point() else pad_id)
