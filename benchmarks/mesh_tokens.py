"""How many tokens a face of a mesh takes, how long the sequences get, and whether the same faces come back.

Compares `CompactMeshTokenizer` with a `MeshAutoencoder` of two quantizers, whose tokens are six a triangle whatever the mesh, on
meshes of a manifest (benchmarks/data/meshes.py makes one) or synthetic ones, by their numbers of faces. Prints a table and
writes a json.

    OMP_NUM_THREADS=1 python benchmarks/mesh_tokens.py --data meshes/manifest.jsonl
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from helicon.data.mesh import MeshTransform
from helicon.data.mesh_data import mesh_data
from helicon.data.synthetic_meshes import SyntheticMeshes
from helicon.models.meshgpt.compact import CompactMeshTokenizer
from report import seconds_of, show

AUTOENCODER = 6  # tokens a triangle: three corners, two codes each
FACES = (50, 100, 200, 400, 800, 4000)  # each row is of meshes with at most so many, and more than the row before


def samples(source: str, bins: int, most: int) -> list[dict[str, Any]]:
    data: Any = SyntheticMeshes(most, num_discrete_coors=bins, edges=False)
    if source != "synthetic":
        data = mesh_data(source, MeshTransform(bins, edges=False), augment=False)
    return [data[index] for index in range(min(most, len(data)))]


def same_faces(tokenizer: CompactMeshTokenizer, codes: Tensor, sample: dict[str, Any]) -> bool:
    """Whether what is decoded is the mesh, face for face and with their windings."""
    corners, _ = tokenizer.decode_from_codes_to_faces(codes)
    return torch.equal(in_order(corners), in_order(sample["vertices"][sample["faces"]]))


def in_order(corners: Tensor) -> Tensor:
    """Faces from their lowest corner on, sorted: equal for equal sets of faces."""
    places, numbers = torch.unique(corners.flatten(0, 1), dim=0, return_inverse=True)
    faces = numbers.view(-1, 3)
    turns = (faces.argmin(dim=1, keepdim=True) + torch.arange(3)) % 3
    return places[torch.unique(faces.gather(1, turns), dim=0)]


def measure(name: str, tokenizer: CompactMeshTokenizer, meshes: list[dict[str, Any]]) -> dict[str, Any]:
    codes = [tokenizer.tokenize(mesh["vertices"], mesh["faces"]) for mesh in meshes]
    faces = [len(mesh["faces"]) for mesh in meshes]
    ratios = [len(tokens) / count for tokens, count in zip(codes, faces, strict=True)]
    seconds = seconds_of(lambda: [tokenizer.tokenize(mesh["vertices"], mesh["faces"]) for mesh in meshes], 1, warm_up=0)
    return {
        "faces": name,
        "meshes": len(meshes),
        "tokens a face": sum(map(len, codes)) / sum(faces),
        "median": statistics.median(ratios),
        "most": max(ratios),
        "autoencoder": AUTOENCODER,
        "longest": max(map(len, codes)),
        "autoencoder's": AUTOENCODER * max(faces),
        "same faces": sum(same_faces(tokenizer, *pair) for pair in zip(codes, meshes, strict=True)),
        "ms a mesh": 1000 * seconds / len(meshes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="synthetic", help="a manifest or folder of meshes")
    parser.add_argument("--num-discrete-coors", type=int, default=128)
    parser.add_argument("--most", type=int, default=10**6, help="no more meshes than that (of synthetic ones: 1,000)")
    parser.add_argument("--tiny", action="store_true", help="a few synthetic meshes, to see that it runs")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "mesh_tokens.json")
    arguments = parser.parse_args()
    is_synthetic = arguments.tiny or arguments.data == "synthetic"
    most = 20 if arguments.tiny else min(arguments.most, 1000 if is_synthetic else arguments.most)
    meshes = samples("synthetic" if is_synthetic else arguments.data, arguments.num_discrete_coors, most)
    tokenizer = CompactMeshTokenizer(arguments.num_discrete_coors)
    rows = []
    for low, high in zip((0, *FACES), FACES, strict=False):
        part = [mesh for mesh in meshes if low < len(mesh["faces"]) <= high]
        if part:
            rows.append(measure(f"{low + 1} to {high}", tokenizer, part))
    show("mesh_tokens", [*rows, measure("all", tokenizer, meshes)], arguments.out)


if __name__ == "__main__":
    main()
