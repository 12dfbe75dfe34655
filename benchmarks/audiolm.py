"""How fast do the stages of AudioLM train, and how fast do they make tokens?

    python benchmarks/audiolm.py                     # on a GPU, about eight minutes: 12 layers, dim 1024, 16 heads
    python benchmarks/audiolm.py --only semantic     # one stage
    python benchmarks/audiolm.py --profile           # also where the time goes
    python benchmarks/audiolm.py --tiny              # anywhere, a few seconds; the numbers mean nothing

Training goes through the trainer, from token ids in memory: semantic 32 x 1024 tokens, with and without forgetful masking;
coarse 16 x (256 semantic + 3 x 256 coarse); fine 16 x 8 x 128; delayed 16 x (256 semantic + 256 frames of 8). Generation is the
stage's own `generate`, from nothing or from 256 semantic tokens: 256 semantic tokens, 64 frames of 3 coarse codes, 64 frames of 8.
The delayed stage stands in the place of coarse and fine: its row says how many seconds a second of sound (50 frames) takes.
"""

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import report
from helicon.models.audiolm.stage import Stage
from helicon.models.audiolm.trainers import StageTrainer
from helicon.models.audiolm.transformers import (
    CoarseTransformer,
    DelayedTransformer,
    FineTransformer,
    SemanticTransformer,
)
from helicon.models.audiolm.wrappers import (
    CoarseTransformerWrapper,
    DelayedTransformerWrapper,
    FineTransformerWrapper,
    SemanticTransformerWrapper,
)


