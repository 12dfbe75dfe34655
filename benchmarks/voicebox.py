"""How fast does a VoiceBox train, and how fast does it speak?

    python benchmarks/voicebox.py                    # on a GPU, about six minutes: 24 layers, dim 1024, 80 mel bands
    python benchmarks/voicebox.py --profile          # also where the time goes
    python benchmarks/voicebox.py --tiny             # anywhere, a few seconds; the numbers mean nothing

Training goes through the trainer: batch 16 x 1024 frames, features and texts from memory, averaged weights, clipping, logging; of rows
that are all as long as each other (the row of the target), and of rows of which each is padded, as most data has them. A sound is 1,024
frames, of which a prompt gives a quarter, in 16 midpoint steps (32 evaluations of the velocity) with guidance, from the text to the
features. Captured evaluations are compared with the same ones one by one, number by number.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import report
from helicon import CharacterTokenizer, ConditionalFlowMatcherWrapper, VoiceBox, VoiceBoxTrainer
from helicon.models.voicebox.solving import Evaluator

STEPS, GUIDANCE = 16, 2.0
TRAIN_TARGET, SAMPLE_TARGETS = 200_000, (0.15, 2.0)
TEXT = "the quick brown fox jumps over the lazy dog, "


@dataclass(frozen=True)
class Size:
    dim: int = 1024
    depth: int = 24
    heads: int = 16
    dim_cond_emb: int = 1024
    mels: int = 80
    frames: int = 1024
    batch: int = 16
    batches: tuple[int, ...] = (1, 16)

    def texts(self, rows: int) -> list[str]:
        """A letter for every six frames, about 15 a second."""
        return [(TEXT[row % len(TEXT) :] + self.frames * TEXT)[: self.frames // 6] for row in range(rows)]


TINY = Size(32, 2, 2, 16, 8, 64, 2, (1, 2))


class Batches:
    """Noise and texts, in memory: reading files is not what is measured."""

    def __init__(self, size: Size, is_padded: bool):
        torch.manual_seed(0)
        texts = size.texts(size.batch)
        self.batches: Sequence[dict[str, Any]] = [
            {"features": torch.randn(size.batch, size.frames, size.mels, device=report.device()), "texts": texts}
            for _ in range(8)
        ]
        for batch in self.batches if is_padded else ():
            batch["feature_lengths"] = torch.randint(
                size.frames // 2, size.frames + 1, (size.batch,), device=report.device()
            )

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (dict(batch) for batch in self.batches)


def built(size: Size) -> ConditionalFlowMatcherWrapper:
    torch.manual_seed(0)
    tokenizer = CharacterTokenizer()
    voicebox = VoiceBox(
        num_cond_tokens=tokenizer.num_tokens, dim_in=size.mels, dim_cond_emb=size.dim_cond_emb, dim=size.dim, depth=size.depth,
        heads=size.heads, dim_head=size.dim // size.heads,
    )  # fmt: skip
    with torch.no_grad():  # as after some training: at first all gates are closed, and nothing could differ
        assert voicebox.transformer.modulation is not None
        voicebox.transformer.modulation.offsets.normal_(std=0.1)
    return ConditionalFlowMatcherWrapper(voicebox, tokenizer=tokenizer)


def time_training(size: Size, is_padded: bool, arguments: argparse.Namespace) -> dict[str, Any]:
    model = built(size)
    with tempfile.TemporaryDirectory() as folder:
        trainer = VoiceBoxTrainer(
            model, train_dataloader=Batches(size, is_padded), batch_size=size.batch, num_train_steps=10**6, max_grad_norm=1.0,
            save_results_every=10**6, save_model_every=10**6, tensorboard=False, compile=arguments.compile,
            results_folder=Path(folder) / "run",
        )  # fmt: skip

        def ten_steps() -> None:
            for _ in range(10):
                trainer.train_step()

        with trainer.session():
            first = report.seconds_of(trainer.train_step, repeats=1, warm_up=0)
            seconds = report.seconds_of(ten_steps, arguments.repeats) / 10
            peak = report.peak_gib()
            if arguments.profile and not is_padded:
                report.profiled("ten training steps", ten_steps)
    speed = size.batch * size.frames / seconds
    padding = "rows of half to all of it" if is_padded else "whole rows"
    return {
        "case": f"train, batch {size.batch} x {size.frames} frames, {padding}",
        "frames per second": speed,
        "target": None if is_padded else TRAIN_TARGET,
        "reached": None if is_padded else f"{speed / TRAIN_TARGET:.0%}",
        "ms per step": 1000 * seconds,
        "first call, s": first,
        "peak GiB": peak,
        "parameters, M": sum(parameter.numel() for parameter in model.parameters()) / 1e6,
    }


def prompted(size: Size, batch: int) -> dict[str, Any]:
    """What a sound is made from."""
    prompt = torch.randn(batch, size.frames // 4, size.mels, generator=torch.Generator().manual_seed(1))
    return {"cond": prompt, "texts": size.texts(batch), "lengths": size.frames}


def time_sampling(
    model: ConditionalFlowMatcherWrapper, size: Size, batch: int, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """With compiled and captured evaluations, with captured ones, and one by one."""
    given = prompted(size, batch)
    make = lambda: model.draw(**given, steps=STEPS, cond_scale=GUIDANCE, seed=0)
    ways = {
        "compiled, captured": Evaluator(compile=True),
        "captured": Evaluator(),
        "one by one": Evaluator(capture=False),
    }
    target = SAMPLE_TARGETS[size.batches.index(batch)]
    rows = []
    for name, evaluator in ways.items() if model.device.type == "cuda" else [("one by one", Evaluator())]:
        model.evaluator = evaluator
        first = report.seconds_of(make, 1, warm_up=0)
        seconds = report.seconds_of(make, arguments.repeats, warm_up=1)
        rows.append(
            {
                "case": f"sample, batch {batch}, {make().evaluations} evaluations, {name}",
                "seconds": seconds,
                "target": target,
                "reached": f"{target / seconds:.0%}",
                "first call, s": first,
            }
        )
        if arguments.profile and len(rows) == 1:
            report.profiled(f"{batch} sounds", make)
    return rows


def same_features(model: ConditionalFlowMatcherWrapper, size: Size) -> bool:
    """Whether captured evaluations make what the same ones make one by one."""
    made: list[Tensor] = []
    for evaluator in (Evaluator(), Evaluator(capture=False)):
        model.evaluator = evaluator
        made.append(model.draw(**prompted(size, size.batches[-1]), steps=4, cond_scale=GUIDANCE, seed=1).features)
    return torch.equal(*made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see that this script runs")
    parser.add_argument("--only", choices=("train", "sample"), help="one half")
    arguments = report.arguments(parser)
    size = TINY if arguments.tiny else Size()
    rows: list[dict[str, Any]] = []
    if arguments.only != "sample":
        rows += [report.measured(time_training(size, is_padded, arguments)) for is_padded in (False, True)]
    if arguments.only != "train":
        model = built(size).to(report.device()).eval()
        for batch in size.batches:
            rows += [report.measured(row) for row in time_sampling(model, size, batch, arguments)]
        print(f"captured = one by one, number by number: {same_features(model, size)}\n")
    report.show("voicebox", rows, arguments.out)


if __name__ == "__main__":
    main()
