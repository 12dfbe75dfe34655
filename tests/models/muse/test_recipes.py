"""Recipes of the image family, from the command line to a run, on real files."""

from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from helicon.cli import app

SMALL = [
    "model.dim=8",
    "model.layers=2",
    "model.encdec_resnet_groups=2",
    "model.discr_layers=1",
    "model.codebook_size=16",
]
SHORT = ["data.image_size=16", "num_train_steps=2", "save_model_every=1", "save_results_every=2", "batch_size=2"]


@pytest.fixture
def pictures() -> str:
    Path("pictures").mkdir()
    for number in range(12):
        Image.new("RGB", (20, 24), (number * 20, 80, 200)).save(f"pictures/{number}.png")
    return "data.source=pictures"


def helicon(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, " ".join((done.output or "").split())


def test_a_recipe_trains_on_a_folder_of_pictures_and_is_resumed(pictures: str) -> None:
    code, said = helicon("train", "muse/vqgan-debug", pictures, *SMALL, *SHORT, "results_folder=run")
    assert code == 0, said
    code, said = helicon("resume", "run", "num_train_steps=3")
    assert code == 0 and "resuming from step 2" in said
    assert Path("run/checkpoints/step-00000003").is_dir()


def test_a_run_without_a_checkpoint_is_resumed_from_the_beginning(pictures: str) -> None:
    helicon("train", "muse/vqgan-debug", pictures, *SMALL, *SHORT, "results_folder=run", "num_train_steps=0")
    for folder in Path("run/checkpoints").glob("*"):
        folder.rename("aside")
    code, said = helicon("resume", "run", "num_train_steps=1")
    assert code == 0 and "it starts from the beginning" in said


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        ("data.source=nowhere", "the data folder nowhere does not exist: name the folder of your data"),
        ("scheduler=StepLR", "scheduler_kwargs={} will not do: StepLR"),
        ("betas=[0.9]", "betas=[0.9] must be two numbers"),
        ("model.dim=0", "dim=0 must be at least 1"),
        ("discr_layers=7", "it needs at least 128 pixels a side and got 16 x 16"),
        ("image_sise=3", "have no argument 'image_sise': did you mean data.image_size?"),
    ],
)
def test_mistakes_are_one_sentence_and_a_non_zero_exit(pictures: str, mistake: str, sentence: str) -> None:
    chosen = [
        option
        for option in [*SMALL, *SHORT]
        if not option.startswith(("model.discr_layers", "model.dim")) or "=7" not in mistake
    ]
    code, said = helicon("train", "muse/vqgan-debug", pictures, *chosen, "results_folder=run", mistake)
    assert code == 1 and sentence in said, said


def test_other_spellings_work_in_recipes_too(pictures: str) -> None:
    code, said = helicon(
        "train", "muse/vqgan-debug", pictures, *SMALL, *SHORT, "results_folder=run", "learning_rate=1e-5"
    )
    assert code == 1 and "another spelling" in said, "the recipe has lr already"
