"""`helicon fit-kmeans`, from files and made-up sounds to a tokenizer that loads."""

import json
from pathlib import Path

import pytest
import soundfile
import torch
from typer.testing import CliRunner, Result

import helicon
from helicon.cli import app
from helicon.cli.fit_kmeans import clips_to_read, clusters_for, usual_seconds
from helicon.data.tokens import TokenCache
from helicon.models.musiclm.conditioning import MuLaNEmbedQuantizer
from helicon.models.semantic.tokenizer import HubertWithKmeans, MelKmeans
from helicon.nn.network import same_network
from models.musiclm.tiny import mulan
from models.semantic.builders import noise, write

TOO_FEW = (
    "4 sounds are too few for 8 quantizers of 50 codes (each code needs one or more): give more of them, or fewer codes "
    "(clusters) or quantizers"
)


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
    assert "tokens: 12 clusters of 1800 frames (0.6 minutes) of mel; in use: 12 (as if" in result.stdout
    assert 'helicon.load("tokens")(audio) gives tokens of audio [b, n] at 16000 Hz' in result.stdout
    assert "reading 100 %" in result.stderr and "clustering 100 %" in result.stderr and "WARNING" not in result.stderr
    tokenizer = helicon.load("tokens")
    assert isinstance(tokenizer, MelKmeans) and tokenizer.codebook_size == 12
    assert tokenizer(noise(2, 3200)).shape == (2, 10)
    for seed, same in (("0", True), ("1", False)):
        assert call(*arguments, "-o", f"again{seed}", "--seed", seed).exit_code == 0
        assert torch.equal(centroids(f"again{seed}"), centroids("tokens")) == same


def test_clusters_of_silence_are_no_good_and_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "silence").mkdir()
    soundfile.write(tmp_path / "silence" / "a.wav", torch.zeros(16000).numpy(), 16000)
    result = call("--data", str(tmp_path / "silence"), "--clusters", "8", "-o", "tokens")
    assert result.exit_code == 0 and "in use: 1 (as if 1" in result.stdout
    assert "WARNING: only 1 of 8 clusters are in use: the sounds are too much alike" in result.stderr


def test_a_folder_and_a_model(sounds: Path, tmp_path: Path) -> None:
    model = write("hubert", tmp_path / "hubert")
    result = call("--data", str(sounds), "-o", "units", "--model", "hubert", "--layer", "2", "--clusters", "7")
    assert result.exit_code == 0, result.output
    tokenizer = helicon.load("units")
    assert isinstance(tokenizer, HubertWithKmeans) and tokenizer.features.layer == 2
    lengths = torch.tensor([11200, 160000, 6400, 32000])  # every clip once
    frames = int(tokenizer.code_lengths(lengths).sum())
    assert f"units: 7 clusters of {frames} frames (0.2 minutes) of hubert" in result.stdout
    assert json.loads(Path("units/config.json").read_text())["arguments"]["checkpoint_path"] == str(model)
    again = HubertWithKmeans(checkpoint_path="hubert", kmeans_path="units", output_layer=2)
    assert torch.equal(again(noise(1, 900)), tokenizer(noise(1, 900)))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-o", "there"], "there is there already: choose another folder, or remove it"),
        (["-o", "sounds/0.wav/new"], "sounds/0.wav/new cannot be written: Not a directory; choose another place with -o"),
        (["-o", "/proc/new"], "/proc/new cannot be written: No such file or directory; choose another place with -o"),
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


def test_a_model_that_is_not_here_is_looked_for_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str, **options: object) -> None:
        raise OSError(f"{name} is not on the hub")

    monkeypatch.setattr("transformers.PreTrainedConfig.get_config_dict", refused)
    result = call("--data", "synthetic", "-o", "new", "--model", "mulan")
    first, last = result.stderr.splitlines()
    assert result.exit_code == 1 and first == "there is no folder mulan here; looking for it on the hub"
    sentence = (
        "there is no folder mulan here, and on the hub the model 'mulan' could not be read (mulan is not on the hub): "
    )
    assert last.startswith(f"error: {sentence}")


def test_data_that_is_not_there() -> None:
    result = call("--data", "absent", "-o", "new")
    assert result.exit_code == 1 and "the data folder absent does not exist" in result.stderr


# ---------------------------------------------------------------------- what a MuLaN hears


