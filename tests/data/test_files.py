import json
import sys
from pathlib import Path

import pytest

from helicon.data.files import find_files, read_manifest


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def test_files_are_found_below_in_order_and_by_extension_of_any_case(tmp_path: Path):
    touch(
        tmp_path,
        "b.PNG",
        "a/z.jpg",
        "a/b/c.JpG",
        "a.gif",
        "B.png",
        "notes.txt",
        "png",
        ".hidden.png",
        ".git/x.png",
        "é.png",
    )
    files = find_files(tmp_path, ("jpg", ".PNG"))
    assert files.keys == ["B.png", "a/b/c.JpG", "a/z.jpg", "b.PNG", "é.png"]
    assert files.paths == [tmp_path / key for key in files.keys] and len(files) == 5
    assert find_files(str(tmp_path), ["gif"]).keys == ["a.gif"]


def test_links_are_followed_but_not_in_circles(tmp_path: Path):
    touch(tmp_path / "elsewhere", "1.png")
    touch(tmp_path / "data", "0.png")
    (tmp_path / "data" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "data")
    assert find_files(tmp_path / "data", ("png",)).keys == ["0.png", "link/1.png"]


def test_no_folder_and_no_files_are_errors_of_one_sentence(tmp_path: Path):
    touch(tmp_path, "x.txt")
    with pytest.raises(ValueError, match=r"nowhere does not exist: name the folder of your data"):
        find_files(tmp_path / "nowhere", ("png",))
    with pytest.raises(ValueError, match=r"is a file, not a folder: name the folder"):
        find_files(tmp_path / "x.txt", ("png",))
    with pytest.raises(ValueError, match="holds no jpg, png file"):
        find_files(tmp_path, ("jpg", "png"))


ROWS = [{"path": "a/1.png", "text": "a cat, sleeping"}, {"path": "./b/../2.png", "text": 'says "é"'}]


def write(path: Path, rows: list[dict] = ROWS) -> Path:
    if path.suffix.lower() == ".jsonl":
        path.write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    elif path.suffix == ".csv":
        lines = [",".join(rows[0])] + [
            ",".join(f'"{v.replace(chr(34), chr(34) * 2)}"' for v in r.values()) for r in rows
        ]
        path.write_text("\n".join(lines), encoding="utf-8-sig")
    else:
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet

        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("extension", [".jsonl", ".JSONL", ".csv", ".parquet"])
def test_all_kinds_of_manifest_say_the_same(tmp_path: Path, extension: str):
    files = read_manifest(write(tmp_path / f"list{extension}"), ("path", "text"))
    assert files.keys == ["a/1.png", "2.png"]
    assert files.paths == [tmp_path / "a" / "1.png", tmp_path / "2.png"]
    assert [row["text"] for row in files.rows] == ["a cat, sleeping", 'says "é"']


def test_absolute_paths_are_kept(tmp_path: Path):
    files = read_manifest(write(tmp_path / "list.jsonl", [{"file": "/data/x.png"}]), ("file",))
    assert files.paths == [Path("/data/x.png")]


@pytest.mark.parametrize("name", ["../x.png", "a/../../x.png", ".."])
def test_paths_out_of_the_folder_are_refused(tmp_path: Path, name: str):
    with pytest.raises(ValueError, match=r"row 2 of .*outside of the manifest's folder.*absolute"):
        read_manifest(write(tmp_path / "list.jsonl", [{"path": "..a/x.png"}, {"path": name}]))


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        (
            "x.jsonl",
            '{"path": "a", "text": "b"}\n{"file": "b"}',
            "row 2 of .* has no column path, text: its columns are file",
        ),
        ("x.jsonl", '{"path": "a", "text": "b"}\n{"path": ', "line 2 of .* is not json"),
        ("x.jsonl", '["a"]', "line 1 of .* is a list, not an object"),
        ("x.jsonl", '{"path": null, "text": "b"}', "row 1 of .* names no file, but None"),
        ("x.jsonl", "\n", "has no rows"),
        ("x.csv", "path,title\na,b\n", "row 1 of .* has no column text: its columns are path, title"),
        ("x.csv", "path,text\n", "has no rows"),
        ("x.parquet", "PAR", "is not a parquet file"),
        ("x.xlsx", "", r"it must end in \.jsonl, \.csv, \.parquet"),
        ("x", "", "it must end in"),
    ],
)
def test_what_is_wrong_with_a_manifest_is_said(tmp_path: Path, name: str, content: str, problem: str):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=problem):
        read_manifest(tmp_path / name, ("path", "text"))


def test_a_manifest_that_is_not_there(tmp_path: Path):
    with pytest.raises(ValueError, match=r"x.csv does not exist"):
        read_manifest(tmp_path / "x.csv")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write(tmp_path / "x.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match="pip install pyarrow"):
        read_manifest(path)


@pytest.mark.parametrize("extension", [".jsonl", ".csv"])
def test_a_manifest_in_another_encoding_is_named(tmp_path: Path, extension: str):
    path = write(tmp_path / f"list{extension}")
    path.write_bytes(path.read_text(encoding="utf-8-sig").encode() + "\ncafé".encode("latin-1"))
    with pytest.raises(
        ValueError, match=rf"list\{extension} is not in UTF-8 \(.* at byte \d+\): save it in that encoding"
    ):
        read_manifest(path, ("path", "text"))
