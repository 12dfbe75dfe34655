"""How fast does MuLaN train, and how large a batch fits?

    python benchmarks/mulan.py                       # on a GPU, about five minutes: 2 x 12 layers, dim 768
    python benchmarks/mulan.py --compile graphs      # recorded steps, but for those in chunks, which cannot be recorded
    python benchmarks/mulan.py --profile             # also where the time goes
    python benchmarks/mulan.py --tiny                # anywhere, a few seconds; the numbers mean nothing

Training goes through the trainer: 10 s of noise at 16 kHz, with texts of 254 bytes, the longest there are, from memory. Fine spectra
(a hop of 40 samples) have 1,984 patches a clip before a quarter of them is dropped, as many as the reference package's clip has, which
is the row of the target; default ones (a hop of 160) have 504. A batch of 256 passes in chunks of 32, or of 64, and is compared as a
whole. Peak memory is of the whole case, compiling and recording included. A row of the target that is reached to less than 80 % prints
its profile on a GPU, asked for or not.
"""

import argparse
import gc
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import report
from helicon.models.musiclm.mulan import MuLaN
from helicon.models.musiclm.towers import AudioSpectrogramTransformer, TextTransformer
from helicon.models.musiclm.trainers import MuLaNTrainer

TARGET, ENOUGH = 300, 0.8  # pairs a second, and the part of it that needs no explanation
TEXT = "a slow waltz for strings and a piano, played softly; "


@dataclass(frozen=True)
class Size:
    dim: int = 768
    depth: int = 12
    heads: int = 12
    mels: int = 128
    patch: int = 16
    text: int = 256  # tokens: bytes, begin and end

    def towers(self, hop: int) -> tuple[AudioSpectrogramTransformer, TextTransformer]:
        layers = {"dim": self.dim, "depth": self.depth, "heads": self.heads, "dim_head": self.dim // self.heads}
        audio = AudioSpectrogramTransformer(
            **layers, patch_size=self.patch, n_mels=self.mels, spec_hop_length=hop,
            spec_aug_freq_mask=self.mels // 4,
        )  # fmt: skip
        return audio, TextTransformer(**layers, max_seq_len=self.text)


@dataclass(frozen=True)
class Case:
    hop: int
    samples: int
    batch: int
    chunk: int | None = None
    is_target: bool = False


TINY = Size(16, 2, 2, 32, 8, 32)
CASES = (
    Case(40, 158_720, 16, is_target=True),
    Case(40, 158_720, 256, 32),
    Case(160, 160_000, 16),
    Case(160, 160_000, 256, 64),
)
TINY_CASES = (Case(80, 1280, 3, is_target=True), Case(160, 1600, 4, 2))


class Batches:
    """Noise and texts, in memory: reading files is not what is measured."""

    def __init__(self, case: Case, size: Size):
        torch.manual_seed(0)
        long = TEXT * (size.text // len(TEXT) + 2)
        texts = [long[row % len(TEXT) :][: size.text - 2] for row in range(case.batch)]
        self.batches: Sequence[dict[str, Any]] = [
            {"audio": 0.1 * torch.randn(case.batch, case.samples, device=report.device()), "texts": texts}
            for _ in range(4)
        ]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (dict(batch) for batch in self.batches)


def time_training(case: Case, size: Size, arguments: argparse.Namespace) -> dict[str, Any]:
    gc.collect()  # what the case before has left
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    model = MuLaN(*size.towers(case.hop))
    patches = model.audio.num_patches(case.samples)
    how = arguments.compile if case.chunk is None else "auto"
    with tempfile.TemporaryDirectory() as folder:
        trainer = MuLaNTrainer(
            model, train_dataloader=Batches(case, size), batch_size=case.batch, chunk_size=case.chunk, num_train_steps=10**6,
            max_grad_norm=1.0, save_results_every=10**6, save_model_every=10**6, tensorboard=False, compile=how,
            results_folder=Path(folder) / "run",
        )  # fmt: skip
        steps = 10 if case.chunk is None else 2

        def some_steps() -> None:
            for _ in range(steps):
                trainer.train_step()

        with trainer.session():
            first = report.seconds_of(trainer.train_step, repeats=1, warm_up=0)
            seconds = report.seconds_of(some_steps, arguments.repeats) / steps
            peak, speed = report.peak_gib(), case.batch / seconds
            is_slow = case.is_target and torch.cuda.is_available() and speed < ENOUGH * TARGET
            if arguments.profile or is_slow:
                report.profiled(f"{steps} training steps of {case.batch} x {patches} patches", some_steps)
    chunks = "" if case.chunk is None else f", in chunks of {case.chunk}"
    return {
        "case": f"train, batch {case.batch} x {case.samples / 16000:.3g} s, {patches} patches{chunks}, compile {how}",
        "pairs per second": speed,
        "target": TARGET if case.is_target else None,
        "reached": f"{speed / TARGET:.0%}" if case.is_target else None,
        "ms per step": 1000 * seconds,
        "first call, s": first,
        "peak GiB": peak,
        "parameters, M": sum(parameter.numel() for parameter in model.parameters()) / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny models, to see that this script runs")
    arguments = report.arguments(parser)
    size, cases = (TINY, TINY_CASES) if arguments.tiny else (Size(), CASES)
    rows = [report.measured(time_training(case, size, arguments)) for case in cases]
    report.show("mulan", rows, arguments.out)


if __name__ == "__main__":
    main()
