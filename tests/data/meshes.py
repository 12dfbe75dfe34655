"""Meshes and mesh files for the tests of data."""

from pathlib import Path

import torch
import trimesh
from torch import Tensor

from helicon.data.mesh import Mesh


def content_of(mesh: trimesh.Trimesh, kind: str) -> bytes:
    content = mesh.export(file_type=kind)
    return content.encode() if isinstance(content, str) else content


def box(width: float = 2.0, height: float = 1.0, depth: float = 1.0) -> trimesh.Trimesh:
    return trimesh.creation.box(extents=(width, height, depth))


def write(folder: Path, *names: str, mesh: trimesh.Trimesh | None = None) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content_of(mesh or box(), path.suffix[1:].lower()))
    return folder


def random_mesh(num_vertices: int, num_faces: int, corners: int = 3, seed: int = 0) -> Mesh:
    generator = torch.Generator().manual_seed(seed)
    faces = torch.rand(num_faces, num_vertices, generator=generator).argsort(dim=1)[:, :corners]
    return Mesh(2 * torch.rand(num_vertices, 3, generator=generator) - 1, faces)


def seeded(data: object, seed: int) -> dict[str, Tensor]:
    return data.fetch(0, torch.Generator().manual_seed(seed))
