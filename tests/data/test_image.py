import io
import logging
import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from helicon.data.dataset import BadFile, unaugmented
from helicon.data.image import ImageDataset, ImageTransform, image_data, to_channels
from helicon.data.loader import Loader
from helicon.data.split import split


def gradient(width: int, height: int) -> Image.Image:
    """Red grows to the right, green downwards."""
    across, down = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([across, down, np.zeros_like(down)], axis=-1).round().astype(np.uint8))


def noise(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def one(tmp_path: Path, image: Image.Image, size: int, name: str = "x.png", channels: int = 3, **options: object):
    image.save(tmp_path / name, **options)
    return ImageDataset(tmp_path, size, channels=channels, augment=False)[0]


@pytest.mark.parametrize("size", [1, 7, 16, 33])
@pytest.mark.parametrize("shape", [(16, 16), (31, 9), (8, 40), (1, 1), (1, 300), (200, 1)])
def test_every_shape_becomes_a_square_in_range(tmp_path: Path, shape: tuple[int, int], size: int):
    image = one(tmp_path, gradient(*shape), size)
    assert image.shape == (3, size, size) and image.dtype == torch.float32 and image.is_contiguous()
    assert image.min() >= 0 and image.max() <= 1


def test_the_right_size_is_kept_to_the_bit(tmp_path: Path):
    picture = noise(12, 12)
    expected = torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 255
    assert torch.equal(one(tmp_path, picture, 12), expected)


def test_the_middle_of_the_long_side_is_kept(tmp_path: Path):
    wide = one(tmp_path, gradient(90, 30), 30)
    assert wide[0].mean().item() == pytest.approx(0.5, abs=0.01)
    assert 0.3 < wide[0].min() < 0.35 and 0.65 < wide[0].max() < 0.7
    assert wide[1].max() > 0.97


def test_augmentation_mirrors_half_the_time_and_only_then(tmp_path: Path):
    gradient(20, 20).save(tmp_path / "x.png")
    data = ImageDataset(tmp_path, 20)
    plain = unaugmented(data)[0]
    seen = [data.fetch(0, torch.Generator().manual_seed(seed)) for seed in range(60)]
    mirrored = sum(torch.equal(image, plain.flip(-1)) for image in seen)
    assert 15 < mirrored < 45 and mirrored + sum(torch.equal(image, plain) for image in seen) == 60
    assert torch.equal(seen[7], data.fetch(0, torch.Generator().manual_seed(7)))
    assert all(torch.equal(unaugmented(data)[0], plain) for _ in range(9)) and data.augment


def test_a_random_crop_moves_along_the_long_side(tmp_path: Path):
    gradient(60, 20).save(tmp_path / "x.png")
    data = ImageDataset(tmp_path, 20, random_crop=True)
    lefts = [data.fetch(0, torch.Generator().manual_seed(seed))[0].min().item() for seed in range(50)]
    assert min(lefts) < 0.08 and max(lefts) > 0.58 and len(set(lefts)) > 20
    centred = unaugmented(data)[0]
    assert torch.equal(centred, ImageDataset(tmp_path, 20, augment=False)[0])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_undone(tmp_path: Path, orientation: int):
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture = gradient(16, 16)
    image = one(tmp_path, picture, 16, exif=exif.tobytes())
    corner = {1: (0, 0), 2: (0, -1), 3: (-1, -1), 4: (-1, 0), 5: (0, 0), 6: (0, -1), 7: (-1, -1), 8: (-1, 0)}[
        orientation
    ]
    assert image[:, *corner].sum() == 0  # where the black corner of the stored picture belongs
    swapped = orientation >= 5
    assert (image[0, 8, 3] - image[0, 8, 12]).abs().gt(0.4) != swapped


def colour(image: torch.Tensor) -> list[int]:
    return (image[:, 1, 1] * 255).round().int().tolist()


def test_kinds_of_picture(tmp_path: Path):
    red = Image.new("RGB", (4, 4), (200, 0, 0))
    assert colour(one(tmp_path, red.convert("P"), 4)) == pytest.approx([200, 0, 0], abs=12)
    assert colour(one(tmp_path, Image.new("L", (4, 4), 99), 4)) == [99, 99, 99]
    assert colour(one(tmp_path, Image.new("1", (4, 4), 1), 4)) == [255, 255, 255]
    assert colour(one(tmp_path, red, 4, channels=1)) == [60]
    assert colour(one(tmp_path, red, 4, channels=4)) == [200, 0, 0, 255]


def test_transparent_pictures_lie_on_white(tmp_path: Path):
    clear = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    assert colour(one(tmp_path, clear, 4)) == [255, 255, 255]
    assert colour(one(tmp_path, clear, 4, channels=1)) == [255]
    assert colour(one(tmp_path, clear, 4, channels=4))[3] == 0
    assert colour(one(tmp_path, Image.new("LA", (4, 4), (100, 128)), 4)) == pytest.approx([177] * 3, abs=1)
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 50, 60, 70])
    assert colour(one(tmp_path, palette, 4, transparency=1)) == [255, 255, 255]
    assert colour(one(tmp_path, palette, 4, transparency=b"\xff\xff")) == [50, 60, 70]
    assert colour(one(tmp_path, palette, 4, transparency=0)) == [50, 60, 70]
    assert colour(one(tmp_path, palette, 4, channels=4, transparency=b"\xff\x80")) == [50, 60, 70, 128]


