"""How fast does a MaskGit train, and how fast does it make pictures?

    python benchmarks/maskgit.py                     # on a GPU, about five minutes: 24 layers, dim 1024, codebook 8192
    python benchmarks/maskgit.py --profile           # also where the time goes
    python benchmarks/maskgit.py --tiny              # anywhere, a few seconds; the numbers mean nothing

Training goes through the trainer: batch 32 x 256 token ids, texts as embeddings of 32 x 768, averaged weights, clipping,
logging. A picture is 18 steps of the confidence sampler with guidance 3 and 16 x 16 tokens, from the text embeddings to the
pixels: reading the text, all passes of the network, and decoding to 256 px by a VQGAN of dim 128 with 4 layers, which is also
given alone. Captured steps are compared with the same steps one by one, token by token.
"""

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import report
from helicon import MaskGit, MaskGitTrainer, MaskGitTransformer, VQGanVAE
from helicon.models.muse.generate import Filler

STEPS, GUIDANCE = 18, 3.0


@dataclass(frozen=True)
class Size:
    dim: int = 1024
    depth: int = 24
    heads: int = 16
    codebook: int = 8192
    side: int = 16  # tokens
    batch: int = 32
    text: tuple[int, int] = (32, 768)
    vae_dim: int = 128
    batches: tuple[int, ...] = (1, 16)
    workers: int = 4

    @property
    def tokens(self) -> int:
        return self.side**2


TINY = Size(16, 2, 2, 64, 2, 2, (3, 8), 8, (1, 2), 0)
TRAIN_TARGET, GENERATE_TARGETS = 150_000, (0.10, 0.45)


class TokenData(torch.utils.data.Dataset):
    """Random tokens and embedded texts, in memory: reading files is not what is measured."""

    def __init__(self, size: Size):
        generator = torch.Generator().manual_seed(0)
        count = 8 * size.batch
        self.ids = torch.randint(size.codebook, (count, size.side, size.side), generator=generator)
        self.texts = torch.randn(count, *size.text, generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"ids": self.ids[index], "text_embeds": self.texts[index]}


def time_training(transformer: MaskGitTransformer, size: Size, arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        trainer = MaskGitTrainer(
            MaskGit(16 * size.side, transformer), dataset=TokenData(size), batch_size=size.batch, num_train_steps=10**6,
            num_workers=size.workers, valid_frac=0, save_results_every=10**6, save_model_every=10**6, tensorboard=False, compile=arguments.compile,
            use_ema=not arguments.no_ema, results_folder=Path(folder) / "run",
        )  # fmt: skip

        def ten_steps() -> None:
            for _ in range(10):
                trainer.train_step()

        with trainer.session():
            first = report.seconds_of(trainer.train_step, repeats=1, warm_up=0)
            seconds = report.seconds_of(ten_steps, arguments.repeats) / 10
            peak = report.peak_gib()
            if arguments.profile:
                report.profiled("ten training steps", ten_steps)
    return {
        "case": f"train, batch {size.batch} x {size.tokens} tokens" + (", no averages" if arguments.no_ema else ""),
        "tokens per second": size.batch * size.tokens / seconds,
        "target": TRAIN_TARGET,
        "reached": f"{size.batch * size.tokens / seconds / TRAIN_TARGET:.0%}",
        "ms per step": 1000 * seconds,
        "first call, s": first,
        "peak GiB": peak,
    }


def time_generation(maskgit: MaskGit, size: Size, batch: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """With compiled and captured steps, with captured ones, and step by step; and the parts of the first."""
    is_cuda = maskgit.device.type == "cuda"
    texts = torch.randn(batch, *size.text, device=maskgit.device)
    make = lambda **options: maskgit.generate(
        text_embeds=texts, timesteps=STEPS, cond_scale=GUIDANCE, seed=0, **options
    )
    ways = {"compiled, captured": Filler(), "captured": Filler(compile=False), "step by step": Filler(capture=False)}
    target = GENERATE_TARGETS[size.batches.index(batch)]
    rows = []
    for name, filler in ways.items() if is_cuda else [("step by step", Filler())]:
        maskgit.filler = filler
        first = report.seconds_of(make, 1, warm_up=0)
        seconds = report.seconds_of(make, arguments.repeats, warm_up=1)
        tokens_alone = report.seconds_of(lambda: make(return_ids=True), arguments.repeats, warm_up=1)
        rows.append(
            {
                "case": f"generate, batch {batch}, {name}",
                "seconds": seconds,
                "target": target,
                "reached": f"{target / seconds:.0%}",
                "tokens alone, s": tokens_alone,
                "first call, s": first,
            }
        )
        if arguments.profile and len(rows) == 1:
            report.profiled(f"{batch} pictures", make)
    return rows


def time_decoding(vae: VQGanVAE, size: Size, batch: int, arguments: argparse.Namespace) -> dict[str, Any]:
    ids = torch.randint(size.codebook, (batch, size.side, size.side), device=vae.device)
    with torch.no_grad():
        seconds = report.seconds_of(lambda: vae.decode_from_ids(ids), arguments.repeats)
    return {"case": f"tokens to pixels, batch {batch} (part of the above)", "seconds": seconds}


def same_tokens(maskgit: MaskGit, size: Size) -> bool:
    """Whether captured steps choose the tokens that the same steps choose one by one."""
    texts = torch.randn(size.batches[-1], *size.text, device=maskgit.device)
    made = []
    for filler in (Filler(compile=False), Filler(capture=False)):
        maskgit.filler = filler
        made.append(maskgit.generate(text_embeds=texts, timesteps=STEPS, seed=1, return_ids=True))
    return torch.equal(*made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see that this script runs")
    parser.add_argument("--only", choices=("train", "generate"), help="one half")
    parser.add_argument("--no-ema", action="store_true", help="train without averaged weights")
    arguments = report.arguments(parser)
    size = TINY if arguments.tiny else Size()
    torch.manual_seed(0)
    transformer = MaskGitTransformer(
        num_tokens=size.codebook, dim=size.dim, seq_len=size.tokens, depth=size.depth, heads=size.heads,
        dim_head=size.dim // size.heads, text_embed_dim=size.text[1],
    )  # fmt: skip
    rows = [report.measured(time_training(transformer, size, arguments))] if arguments.only != "generate" else []
    if arguments.only != "train":
        groups = 4 if arguments.tiny else 16
        vae = VQGanVAE(
            dim=size.vae_dim, layers=4, codebook_size=size.codebook, encdec_resnet_groups=groups, use_gan=False
        )
        maskgit = MaskGit(16 * size.side, transformer, vae=vae).to(report.device())
        assert maskgit.vae is not None
        for batch in size.batches:
            rows += [report.measured(row) for row in time_generation(maskgit, size, batch, arguments)]
            rows.append(time_decoding(maskgit.vae, size, batch, arguments))
        print(f"captured = step by step, token by token: {same_tokens(maskgit, size)}\n")
    count = sum(parameter.numel() for parameter in transformer.parameters()) / 1e6
    rows[0]["parameters, M"] = count
    report.show("maskgit", rows, arguments.out)


if __name__ == "__main__":
    main()
