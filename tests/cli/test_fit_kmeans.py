"""`helicon fit-kmeans`, from files and made-up sounds to a tokenizer that loads."""

import json
from pathlib import Path

import pytest
import soundfile
import torch
from typer.testing import CliRunner, Result

import helicon
from helicon.cli import app
from helicon.models.semantic.tokenizer import HubertWithKmeans, MelKmeans
from models.semantic.builders import noise, write


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["fit-kmeans", *arguments])


def centroids(folder: str) -> torch.Tensor:
    return helicon.load(folder).kmeans.centroids


@pytest.fixture
def sounds(tmp_path: Path) -> Path:
    """Three recordings, one of them longer than a clip, at another rate than any model's."""
    (tmp_path / "sounds").mkdir()
    for number, seconds in enumerate((0.7, 10.4, 2.0)):
        wave = noise(int(8000 * seconds), seed=number).cumsum(0) / 10
        soundfile.write(tmp_path / "sounds" / f"{number}.wav", (wave - wave.mean()).clamp(-1, 1).numpy(), 8000)
    return tmp_path / "sounds"


def test_made_up_sounds(tmp_path: Path) -> None:
    arguments = ["--data", "synthetic", "--clusters", "12", "--hours", "0.01"]
    result = call(*arguments, "-o", "tokens")
    assert result.exit_code == 0, result.output
    assert "tokens: 12 clusters of 1800 frames (0.01 hours) of mel, of which 12 are used" in result.stdout
    assert 'helicon.load("tokens")(audio) gives tokens of audio [b, n] at 16000 Hz' in result.stdout
    assert "reading 100 %" in result.stderr and "clustering 100 %" in result.stderr
    tokenizer = helicon.load("tokens")
    assert isinstance(tokenizer, MelKmeans) and tokenizer.codebook_size == 12
    assert tokenizer(noise(2, 3200)).shape == (2, 10)
    for seed, same in (("0", True), ("1", False)):
        assert call(*arguments, "-o", f"again{seed}", "--seed", seed).exit_code == 0
        assert torch.equal(centroids(f"again{seed}"), centroids("tokens")) == same


def test_a_folder_and_a_model(sounds: Path, tmp_path: Path) -> None:
    model = write("hubert", tmp_path / "hubert")
    result = call("--data", str(sounds), "-o", "units", "--model", "hubert", "--layer", "2", "--clusters", "7")
    assert result.exit_code == 0, result.output
    tokenizer = helicon.load("units")
    assert isinstance(tokenizer, HubertWithKmeans) and tokenizer.features.layer == 2
    lengths = torch.tensor([11200, 160000, 6400, 32000])  # every clip once
    frames = int(tokenizer.code_lengths(lengths).sum())
    assert f"units: 7 clusters of {frames} frames (0.00 hours) of hubert" in result.stdout
    assert json.loads(Path("units/config.json").read_text())["arguments"]["checkpoint_path"] == str(model)
    again = HubertWithKmeans(checkpoint_path="hubert", kmeans_path="units", output_layer=2)
    assert torch.equal(again(noise(1, 900)), tokenizer(noise(1, 900)))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-o", "there"], "there is there already: choose another folder, or remove it"),
        (["-o", "new", "--hours", "0"], "--hours 0.0: it must be more than 0"),
        (["-o", "new", "--layer", "3"], "--layer 3 is for a model: mel has no layers"),
        (["-o", "new", "--model", "hubert"], "layer 9 must lie between -4 and 3: the model has 3 layers"),
        (["-o", "new", "--clusters", "5000"], "5000 clusters cannot be found in 655 frames: give more audio, or fewer clusters"),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_one_sentence(sounds: Path, tmp_path: Path, arguments: list[str], sentence: str) -> None:
    write("hubert", tmp_path / "hubert")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "work.txt").touch()
    result = call("--data", "sounds", *arguments)
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (1, f"error: {sentence}")
    assert not Path("new").exists()


def test_data_that_is_not_there() -> None:
    result = call("--data", "absent", "-o", "new")
    assert result.exit_code == 1 and "the data folder absent does not exist" in result.stderr
