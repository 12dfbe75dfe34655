"""The image tokenizer through its real trainer: where pictures may come from, and what a run leaves behind."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import helicon
from helicon.models.muse.trainers import VQGanVAETrainer
from helicon.models.muse.vqgan import VQGanVAE

SIZE = 16
TIMES = {"images_per_second", "data_wait_fraction"}  # what may differ between two runs of the same numbers


class Backbone(nn.Module):
    """A perceptual backbone with a dropout, as VGG has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.Dropout(0.5))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


def tiny(**changes: Any) -> VQGanVAE:
    torch.manual_seed(0)
    sizes = {"dim": 8, "layers": 2, "discr_layers": 1, "encdec_resnet_groups": 2, "codebook_size": 16}
    return VQGanVAE(**{**sizes, **changes})


def trainer(vae: VQGanVAE | None = None, **options: Any) -> VQGanVAETrainer:
    chosen = {"num_train_steps": 2, "batch_size": 2, "valid_frac": 0.0, "tensorboard": False, "results_folder": "run"}
    return VQGanVAETrainer(tiny() if vae is None else vae, **{**chosen, **options})


def picture(number: int) -> Image.Image:
    """Darker on the left than on the right, and of a colour of its own."""
    ramp = np.linspace(0, 100, SIZE, dtype=np.uint8)
    pixels = np.broadcast_to(ramp[None, :, None], (SIZE, SIZE, 3)) + np.array([number * 10, 60, 150 - number * 9])
    return Image.fromarray(pixels.astype(np.uint8))


def pixels(number: int) -> Tensor:
    return torch.from_numpy(np.array(picture(number))).permute(2, 0, 1) / 255


def folder_of_pictures(name: str = "pictures", count: int = 6) -> Path:
    folder = Path(name)
    (folder / "below").mkdir(parents=True)
    for number in range(count):
        picture(number).save(folder / ("below" if number % 2 else "") / f"{number}.png")
    return folder


class Own(Dataset):
    """A user's dataset, whose samples are whatever `make` says."""

    def __init__(self, make: Callable[[int], Any], count: int = 6):
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def numbers_seen(run: VQGanVAETrainer, steps: int) -> list[int]:
    """Which pictures, mirrored or not, the network was given in the first steps."""
    seen: list[int] = []

    def note(network: nn.Module, inputs: tuple[Tensor]) -> None:
        for image in inputs[0]:
            distances = [
                min(float((image - p).abs().max()) for p in (pixels(n), pixels(n).flip(-1))) for n in range(12)
            ]
            assert min(distances) < 2 / 255, "no picture that was given"
            seen.append(distances.index(min(distances)))

    with run.task.networks["generator"].register_forward_pre_hook(note):
        for _ in range(steps):
            run.train_step()
    return seen


def state(run: VQGanVAETrainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in run.task.model.own_state().items()}


