"""Recipes of the codec, from the command line to a run, on real files."""

import inspect
from pathlib import Path

import numpy as np
import pytest
import soundfile
from typer.testing import CliRunner

from helicon import registry
from helicon.cli import app
from helicon.config import load_recipe
from helicon.models.soundstream.discriminators import ComplexSTFTDiscriminator, WaveDiscriminator
from helicon.models.soundstream.model import CODEBOOK_SIZE, SoundStream
from helicon.models.soundstream.trainers import training_sounds

SHORT = [
    "data.data_max_length_seconds=0.05",
    "num_train_steps=2",
    "save_model_every=1",
    "save_results_every=2",
    "batch_size=2",
]


@pytest.fixture
def sounds() -> str:
    Path("sounds").mkdir()
    random = np.random.default_rng(0)
    for number in range(12):
        soundfile.write(f"sounds/{number}.wav", random.normal(scale=0.1, size=1000), 8000)
    return "data.source=sounds"


def helicon(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, " ".join((done.output or "").split())


def recipe(name: str) -> dict[str, object]:
    return dict(load_recipe(name, sections=lambda trains: registry.entries[trains].recipe_sections()).model)


def test_a_recipe_trains_on_a_folder_of_sounds_and_is_resumed(sounds: str) -> None:
    code, said = helicon("train", "soundstream/debug", sounds, *SHORT, "results_folder=run")
    assert code == 0, said
    code, said = helicon("resume", "run", "num_train_steps=3")
    assert code == 0 and "resuming from step 2" in said
    assert Path("run/checkpoints/step-00000003").is_dir()


@pytest.mark.parametrize("name", ["soundstream", "debug"])
def test_most_frames_of_a_crop_see_as_much_of_the_past_as_frames_of_a_long_recording(name: str) -> None:
    found = load_recipe(f"soundstream/{name}", sections=lambda trains: registry.entries[trains].recipe_sections())
    codec = SoundStream(**found.model)
    attention = codec.autoencoder.encoder_attention
    frames = codec.autoencoder.num_frames(round(found.data["data_max_length_seconds"] * codec.sample_hz))
    assert attention is not None and attention.window_size <= 0.7 * frames


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        ("data.source=nowhere", "the data folder nowhere does not exist: name the folder of your data"),
        ("sample_hz=16000", "the sounds have 16000 samples a second and the codec 8000: make the two rates equal"),
        ("model.strides=[4]", "strides=(4,) and channel_mults=(2, 4) must be as many"),
        ("mel_loss=paper", "mel_loss"),
        ("rq_kwargs={dekay: 0.9}", "the section model cannot be built"),
        ("data_max_length_secs=3", "did you mean"),
    ],
)
def test_mistakes_are_one_sentence_and_a_non_zero_exit(sounds: str, mistake: str, sentence: str) -> None:
    code, said = helicon("train", "soundstream/debug", sounds, *SHORT, "results_folder=run", mistake)
    assert code == 1 and sentence in said, said


def test_the_constructor_s_defaults_are_those_of_the_default_recipe() -> None:
    defaults = {name: p.default for name, p in inspect.signature(SoundStream).parameters.items()}
    defaults["codebook_size"] = CODEBOOK_SIZE  # what None stands for
    for name, value in recipe("soundstream/soundstream").items():
        default = defaults[name]
        assert (list(default) if isinstance(default, tuple) else default) == value, name


def test_the_reference_s_recipe_has_its_architecture_and_weights() -> None:
    """Its losses as plain factors, its discriminators, its padding; but no modulus for a logit."""
    model = SoundStream(**recipe("soundstream/reference"))
    members = list(model.discriminators.members.values())
    assert [type(member) for member in members] == [WaveDiscriminator] * 3 + [ComplexSTFTDiscriminator]
    assert model.loss.weights == {"wave": 1.0, "mel": 1e-5, "adversarial": 1.0, "feature": 100.0}
    assert model.loss.balancer is None and not model.loss.mel.log_only and not model.loss.relative_features
    assert model.loss.mel.windows == [64, 128, 256, 512, 1024, 2048] and set(model.loss.mel.n_mels) == {64}
    assert model.loss.mel.n_ffts == [512, 512, 512, 512, 1024, 2048]
    parts = (model.autoencoder, model.discriminators)
    assert [round(sum(p.numel() for p in part.parameters()) / 1e6) for part in parts] == [18, 22]


def test_every_recipe_s_sounds_have_the_rate_of_its_codec() -> None:
    for name in ("soundstream/debug", "soundstream/soundstream", "soundstream/reference"):
        read = load_recipe(name, sections=lambda trains: registry.entries[trains].recipe_sections())
        default = inspect.signature(training_sounds).parameters["sample_hz"].default
        assert read.model.get("target_sample_hz", 16000) == read.data.get("sample_hz", default)
