from pathlib import Path

import pytest
import torch

from helicon.data.dataset import BadFile
from helicon.data.files import Files
from helicon.data.paired import (
    Captions,
    CaptionsBeside,
    ColumnCaptions,
    FolderCaptions,
    FolderClasses,
    Paired,
    captions_of,
)


def files(tmp_path: Path) -> Files:
    keys = ["red_fox/1.wav", "red_fox/2.wav", "birds/a.b/hen.wav"]
    rows = [{"path": key, "text": text} for key, text in zip(keys, ("one", "two", None), strict=True)]
    for key in keys:
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
    return Files([tmp_path / key for key in keys], keys, rows)


def test_a_column(tmp_path: Path):
    captions = captions_of(files(tmp_path), "column")
    assert [captions[0], captions[1]] == ["one", "two"] and len(captions) == 3
    with pytest.raises(BadFile, match=r"birds/a.b/hen.wav: its column text holds no text, but None"):
        captions[2]
    with pytest.raises(BadFile, match="row 0"):
        ColumnCaptions([{"caption": 3}], "caption")[0]
    with pytest.raises(BadFile, match="row 0: its column caption holds no text, but ' '"):
        ColumnCaptions([{"caption": " "}], "caption")[0]
    with pytest.raises(ValueError, match="a folder has no columns"):
        captions_of(Files([], []), "column")


def test_a_text_file_beside(tmp_path: Path):
    (tmp_path / "red_fox").mkdir()
    (tmp_path / "red_fox" / "1.txt").write_text("\ufeffa quick fox\n", encoding="utf-8")
    (tmp_path / "red_fox" / "2.txt").write_bytes(b"\xff\xfe\xfa")
    captions = captions_of(files(tmp_path), "beside")
    assert isinstance(captions, CaptionsBeside) and captions[0] == "a quick fox"
    with pytest.raises(BadFile, match=r"2.wav: its caption 2.txt cannot be read \(it is not in UTF-8\)"):
        captions[1]
    (tmp_path / "red_fox" / "2.txt").write_text(" \n")
    with pytest.raises(BadFile, match=r"2.wav: its caption 2.txt is empty"):
        captions[1]
    with pytest.raises(BadFile, match=r"hen.wav: its caption hen.txt cannot be read .*No such file"):
        captions[2]


def test_the_name_of_the_folder(tmp_path: Path):
    captions = captions_of(files(tmp_path), "folder")
    assert [captions[i] for i in range(len(captions))] == ["red fox", "red fox", "a.b"]
    with pytest.raises(ValueError, match=r"1.png is in no subfolder"):
        FolderCaptions(["1.png"])


def test_media_of_any_kind_are_paired():
    paired = Paired([torch.zeros(5), torch.ones(3)], ["quiet", "loud"], "waves")
    assert isinstance(["quiet"], Captions)
    assert paired[1]["texts"] == "loud" and paired[1]["waves"].eq(1).all()
    assert paired.fetch(0, torch.Generator())["texts"] == "quiet"
    with pytest.raises(ValueError, match="2 items and 1 captions"):
        Paired([1, 2], ["x"], "waves")


class Named(list[dict[str, str]]):
    """Items with keys."""

    keys = ("b_c/1.png", "a/2.png", "b_c/3.png")


def test_the_classes_of_folders():
    items = Named({"images": name} for name in "xyz")
    data = FolderClasses(items)
    assert data.names == ["a", "b c"] and list(data) == [
        {"images": n, "classes": c} for n, c in zip("xyz", (1, 0, 1), strict=True)
    ]
    assert FolderClasses(items, ["b c", "z", "a"])[1]["classes"] == 2
    with pytest.raises(ValueError, match="a is a folder of pictures and none of the classes b c, d"):
        FolderClasses(items, ["b c", "d"])
    with pytest.raises(ValueError, match="for files in folders"):
        FolderClasses([{"images": 1}])
