"""Pictures of any kind to float tensors [c, h, w] in [0, 1], c channels (1 grey, 3 colour, 4 with transparency).

The largest square of a picture is scaled to the size asked for: the middle one, or while training, if wanted, a random
one. Mirroring is the other augmentation. Sources: a folder, a manifest, a Hugging Face dataset, or any torch Dataset.
"""

import dataclasses
import io
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset

from helicon.data.dataset import BadFile, View
from helicon.data.fields import TEXT, Field, Routed
from helicon.data.files import Files, find_files, read_manifest
from helicon.data.paired import CaptionSource, ColumnCaptions, Paired, captions_of, check_columns

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")
MAX_OVERSHOOT = 0.25  # how far a picture that was scaled by a sharp filter may go beyond black and white

# What Pillow raises for damaged and foreign files: its decoders are many, and each fails in its own way.
DECODING_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    ArithmeticError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


def is_image(value: Any) -> bool:
    if isinstance(value, Tensor):
        is_pixels = value.is_floating_point() or value.dtype == torch.uint8
        return is_pixels and value.ndim == 3 and value.shape[0] in (1, 3, 4)
    return isinstance(value, Image.Image)


IMAGE = Field(is_image, "a float tensor [c, h, w] in [0, 1] with 1, 3 or 4 channels, or a PIL image")
CAPTIONED_IMAGES = {"images": IMAGE, "texts": dataclasses.replace(TEXT, is_required=False)}


@dataclass(frozen=True)
class ImageTransform:
    """A picture to a tensor: the square cut out, the size, the channels."""

    image_size: int
    channels: int = 3
    random_crop: bool = False

    def __post_init__(self) -> None:
        if self.image_size < 1:
            raise ValueError(f"image_size={self.image_size}: it must be at least 1")
        if self.channels not in (1, 3, 4):
            raise ValueError(f"channels={self.channels}: it must be 1 (grey), 3 (colour) or 4 (with transparency)")

    def decode(self, source: Path | io.BytesIO, name: str) -> Image.Image:
        """The picture in a file, upright; BadFile if there is none. A large jpeg is decoded at a fraction."""
        try:
            with Image.open(source) as image:
                # Twice the size wanted leaves the rest to the better filter of `__call__`.
                image.draft("L" if self.channels == 1 else None, (2 * self.image_size, 2 * self.image_size))
                image.load()
                return ImageOps.exif_transpose(image)
        except DECODING_ERRORS as error:
            raise BadFile(name, f"not a readable picture ({type(error).__name__}: {error})") from error

    def __call__(
        self, image: Image.Image, name: str, augment: bool = False, generator: torch.Generator | None = None
    ) -> Float[Tensor, "c h w"]:
        try:
            image = to_channels(image, self.channels)
        except DECODING_ERRORS as error:
            raise BadFile(name, f"its pixels cannot be read as {self.channels} channels ({error})") from error
        place, mirror = torch.rand(2, generator=generator).tolist() if augment else (0.5, 1.0)
        box = self._square(image.width, image.height, place if self.random_crop else 0.5)
        size = (self.image_size, self.image_size)
        image = image.resize(size, Image.Resampling.BICUBIC, box=box, reducing_gap=2.0)
        if mirror < 0.5:
            image = ImageOps.mirror(image)
        return to_tensor(image)

    @staticmethod
    def _square(width: int, height: int, place: float) -> tuple[float, float, float, float]:
        """The largest square, at `place` (0 to 1) along the longer side. (Cut before scaling: a strip stays small.)"""
        side = min(width, height)
        left, top = (width - side) * place, (height - side) * place
        return left, top, left + side, top + side


