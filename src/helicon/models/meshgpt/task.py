"""How the mesh family is trained: the autoencoder on the bins of coordinates, the transformer on the tokens of faces.

Letters: b batch, v vertices, f faces, n corners of a face, e pairs of faces, t tokens, q codes of a vertex.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from helicon.data.mesh import Mesh
from helicon.data.tokens import write_whole
from helicon.engine.task import Batch, Loss, Task, Update, without_texts
from helicon.metrics.codes import code_counts, usage
from helicon.metrics.mesh import coordinate_accuracy, triangle_accuracy
from helicon.models.meshgpt.assemble import assembled, mesh_report, write_mesh
from helicon.models.meshgpt.autoencoder import MeshAutoencoder, Reconstruction
from helicon.models.meshgpt.picture import mesh_sheet
from helicon.models.meshgpt.transformer import MeshTransformer

MAX_SHOWN = 6

Writers = Mapping[str, Callable[[Path], object]]


class MeshAutoencoderTask(Task):
    """Batches are `{"vertices": [b, v, 3], "faces": [b, f, n]}`, faces padded with -1, with "face_edges" `[b, e, 2]` where somebody
    else found them.

    The loss is a mean over faces, of which batches have different numbers: each weighs as many as it has.
    """

    model: MeshAutoencoder
    unit = "faces"

    def weight(self, batch: Batch) -> Tensor:
        return (batch["faces"] >= 0).all(dim=2).sum()

    def units(self, batch: Batch) -> int:
        """Faces, padding among them: how many are real only the device knows."""
        rows, faces, _ = batch["faces"].shape
        return rows * faces

    def read(self, batch: Batch) -> Batch:
        return without_texts(batch)

    def forward(self, batch: Batch) -> Reconstruction:
        given = {name: batch[name] for name in ("vertices", "faces", "face_edges") if name in batch}
        return self.networks["model"](**given, return_reconstruction=True)

    def updates(self, step: int) -> Sequence[Update]:
        return [Update("model", lambda outputs: Loss(outputs.loss, {**_parts(outputs), **_accuracies(outputs)}))]

    def validate(self, batch: Batch) -> Loss:
        """The error of the coordinates alone: what the quantizer costs is not comparable from one to the other."""
        outputs = self.forward(batch)
        counts = {"codes": code_counts(outputs.codes, self.model.codebook_size)}
        return Loss(outputs.breakdown.reconstruction, _accuracies(outputs), counts)

    def summary(self, counts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return usage(counts["codes"])

    @torch.no_grad()
    def sample(self, batch: Batch, seed: int) -> list[Mesh]:
        """Reconstructions of the first meshes of the batch; nothing about them is random."""
        shown = _first(batch, ("vertices", "faces"))
        made = self.model.decode_from_codes_to_faces(self.model.tokenize(**shown))
        return _meshes(*made[:2])

    def present(self, batch: Batch, samples: Mapping[str, Any]) -> Writers:
        """A sheet with the originals, below them the reconstructions; and each as a file."""
        shown = _first(batch, ("vertices", "faces"))
        originals = [
            assembled(vertices[faces.clamp(min=0)], (faces >= 0).all(dim=1))
            for vertices, faces in zip(*shown.values(), strict=True)
        ]
        return _files({"original": originals, **samples}, _captions(batch, len(originals)))


class MeshTransformerTask(Task):
    """Batches hold "codes", `[b, t]` or `[b, t, q]` with -1 past the end, or the "vertices" and "faces" that the frozen tokenizer makes
    them of; what the transformer is conditioned on, "texts" or "text_embeds" `[b, m, d]` (zero where padded, or with
    "text_embeds_lengths"); and "num_faces" `[b]`, where the codes do not tell.

    The loss is a mean over tokens, of which batches have different numbers: each weighs as many as it has.
    """

    model: MeshTransformer
    unit = "tokens"

    def __init__(self, transformer: MeshTransformer):
        super().__init__(transformer, frozen=transformer.frozen)

    def codes(self, batch: Batch) -> Tensor:
        """Made once, and kept in the batch."""
        if "codes" not in batch:
            meshes = {name: batch[name] for name in ("vertices", "faces", "face_edges") if name in batch}
            batch["codes"] = self.model.tokenize(**meshes)
            batch.setdefault("num_faces", (batch["faces"] >= 0).all(dim=2).sum(dim=1))
        return batch["codes"]

    def read(self, batch: Batch) -> Batch:
        return {"codes": self.codes(batch), **self.model.batch_texts(batch), **self._counts(batch)}

    def weight(self, batch: Batch) -> Tensor:
        return self.model.num_labels(self.codes(batch))

    def units(self, batch: Batch) -> int:
        """Tokens, padding among them: how many are real only the device knows."""
        return self.codes(batch).numel()

    def forward(self, batch: Batch, **options: Any) -> Tensor:
        codes = self.codes(batch)
        return self.networks["model"](codes=codes, **self.model.batch_texts(batch), **self._counts(batch), **options)

    def _counts(self, batch: Batch) -> dict[str, Tensor]:
        is_asked = self.model.num_faces_emb is not None and "num_faces" in batch
        return {"num_faces": batch["num_faces"]} if is_asked else {}

    def updates(self, step: int) -> Sequence[Update]:
        return [Update("model", Loss)]

    def validate(self, batch: Batch) -> Loss:
        """The same loss, with the text always there."""
        return Loss(self.forward(batch, cond_drop_prob=0.0))

    @torch.no_grad()
    def sample(self, batch: Batch, seed: int) -> list[Mesh] | None:
        """Meshes for the captions of the batch, cut off where its longest ends; none where there is nothing to decode tokens with."""
        if self.model.autoencoder is None:
            return None
        longest = self.codes(batch).flatten(1).shape[1]
        few = {name: value[:MAX_SHOWN] for name, value in batch.items()}
        conditions: dict[str, Any] = {**self.model.batch_texts(few), **self._counts(few)}
        rows = len(few["codes"])
        return _meshes(*self.model.generate(batch_size=rows, max_seq_len=longest, seed=seed, **conditions))

    def present(self, batch: Batch, samples: Mapping[str, Any]) -> Writers:
        """A sheet with the true meshes, as the tokens tell them, and below them those that were made; and each as a file."""
        made = {name: meshes for name, meshes in samples.items() if meshes is not None}
        if not made:
            return {}
        codes = self.model.shaped(self.model.by_face(self.codes(batch)[:MAX_SHOWN]))
        originals = _meshes(*self.model.autoencoder.decode_from_codes_to_faces(codes))
        return _files({"original": originals, **made}, _captions(batch, len(originals)))


def _parts(outputs: Reconstruction) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in {**outputs.breakdown._asdict(), **outputs.parts}.items()}


def _accuracies(outputs: Reconstruction) -> dict[str, Tensor]:
    found = (outputs.logits.detach().argmax(dim=-1), outputs.targets, outputs.is_face)
    return {"triangle_accuracy": triangle_accuracy(*found), "coordinate_accuracy": coordinate_accuracy(*found)}


def _first(batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
    return {name: batch[name][:MAX_SHOWN] for name in names}


def _meshes(coordinates: Tensor, mask: Tensor) -> list[Mesh]:
    return [assembled(*mesh) for mesh in zip(coordinates.float(), mask, strict=True)]


def _captions(batch: Batch, rows: int) -> list[str]:
    return list(batch["texts"][:rows]) if "texts" in batch else [""] * rows


def _files(rows: Mapping[str, Sequence[Mesh]], captions: Sequence[str]) -> dict[str, Callable[[Path], object]]:
    """Every mesh that has faces as a glb file, all of them as one picture, and what state each is in."""
    named = {f"{number:02d}-{name}": mesh for name, meshes in rows.items() for number, mesh in enumerate(meshes)}
    files: dict[str, Callable[[Path], object]] = {
        f"{name}.glb": partial(write_mesh, mesh=mesh) for name, mesh in named.items() if len(mesh.faces)
    }
    told = [f"{name} {captions[int(name[:2])]}".strip() + f": {mesh_report(named[name])}\n" for name in sorted(named)]
    files["meshes.txt"] = partial(write_whole, content="".join(told).encode())
    return files | {"meshes.png": lambda path: mesh_sheet(list(rows.values()), captions).save(path)}
