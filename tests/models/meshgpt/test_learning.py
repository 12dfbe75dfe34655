"""The mesh family really learns, to stated numbers: on meshes it has never seen, and from captions it has."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import helicon
from helicon import MeshAutoencoder, MeshTransformer, registry
from helicon.config import Recipe, load_recipe
from helicon.data.mesh_data import collate_meshes
from helicon.data.synthetic_meshes import KINDS, MeshAttributes, SyntheticMeshes, describe_mesh
from helicon.metrics.mesh import triangle_accuracy
from helicon.models.meshgpt.assemble import assembled

OTHER = 12345  # a seed that no recipe has
VARIED = ("table", "stool", "chair", "bench", "shelf", "lamp")  # of boxes, cylinders and buckets nearly all are seen
SIDES = [8, 16, 24]  # of what is round: up to 196 triangles
HOW: dict[str, Any] = {"temperature": 0.5, "filter_thres": 0, "seed": 1}


def read(recipe: str, *overrides: str) -> Recipe:
    return load_recipe(recipe, overrides, sections=lambda name: registry.entries[name].recipe_sections())


def train(folder: Path, recipe: str, *overrides: str) -> None:
    registry.build_trainer(read(recipe, *overrides), results_folder=folder).train()


def furniture(count: int, seed: int = OTHER, **choices: Any) -> SyntheticMeshes:
    return SyntheticMeshes(count, seed, num_discrete_coors=64, edges=False, **choices)


def never_seen(recipe: str, each: int, **choices: Any) -> tuple[list[dict[str, Any]], list[MeshAttributes]]:
    """So many meshes of each kind, all different, and none that the recipe trains on: most of another seed are, on so coarse a grid."""
    mark = lambda mesh: (mesh["vertices"].numpy().tobytes(), mesh["faces"].numpy().tobytes())
    trained = furniture(read(recipe).data["num_samples"], seed=0, **choices)
    known = {mark(trained[index]) for index in range(len(trained)) if trained.attributes(index).kind in VARIED}

    def new(data: SyntheticMeshes) -> Iterator[tuple[dict[str, Any], MeshAttributes]]:
        for index in range(len(data)):
            if mark(data[index]) not in known:
                known.add(mark(data[index]))
                yield data[index], data.attributes(index)

    found = [pair for kind in VARIED for pair in islice(new(furniture(20_000, kinds=[kind], **choices)), each)]
    assert len(found) == each * len(VARIED)
    return [mesh for mesh, _ in found], [attributes for _, attributes in found]


@pytest.mark.slow
def test_the_autoencoder_gets_99_percent_of_unseen_triangles_right() -> None:
    """Measured: 99.8 % of the triangles of 150 pieces of furniture of six kinds, 36 to 196 faces each, after half a minute
    of one core."""
    train(Path("run"), "meshgpt/autoencoder-demo", f"data.meshes={{num_sides: {SIDES}}}", "trainer.batch_size=12")
    network = helicon.load("run")
    assert isinstance(network, MeshAutoencoder)
    batch = collate_meshes(never_seen("meshgpt/autoencoder-demo", 25, num_sides=SIDES)[0])
    counts = (batch["faces"] >= 0).all(dim=2).sum(dim=1)
    assert len(counts) >= 100 and 20 <= int(counts.min()) < 50 and 180 < int(counts.max()) <= 200
    with torch.no_grad():
        whole = network.eval()(batch["vertices"], batch["faces"], return_reconstruction=True)
    assert float(triangle_accuracy(whole.logits.argmax(dim=-1), whole.targets, whole.is_face)) >= 0.99
    decoded, bins, mask = network.decode_from_codes_to_faces(
        network.tokenize(batch["vertices"], batch["faces"]), return_discrete_codes=True
    )
    assert torch.equal(mask, whole.is_face) and not decoded[mask].isnan().any()
    assert float(triangle_accuracy(bins, whole.targets, mask)) >= 0.99


@pytest.fixture(scope="module")
def transformer(tmp_path_factory: pytest.TempPathFactory) -> MeshTransformer:
    """The demo's network, trained once."""
    folder = tmp_path_factory.mktemp("demo") / "run"
    train(folder, "meshgpt/compact-demo")
    network = helicon.load(folder)
    assert isinstance(network, MeshTransformer)
    return network


def is_right(made: tuple[Tensor, Tensor], wanted: list[MeshAttributes]) -> Tensor:
    """Which of the meshes are recognised as what they should be: the kind, the height and the footprint."""
    meshes = [assembled(*mesh) for mesh in zip(*made, strict=True)]
    seen = [describe_mesh(mesh.vertices, mesh.faces) for mesh in meshes]
    return torch.tensor([one == it for one, it in zip(seen, wanted, strict=True)])


@pytest.mark.slow
def test_the_transformer_makes_what_its_caption_says(transformer: MeshTransformer) -> None:
    """Of eight kinds, 28 to 76 faces; boxes have but 12. All 22 captions are trained on; chance is one in 22. Measured: 93 of 100, and
    without a caption 1. (With boxes among them: 97, of which 47 are meshes that it has seen, and without a caption 6.)"""
    data = furniture(100, kinds=[kind for kind in KINDS if kind != "box"])
    assert all(20 <= len(data[index]["faces"]) <= 200 for index in range(100))
    asked = [data.attributes(index) for index in range(100)]
    captions = [attributes.caption for attributes in asked]
    assert is_right(transformer.generate(texts=captions, **HOW), asked).sum() >= 85
    assert is_right(transformer.generate(batch_size=100, **HOW), asked).sum() <= 20


@pytest.mark.slow
def test_the_transformer_completes_half_a_mesh_it_has_never_seen(transformer: MeshTransformer) -> None:
    """Measured: 112 of 120 are what they were (108 at temperature 0.7). Many a half can be told already; of the 46 that cannot, 42."""
    meshes, asked = never_seen("meshgpt/compact-demo", 20)
    tokenizer = transformer.autoencoder
    codes = [tokenizer.tokenize(mesh["vertices"], mesh["faces"]) for mesh in meshes]
    prompt = pad_sequence([row[: len(row) // 2] for row in codes], batch_first=True, padding_value=-1)
    captions = [attributes.caption for attributes in asked]
    made = transformer.generate(prompt, texts=captions, return_codes=True, **HOW)
    is_given = prompt >= 0
    assert torch.equal(made[:, : prompt.shape[1]][is_given], prompt[is_given])
    completed, given = (is_right(tokenizer.decode_from_codes_to_faces(row), asked) for row in (made, prompt))
    assert completed.float().mean() >= 0.85
    assert (~given).sum() >= 30 and completed[~given].float().mean() >= 0.75