def metrics(folder: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


# ---------------------------------------------------------------------------------------------- where pictures come from


def hugging_face() -> Any:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    rows = {"image": [picture(number) for number in range(6)], "text": ["a picture"] * 6}
    return datasets.Dataset.from_dict(rows, features=features)


SOURCES: dict[str, Callable[[], dict[str, Any]]] = {
    "folder": lambda: {"folder": folder_of_pictures(), "image_size": SIZE},
    "folder by name": lambda: {"folder": str(folder_of_pictures()), "image_size": SIZE},
    "hugging face": lambda: {"dataset": hugging_face(), "image_size": SIZE},
    "pictures": lambda: {"dataset": Own(picture), "image_size": SIZE},
    "tensors": lambda: {"dataset": Own(pixels), "image_size": SIZE},
    "tuples with text": lambda: {"dataset": Own(lambda n: ("a picture", pixels(n))), "image_size": SIZE},
    "dicts": lambda: {"dataset": Own(lambda n: {"images": pixels(n)}), "image_size": SIZE},
    "tuples by name": lambda: {
        "dataset": Own(lambda n: (n, pixels(n), pixels(0))),
        "image_size": SIZE,
        "ds_fields": ("_", "images", "_"),
    },
    "loader of tensors": lambda: {"train_dataloader": DataLoader(Own(pixels), batch_size=2, shuffle=True)},
    "loader of tuples with text": lambda: {
        "train_dataloader": DataLoader(Own(lambda n: (pixels(n), "a picture")), batch_size=2, shuffle=True)
    },
    "loader of tuples by name": lambda: {
        "train_dataloader": DataLoader(Own(lambda n: (n, pixels(n))), batch_size=2, shuffle=True),
        "ds_fields": ("_", "images"),
    },
}


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_gives_its_pictures_each_once_an_epoch(source: str):
    """D-T12: the reference's trainer knows no batches but tuples and dicts."""
    run = trainer(**SOURCES[source](), num_train_steps=100, discr_start_step=100)
    seen = numbers_seen(run, 6)
    assert sorted(seen[:6]) == sorted(seen[6:]) == list(range(6))
    assert seen[:6] != seen[6:], "in an order of their own each time"


def test_a_dataset_of_tuples_that_do_not_tell_is_refused_by_what_was_found():
    run = trainer(dataset=Own(lambda n: (pixels(n), n)), image_size=SIZE)
    with pytest.raises(ValueError, match=r"fit no fields: found float32 \[3, 16, 16\], int.*ds_fields"):
        run.train()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"folder": "pictures"}, "image_size is needed: how many pixels a side"),
        ({"folder": "empty", "image_size": SIZE}, "empty holds no jpg, jpeg, png, webp file, nor do its subfolders"),
        ({"folder": "nowhere", "image_size": SIZE}, "the data folder nowhere does not exist"),
        ({"folder": "pictures", "dataset": Own(pixels), "image_size": SIZE}, "a folder or a dataset of pictures"),
        ({}, "give either a dataset"),
        ({"folder": "pictures", "image_size": SIZE, "batch_size": 7}, "has 6 samples, fewer than the 7 of one step"),
        ({"folder": "pictures", "image_size": SIZE, "apply_grad_penalty_every": -1}, "must not be negative"),
    ],
)
def test_what_cannot_be_trained_on_is_told_in_one_sentence(options: dict[str, Any], sentence: str):
    folder_of_pictures()
    Path("empty").mkdir()
    with pytest.raises(ValueError, match=sentence) as caught:
        trainer(**options)
    assert "\n" not in str(caught.value)


def test_a_truncated_picture_is_skipped_and_listed_and_the_rest_is_learned_from():
    folder = folder_of_pictures()
    path = folder / "below" / "3.png"
    path.write_bytes(path.read_bytes()[:60])
    run = trainer(folder=folder, image_size=SIZE, num_train_steps=100)
    assert 3 not in numbers_seen(run, 3)
    (line,) = Path("run/bad_files.txt").read_text().splitlines()
    assert line.startswith(f"{path}\tnot a readable picture")


def test_a_folder_in_which_nothing_can_be_read_is_an_error():
    folder = folder_of_pictures(count=3)
    for path in folder.rglob("*.png"):
        path.write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"none of the 3 files can be read, for example pictures.*png"):
        trainer(folder=folder, image_size=SIZE).train()


@pytest.mark.parametrize("how", ["held out", "given", "given dataset"])
def test_pictures_are_mirrored_for_training_and_never_for_validation(how: str):
    """D-R10: the reference mirrors what it validates and shows."""
    folder = folder_of_pictures(count=12)
    given = {"given": folder_of_pictures("others", 12), "given dataset": Own(picture, 12)}
    options = {"valid_frac": 0.7} if how == "held out" else {"val_dataset": given[how]}
    run = trainer(folder=folder, image_size=SIZE, val_num_batches=None, **options)
    is_mirrored = lambda batch: [bool(image[0, 0, 0] > image[0, 0, -1]) for image in batch["images"]]
    steps = run.feed.train.steps()
    assert len({mirrored for _ in range(12) for batch in next(steps) for mirrored in is_mirrored(batch)}) == 2
    assert not any(mirrored for batch in run.feed.valid.validation(None) for mirrored in is_mirrored(batch))
    assert not any(is_mirrored(run.feed.first_batch()))


# ---------------------------------------------------------------------------------------------- what a run does


def test_both_networks_learn_and_the_run_can_be_looked_at_and_loaded():
    vae = tiny()
    before = copy.deepcopy(vae.own_state())
    run = trainer(vae, folder=folder_of_pictures(), image_size=SIZE, valid_frac=0.2, log_every=1, save_results_every=1)
    run.train()
    # (The bias of the logits stays where it is while real and fake both lie inside the hinge.)
    assert [name for name, p in vae.named_parameters() if p.ndim > 1 and torch.equal(p, before[name])] == []
    assert [path.name for path in sorted(Path("run/samples").iterdir())] == [
        "step-00000001-reconstructions.png",
        "step-00000002-reconstructions.png",
    ]
    learned, looked = metrics("run")[:2]
    assert {"loss", "discriminator_loss", "reconstruction", "adversarial", "gradient_penalty", "lr"} <= learned.keys()
    assert {"valid_loss", "valid_reconstruction", "valid_psnr", "valid_codebook_use"} <= looked.keys()
    loaded = helicon.load("run")
    assert isinstance(loaded, VQGanVAE) and loaded.encode(pixels(0)[None])[1].shape == (1, 4, 4)


