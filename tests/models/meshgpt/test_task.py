import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import trimesh
from PIL import Image

from helicon.data.mesh import Mesh
from helicon.data.mesh_data import collate_meshes
from helicon.models.meshgpt.task import MAX_SHOWN, MeshAutoencoderTask, MeshTransformerTask
from helicon.models.meshgpt.transformer import MeshTransformer
from models.meshgpt.tiny import COUNTED, TEXT, autoencoder, batch_of, compact, furniture, transformer

TOKENIZERS = {"autoencoder": autoencoder, "compact": compact}


def written(task: Any, batch: dict[str, Any], samples: dict[str, Any]) -> dict[str, Path]:
    files = {name: Path(name) for name in task.present(batch, samples)}
    for name, write in task.present(batch, samples).items():
        write(files[name])
    return files


def test_the_loss_of_batches_weighed_by_their_faces_is_that_of_one_batch() -> None:
    task = MeshAutoencoderTask(autoencoder(commit_loss_weight=0.0).eval())
    data = furniture(4)
    samples = [data[index] for index in range(4)]
    assert len({len(sample["faces"]) for sample in samples}) > 1
    batches = [collate_meshes(part) for part in (samples[:1], samples[1:])]
    weights = [task.weight(batch) for batch in batches]
    assert weights == [len(samples[0]["faces"]), sum(len(sample["faces"]) for sample in samples[1:])]
    with torch.no_grad():
        together = sum(task.forward(batch).loss * weight for batch, weight in zip(batches, weights, strict=True))
        at_once = task.forward(collate_meshes(samples)).loss
    assert float(together / sum(weights)) == pytest.approx(float(at_once), rel=1e-5)


def test_an_autoencoder_s_step_and_validation_tell_how_many_triangles_are_right() -> None:
    task, batch = MeshAutoencoderTask(autoencoder()), batch_of()
    outputs = task.forward(batch)
    loss = task.updates(0)[0].loss(outputs)
    assert loss.total.requires_grad and not any(part.requires_grad for part in loss.parts.values())
    assert {"reconstruction", "commitment", "triangle_accuracy", "coordinate_accuracy"} <= loss.parts.keys()
    with torch.no_grad():
        outputs.logits.zero_().scatter_(-1, outputs.targets[..., None], 1.0)
    perfect = task.updates(0)[0].loss(outputs).parts
    assert perfect["triangle_accuracy"] == perfect["coordinate_accuracy"] == 1
    with torch.no_grad():
        outputs.logits[0, 0, 0, 0] = outputs.logits[0, 0, 0, 0].roll(1)
    faces = int(task.weight(batch))
    spoilt = task.updates(0)[0].loss(outputs).parts
    assert float(spoilt["triangle_accuracy"]) == pytest.approx(1 - 1 / faces)
    assert float(spoilt["coordinate_accuracy"]) == pytest.approx(1 - 1 / (9 * faces))
    task.model.eval()
    valid = task.validate(batch)
    assert valid.total == task.forward(batch).breakdown.reconstruction
    assert valid.counts["codes"].shape == (2, 64)
    used = task.summary(valid.counts)
    assert 0 < used["codebook_use"] <= 1 <= used["perplexity"] <= 64