@dataclass(frozen=True)
class Size:
    dim: int = 1024
    depth: int = 12
    heads: int = 16
    codes: int = 1024
    quantizers: tuple[int, int] = (3, 5)  # coarse and fine
    tokens: int = 1024  # of a semantic row
    semantic: int = 256  # tokens before codes
    frames: tuple[int, int] = (256, 128)  # of coarse and fine rows
    batches: tuple[int, int] = (32, 16)  # semantic, and the others
    made: tuple[int, int] = (256, 64)  # semantic tokens and frames of codes

    @property
    def layers(self) -> dict[str, int]:
        return {"dim": self.dim, "depth": self.depth, "heads": self.heads, "dim_head": self.dim // self.heads}


TINY = Size(16, 2, 2, 16, (2, 1), 12, 6, (4, 4), (2, 2), (6, 4))
TRAIN_TARGETS = {"semantic": 430_000, "semantic, forgetful": 350_000, "coarse": 430_000, "fine": 430_000}
GENERATE_TARGETS = {("semantic", 1): 1_450, ("semantic", 32): 29_000, ("coarse", 1): 1_400, ("coarse", 16): 20_000}


class Rows(torch.utils.data.Dataset):
    """Random tokens in memory: reading files is not what is measured."""

    def __init__(self, size: Size, tokens: int, frames: int, count: int):
        generator = torch.Generator().manual_seed(0)
        # (No two neighbours alike: tokens that repeat the one before would be left out.)
        steps = torch.randint(1, size.codes, (count, max(tokens, 1)), generator=generator)
        self.ids = steps.cumsum(dim=1) % size.codes
        self.codes = torch.randint(size.codes, (count, max(frames, 1), sum(size.quantizers)), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"semantic_token_ids": self.ids[index], "token_ids": self.codes[index]}


def built(name: str, size: Size, mask_prob: float) -> Stage:
    coarse, fine = size.quantizers
    semantic = {"num_semantic_tokens": size.codes}
    options: dict[str, Any] = {"mask_prob": mask_prob}
    if name == "semantic":
        return SemanticTransformerWrapper(transformer=SemanticTransformer(**size.layers, **semantic), **options)
    if name == "coarse":
        transformer = CoarseTransformer(
            **size.layers, **semantic, codebook_size=size.codes, num_coarse_quantizers=coarse
        )
        return CoarseTransformerWrapper(transformer=transformer, **options)
    if name == "fine":
        quantizers = {"num_coarse_quantizers": coarse, "num_fine_quantizers": fine}
        return FineTransformerWrapper(
            transformer=FineTransformer(**size.layers, **quantizers, codebook_size=size.codes), **options
        )
    delayed = DelayedTransformer(**size.layers, **semantic, codebook_size=size.codes, num_quantizers=coarse + fine)
    return DelayedTransformerWrapper(transformer=delayed, **options)


def shape_of(name: str, size: Size) -> tuple[int, int, int, int]:
    """Rows, semantic tokens and frames of a training batch, and the tokens that the rate counts."""
    many, few = size.batches
    coarse, fine = size.quantizers
    first, second = size.frames
    if name == "semantic":
        return many, size.tokens, 0, many * size.tokens
    if name == "fine":
        return few, 0, second, few * second * (coarse + fine)
    return few, size.semantic, first, few * (size.semantic + first * (coarse if name == "coarse" else coarse + fine))


def time_training(name: str, size: Size, mask_prob: float, arguments: argparse.Namespace) -> dict[str, Any]:
    rows, tokens, frames, counted = shape_of(name, size)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = StageTrainer(
            built(name, size, mask_prob), dataset=Rows(size, tokens, frames, 8 * rows), batch_size=rows, num_train_steps=10**6,
            num_workers=0 if arguments.tiny else 4, valid_frac=0, save_results_every=10**6, save_model_every=10**6, tensorboard=False,
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
                report.profiled(f"ten training steps, {name}", ten_steps)
    case = name + (", forgetful" if mask_prob else "")
    target = TRAIN_TARGETS.get(case)
    return {
        "case": f"train {case}, {rows} rows",
        "tokens per second": counted / seconds,
        "target": target,
        "reached": None if target is None else f"{counted / seconds / target:.0%}",
        "ms per step": 1000 * seconds,
        "first call, s": first,
        "peak GiB": peak,
    }


def time_generation(name: str, size: Size, batch: int, arguments: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    stage: Any = built(name, size, 0.0).to(report.device()).eval()
    stage.transformer.eos_id = -2  # which is never drawn: an untrained network would end where it likes
    tokens, frames = size.made
    coarse, fine = size.quantizers
    ids = Rows(size, size.semantic, frames, batch)
    known: Mapping[str, Any]
    if name == "semantic":
        known, counted = {"max_length": tokens, "batch_size": batch}, batch * tokens
    elif name == "fine":
        known, counted = {"coarse_token_ids": ids.codes[..., :coarse].to(stage.device)}, batch * frames * fine
    else:
        known = {"semantic_token_ids": ids.ids.to(stage.device), "max_time_steps": frames}
        counted = batch * frames * (coarse if name == "coarse" else coarse + fine)
    make = lambda: stage.generate(**known, seed=0, filter_thres=0.9)
    first = report.seconds_of(make, 1, warm_up=0)
    seconds = report.seconds_of(make, arguments.repeats, warm_up=1)
    if arguments.profile and batch > 1:
        report.profiled(f"generate {name}, batch {batch}", make)
    target = GENERATE_TARGETS.get((name, batch))
    return {
        "case": f"generate {name}, batch {batch}",
        "tokens per second": counted / seconds,
        "target": target,
        "reached": None if target is None else f"{counted / seconds / target:.0%}",
        "seconds": seconds,
        "seconds for 50 frames": None if name == "semantic" else 50 * seconds / frames,
        "first call, s": first,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny models, to see that this script runs")
    parser.add_argument("--only", choices=("semantic", "coarse", "fine", "delayed"), help="one stage")
    parser.add_argument("--what", choices=("train", "generate"), help="one half")
    arguments = report.arguments(parser)
    size = TINY if arguments.tiny else Size()
    rows = []
    for name in ("semantic", "coarse", "fine", "delayed"):
        if arguments.only not in (None, name):
            continue
        if arguments.what != "generate":
            for mask_prob in (0.0, 0.15) if name == "semantic" else (0.0,):
                rows.append(report.measured(time_training(name, size, mask_prob, arguments)))
        if arguments.what != "train":
            for batch in (1, size.batches[0] if name == "semantic" else size.batches[1]):
                rows.append(report.measured(time_generation(name, size, batch, arguments)))
    report.show("audiolm", rows, arguments.out)


if __name__ == "__main__":
    main()
