"""How good are the meshes? An autoencoder and transformers, learned from some hundred captioned meshes in minutes.

    python benchmarks/data/meshes.py unpacked meshes                                  # the data, see there
    python benchmarks/meshes.py --data meshes --stage autoencoder --out report        # 150 seconds of training
    python benchmarks/meshes.py --data meshes --stage transformer --budget-seconds 580 --out report
    python benchmarks/meshes.py --data meshes --stage compact --budget-seconds 580 --out report     # needs no autoencoder
    python benchmarks/meshes.py --data synthetic --tiny --out report                  # anywhere, a minute; means nothing

A tenth of the meshes (chosen by a hash of their names) is held out; the others are stretched at random, a few times each, beforehand. All
of them wait on the device, in groups of like size, so that nothing but the network takes time. Each stage measures its speed, fits the
number of steps, and with it the cosine schedule, to the time it has, trains through the trainer, and is judged with the averaged weights on
the held-out meshes. Of the autoencoder: how many triangles come back with all nine coordinates in their bins, and how many coordinates. Of
the transformers (with those averaged weights that validated best, on the same meshes): the cross-entropy of a token and of a face, and what
they make of held-out captions: how many meshes are watertight, edges at which more than two faces meet, and the chamfer distance to the
mesh that the caption is of and to another. The row "real" says the same of the held-out meshes themselves. The stages leave their networks
in `--run`. `model.KEY=VALUE` and `trainer.KEY=VALUE` change a stage.
"""

import argparse
import json
import math
import random
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import report
from budget import Deadline, curves, train_for
from helicon.config import apply_override
from helicon.data.dataset import BadFile
from helicon.data.files import Files, read_manifest
from helicon.data.mesh import Mesh, MeshTransform, read_mesh
from helicon.data.mesh_data import collate_meshes
from helicon.data.seeds import seeded_generator
from helicon.data.split import split_indices
from helicon.data.synthetic_meshes import SyntheticMeshes
from helicon.engine.trainer import Trainer
from helicon.metrics.codes import code_counts, usage
from helicon.metrics.contact_sheet import below_each_other
from helicon.metrics.mesh import chamfer_distance, coordinate_accuracy, surface_points, triangle_accuracy
from helicon.models.meshgpt.assemble import assembled, mesh_report, write_mesh
from helicon.models.meshgpt.autoencoder import MeshAutoencoder
from helicon.models.meshgpt.compact import CompactMeshTokenizer
from helicon.models.meshgpt.data import LENGTHS
from helicon.models.meshgpt.picture import mesh_sheet
from helicon.models.meshgpt.trainers import MeshAutoencoderTrainer, MeshTransformerTrainer
from helicon.models.meshgpt.transformer import MeshTransformer
from helicon.nn.network import load_network

HELD_OUT, MOST_HELD_OUT = 0.1, 256
GUIDANCE = (1.0, 3.0)  # of the samples; those of the last are shown
SAMPLING: Mapping[str, Any] = {"filter_thres": None, "top_p": 0.95}
ACROSS, DOWN = 8, 4  # meshes in a row of a sheet, and rows
MINUTES = {"autoencoder": 2.5, "transformer": 7.0, "compact": 7.0}
RESERVE = {"autoencoder": 40, "transformer": 90, "compact": 90}  # seconds for judging and saving

Sample = dict[
    str, Any
]  # a caption in "texts", with "vertices" [v, 3] and "faces" [f, 3] or with "codes" [t] and "num_faces"


@dataclass(frozen=True)
class Size:
    models: Mapping[str, Mapping[str, Any]]  # keywords of the networks, by stage
    batches: Mapping[str, int]
    groups: Mapping[str, int]  # of meshes of like size: one is compiled for; more of them, once more, for all sizes
    copies: int  # of each mesh, one of them as it is
    synthetic: int  # meshes, where they are made up
    made: int  # captions that meshes are made for
    made_at_once: int
    probe: int  # steps that are timed