def test_sixteen_bits_are_scaled_not_cut_off(tmp_path: Path):
    values = np.linspace(0, 65535, 256).round().astype(np.uint16).reshape(16, 16)
    image = one(tmp_path, Image.fromarray(values), 16, channels=1)
    assert (image[0].flatten() * 255).round().int().tolist() == list(range(256))
    assert torch.equal(one(tmp_path, Image.fromarray(values), 16)[2], image[0])
    wide = to_channels(Image.fromarray(values.astype(np.int32)), 1)
    assert np.asarray(wide).flatten().tolist() == list(range(256))
    between = np.array([[128, 129, 385, 386]], dtype=np.uint16)  # the nearest of 256 levels, 257 apart
    assert np.asarray(to_channels(Image.fromarray(between), 1)).tolist() == [[0, 1, 1, 2]]
    with pytest.raises(BadFile, match="no agreed white"):
        ImageTransform(4)(Image.fromarray(values.astype(np.float32)), "x.tif")


def test_cmyk_jpeg(tmp_path: Path):
    image = one(tmp_path, Image.new("CMYK", (16, 16), (0, 255, 255, 0)), 8, "x.jpg")
    assert colour(image) == pytest.approx([255, 0, 0], abs=6)


@pytest.mark.parametrize("channels", [1, 3])
def test_large_jpegs_are_decoded_small_and_look_the_same(tmp_path: Path, channels: int):
    picture = gradient(640, 512)
    picture.save(tmp_path / "x.jpg", quality=95)
    transform = ImageTransform(32, channels)
    decoded = transform.decode(tmp_path / "x.jpg", "x")
    assert decoded.size == (80, 64)
    exact = transform(picture, "x")
    assert (transform(decoded, "x") - exact).abs().max() < 0.02