def to_channels(image: Image.Image, channels: int) -> Image.Image:
    """8 bits a channel, as L, RGB or RGBA; what is transparent lies on white where there is no such channel."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = _eight_bits(image)
    if image.has_transparency_data and channels != 4:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    mode = {1: "L", 3: "RGB", 4: "RGBA"}[channels]
    return image if image.mode == mode else image.convert(mode)


def _eight_bits(image: Image.Image) -> Image.Image:
    """Pillow's own conversion would cut off everything above 255."""
    values = np.asarray(image)
    if values.dtype.kind == "f" or values.min() < 0 or values.max() > 65535:
        raise ValueError(f"mode {image.mode} with values from {values.min()} to {values.max()} has no agreed white")
    return Image.fromarray(((values.astype(np.int64) + 128) // 257).astype(np.uint8))


def to_tensor(image: Image.Image) -> Float[Tensor, "c h w"]:
    pixels = torch.from_numpy(np.array(image))
    pixels = pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)
    return pixels.to(torch.float32, memory_format=torch.contiguous_format).div_(255)


class ImageFiles(Dataset[Tensor]):
    """Picture files, by path."""

    def __init__(self, files: Files, transform: ImageTransform, augment: bool = True):
        self.files, self.transform, self.augment = files, transform, augment

    def __len__(self) -> int:
        return len(self.files)

    @property
    def keys(self) -> list[str]:
        return self.files.keys

    def fetch(self, index: int, generator: torch.Generator | None = None) -> Float[Tensor, "c h w"]:
        path = self.files.paths[index]
        image = self.transform.decode(path, str(path))
        return self.transform(image, str(path), self.augment, generator)

    def __getitem__(self, index: int) -> Float[Tensor, "c h w"]:
        return self.fetch(index)


class ImageDataset(ImageFiles):
    """The pictures in a folder and its subfolders."""

    def __init__(
        self,
        folder: str | Path,
        image_size: int,
        exts: Sequence[str] = IMAGE_EXTENSIONS,
        *,
        channels: int = 3,
        augment: bool = True,
        random_crop: bool = False,
    ):
        super().__init__(find_files(folder, exts), ImageTransform(image_size, channels, random_crop), augment)


class ImageColumn(View):
    """The pictures in one column of a Hugging Face dataset (or of anything that gives rows as dicts)."""

    def __init__(self, dataset: Any, column: str, transform: ImageTransform, augment: bool = True):
        feature = dataset.features[column]
        if getattr(feature, "decode", False):  # decoded here: faster for jpegs, and a damaged one is a BadFile
            dataset = dataset.cast_column(column, dataclasses.replace(feature, decode=False))
        super().__init__(dataset.select_columns([column]))
        self.column, self.transform, self.augment = column, transform, augment

    def change(self, sample: Any, index: int, generator: torch.Generator | None) -> Float[Tensor, "c h w"]:
        value = sample[self.column]
        if isinstance(value, Image.Image):
            return self.transform(value, f"row {index}", self.augment, generator)
        name = f"row {index} {value.get('path') or ''}".strip()
        content = io.BytesIO(value["bytes"]) if value.get("bytes") is not None else Path(value["path"])
        return self.transform(self.transform.decode(content, name), name, self.augment, generator)


class TensorImages(View):
    """A user's own dataset of {"images": ...}: PIL images are transformed, tensors must have the size asked for."""

    def __init__(self, dataset: Any, transform: ImageTransform, augment: bool = True):
        super().__init__(dataset)
        self.transform, self.augment = transform, augment

    def change(self, sample: Any, index: int, generator: torch.Generator | None) -> dict[str, Any]:
        image = sample["images"]
        if isinstance(image, Image.Image):
            return {**sample, "images": self.transform(image, f"item {index}", self.augment, generator)}
        expected = (self.transform.channels, self.transform.image_size, self.transform.image_size)
        if tuple(image.shape) != expected:
            raise ValueError(
                f"item {index} is an image of shape {tuple(image.shape)}, not {expected}: "
                "let the dataset return PIL images, or tensors of that shape, or change image_size or channels"
            )
        if image.dtype == torch.uint8:
            return {**sample, "images": image.float() / 255}
        low, high = (float(value) for value in image.aminmax())
        if not (low > -MAX_OVERSHOOT and high < 1 + MAX_OVERSHOOT):  # or one of them is NaN
            raise ValueError(
                f"item {index} is an image with values from {low:.4g} to {high:.4g}: floats must lie in [0, 1]"
            )
        return sample


def image_data(
    source: Any,
    image_size: int,
    *,
    captions: CaptionSource | None = None,
    channels: int = 3,
    augment: bool = True,
    random_crop: bool = False,
    exts: Sequence[str] = IMAGE_EXTENSIONS,
    image_column: str | None = None,
    text_column: str = "text",
    ds_fields: Sequence[str] | None = None,
) -> View:
    """Samples {"images": [c, h, w]}, with "texts" if there are captions, from whatever holds pictures.

    `source` is a folder, a manifest (.jsonl, .csv, .parquet with a column `path`), a Hugging Face dataset (column
    `image`) or a torch Dataset, whose samples are routed by `ds_fields` or by type. `captions` says where the text is:
    in the "column" `text_column`, in a file "beside" each picture, or in the name of its "folder".
    """
    transform = ImageTransform(image_size, channels, random_crop)
    if isinstance(source, (str, Path)):
        files = _files(
            Path(source).expanduser(), exts, image_column or "path", text_column if captions == "column" else None
        )
        images = ImageFiles(files, transform, augment)
        return Paired(images, captions_of(files, captions, text_column), "images") if captions else _alone(images)
    if hasattr(source, "column_names"):
        return _from_columns(source, transform, augment, captions, image_column or "image", text_column)
    if captions is not None:
        raise ValueError(f"captions={captions!r} is for files and columns: let the dataset itself return the texts")
    if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
        raise ValueError(f"a {type(source).__name__} is no source of images: give a folder, a manifest or a dataset")
    return TensorImages(Routed(source, CAPTIONED_IMAGES, ds_fields), transform, augment)


def _alone(images: Any) -> View:
    return Routed(images, {"images": IMAGE}, ("images",))


def _files(path: Path, exts: Sequence[str], path_column: str, text_column: str | None) -> Files:
    if path.is_dir() or not path.suffix:
        return find_files(path, exts)
    return read_manifest(path, (path_column,) if text_column is None else (path_column, text_column))


def _from_columns(
    source: Any,
    transform: ImageTransform,
    augment: bool,
    captions: CaptionSource | None,
    image_column: str,
    text_column: str,
) -> View:
    check_columns(source, image_column, text_column, captions)
    images = ImageColumn(source, image_column, transform, augment)
    if captions is None:
        return _alone(images)
    rows = source.select_columns([text_column])
    return Paired(images, ColumnCaptions(rows, text_column), "images")