TRANSFORMER = {
    "dim": 512, "attn_depth": 12, "attn_heads": 8, "dropout": 0.1, "condition_on_text": True,
    "text_condition_model_kwargs": [{"dim": 256, "depth": 4, "max_length": 64, "dropout": 0.1}],
}  # fmt: skip
FULL = Size(
    models={"autoencoder": {}, "transformer": TRANSFORMER, "compact": TRANSFORMER},
    batches={"autoencoder": 64, "transformer": 32, "compact": 64},
    groups={"autoencoder": 1, "transformer": 1, "compact": 1}, copies=8, synthetic=3000, made=64, made_at_once=32, probe=30,
)  # fmt: skip
TINY_AUTOENCODER = {
    "encoder_dims_through_depth": (24, 32), "decoder_dims_through_depth": (32, 32), "dim_codebook": 24,
    "dim_coor_embed": 16, "codebook_size": 1024,
}  # fmt: skip
TINY_TRANSFORMER = {
    "dim": 32, "attn_depth": 1, "attn_heads": 2, "attn_dim_head": 16, "fine_attn_depth": 1, "condition_on_text": True,
    "text_condition_model_kwargs": [{"dim": 16, "depth": 1, "heads": 2, "dim_head": 8, "max_length": 96}],
}  # fmt: skip
TINY = Size(
    models={"autoencoder": TINY_AUTOENCODER, "transformer": TINY_TRANSFORMER, "compact": TINY_TRANSFORMER},
    batches={"autoencoder": 4, "transformer": 4, "compact": 4},
    groups={"autoencoder": 1, "transformer": 2, "compact": 2}, copies=2, synthetic=40, made=4, made_at_once=3, probe=2,
)  # fmt: skip
# Of the trainers. (The autoencoder learns faster with AdamW than with Muon, at equal rates.)
TRAINING: Mapping[str, Mapping[str, Any]] = {
    "autoencoder": {"optimizer": "adamw", "lr": 2e-3},
    "transformer": {"optimizer": "muon", "lr": 8e-4, "wd": 0.02},
    "compact": {"optimizer": "muon", "lr": 8e-4, "wd": 0.02},
}


# ---------------------------------------------------------------------------------------------------- data


def load_meshes(source: str, max_faces: int, size: Size) -> tuple[list[Sample], list[Sample]]:
    """The meshes to learn from, each with its stretched copies, and those held out."""
    if source == "synthetic":  # whose captions a stretched copy would belie
        found = {str(number): [sample] for number, sample in enumerate(made_up(size.synthetic))}
        found = {key: copies for key, copies in found.items() if len(copies[0]["faces"]) <= max_faces}
    else:
        found = _from_files(Path(source), MeshTransform(edges=False, max_faces=max_faces), size.copies)
    if len(found) < 2:
        raise SystemExit(f"{source} has {len(found)} meshes of at most {max_faces} faces, too few: raise --max-faces")
    keys = list(found)
    learned, held_out = split_indices(keys, HELD_OUT, seed=0)
    random.Random(0).shuffle(held_out)  # neighbours are alike, and the first ones are shown
    print(f"{len(learned)} meshes of at most {max_faces} faces to learn from, {len(held_out)} held out", flush=True)
    copies = list(chain.from_iterable(found[keys[index]] for index in learned))
    return copies, [found[keys[index]][0] for index in held_out[:MOST_HELD_OUT]]


def made_up(count: int) -> list[Sample]:
    data = SyntheticMeshes(count, edges=False)
    return [data[index] for index in range(count)]


def _from_files(folder: Path, transform: MeshTransform, copies: int) -> dict[str, list[Sample]]:
    """The meshes that are small enough, each with its copies, by their keys."""
    files = read_manifest(folder / "manifest.jsonl", ("path", "text"))
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda index: _copies(files, index, transform, copies), range(len(files)))
        return {key: samples for key, samples in zip(files.keys, found, strict=True) if samples}


def _copies(files: Files, index: int, transform: MeshTransform, count: int) -> list[Sample]:
    """The mesh as it is, then stretched; nothing of one that has too many faces."""
    path, key, text = files.paths[index], files.keys[index], {"texts": files.rows[index]["text"]}
    try:
        mesh = read_mesh(path, path.suffix.lower().removeprefix("."), key)
        plain = transform(mesh, key)
    except BadFile:
        return []
    draws = [seeded_generator("copy", key, number) for number in range(1, count)]
    return [plain | text, *(transform(mesh, key, augment=True, generator=draw) | text for draw in draws)]