def bytes_of(image: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["png", "jpeg"])
def test_damaged_and_foreign_files_are_bad_files(tmp_path: Path, kind: str):
    whole = bytes_of(noise(40, 40), kind)
    contents = [b"", b"no picture at all", whole[:3], whole[: len(whole) // 2], b"<svg></svg>", whole[100:]]
    for number, content in enumerate(contents):
        path = tmp_path / str(number) / "x.png"
        path.parent.mkdir()
        path.write_bytes(content)
        with pytest.raises(BadFile, match=f"{number}/x.png: not a readable picture"):
            ImageDataset(path.parent, 8)[0]
    gone = ImageDataset(tmp_path, 8)
    gone.files.paths[0].unlink()
    with pytest.raises(BadFile, match="FileNotFoundError"):
        gone[0]


@pytest.mark.parametrize("kind", ["png", "jpeg", "gif", "bmp", "tiff", "webp"])
def test_flipped_bytes_are_a_picture_or_a_bad_file_never_a_crash(kind: str):
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    noise(24, 24).save(buffer, kind, exif=exif)
    whole, generator, transform = buffer.getvalue(), random.Random(0), ImageTransform(8)
    bad = 0
    for _ in range(150):
        content = bytearray(whole)
        for _ in range(generator.choice((1, 3, 30))):
            content[generator.randrange(min(len(content), generator.choice((60, 400, 10**6))))] = generator.randrange(
                256
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's remarks on damaged metadata
            try:
                assert transform(transform.decode(io.BytesIO(content), "x"), "x").shape == (3, 8, 8)
            except BadFile:
                bad += 1
    assert bad > 10


def test_a_folder_with_bad_files_trains_and_lists_them(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    for number in range(5):
        gradient(9, 9).save(folder / f"{number}.PNG")
    (folder / "sub" / "2.jpg").write_bytes(b"junk")
    loader = Loader(image_data(folder, 8), batch_size=3, bad_files=tmp_path / "bad_files.txt")
    with caplog.at_level(logging.WARNING):
        batches = [next(loader.steps())[0], *loader.validation(None)]
    assert all(batch["images"].shape == (3, 3, 8, 8) for batch in batches) and len(batches) == 3
    assert loader.bad == [str(folder / "sub" / "2.jpg")]
    assert (tmp_path / "bad_files.txt").read_text().startswith(f"{folder}/sub/2.jpg\tnot a readable picture")
    assert "skipped" in caplog.text


def test_folders_are_checked(tmp_path: Path):
    with pytest.raises(ValueError, match="holds no jpg, jpeg, png, webp file"):
        ImageDataset(tmp_path, 8)
    with pytest.raises(ValueError, match="does not exist"):
        image_data(tmp_path / "none", 8)
    gradient(4, 4).save(tmp_path / "x.bmp")
    assert len(ImageDataset(tmp_path, 8, ["bmp"])) == 1
    gradient(4, 4).save(tmp_path / "y.webp")
    assert ImageDataset(tmp_path, 8).keys == ["y.webp"]
    for wrong in ({"image_size": 0}, {"image_size": 4, "channels": 2}):
        with pytest.raises(ValueError, match=r"(image_size|channels)="):
            ImageDataset(tmp_path, exts=["bmp"], **wrong)


def captioned_folder(tmp_path: Path) -> Path:
    for name in ("a_b/1", "c/2"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        gradient(9, 5).save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text(f"picture {name}\n")
    return tmp_path


def test_captions_beside_files_and_in_folder_names(tmp_path: Path):
    folder = captioned_folder(tmp_path)
    assert [s["texts"] for s in image_data(str(folder), 8, captions="beside")] == ["picture a_b/1", "picture c/2"]
    assert [s["texts"] for s in image_data(folder, 8, captions="folder")] == ["a b", "c"]
    data = image_data(folder, 8, captions="folder")
    assert list(data.keys) == ["a_b/1.png", "c/2.png"] and data[0]["images"].shape == (3, 8, 8)
    assert set(image_data(folder, 8)[0]) == {"images"}
    with pytest.raises(ValueError, match="a folder has no columns"):
        image_data(folder, 8, captions="column")


def test_a_manifest(tmp_path: Path):
    captioned_folder(tmp_path)
    (tmp_path / "list.csv").write_text("path,text,title\nc/2.png,two,second\na_b/1.png,one,first\n")
    data = image_data(tmp_path / "list.csv", 8, captions="column", text_column="title")
    assert [sample["texts"] for sample in data] == ["second", "first"] and list(data.keys) == ["c/2.png", "a_b/1.png"]
    assert [s["texts"] for s in image_data(tmp_path / "list.csv", 8, captions="beside")] == [
        "picture c/2",
        "picture a_b/1",
    ]
    with pytest.raises(ValueError, match="has no column caption: its columns are path, text, title"):
        image_data(tmp_path / "list.csv", 8, captions="column", text_column="caption")
    with pytest.raises(ValueError, match="has no column file"):
        image_data(tmp_path / "list.csv", 8, image_column="file")
    with pytest.raises(ValueError, match="must end in"):
        image_data(tmp_path / "a_b" / "1.txt", 8)


def test_a_split_of_pictures_augments_the_training_part_only(tmp_path: Path):
    for number in range(8):
        gradient(9, 9).save(tmp_path / f"{number}.png")
    train, valid = split(image_data(tmp_path, 9), 0.25, 42)
    assert valid is not None and len(valid) == 2
    assert (
        len({tuple(valid.fetch(0, torch.Generator().manual_seed(s))["images"].flatten().tolist()) for s in range(9)})
        == 1
    )
    assert (
        len({tuple(train.fetch(0, torch.Generator().manual_seed(s))["images"].flatten().tolist()) for s in range(9)})
        == 2
    )


def test_hugging_face_datasets():
    datasets = pytest.importorskip("datasets")
    good = [bytes_of(gradient(20, 10), "jpeg"), bytes_of(gradient(10, 10), "png")]
    rows = {"image": [{"bytes": b, "path": f"{i}.x"} for i, b in enumerate([*good, b"junk"])], "text": ["a", None, "c"]}
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    source = datasets.Dataset.from_dict(rows, features=features)
    data = image_data(source, 8, captions="column")
    assert data[0]["texts"] == "a" and data[0]["images"].shape == (3, 8, 8) and len(data) == 3
    with pytest.raises(BadFile, match="row 1: its column text holds no text"):
        data[1]
    with pytest.raises(BadFile, match=r"row 2 2.x: not a readable picture"):
        data[2]
    assert set(image_data(source, 8)[1]) == {"images"}
    _, valid = split(image_data(source.select([0, 1]), 8), 0.5, 0)
    assert valid is not None and torch.equal(valid[0]["images"], valid[0]["images"])
    again = source.rename_columns({"image": "picture", "text": "title"})
    named = image_data(again, 8, captions="column", image_column="picture", text_column="title")
    assert torch.equal(unaugmented(named)[0]["images"], unaugmented(data)[0]["images"])
    with pytest.raises(ValueError, match="no column 'image': its columns are picture, title"):
        image_data(again, 8)
    with pytest.raises(ValueError, match="captions='beside' is for files"):
        image_data(source, 8, captions="beside")
    with pytest.raises(ValueError, match="choose a split"):
        image_data(datasets.DatasetDict({"train": source}), 8)
    with pytest.raises(ValueError, match="streaming"):
        image_data(source.to_iterable_dataset(), 8)


class Own(Dataset):
    def __init__(self, *samples: object):
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> object:
        return self.samples[index]


def test_a_users_own_dataset():
    picture = torch.rand(3, 8, 8)
    data = image_data(Own(picture, (picture, "a"), ("b", noise(9, 12)), {"images": (picture * 255).byte()}), 8)
    assert torch.equal(data[0]["images"], picture)
    assert data[1]["texts"] == "a" and data[2]["texts"] == "b" and data[2]["images"].shape == (3, 8, 8)
    assert (data[3]["images"] - picture).abs().max() < 1 / 255
    sharp = (picture * 1.2 - 0.1).half()  # a little beyond black and white
    assert torch.equal(image_data(Own(sharp), 8)[0]["images"], sharp)
    assert torch.equal(image_data(Own((picture, 7)), 8, ds_fields=("images", "_"))[0]["images"], picture)
    for wrong, problem in [
        (image_data(Own((picture, 7)), 8), r"fit no fields: found float32 \[3, 8, 8\], int.*ds_fields"),
        (image_data(Own(picture), 9), r"item 0 is an image of shape \(3, 8, 8\), not \(3, 9, 9\)"),
        (image_data(Own(torch.ones(3, 8, 8) * 255), 8), r"values from 255 to 255: floats must lie in \[0, 1\]"),
        (image_data(Own(torch.ones(3, 8, 8) * -1), 8), "values from -1 to -1"),
        (image_data(Own(picture / 0 * 0), 8), "values from nan to nan"),
    ]:
        with pytest.raises(ValueError, match=problem):
            wrong[0]
    with pytest.raises(ValueError, match="let the dataset itself return the texts"):
        image_data(Own(picture), 8, captions="beside")
    with pytest.raises(ValueError, match="int is no source of images"):
        image_data(3, 8)
    pictures = image_data(Own(gradient(8, 8)), 8)
    assert (
        len({tuple(pictures.fetch(0, torch.Generator().manual_seed(s))["images"].flatten().tolist()) for s in range(9)})
        == 2
    )
    plain = unaugmented(pictures)
    assert (
        len({tuple(plain.fetch(0, torch.Generator().manual_seed(s))["images"].flatten().tolist()) for s in range(9)})
        == 1
    )