def test_the_codes_of_a_mulan_go_into_a_cache(sounds: Path) -> None:
    mulan().save_pretrained("mulan")
    arguments = ["--data", str(sounds), "--model", "mulan", "--clusters", "4", "--quantizers", "2", "--seconds", "0.5"]
    result = call(*arguments, "-o", "codes")
    assert result.exit_code == 0, result.output
    assert "codes: 2 codes of 4 for what mulan hears, fitted to 27 sounds; they leave" in result.stdout
    assert "--conditioner codes, and model.audio_conditioner=codes." in result.stdout
    quantizer = helicon.load("codes")
    assert isinstance(quantizer, MuLaNEmbedQuantizer) and quantizer.is_fitted
    assert (quantizer.num_quantizers, quantizer.codebook_size, quantizer.sample_hz) == (2, 4, 8000)
    assert call(*arguments, "-o", "again").exit_code == 0
    assert same_network(helicon.load("again"), quantizer)
    assert call("--data", "synthetic", "--clusters", "3", "--hours", "0.002", "-o", "kmeans").exit_code == 0
    words = ["tokenize", "kmeans", "--conditioner", "codes", "--data", str(sounds), "-o", "cache"]
    result = CliRunner().invoke(app, [*words, "data_max_length_seconds=0.5", "--workers", "0"])
    assert result.exit_code == 0, result.output
    cache = TokenCache("cache")
    assert cache[0]["condition_ids"].shape == (2,) and len(cache) == 27
    assert "--conditioner" in cache.index.command(Path("cache"))


def test_clips_are_counted_for_a_mulan_and_there_are_no_more_clusters_than_they_are_enough_for(sounds: Path) -> None:
    """A clip is one latent: hours of them are few, and codes that are fitted to few sounds tell each apart, and then nothing."""
    mulan().save_pretrained("mulan")
    arguments = ["--data", str(sounds), "--model", "mulan", "--seconds", "0.2"]
    result = call(*arguments, "-o", "codes")
    assert result.exit_code == 0, result.output
    assert "66 sounds are few: 7 clusters in the place of 500 (--clusters)" in result.stderr
    assert "codes: 8 codes of 7 for what mulan hears, fitted to 60 sounds; they leave" in result.stdout
    assert "of the variance of 6 others. Of the first, 7 are used" in result.stdout
    assert helicon.load("codes").codebooks.square().sum(dim=(1, 2)).min() > 1e-6, "every codebook has something to tell"
    result = call(*arguments, "--clusters", "30", "-o", "more")
    sentence = "66 sounds are too few for 8 quantizers of 30 codes (after 4 nothing is left to tell): give more of them"
    assert result.exit_code == 1 and sentence in result.stderr and not Path("more").exists()
    result = call(*arguments, "--hours", "0.002", "-o", "less")
    assert "36 sounds are few: 4 clusters in the place of 500" in result.stderr, (
        "hours are a limit where they are given"
    )


def test_clips_are_as_long_as_those_the_mulan_learned_from(sounds: Path) -> None:
    mulan(clip_seconds=0.5).save_pretrained("mulan")
    arguments = ["--model", "mulan", "--clusters", "4", "--quantizers", "2"]
    result = call("--data", str(sounds), *arguments, "-o", "codes")
    assert "fitted to 27 sounds" in result.stdout, result.output
    assert call("--data", str(sounds), *arguments, "--seconds", "0.5", "-o", "same").exit_code == 0
    assert same_network(helicon.load("codes"), helicon.load("same"))
    assert usual_seconds(None, False) == usual_seconds(mulan(), False) == 10.0, "nobody knows"
    assert usual_seconds(mulan(clip_seconds=20.0), False) == 20.0
    made_up = [usual_seconds(network, True) for network in (None, mulan(clip_seconds=0.5), mulan(clip_seconds=20.0))]
    assert made_up == [2.0, 0.5, 2.0]


def test_of_many_sounds_as_many_are_read_as_codes_need() -> None:
    assert clips_to_read(None, 10.0, 500, False) == 25_000 and clips_to_read(None, 10.0, None, False) == 1080
    assert clips_to_read(1.0, 10.0, 500, False) == 360
    assert clips_to_read(None, 0.5, 500, True) == clips_to_read(None, 0.5, 100_000, True) == 5000, "made-up ones"
    assert clips_to_read(1.0, 0.5, 500, True) == 7200 and clusters_for(5000) == 500
    assert clusters_for(25_000) == 500 and clusters_for(1080) == 121


def test_more_codes_than_sounds_are_refused_before_any_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    mulan().save_pretrained("mulan")
    monkeypatch.setattr(MuLaNEmbedQuantizer, "latents", lambda *_, **__: pytest.fail("a sound was heard"))
    result = call("--data", "synthetic", "--model", "mulan", "--clusters", "100000", "-o", "codes")
    assert "5000 sounds are too few for 8 quantizers of 100000 codes (each code needs one or more)" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "mulan", "--clusters", "50"], TOO_FEW),
        (["--model", "mulan", "--layer", "3"], "--layer 3 is nothing for mulan: leave it out"),
        (["--quantizers", "3"], "--quantizers 3 is nothing for mel: leave it out"),
        (["--model", "mel-kmeans"], "--model mel-kmeans holds a MelKmeans: give the run of a MuLaN, mel or a HuBERT"),
        (["--seconds", "0"], "--seconds 0: it must be more than 0"),
    ],
)  # fmt: skip
def test_mistakes_with_a_mulan(sounds: Path, arguments: list[str], sentence: str) -> None:
    mulan().save_pretrained("mulan")
    MelKmeans(3).save_pretrained("mel-kmeans")
    result = call("--data", "sounds", "-o", "new", *arguments)
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (1, f"error: {sentence}")
    assert not Path("new").exists()