@pytest.mark.parametrize("changes", [{"use_gan": False}, {"use_vgg_and_gan": False}])
def test_without_a_gan_the_trainer_trains_logs_saves_and_resumes(changes: dict[str, Any]):
    """D-R7: the reference's trainer cannot be built. D-R12: it says nothing without a discriminator."""
    folder = folder_of_pictures()
    trainer(tiny(**changes), folder=folder, image_size=SIZE, log_every=1).train()
    assert [line["step"] for line in metrics("run")] == [1, 2]
    assert {"loss", "reconstruction", "quantizer"} <= metrics("run")[0].keys()
    assert "discriminator_loss" not in metrics("run")[0]
    resumed = trainer(tiny(**changes), folder=folder, image_size=SIZE, num_train_steps=3, resume=True)
    assert resumed.step == 2
    resumed.train()


@pytest.mark.parametrize(
    ("options", "paying"),
    [
        ({}, [0, 4]),
        ({"apply_grad_penalty_every": 2}, [0, 2, 4]),
        ({"apply_grad_penalty_every": 0}, []),
        ({"apply_grad_penalty_every": 3, "grad_accum_every": 2}, [0, 3]),
        ({"apply_grad_penalty_every": 3, "discr_start_step": 2}, [3]),
    ],
)
def test_the_penalty_is_paid_at_the_steps_asked_for(options: dict[str, Any], paying: list[int]):
    """D-R1: in the reference the discriminator pays it at every step, whatever is asked."""
    run = trainer(folder=folder_of_pictures(), image_size=SIZE, num_train_steps=6, **options)
    logged: list[dict[str, Tensor]] = []
    run.train(logged.append)
    assert [step for step, logs in enumerate(logged) if "gradient_penalty" in logs] == paying
    start = options.get("discr_start_step", 0)
    assert [step for step, logs in enumerate(logged) if "discriminator_loss" in logs] == list(range(start, 6))


def rows_of_grid(step: int, shown: int) -> list[np.ndarray]:
    """The rows of pictures of a sampling step's grid, without what stands between them."""
    (path,) = Path("run/samples").glob(f"step-{step:08d}-*")
    grid = np.asarray(Image.open(path))
    gap = (grid.shape[1] - shown * SIZE) // (shown - 1)
    rows = (grid.shape[0] + gap) // (SIZE + gap)
    return [grid[row * (SIZE + gap) : row * (SIZE + gap) + SIZE] for row in range(rows)]


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_one_grid_shows_originals_and_what_both_weights_make_of_the_same_pictures(beta: float):
    """D-R10: the reference shows the two networks different pictures, in two files."""
    folder = folder_of_pictures()
    run = trainer(folder=folder, image_size=SIZE, valid_frac=0.5, ema_beta=beta, lr=1e-2, save_results_every=2)
    run.train()
    assert len(list(Path("run/samples").iterdir())) == 1
    originals, online, averaged = rows_of_grid(step=2, shown=2)
    expected = run.feed.first_batch()["images"]
    shown = np.concatenate([image.permute(1, 2, 0).mul(255).round().numpy() for image in expected], axis=1)
    assert (originals[:, :SIZE] == shown[:, :SIZE]).all() and (originals[:, -SIZE:] == shown[:, -SIZE:]).all()
    assert (online == averaged).all() == (beta == 0.0), "without memory the average is the network itself"


def test_every_picture_weighs_the_same_though_batches_are_not_equally_large():
    batches = [[0, 1, 2], [3]]
    losses = {}
    for name, sizes in {"apart": batches, "together": [[0, 1, 2, 3]]}.items():
        loader = DataLoader(Own(pixels), batch_sampler=sizes)
        run = trainer(
            tiny(use_vgg_and_gan=False, fsq_levels=[4, 4], codebook_size=16),
            train_dataloader=loader,
            grad_accum_every=len(sizes),
            num_train_steps=1,
            results_folder=name,
        )
        run.train(lambda logs, name=name: losses.update({name: (float(logs["loss"]), float(logs["grad_norm"]))}))
    assert losses["apart"] == pytest.approx(losses["together"], rel=1e-5)


