"""How fast does the image tokenizer train? Through the trainer itself, with a VGG16 for the perceptual loss and a discriminator.

    python benchmarks/vqgan.py                       # on a GPU: dim 128, 4 layers, codebook 8192, batch 16 x 256 px
    python benchmarks/vqgan.py --tiny                # anywhere, a few seconds; the numbers mean nothing

The backbone has VGG16's shape and random weights: the time does not depend on them.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import report
from helicon import VQGanVAE, VQGanVAETrainer

VGG16 = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # channels and convolutions of each stage


class VGG(nn.Module):
    """The convolutions of VGG16; gives the features at the end of each stage."""

    def __init__(self, width: int = 64):
        super().__init__()
        stages, channels = [], 3
        for full, count in VGG16:
            layers: list[nn.Module] = []
            for _ in range(count):
                layers += [nn.Conv2d(channels, full * width // 64, 3, padding=1), nn.ReLU()]
                channels = full * width // 64
            stages.append(nn.Sequential(*layers))
        self.stages = nn.ModuleList(stages)

    def forward(self, images: Tensor) -> list[Tensor]:
        features = []
        for index, stage in enumerate(self.stages):
            images = stage(images if index == 0 else nn.functional.max_pool2d(images, 2))
            features.append(images)
        return features


class Pictures(torch.utils.data.Dataset):
    """Random pictures, in memory: reading files is not what is measured."""

    def __init__(self, size: int):
        self.images = torch.rand(128, 3, size, size, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"images": self.images[index]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--repeats", type=int, default=5, help="measurements, of 10 steps each")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--profile", type=Path, help="write the operators of one step, by time on the device")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    dim, size, batch, width = (8, 32, 2, 4) if arguments.tiny else (128, 256, 16, 64)
    torch.manual_seed(0)
    vae = VQGanVAE(
        dim=dim, layers=4, codebook_size=8192, encdec_resnet_groups=4 if arguments.tiny else 16, vgg=VGG(width)
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = VQGanVAETrainer(
            vae, dataset=Pictures(size), image_size=size, batch_size=batch, num_train_steps=10**6, apply_grad_penalty_every=0,
            num_workers=0 if arguments.tiny else arguments.workers, valid_frac=0, save_results_every=10**6,
            save_model_every=10**6, tensorboard=False, results_folder=Path(folder) / "run",
        )  # fmt: skip

        def ten_steps() -> None:
            for _ in range(10):
                trainer.train_step()

        with trainer.session():
            first = report.seconds_of(trainer.train_step, repeats=1, warm_up=0)
            seconds = report.seconds_of(ten_steps, arguments.repeats) / 10
            if arguments.profile:
                with torch.profiler.profile() as profile:
                    ten_steps()
                    report.synchronize()
                order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
                arguments.profile.write_text(
                    profile.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=90)
                )
    count = lambda module: sum(parameter.numel() for parameter in module.parameters()) / 1e6
    row = {
        "case": f"VQGAN train, dim {dim}, batch {batch} x {size} px, VGG + GAN",
        "images per second": batch / seconds,
        "ms per step": 1000 * seconds,
        "first step, s": first,
        "peak GiB": report.peak_gib(),
        "generator, M": count(vae.autoencoder),
        "discriminator, M": count(vae.discr),
    }
    report.show("vqgan", [row], arguments.out)


if __name__ == "__main__":
    main()
