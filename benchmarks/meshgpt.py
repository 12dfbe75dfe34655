"""How fast do the mesh networks train, and how fast are meshes made?

    python benchmarks/meshgpt.py                        # on a GPU, some minutes: the default sizes
    python benchmarks/meshgpt.py --only autoencoder     # one network
    python benchmarks/meshgpt.py --profile              # also where the time goes
    python benchmarks/meshgpt.py --tiny                 # anywhere, a few seconds; the numbers mean nothing

Training goes through the trainer, from batches that are on the device: the autoencoder 32 meshes of 768 random faces over 400
vertices, in fp32 and in bf16; the transformer 16 meshes of 400 faces, of 6 tokens each. Generation is the transformer's own `generate`,
from nothing to the codes of 40 faces (240 tokens). The compact transformer is of the same size, on the tokens of the tokenizer
that learns nothing, of which a face takes 2.4 in the mean over real meshes (benchmarks/mesh_tokens.py): compare faces per second.
"""

import argparse
import gc
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import report
from helicon.engine.trainer import Trainer
from helicon.models.meshgpt.autoencoder import MeshAutoencoder
from helicon.models.meshgpt.compact import CompactMeshTokenizer
from helicon.models.meshgpt.trainers import MeshAutoencoderTrainer, MeshTransformerTrainer
from helicon.models.meshgpt.transformer import MeshTransformer

COMPACT_TOKENS = 2.4  # of a face
NUM_BATCHES = 8  # that are gone through again and again


@dataclass(frozen=True)
class Size:
    """Keywords of the networks, where they are not the defaults, and the shapes they are given."""

    autoencoder: Mapping[str, Any] = field(default_factory=dict)
    transformer: Mapping[str, Any] = field(default_factory=dict)
    meshes: tuple[int, int, int] = (32, 768, 400)  # of the autoencoder: a batch, faces, vertices
    rows: tuple[int, int] = (16, 400)  # of the transformers: a batch, faces
    made: int = 40  # faces
    batches: tuple[int, ...] = (1, 8)


TINY = Size(
    {
        "encoder_dims_through_depth": (8, 12), "decoder_dims_through_depth": (8, 12), "dim_codebook": 12,
        "dim_coor_embed": 8, "codebook_size": 64,
    },
    {"dim": 16, "attn_depth": 1, "attn_heads": 2, "attn_dim_head": 8, "fine_attn_depth": 1},
    (2, 7, 5), (2, 5), 5, (1, 2),
)  # fmt: skip
AUTOENCODER_TARGET, MEMORY_TARGET = 1_200_000, 8  # faces a second, GiB
TRAIN_TARGET, GENERATE_TARGETS = 800_000, {1: 1_500, 8: 10_000}  # tokens a second


@dataclass(frozen=True)
class Batches:
    """The same few batches, in memory: reading files is not what is measured."""

    batches: Sequence[dict[str, Tensor]]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (dict(batch) for batch in self.batches)


def random_meshes(size: Size) -> Batches:
    generator = torch.Generator().manual_seed(0)
    batch, faces, vertices = size.meshes

    def one() -> dict[str, Tensor]:
        # Three different corners for each face: what is no triangle is no work.
        corners = torch.rand(batch, faces, vertices, generator=generator).topk(3, dim=-1).indices
        return {"vertices": 2 * torch.rand(batch, vertices, 3, generator=generator) - 1, "faces": corners}

    return on_device([one() for _ in range(NUM_BATCHES)])


def random_codes(codebook_size: int, rows: int, tokens: int) -> Batches:
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randint(codebook_size, (rows, tokens), generator=generator)
    return on_device([{"codes": draw()} for _ in range(NUM_BATCHES)])


def on_device(batches: Sequence[dict[str, Tensor]]) -> Batches:
    return Batches([{name: value.to(report.device()) for name, value in batch.items()} for batch in batches])


@dataclass(frozen=True)
class Kind:
    """One of the two kinds of transformer."""

    name: str
    codebook_size: int
    tokens_per_face: int  # 1: they do not come in faces
    tokens_of_a_face: float  # in the mean

    def built(self, size: Size) -> MeshTransformer:
        torch.manual_seed(0)
        sizes = {"codebook_size": self.codebook_size, "tokens_per_face": self.tokens_per_face}
        return MeshTransformer(**sizes, **size.transformer)

    def tokens(self, faces: int) -> int:
        return round(self.tokens_of_a_face * faces)


def kinds(size: Size) -> dict[str, Kind]:
    autoencoder, compact = MeshAutoencoder(**size.autoencoder), CompactMeshTokenizer()
    per_face = autoencoder.tokens_per_face
    return {
        "transformer": Kind("transformer", autoencoder.codebook_size, per_face, per_face),
        "compact": Kind("compact transformer", compact.codebook_size, 1, COMPACT_TOKENS),
    }


