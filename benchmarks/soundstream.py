"""How fast does a SoundStream train, encode and decode?

    python benchmarks/soundstream.py                 # on a GPU, minutes
    python benchmarks/soundstream.py --only code     # encoding and decoding alone
    python benchmarks/soundstream.py --profile       # also where the time goes
    python benchmarks/soundstream.py --tiny          # anywhere, a few seconds; the numbers mean nothing

Training goes through the trainer, 32 clips of 2 s at 16 kHz from memory, both networks at every step, averaged weights, clipping, no
gradient penalty. Encoding and decoding: the same batch to codes and back, in float32 as for tokens, and in bf16; as it is, and with the
networks compiled. All with the reference's architecture and losses (recipe soundstream/reference: the rows with a target), and with the
default recipe's.
"""

import argparse
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import report
from helicon import SoundStream, SoundStreamTrainer, registry
from helicon.config import load_recipe
from helicon.engine.compiling import compile_in_place

TARGETS = {"reference": 400, "encode": 20_000, "decode": 20_000}
TINY = {
    "channels": 4, "strides": (2, 4), "channel_mults": (2, 3), "codebook_dim": 8, "codebook_size": 16, "rq_num_quantizers": 3,
    "enc_cycle_dilations": (1,), "dec_cycle_dilations": (1,), "attn_heads": 2, "attn_dim_head": 4,
    "multi_spectral_window_powers_of_two": (5, 7), "multi_spectral_n_mels": (4, 8), "discr_periods": (2,), "discr_windows": (32,),
    "discr_channels": 2, "discr_multi_scales": (), "complex_stft_discr_kwargs": None,
}  # fmt: skip


class Noise(torch.utils.data.Dataset):
    """Sounds in memory: reading files is not what is measured."""

    def __init__(self, count: int, samples: int):
        self.waves = torch.randn(count, samples, generator=torch.Generator().manual_seed(0)) * 0.1

    def __len__(self) -> int:
        return len(self.waves)

    def __getitem__(self, index: int) -> Tensor:
        return self.waves[index]


def built(recipe: str, is_tiny: bool) -> SoundStream:
    torch.manual_seed(0)
    keywords = load_recipe(
        f"soundstream/{recipe}", sections=lambda trains: registry.entries[trains].recipe_sections()
    ).model
    return SoundStream(**({**keywords, **TINY} if is_tiny else keywords))


def time_training(recipe: str, arguments: argparse.Namespace) -> dict[str, Any]:
    codec = built(recipe, arguments.tiny)
    rows, seconds = (2, 0.05) if arguments.tiny else (32, 2.0)
    samples = round(seconds * codec.sample_hz)
    with tempfile.TemporaryDirectory() as folder:
        trainer = SoundStreamTrainer(
            codec, dataset=Noise(8 * rows, samples), batch_size=rows, num_train_steps=10**6, grad_accum_every=1,
            num_workers=0 if arguments.tiny else 4, apply_grad_penalty_every=0, valid_frac=0, save_results_every=10**6,
            save_model_every=10**6, tensorboard=False, compile=arguments.compile, results_folder=Path(folder) / "run",
        )  # fmt: skip

        def ten_steps() -> None:
            for _ in range(10):
                trainer.train_step()

        with trainer.session():
            first = report.seconds_of(trainer.train_step, repeats=1, warm_up=0)
            time = report.seconds_of(ten_steps, arguments.repeats) / 10
            peak = report.peak_gib()
            if arguments.profile:
                report.profiled(f"ten training steps, {recipe}", ten_steps)
    target = TARGETS.get(recipe)
    parts = (codec.autoencoder, codec.discriminators)
    return {
        "case": f"train, recipe {recipe}, {rows} x {seconds:g} s",
        "seconds of audio per second": rows * seconds / time,
        "target": target,
        "reached": None if target is None else f"{rows * seconds / time / target:.0%}",
        "ms per step": 1000 * time,
        "first call, s": first,
        "peak GiB": peak,
        "parameters, M": " + ".join(f"{sum(p.numel() for p in part.parameters()) / 1e6:.0f}" for part in parts if part),
    }


def time_coding(recipe: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    codec = built(recipe, arguments.tiny).to(report.device()).eval()
    rows, seconds = (2, 0.05) if arguments.tiny else (32, 2.0)
    waves = torch.randn(rows, round(seconds * codec.sample_hz), device=codec.device) * 0.1
    codes, is_cuda = codec.encode(waves), codec.device.type == "cuda"
    work: dict[str, Callable[[], object]] = {
        "encode": lambda: codec.encode(waves),
        "decode": lambda: codec.decode(codes),
    }
    found = []
    for is_compiled in (False, True) if is_cuda else (False,):
        if is_compiled:
            compile_in_place(codec.autoencoder.encoder)
            compile_in_place(codec.autoencoder.decoder)
        for is_half, name in product((False, True) if is_cuda else (False,), work):
            with torch.autocast(codec.device.type, torch.bfloat16, enabled=is_half):
                first = report.seconds_of(work[name], repeats=1, warm_up=0)
                time = report.seconds_of(work[name], arguments.repeats)
                if arguments.profile and is_half == is_compiled:
                    report.profiled(name, work[name])
            target = TARGETS[name] if recipe == "reference" else None
            how = f"{'bf16' if is_half else 'float32'}{', compiled' if is_compiled else ''}"
            found.append(
                {
                    "case": f"{name}, recipe {recipe}, {how}",
                    "seconds of audio per second": rows * seconds / time,
                    "target": target,
                    "reached": None if target is None else f"{rows * seconds / time / target:.0%}",
                    "ms per step": 1000 * time,
                    "first call, s": first,
                }
            )
    with torch.autocast(codec.device.type, torch.bfloat16, enabled=is_cuda):
        same = (codec.encode(waves) == codes).float().mean(dim=(0, 1))
    print(
        "codes that are the same as in float32, level by level: " + ", ".join(f"{part:.1%}" for part in same.tolist())
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see that this script runs")
    parser.add_argument("--recipes", nargs="+", default=("reference", "soundstream"), help="codecs to time")
    parser.add_argument("--only", choices=("train", "code"), help="one half")
    arguments = report.arguments(parser)
    rows = []
    if arguments.only != "code":
        rows += [report.measured(time_training(recipe, arguments)) for recipe in arguments.recipes]
    if arguments.only != "train":
        rows += [report.measured(row) for recipe in arguments.recipes for row in time_coding(recipe, arguments)]
    report.show("soundstream", rows, arguments.out)


if __name__ == "__main__":
    main()
