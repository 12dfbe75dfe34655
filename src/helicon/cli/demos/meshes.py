"""Meshes from words."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helicon.cli import page
from helicon.cli.demos.outline import PAGE, Captioned, Demo, both, files_of, steps_of, varied
from helicon.cli.generate import MANIFEST, loaded
from helicon.cli.page import Page
from helicon.cli.steps import Stage, Work, make, replaced

if TYPE_CHECKING:
    from helicon.data.mesh import Mesh
    from helicon.data.synthetic_meshes import SyntheticMeshes
    from helicon.nn.network import Network

MESHES, COMPLETED = "meshes", "completed"
MESHES_OF_EACH = 2
TRANSFORMER = Stage("transformer", "meshgpt/compact-demo")
HOW_MODELLED: Mapping[str, Any] = {"temperature": 0.7, "filter_thres": 0.0}  # what the recipes were tuned with
KEPT = 0.5  # of a mesh that is to be completed


def show_meshes(work: Work) -> None:
    """Makes meshes for captions, completes others, and writes the page."""
    from helicon.engine.checkpoint import resolve
    from helicon.models.meshgpt.meshes import MeshMaker

    data = work.recipes[TRANSFORMER.name].data
    seen, never_seen = captions_of_meshes(data)
    network = loaded(resolve(work.home(TRANSFORMER.name)))
    make(MeshMaker(network, texts=[*seen, *never_seen], **HOW_MODELLED), MESHES_OF_EACH, work.home(MESHES))
    complete(network, data, work.home(COMPLETED))
    mesh_page(work, seen, never_seen).write(work.folder / PAGE)


def captions_of_meshes(data: Mapping[str, Any], most: int = 9) -> tuple[list[str], list[str]]:
    """Captions of different meshes that the model has learned from, and of meshes that were kept from it."""

    def drawn(**chosen: bool) -> list[str]:
        found = map(meshes_anew(data, 1000, **chosen).attributes, reversed(range(1000)))
        return varied({(f"{a.footprint} {a.kind}", a.height): a.caption for a in found}, most)

    has_kept = bool((data.get("meshes") or {}).get("held_out"))
    return drawn(), drawn(is_held_out=True) if has_kept else []


def meshes_anew(data: Mapping[str, Any], count: int, is_held_out: bool = False) -> "SyntheticMeshes":
    """Meshes like those of a recipe's data section but none of them; or such as were kept from it altogether."""
    from helicon.data.synthetic_meshes import SyntheticMeshes

    choices = dict(data.get("meshes") or {})
    kept = [(kind, height) for kind, height in choices.pop("held_out", ())]
    pairs: dict[str, Any] = {"only" if is_held_out else "held_out": kept}
    return SyntheticMeshes(count, seed=data.get("seed", 0) + 1, edges=False, **pairs, **choices)


def complete(network: "Network", data: Mapping[str, Any], folder: Path, most: int = 4) -> None:
    """Meshes of different kinds that it has not learned from, the first half of each, and what becomes of that without a caption."""
    from helicon.data.mesh import Mesh
    from helicon.models.meshgpt.meshes import MadeMesh, MeshMaker

    meshes, lines = meshes_anew(data, 1000), []
    kinds = {meshes.attributes(index).kind: index for index in reversed(range(1000))}
    with replaced(folder) as partial:
        partial.mkdir()
        for number, sample in enumerate(map(meshes.fetch, [*kinds.values()][:most])):
            paths = {name: partial / f"{number:05d}-{name}.glb" for name in ("whole", "half", "completed")}
            MadeMesh.of(Mesh(sample["vertices"], sample["faces"])).write(paths["whole"])
            maker = MeshMaker(network, prompt=paths["whole"], keep=KEPT, **HOW_MODELLED)
            maker.beginning().write(paths["half"])
            maker.make([0], seed=0)[0].write(paths["completed"])
            lines += [{"path": path.name, "text": sample["texts"]} for path in paths.values()]
        (partial / MANIFEST).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def mesh_page(work: Work, seen: Sequence[str], never_seen: Sequence[str]) -> Page:
    at = work.folder / PAGE
    shown = Page(
        "Meshes from words",
        "One network, trained on made-up furniture: a mesh is written as two or three tokens a face, and the network learned to write "
        "such tokens, one after the other, for a caption.",
    )
    modelled, completed = (Modelled.read(work.home(name)) for name in (MESHES, COMPLETED))
    remark = f"{MESHES_OF_EACH} meshes for each caption, drawn with seed 0 and not chosen; each picture leads to its glb file."
    shown.section("What it makes", page.paragraph(f"{remark} {modelled.verdict(seen)}"), modelled.shown(seen, at))
    if never_seen:
        remark = (
            "No mesh with these captions was among those it learned from: it puts together what it knows of each word. "
            + modelled.verdict(never_seen)
        )
        shown.section("What it has never seen", page.paragraph(remark), modelled.shown(never_seen, at))
    right = sum(is_mesh_of(made, text) for text, (*_, made) in completed.files.items())
    remark = (
        "A mesh it has not learned from, the half of it that it was given (without the caption), and what it made of that: "
        f"{right} of {len(completed.files)} became what they were."
    )
    shown.section("Half a mesh, completed", page.paragraph(remark), completed.shown([*completed.files], at))
    numbers = page.metrics(work.home(TRANSFORMER.name))
    curves = page.charts(page.chart("From words to tokens: loss", both(numbers, "loss")))
    shown.section("How far it came", page.tiles(_mesh_numbers(numbers, modelled)), curves)
    files = files_of(work, {MESHES: "The meshes above, their pictures and captions, and all of them as sheet.png."})
    shown.section("Go on from here", page.commands(_mesh_commands(work, [*never_seen, *seen][0])), files)
    return shown