def time_steps(build: Callable[..., Trainer], case: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step and what goes with it; `build` takes the options of the trainer."""
    gc.collect()  # an earlier trainer is no part of this one's memory
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(
            num_train_steps=10**6, save_results_every=10**6, save_model_every=10**6, tensorboard=False,
            compile=arguments.compile, results_folder=Path(folder) / "run",
        )  # fmt: skip

        def ten_steps() -> None:
            for _ in range(10):
                trainer.train_step()

        with trainer.session():
            first = report.seconds_of(trainer.train_step, repeats=1, warm_up=0)
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            seconds = report.seconds_of(ten_steps, arguments.repeats) / 10
            peak = report.peak_gib()
            if arguments.profile:
                report.profiled(f"ten steps, {case}", ten_steps)
        count = sum(parameter.numel() for parameter in trainer.task.model.parameters())
    timed = {"seconds": seconds, "first call, s": first, "peak GiB": peak, "parameters, M": count / 1e6}
    return {"case": case, **timed}


def time_autoencoder(size: Size, precision: str, arguments: argparse.Namespace) -> dict[str, Any]:
    batch, faces, _ = size.meshes
    torch.manual_seed(0)
    model, meshes = MeshAutoencoder(**size.autoencoder), random_meshes(size)
    build = lambda **options: MeshAutoencoderTrainer(
        model, train_dataloader=meshes, batch_size=batch, grad_accum_every=1, mixed_precision=precision, **options
    )
    case = f"train autoencoder, {batch} x {faces} faces, {'fp32' if precision == 'no' else precision}"
    timed = time_steps(build, case, arguments)
    rate = batch * faces / timed["seconds"]
    return {
        "case": case,
        "faces per second": rate,
        "target": AUTOENCODER_TARGET,
        "reached": f"{rate / AUTOENCODER_TARGET:.0%}",
        **timed,
        "target, GiB": MEMORY_TARGET,
    }


def time_training(kind: Kind, size: Size, arguments: argparse.Namespace) -> dict[str, Any]:
    batch, faces = size.rows
    tokens = kind.tokens(faces)
    transformer, codes = kind.built(size), random_codes(kind.codebook_size, batch, tokens)
    build = lambda **options: MeshTransformerTrainer(
        transformer, train_dataloader=codes, batch_size=batch, grad_accum_every=1, **options
    )
    case = f"train {kind.name}, {batch} x {tokens} tokens"
    timed = time_steps(build, case, arguments)
    target = TRAIN_TARGET if kind.name == "transformer" else None
    return {"case": case, **rates(batch * faces, batch * tokens, timed["seconds"], target), **timed}


def time_generation(kind: Kind, size: Size, batch: int, arguments: argparse.Namespace) -> dict[str, Any]:
    transformer, tokens = kind.built(size).to(report.device()).eval(), kind.tokens(size.made)
    transformer.eos_id = -2  # which is never drawn: an untrained network would end where it likes
    make = lambda: transformer.generate(batch_size=batch, max_seq_len=tokens, return_codes=True, seed=0)
    first = report.seconds_of(make, 1, warm_up=0)
    seconds = report.seconds_of(make, arguments.repeats, warm_up=1)
    case = f"generate {kind.name}, batch {batch}, {tokens} tokens"
    assert make().numel() == batch * tokens, "a mesh has ended early: the numbers are not of all its tokens"
    if arguments.profile and batch > 1:
        report.profiled(case, make)
    target = GENERATE_TARGETS.get(batch) if kind.name == "transformer" else None
    rated = rates(batch * size.made, batch * tokens, seconds, target)
    return {"case": case, **rated, "seconds": seconds, "first call, s": first}


def rates(faces: int, tokens: int, seconds: float, target: float | None) -> dict[str, Any]:
    return {
        "faces per second": faces / seconds,
        "tokens per second": tokens / seconds,
        "target": target,
        "reached": None if target is None else f"{tokens / seconds / target:.0%}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny models, to see that this script runs")
    parser.add_argument("--only", choices=("autoencoder", "transformer", "compact"), help="one network")
    parser.add_argument("--what", choices=("train", "generate"), help="one half")
    arguments = report.arguments(parser)
    if arguments.only == "autoencoder" and arguments.what == "generate":
        parser.error("an autoencoder makes no meshes by itself: leave --only or --what out")
    size = TINY if arguments.tiny else Size()
    rows = []
    if arguments.only in (None, "autoencoder") and arguments.what != "generate":
        for precision in ("no", "bf16"):
            rows.append(report.measured(time_autoencoder(size, precision, arguments)))
    for name, kind in kinds(size).items():
        if arguments.only not in (None, name):
            continue
        if arguments.what != "generate":
            rows.append(report.measured(time_training(kind, size, arguments)))
        if arguments.what != "train":
            for batch in size.batches:
                rows.append(report.measured(time_generation(kind, size, batch, arguments)))
    report.show("meshgpt", rows, arguments.out)


if __name__ == "__main__":
    main()