def test_without_an_average_the_grid_has_two_rows():
    trainer(folder=folder_of_pictures(), image_size=SIZE, use_ema=False, save_results_every=2).train()
    assert len(rows_of_grid(step=2, shown=2)) == 2


def test_the_decay_asked_for_is_the_decay_used():
    """D-R3: the reference was asked for 0.995 and used 0.9999."""
    folder = folder_of_pictures()
    assert trainer(folder=folder, image_size=SIZE).ema.beta == 0.995
    assert trainer(folder=folder, image_size=SIZE, results_folder="other", ema_beta=0.5).ema.beta == 0.5


def test_a_resumed_run_equals_the_unbroken_one_bit_for_bit():
    """D-R4 and D-R5: in the reference moments land on other parameters, and step and average are forgotten."""
    folder = folder_of_pictures()

    def start(name: str, **options: Any) -> VQGanVAETrainer:
        vae = tiny(vgg=Backbone())
        often = {"save_model_every": 3, "log_every": 1, "warmup_steps": 4, "max_grad_norm": 1.0, "discr_lr": 1e-3}
        chosen = {"num_train_steps": 7, "valid_frac": 0.2, "save_results_every": 2, "resume": True, **often, **options}
        return trainer(vae, folder=folder, image_size=SIZE, results_folder=name, **chosen)

    whole = start("whole")
    whole.train()
    half = start("broken")
    while half.step < 4:
        half.train_step()
    half.writer.wait()
    resumed = start("broken")
    assert resumed.step == 3
    resumed.train()
    assert all(torch.equal(state(resumed)[name], value) for name, value in state(whole).items())
    assert all(torch.equal(a, b) for a, b in zip(resumed.ema.average, whole.ema.average, strict=True))
    for name, optimizer in whole.optimizers.items():
        mine = resumed.optimizers[name].state()
        assert all(torch.equal(mine[key], value) for key, value in optimizer.state().items())
    assert metrics("broken") == metrics("whole")


def test_a_checkpoint_gives_any_network_its_averaged_weights():
    """D-R6: the reference's EMA file has other names than the network, which cannot load it."""
    run = trainer(folder=folder_of_pictures(), image_size=SIZE, ema_beta=0.9, lr=1e-2)
    run.train()
    other = tiny()
    other.load("run/checkpoints/step-00000002")
    online = state(run)
    with run.ema.swapped_in():
        averaged = state(run)
    assert all(torch.equal(other.own_state()[name], value) for name, value in averaged.items())
    changed = {name.split(".")[0] for name, value in averaged.items() if not torch.equal(value, online[name])}
    assert changed == {"autoencoder"}


def test_a_checkpoint_holds_every_weight_once_and_the_average_of_the_autoencoder_alone():
    """D-T12: the reference's checkpoints hold the online network twice."""
    run = trainer(tiny(vgg=Backbone()), folder=folder_of_pictures(), image_size=SIZE)
    run.train()
    folder = Path("run/checkpoints/step-00000002")
    own = run.task.model.own_state().keys()
    assert load_file(folder / "model.safetensors").keys() == own
    assert load_file(folder / "ema.safetensors").keys() == {name for name in own if name.startswith("autoencoder.")}
    assert sorted(path.name for path in folder.rglob("*.safetensors")) == [
        "ema.safetensors",
        "model.safetensors",
        "optimizer-discriminator.safetensors",
        "optimizer-generator.safetensors",
    ]


def test_a_lent_backbone_is_used_and_left_as_it_was():
    """D-R8 and D-V2: in the reference it keeps gradients, drops features at random and is trained along."""
    backbone = Backbone()
    before, modes = copy.deepcopy(backbone.state_dict()), []
    backbone.register_forward_hook(lambda module, *_: modes.append(any(m.training for m in module.modules())))
    run = trainer(tiny(vgg=backbone), folder=folder_of_pictures(), image_size=SIZE, num_train_steps=3, log_every=1)
    run.train()
    assert modes and not any(modes)
    assert all(torch.equal(value, before[name]) for name, value in backbone.state_dict().items())
    assert all(p.grad is None for p in backbone.parameters())
    assert all(line["perceptual"] > 0 for line in metrics("run"))
    optimised = {id(p) for optimizer in run.optimizers.values() for p in optimizer.parameters}
    assert optimised == {id(p) for p in run.task.model.parameters()}
