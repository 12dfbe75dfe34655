"""How fast are the pairs of neighbouring faces found, and are they the same as by comparing every face with every other?

Times `face_edges` on grids of triangles and of quads with shuffled faces, against the comparison of all pairs where that
fits into memory, prints a table and writes a json.

    OMP_NUM_THREADS=1 python benchmarks/face_edges.py --faces 800 5000 50000
"""

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor

from helicon.data.mesh import face_edges
from report import seconds_of, show


def grid(num_faces: int, num_corners: int) -> Tensor:
    """`num_faces` faces of a square sheet, in a random order."""
    side = math.isqrt(num_faces) + 1
    corner = torch.arange(side)[:, None] * (side + 1) + torch.arange(side)
    quads = torch.stack([corner, corner + 1, corner + side + 2, corner + side + 1], dim=-1).view(-1, 4)
    faces = quads if num_corners == 4 else quads[:, [0, 1, 2, 0, 2, 3]].view(-1, 3)
    return faces[:num_faces][torch.randperm(num_faces, generator=torch.Generator().manual_seed(0))]


def by_comparison(faces: Tensor) -> Tensor:
    """Every face with every other: neighbours have two corners in common. (Right for the faces of a sheet.)"""
    common = (faces[:, None, :, None] == faces[None, :, None, :]).any(dim=-1).sum(dim=-1)
    return (common >= 2).nonzero()


def measure(num_faces: int, num_corners: int, repeats: int, most_compared: int) -> dict[str, object]:
    faces = grid(num_faces, num_corners)
    row: dict[str, object] = {"faces": num_faces, "corners": num_corners, "pairs": len(face_edges(faces))}
    row["seconds"] = fast = seconds_of(lambda: face_edges(faces), repeats)
    if num_faces > most_compared:
        return row
    row["equal"] = torch.equal(face_edges(faces), by_comparison(faces))
    row["comparison_seconds"] = slow = seconds_of(lambda: by_comparison(faces), 1, warm_up=0)
    return {**row, "times_faster": slow / fast}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faces", type=int, nargs="+", default=[800, 5000, 50000])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--most-compared", type=int, default=5000, help="no comparison of more faces than that")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "face_edges.json")
    arguments = parser.parse_args()
    rows = [
        measure(num_faces, num_corners, arguments.repeats, arguments.most_compared)
        for num_faces in arguments.faces
        for num_corners in (3, 4)
    ]
    show("face_edges", rows, arguments.out)


if __name__ == "__main__":
    main()