def test_reconstructions_are_shown_beside_their_originals() -> None:
    task, batch = MeshAutoencoderTask(autoencoder().eval()), batch_of(MAX_SHOWN + 2)
    made = task.sample(batch, seed=0)
    files = written(task, batch, {"online": made})
    assert len(made) == MAX_SHOWN and all(isinstance(mesh, Mesh) for mesh in made)
    with Image.open(files["meshes.png"]) as sheet:
        assert sheet.width > MAX_SHOWN * 128 and sheet.height > 2 * 128
    original = trimesh.load_mesh(files["00-original.glb"])
    assert len(original.faces) == int((batch["faces"][0] >= 0).all(dim=1).sum())
    lines = files["meshes.txt"].read_text().splitlines()
    assert len(lines) == 2 * MAX_SHOWN
    assert any(line.startswith(f"00-original {batch['texts'][0]}: {len(original.faces)} faces") for line in lines)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_meshes_and_their_codes_cost_the_same(name: str) -> None:
    network = transformer(TOKENIZERS[name](), **TEXT, **COUNTED)
    task, batch = MeshTransformerTask(network), batch_of()
    network.eval()
    codes = network.tokenize(batch["vertices"], batch["faces"])
    num_faces = (batch["faces"] >= 0).all(dim=2).sum(dim=1)
    of_codes = {"codes": codes, "num_faces": num_faces, "texts": batch["texts"]}
    assert torch.equal(task.validate(batch_of()).total, task.validate(of_codes).total)
    other = {**of_codes, "num_faces": num_faces * 4}
    assert not torch.equal(task.validate(other).total, task.validate(of_codes).total)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_codes_are_made_once_for_a_batch_and_the_weight_counts_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task, batch, calls = MeshTransformerTask(transformer(TOKENIZERS[name]())), batch_of(), []
    tokenize = MeshTransformer.tokenize
    monkeypatch.setattr(MeshTransformer, "tokenize", lambda self, **kw: calls.append(1) or tokenize(self, **kw))
    weight = int(task.weight(batch))
    task.units(batch)
    task.forward(batch).backward()
    assert len(calls) == 1
    real = int((batch["codes"] >= 0).sum())
    assert weight == real + 3  # each mesh has an end


def test_texts_are_read_outside_of_the_network_and_dropped_in_training_alone() -> None:
    network = transformer(compact(), **TEXT, text_condition_cond_drop_prob=1.0)
    task, seen = MeshTransformerTask(network), []

    def noted(**given: Any) -> torch.Tensor:
        seen.append(given)
        return network(**given)

    task.networks["model"] = noted  # type: ignore[assignment]
    first, second = batch_of(), batch_of()
    second["texts"] = ["something else"] * 3
    network.train()
    assert torch.equal(task.forward(first), task.forward(second)), "every text is dropped"
    assert not torch.equal(task.validate(first).total, task.validate(second).total)
    assert all("texts" not in given and given["text_ids"].shape[1] % 16 == 0 for given in seen)


def test_embedded_texts_have_their_lengths() -> None:
    network = transformer(compact(), condition_on_text=True, text_embed_dim=5).eval()
    task, batch = MeshTransformerTask(network), batch_of()
    batch["text_embeds"] = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    changed = copy.copy(batch)
    changed["text_embeds"] = batch["text_embeds"].clone()
    changed["text_embeds"][:, 2:] = 7.0
    assert not torch.equal(task.validate(batch).total, task.validate(changed).total)
    for one in (batch, changed):
        one["text_embeds_lengths"] = torch.tensor([2, 1, 2])
    assert torch.equal(task.validate(batch).total, task.validate(changed).total)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_generated_meshes_are_files_with_a_sheet(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    task, batch = MeshTransformerTask(transformer(tokenizer, **TEXT).eval()), batch_of()
    made = task.sample(batch, seed=3)
    assert made is not None and len(made) == 3
    again = task.sample(batch, seed=3)
    assert all(torch.equal(one.vertices, other.vertices) for one, other in zip(made, again, strict=True))
    files = written(task, batch, {"online": made, "ema": made})
    assert {"meshes.png", "meshes.txt", "00-original.glb"} <= files.keys()
    assert {f"{number:02d}-ema.glb" for number, mesh in enumerate(made) if len(mesh.faces)} <= files.keys()
    lines = files["meshes.txt"].read_text().splitlines()
    assert len(lines) == 9 and all(line.endswith("watertight") for line in lines)
    if name == "compact":  # which loses nothing
        original = trimesh.load_mesh(files["00-original.glb"])
        assert len(original.faces) == int((batch["faces"][0] >= 0).all(dim=1).sum())


def test_without_a_tokenizer_there_is_nothing_to_show() -> None:
    task = MeshTransformerTask(transformer(None, codebook_size=9, tokens_per_face=6))
    batch = {"codes": torch.randint(9, (2, 12))}
    assert task.sample(batch, seed=0) is None
    assert task.present(batch, {"online": None, "ema": None}) == {}
    assert task.frozen == {} and task.forward(batch).requires_grad