def grouped(samples: Sequence[Sample], count: int, device: torch.device) -> list[Sample]:
    """The samples by size, equally many in each group but for one: each padded to its longest, on the device."""
    sized = "codes" if "codes" in samples[0] else "faces"
    order = sorted(range(len(samples)), key=lambda index: len(samples[index][sized]))
    parts = torch.tensor(order).tensor_split(min(count, len(order)))
    return [on_device([samples[index] for index in part.tolist()], device) for part in parts]


def on_device(samples: Sequence[Sample], device: torch.device) -> Sample:
    batch = collate_meshes(samples)
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}


@dataclass(frozen=True)
class Batches:
    """From each group in turn a batch, in an order drawn anew each time; what is left of a group is left out."""

    groups: Sequence[Sample]
    batch_size: int

    def __len__(self) -> int:
        return len(self.groups) * min(max(1, len(group["texts"]) // self.batch_size) for group in self.groups)

    def __iter__(self) -> Iterator[Sample]:
        orders = [torch.randperm(len(group["texts"])).split(self.batch_size) for group in self.groups]
        for number in range(len(self)):
            which = number % len(self.groups)
            yield _some(self.groups[which], orders[which][number // len(self.groups)])


def _some(group: Sample, chosen: Tensor) -> Sample:
    places = chosen.to(next(value.device for value in group.values() if isinstance(value, Tensor)))
    texts = [group["texts"][index] for index in chosen.tolist()]
    return {name: value[places] for name, value in group.items() if isinstance(value, Tensor)} | {"texts": texts}


@dataclass(frozen=True)
class Whole:
    """Each group as one batch, to validate on: of sizes of their own, for which it is not worth compiling anything."""

    groups: Sequence[Sample]

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[Sample]:
        with torch.compiler.set_stance("force_eager"):
            yield from (dict(group) for group in self.groups)


@dataclass(frozen=True)
class Experiment:
    """What all stages have in common."""

    size: Size
    learned: list[Sample]
    held_out: list[Sample]
    run: Path  # keeps networks
    out: Path  # gets pictures, meshes and the report
    device: torch.device
    overrides: Sequence[str]

    def settings(self, stage: str, *constructors: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Keywords of the network and of the trainer."""
        body = {"model": dict(self.size.models[stage]), "trainer": dict(TRAINING[stage])}
        body["trainer"]["batch_size"] = self.size.batches[stage]
        for override in self.overrides:
            apply_override(override, body, dict(zip(("model", "trainer"), constructors, strict=True)))
        return body["model"], body["trainer"]


def options(steps: int, run: Path) -> dict[str, Any]:
    """What all trainings have in common."""
    return {
        "num_train_steps": steps, "scheduler": "cosine", "warmup_steps": min(200, steps // 10), "max_grad_norm": 1.0,
        "ema_beta": 0.999, "log_every": max(1, steps // 100), "val_every": max(1, steps // 20), "val_num_batches": None,
        "save_results_every": 10**9, "save_model_every": 10**9, "tensorboard": False, "results_folder": run,
        "force_clear_prev_results": True,
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------- the autoencoder


def train_autoencoder(experiment: Experiment, deadline: Deadline) -> list[dict[str, Any]]:
    size, device = experiment.size, experiment.device
    keywords, own = experiment.settings("autoencoder", MeshAutoencoder, MeshAutoencoderTrainer)
    torch.manual_seed(0)
    model = MeshAutoencoder(**keywords)
    learned, held_out = (
        grouped(samples, size.groups["autoencoder"], device) for samples in (experiment.learned, experiment.held_out)
    )
    train, valid = Batches(learned, own["batch_size"]), Whole(held_out)

    def build(steps: int, _: int, run: Path | None) -> Trainer:
        shared = options(steps, run or experiment.run / "autoencoder-run")
        return MeshAutoencoderTrainer(model, train_dataloader=train, val_dataloader=valid, **{**shared, **own})

    trainer, how = train_for(deadline, size.probe, build)
    exactly = torch.autocast(device.type, enabled=False)  # as the transformer's meshes are tokenized
    with trainer.inference(), exactly, torch.compiler.set_stance("force_eager"):
        quality = judge_autoencoder(model, valid)
        shown = experiment.held_out[: ACROSS * DOWN]
        rebuilt = reconstructed(model, shown, device)
        model.save(experiment.run / "autoencoder")
    sheet([true_mesh(sample) for sample in shown], rebuilt, captions(shown)).save(
        experiment.out / "reconstructions.png"
    )
    return [{"case": "autoencoder", "parameters, M": millions(model), **how, **quality}]


def judge_autoencoder(model: MeshAutoencoder, batches: Whole) -> dict[str, float]:
    sums, counts = torch.zeros(3), torch.zeros(())
    for batch in batches:
        made = model(batch["vertices"], batch["faces"], return_reconstruction=True)
        found = (made.logits.argmax(dim=-1), made.targets, made.is_face)
        faces = made.is_face.sum()
        sums += torch.stack([triangle_accuracy(*found) * faces, coordinate_accuracy(*found) * faces, faces]).cpu()
        counts = counts + code_counts(made.codes, model.codebook_size).cpu()
    triangles, coordinates, faces = sums.tolist()
    used = usage(counts)
    return {
        "triangles right": triangles / faces,
        "coordinates right": coordinates / faces,
        "codebook use": used["codebook_use"].item(),
        "perplexity": used["perplexity"].item(),
    }


def reconstructed(model: MeshAutoencoder, samples: Sequence[Sample], device: torch.device) -> list[Mesh]:
    batch = on_device(samples, device)
    coordinates, mask = model.decode_from_codes_to_faces(model.tokenize(batch["vertices"], batch["faces"]))
    return [assembled(*mesh) for mesh in zip(coordinates.float(), mask, strict=True)]


# ---------------------------------------------------------------------------------------------------- the transformers


def train_transformer(experiment: Experiment, deadline: Deadline) -> list[dict[str, Any]]:
    if not (experiment.run / "autoencoder").exists():
        raise SystemExit(f"{experiment.run} holds no autoencoder: run --stage autoencoder first, with the same --run")
    tokenizer = load_network(experiment.run / "autoencoder")
    assert isinstance(tokenizer, MeshAutoencoder)
    return _train_on_codes("transformer", tokenizer.to(experiment.device), experiment, deadline)


def train_compact(experiment: Experiment, deadline: Deadline) -> list[dict[str, Any]]:
    return _train_on_codes("compact", CompactMeshTokenizer(), experiment, deadline)


def _train_on_codes(
    stage: str, tokenizer: MeshAutoencoder | CompactMeshTokenizer, experiment: Experiment, deadline: Deadline
) -> list[dict[str, Any]]:
    size, device = experiment.size, experiment.device
    keywords, own = experiment.settings(stage, MeshTransformer, MeshTransformerTrainer)
    learned, held_out = (
        grouped(tokenized(tokenizer, samples, device), size.groups[stage], device)
        for samples in (experiment.learned, experiment.held_out)
    )
    longest = max(group["codes"].shape[1] for group in (*learned, *held_out))
    longest += -longest % (LENGTHS * tokenizer.tokens_per_face)  # to which the trainer fills batches up
    torch.manual_seed(1)
    model = MeshTransformer(tokenizer, **{"max_seq_len": longest, **keywords})
    train, valid = Batches(learned, own["batch_size"]), Whole(held_out)

    def build(steps: int, _: int, run: Path | None) -> Trainer:
        shared = options(steps, run or experiment.run / f"{stage}-run")
        return MeshTransformerTrainer(model, train_dataloader=train, val_dataloader=valid, **{**shared, **own})

    trainer, how = train_for(deadline, size.probe, build, keep_best=True)
    shown = experiment.held_out[: size.made]
    real, rows, made = [true_mesh(sample) for sample in shown], [], []
    # Nothing is worth compiling for a few meshes of several lengths. (Steps are captured as CUDA graphs all the same.)
    with trainer.inference(), torch.compiler.set_stance("force_eager"):
        quality = judge_codes(model, valid)
        model.save(experiment.run / stage)
        for guidance in GUIDANCE:
            made = generated(model, captions(shown), size.made_at_once, guidance)
            states = {"case": f"{stage}, samples, guidance {guidance:g}", **state_of(made)}
            rows.append(report.measured({**states, **distances(made, real, device)}))
    sheet(real, made, captions(shown)).save(experiment.out / f"{stage}-samples.png")
    for number, mesh in enumerate(made[: ACROSS * DOWN]):
        if len(mesh.faces):
            write_mesh(experiment.out / f"{stage}-{number:02d}.glb", mesh)
    judged = {"case": stage, "parameters, M": millions(model), **how, **quality}
    return [judged, {"case": f"{stage}, real", **state_of(real), **distances(real, real, device)}, *rows]


@torch.no_grad()
def tokenized(
    tokenizer: MeshAutoencoder | CompactMeshTokenizer, samples: Sequence[Sample], device: torch.device
) -> list[Sample]:
    """Codes in the place of meshes, in the same order."""
    batch_size, found = 64, []
    for start in range(0, len(samples), batch_size):
        part = samples[start : start + batch_size]
        if isinstance(tokenizer, CompactMeshTokenizer):
            codes = [tokenizer.tokenize(sample["vertices"], sample["faces"]) for sample in part]
        else:
            batch = on_device(part, device)
            rows = tokenizer.tokenize(batch["vertices"], batch["faces"]).flatten(1).cpu()
            codes = [row[row >= 0] for row in rows]
        found += [
            {"codes": row, "num_faces": torch.tensor(len(sample["faces"])), "texts": sample["texts"]}
            for row, sample in zip(codes, part, strict=True)
        ]
    return found


def judge_codes(model: MeshTransformer, batches: Whole) -> dict[str, float]:
    """What a token costs and what a face costs, which can be compared between tokenizers."""
    nats = tokens = faces = 0.0
    for batch in batches:
        counted = model.num_labels(batch["codes"]).item()
        nats += counted * model(codes=batch["codes"], texts=batch["texts"], cond_drop_prob=0.0).item()
        tokens += counted
        faces += batch["num_faces"].sum().item()
    return {
        "nats a token": nats / tokens,
        "perplexity a token": math.exp(nats / tokens),
        "nats a face": nats / faces,
        "perplexity a face": math.exp(nats / faces),
    }


def generated(model: MeshTransformer, texts: Sequence[str], at_once: int, guidance: float) -> list[Mesh]:
    """A mesh for each text, in batches of one size (the last filled up with texts that are made again)."""
    found: list[Mesh] = []
    for start in range(0, len(texts), at_once):
        part = [texts[(start + offset) % len(texts)] for offset in range(at_once)]
        coordinates, mask = model.generate(texts=part, cond_scale=guidance, seed=start, **SAMPLING)
        found += [assembled(*mesh) for mesh in zip(coordinates.float(), mask, strict=True)]
    return found[: len(texts)]


def state_of(meshes: Sequence[Mesh]) -> dict[str, float]:
    reports = [mesh_report(mesh) for mesh in meshes]
    mean = lambda name: sum(getattr(each, name) for each in reports) / len(reports)
    return {
        "faces": mean("faces"),
        "watertight": mean("watertight"),
        "non-manifold edges": mean("non_manifold_edges"),
        "boundary edges": mean("boundary_edges"),
    }


def distances(made: Sequence[Mesh], real: Sequence[Mesh], device: torch.device) -> dict[str, float | None]:
    """To the mesh that the caption is of, and to that of another caption: the same where captions tell nothing."""
    places = [place for place, mesh in enumerate(made) if len(mesh.faces)]
    if not places:
        return {"distance": None, "distance to another": None}
    found = points_on([made[place] for place in places], device)
    own, others = (
        points_on([real[(place + shift) % len(real)] for place in places], device) for shift in (0, len(real) // 2)
    )
    return {
        "distance": chamfer_distance(found, own).nanmean().item(),
        "distance to another": chamfer_distance(found, others).nanmean().item(),
    }


def points_on(meshes: Sequence[Mesh], device: torch.device) -> Tensor:
    corners = [mesh.vertices[mesh.faces] for mesh in meshes]
    lengths = torch.tensor([len(each) for each in corners])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    return surface_points(pad_sequence(corners, batch_first=True).to(device), mask.to(device))


# ---------------------------------------------------------------------------------------------------- showing


def true_mesh(sample: Sample) -> Mesh:
    return assembled(sample["vertices"][sample["faces"]])


def captions(samples: Sequence[Sample]) -> list[str]:
    return [sample["texts"] for sample in samples]


def millions(model: torch.nn.Module) -> float:
    return sum(parameter.numel() for parameter in model.parameters()) / 1e6


def sheet(real: Sequence[Mesh], made: Sequence[Mesh], texts: Sequence[str]) -> Image.Image:
    """Rows of captions, each with the true meshes above those that were made."""
    starts = range(0, min(len(made), ACROSS * DOWN), ACROSS)
    parts = [slice(start, start + ACROSS) for start in starts]
    rows = [mesh_sheet([real[part], made[part]], texts[part], size=192) for part in parts]
    return below_each_other(rows, gap=12)


CURVES = {
    "autoencoder": ("loss", "valid_triangle_accuracy", "valid_coordinate_accuracy", "valid_perplexity"),
    "transformer": ("loss", "valid_loss"),
    "compact": ("loss", "valid_loss"),
}
STAGES = {"autoencoder": train_autoencoder, "transformer": train_transformer, "compact": train_compact}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help='a folder with manifest.jsonl (path, text), or "synthetic"')
    parser.add_argument("--stage", choices=(*STAGES, "all"), default="all")
    parser.add_argument("--max-faces", type=int, default=400, help="larger meshes are left out")
    parser.add_argument("--minutes", type=float, help=f"to train a stage for; usually {MINUTES}")
    parser.add_argument("--budget-seconds", type=float, help="for each stage as a whole: it trains less if it must")
    parser.add_argument("--tiny", action="store_true", help="tiny networks, to see that this script runs")
    parser.add_argument("--run", type=Path, default=Path("runs/meshes"), help="where networks are kept between stages")
    parser.add_argument("--out", type=Path, required=True, help="a folder for report.json, pictures and meshes")
    parser.add_argument("overrides", nargs="*", help="model.KEY=VALUE or trainer.KEY=VALUE, of one --stage")
    arguments = parser.parse_args()
    if arguments.overrides and arguments.stage == "all":
        parser.error("model.KEY=VALUE and trainer.KEY=VALUE are of one stage: name it with --stage")
    size = TINY if arguments.tiny else FULL
    for folder in (arguments.run, arguments.out):
        folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    meshes = load_meshes(arguments.data, arguments.max_faces, size)
    experiment = Experiment(size, *meshes, arguments.run, arguments.out, report.device(), arguments.overrides)
    stages = list(STAGES) if arguments.stage == "all" else [arguments.stage]
    if "autoencoder" in stages:  # what was made of an earlier one is out of date
        (arguments.run / "transformer.json").unlink(missing_ok=True)
    for stage in stages:
        deadline = Deadline(start, arguments.minutes or MINUTES[stage], arguments.budget_seconds, RESERVE[stage])
        rows = STAGES[stage](experiment, deadline)
        (arguments.run / f"{stage}.json").write_text(json.dumps(rows))
        curves(arguments.run / f"{stage}-run", CURVES[stage]).save(arguments.out / f"{stage}-curves.png")
        shutil.copy(arguments.run / f"{stage}-run" / "metrics.jsonl", arguments.out / f"{stage}-metrics.jsonl")
        start = time.monotonic()
    kept = [arguments.run / f"{stage}.json" for stage in STAGES]
    rows = [row for path in kept if path.exists() for row in json.loads(path.read_text())]
    report.show("meshes", rows, arguments.out / "report.json")


if __name__ == "__main__":
    main()