class Modelled(Captioned):
    """The meshes of each caption."""

    def shown(self, captions: Sequence[str], at: Path) -> str:
        """Pictures that lead from the page at `at` to their files."""
        from helicon.models.meshgpt.meshes import MadeMesh, picture_beside

        def piece(path: Path) -> str:
            return page.mesh(path, picture_beside(path), at, str(MadeMesh.of(mesh_in(path)).report))

        return page.gallery((text, [piece(path) for path in self.files.get(text, ())]) for text in captions)

    def verdict(self, captions: Sequence[str]) -> str:
        """How many of the meshes are what their captions say, in words; one that has no faces, and no file, is not."""
        right = sum(is_mesh_of(path, text) for text in captions for path in self.files.get(text, ()))
        return (
            f"{right} of {MESHES_OF_EACH * len(captions)} are of the kind, the height and the outline asked for, as far as a simple "
            "rule can tell."
        )

    @property
    def num_watertight(self) -> int:
        from helicon.models.meshgpt.meshes import MadeMesh

        return sum(MadeMesh.of(mesh_in(path)).report.watertight for paths in self.files.values() for path in paths)


def mesh_in(path: Path) -> "Mesh":
    from helicon.data.mesh import read_mesh

    return read_mesh(path, path.suffix.removeprefix("."), str(path))


def is_mesh_of(path: Path, caption: str) -> bool:
    """Whether a mesh seems to be what its caption says."""
    from helicon.data.synthetic_meshes import describe_mesh

    mesh = mesh_in(path)
    found = describe_mesh(mesh.vertices, mesh.faces)
    return found is not None and found.caption == caption


def _mesh_numbers(numbers: Mapping[str, page.Points], modelled: Modelled) -> list[tuple[str, str]]:
    made = sum(map(len, modelled.files.values()))
    return [
        (page.last(numbers, "valid_loss", "{:.2f}"), "nats for a token: how much the true one surprises the network"),
        (
            f"{modelled.num_watertight} of {made}",
            "of the meshes above are watertight, with every edge between two faces",
        ),
    ]


def _mesh_commands(work: Work, caption: str) -> list[tuple[str, str]]:
    chosen = "".join(f" {name}={value:g}" for name, value in HOW_MODELLED.items())
    run = shlex.quote(str(work.home(TRANSFORMER.name)))
    whole = shlex.quote(str(work.home(COMPLETED) / "00000-whole.glb"))
    resume = f"helicon resume {run} num_train_steps={4 * steps_of(work.home(TRANSFORMER.name))}"
    return [
        ("other words, more meshes of each", f'helicon generate {run} --text "{caption}" --samples 8{chosen}'),
        ("complete a mesh", f"helicon generate {run} --prompt {whole} keep={KEPT:g}{chosen}"),
        ("train on for longer; the demo's command then renews this page", resume),
        ("your own meshes, a text beside each, on a GPU", "helicon train meshgpt/compact data.source=my/meshes"),
        ("everything that can be trained", "helicon recipes"),
    ]


DEMO = Demo((TRANSFORMER,), show_meshes)
