"""From what stands on the command line to mesh files: MeshGPT's side of `helicon generate`.

A mesh is written with a picture of it beside: `table.glb` and `table.png`. What state it is in is told.

Letters: b meshes, n tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from jaxtyping import Int
from torch import Tensor

from helicon.data.dataset import BadFile
from helicon.data.mesh import CUBE, Mesh, face_edges, fit_to_cube, moved_to_range, read_mesh, tidy
from helicon.metrics.contact_sheet import Sheet, sheet_of_prompts
from helicon.models.meshgpt.assemble import MeshReport, assembled, mesh_report, write_mesh
from helicon.models.meshgpt.picture import mesh_picture, mesh_sheet
from helicon.models.meshgpt.transformer import MeshTransformer
from helicon.nn.network import Network
from helicon.nn.sampling import Sampling

PICTURE = ".png"
PICTURE_SIZE = 320  # pixels a side, of a picture beside a mesh
ON_A_SHEET = 192


@dataclass(frozen=True)
class MadeMesh:
    """A mesh, and the state it is in."""

    mesh: Mesh
    report: MeshReport

    @classmethod
    def of(cls, mesh: Mesh, dropped: int = 0) -> "MadeMesh":
        return cls(mesh, mesh_report(mesh, dropped))

    def write(self, path: Path) -> str:
        """The mesh, and its picture beside it (alone, where the name is that of a picture); returns the report in words."""
        if path.suffix.lower() != PICTURE:
            write_mesh(path, self.mesh)
        mesh_picture(self.mesh, PICTURE_SIZE).save(picture_beside(path))
        return str(self.report)


def picture_beside(path: Path) -> Path:
    """Where the picture of a mesh file is."""
    return path.with_suffix(PICTURE)


class MeshMaker:
    """Makes meshes with a MeshTransformer: from texts, from the first faces of a mesh, or from nothing."""

    suffixes: ClassVar[tuple[str, ...]] = (".glb", ".obj", ".ply", ".stl", PICTURE)

    def __init__(
        self,
        network: Network,
        *,
        texts: Sequence[str] = (),
        prompt: Path | None = None,
        keep: float = 1.0,
        num_faces: int | None = None,
        max_seq_len: int | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        filter_thres: float | None = None,
        cond_scale: float = 1.0,
        remove_parallel_component: bool = False,
        rescale_phi: float = 0.0,
    ):
        """
        Args:
            texts: what the meshes shall be, of a network that reads texts; none leaves it to the network.
            prompt: the mesh file that every mesh begins with.
            keep: how much of the prompt that is: the first faces, in the order in which the network makes them. All of it is a part of a
                mesh, in the cube (from -1 to 1, or of the autoencoder's range) that the whole shall fill; less than 1 is said of a
                whole mesh, of any size.
            num_faces: about how many faces to make, of a network that is conditioned on it.
            max_seq_len: the most tokens of a mesh, those of the prompt among them; by default as many as the network was built for.
            temperature: of the tokens; 0 takes the likeliest.
            top_k: tokens are drawn from so many of the likeliest.
            top_p: tokens are drawn from the likeliest whose probabilities add up to it.
            filter_thres: tokens are drawn from the likeliest 1 - filter_thres of all; by default 0.9, or nothing beside top_k or top_p.
            cond_scale: how closely the text is followed; 1 is no guidance.
            remove_parallel_component: guidance leaves out the part of its change that is parallel to the logits.
            rescale_phi: how much of the spread that logits have without guidance is given back to guided ones.
        """
        assert isinstance(network, MeshTransformer)
        if network.autoencoder is None:
            raise ValueError("this MeshTransformer learned from codes, without a tokenizer: it makes no meshes")
        self.network, self.texts = network, _readable(network, list(texts))
        guidance: dict[str, Any] = {"remove_parallel_component": remove_parallel_component, "rescale_phi": rescale_phi}
        if Sampling(temperature, top_k, top_p, filter_thres, cond_scale, **guidance).is_guided and not self.texts:
            raise ValueError(f"cond_scale={cond_scale:g} guides by a text: give one with --text, or leave it out")
        self.options: dict[str, Any] = {
            "num_faces": _possible_count(network, num_faces),
            "max_seq_len": _possible_length(network, max_seq_len),
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "filter_thres": filter_thres,
            "cond_scale": cond_scale,
            **guidance,
        }
        self.prompt = None if prompt is None else self._beginning(prompt, keep)
        if prompt is None and keep != 1:
            raise ValueError(f"keep={keep:g} is how much of a mesh to go on from: give that with --prompt")

    @property
    def prompts(self) -> list[str]:
        return self.texts or [""]

    def make(self, which: Sequence[int], seed: int) -> list[MadeMesh]:
        """A mesh for each of these prompts, as one batch."""
        texts = [self.texts[index] for index in which] if self.texts else None
        made = self.network.generate(self.prompt, batch_size=len(which), texts=texts, seed=seed, **self.options)
        return [_made(*row) for row in zip(*made, strict=True)]

    def beginning(self) -> MadeMesh:
        """What is kept of the prompt, as the tokenizer reads it."""
        assert self.prompt is not None
        (coordinates,), (mask,) = self.network.autoencoder.decode_from_codes_to_faces(self.prompt)
        return _made(coordinates, mask)

    def beside(self, path: Path) -> Path | None:
        return None if path.suffix.lower() == PICTURE else picture_beside(path)

    def sheet(self, meshes: Sequence[MadeMesh]) -> Sheet:
        draw = lambda rows, captions: mesh_sheet([[made.mesh for made in row] for row in rows], captions, ON_A_SHEET)
        return sheet_of_prompts(meshes, self.prompts, draw)

    def _beginning(self, path: Path, keep: float) -> Int[Tensor, "1 n"]:
        """The tokens to go on from: the first of those of the mesh, in whole faces where they come in faces."""
        if not 0 < keep <= 1:
            raise ValueError(f"keep={keep:g} is the share of {path} to go on from: give more than 0, and at most 1")
        mesh = self._read(path, is_whole=keep < 1)
        batch = (mesh.vertices, mesh.faces, face_edges(mesh.faces))
        codes = self.network.tokenize(*(part[None].to(self.network.device) for part in batch))
        size = self.network.tokens_per_face
        kept = max(1, round(keep * codes.shape[1] / size)) * size
        most = self.options["max_seq_len"] or self.network.max_seq_len
        if kept >= most:
            raise ValueError(
                f"{path} is {kept} tokens, which leaves nothing of the {most} a mesh may have here: keep less of it, as in keep=0.5"
            )
        return codes[:, :kept]

    def _read(self, path: Path, is_whole: bool) -> Mesh:
        """A mesh as the tokenizer knows them: on its grid, in order."""
        if not path.is_file():
            raise FileNotFoundError(f"--prompt {path} is not there: name a mesh file")
        is_quads, bins = self.network.num_vertices_per_face == 4, self.network.autoencoder.num_discrete_coors
        low, high = span = self.network.autoencoder.coor_continuous_range
        try:
            mesh = read_mesh(path, path.suffix.lower().removeprefix("."), str(path), is_quads)
        except BadFile as error:
            raise ValueError(str(error)) from error
        if not is_whole and not (low <= mesh.vertices.min() and mesh.vertices.max() <= high):
            raise ValueError(
                f"{path} is not in the cube from {low:g} to {high:g}, so where in the whole it belongs is not known: "
                "move it there, or give the whole mesh and keep a part of it, as in keep=0.5"
            )
        in_cube = fit_to_cube(mesh.vertices) if is_whole else moved_to_range(mesh.vertices, span, CUBE)
        mesh = tidy(Mesh(in_cube, mesh.faces), bins)
        if len(mesh.faces) == 0:
            raise ValueError(f"{path}: none of its faces has an area, with coordinates in {bins} bins")
        return Mesh(moved_to_range(mesh.vertices, CUBE, span), mesh.faces)


def _readable(network: MeshTransformer, texts: list[str]) -> list[str]:
    """The texts, once it is seen that someone reads them."""
    if texts and network.text_proj is None:
        raise ValueError("this MeshTransformer was trained without texts: leave --text out")
    if texts and network.text_encoder is None:
        raise ValueError("this MeshTransformer reads embedded texts: call its generate with text_embeds, in Python")
    return texts


def _possible_count(network: MeshTransformer, num_faces: int | None) -> int | None:
    if num_faces is not None and network.num_faces_emb is None:
        raise ValueError("this MeshTransformer learned nothing of numbers of faces: leave num_faces out")
    if num_faces is not None and num_faces < 1:
        raise ValueError(f"num_faces={num_faces} must be at least 1")
    return num_faces


def _possible_length(network: MeshTransformer, max_seq_len: int | None) -> int | None:
    if max_seq_len is not None and not network.tokens_per_face <= max_seq_len <= network.max_seq_len:
        raise ValueError(
            f"max_seq_len={max_seq_len} must be {network.tokens_per_face}, the tokens of a face, to {network.max_seq_len}, "
            "which the network was built for"
        )
    return max_seq_len


def _made(coordinates: Tensor, mask: Tensor) -> MadeMesh:
    mesh = assembled(coordinates, mask)
    return MadeMesh.of(mesh, dropped=int(mask.sum()) - len(mesh.faces))
