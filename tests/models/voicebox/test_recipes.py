"""The recipes of Voicebox: what they build, and that the parts of one size belong together."""

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from helicon import registry
from helicon.cli import app
from helicon.cli.demos.speech import Clip, in_voices, voices_in
from helicon.config import Recipe, load_recipe
from helicon.data.synthetic_speech import SyntheticSpeech
from helicon.models.voicebox.durations import DurationPredictor
from helicon.models.voicebox.features import MelVoco
from helicon.models.voicebox.model import VoiceBox
from helicon.models.voicebox.text import CharacterTokenizer


def read(name: str) -> Recipe:
    return load_recipe(f"voicebox/{name}", sections=lambda trains: registry.entries[trains].recipe_sections())


def millions(recipe: Recipe) -> int:
    (found,) = re.findall(r"\((\d+) M parameters\)", recipe.summary)
    return int(found)


def test_the_full_size_is_what_its_recipe_says() -> None:
    recipe = read("voicebox")
    tokens = CharacterTokenizer().num_tokens
    with torch.device("meta"):  # which allocates nothing
        network = VoiceBox(
            **recipe.model["voicebox"], num_cond_tokens=tokens, dim_in=recipe.model["audio_enc_dec"]["n_mels"]
        )
    assert (network.dim, len(network.transformer.layers), network.alignment) == (1024, 24, "free")
    assert round(sum(p.numel() for p in network.parameters()) / 1e6) == millions(recipe)
    assert recipe.trainer["compile"] == "graphs"


def test_the_durations_are_of_the_size_their_recipe_says() -> None:
    recipe = read("durations")
    with torch.device("meta"):
        network = DurationPredictor(**recipe.model["predictor"], num_phoneme_tokens=100)
    assert round(sum(p.numel() for p in network.parameters()) / 1e6) == millions(recipe)


def test_the_vocoder_makes_the_frames_of_the_full_size_audible() -> None:
    vocoder, space = read("vocoder").model, read("voicebox").model["audio_enc_dec"]
    names = ("sampling_rate", "n_mels", "n_fft", "hop_length")
    assert MelVoco(**space).mel == MelVoco(**{name: vocoder[name] for name in names}).mel


def test_the_demo_says_in_whose_voices_it_speaks() -> None:
    clips = [Clip(SyntheticSpeech(9, 8000).utterance(index), torch.zeros(1), (0.0, 0.1), "") for index in range(9)]
    assert voices_in(in_voices(clips)).startswith("in the voice of a clip of another text")
    alone = [clip for clip in clips if clip.said.voice == clips[0].said.voice]
    assert voices_in(in_voices(alone)) == "going on from a clip of another text, in the only voice it learned"
    assert read("voicebox-demo").data["speech"]["voices"] == ["soprano"]


@pytest.mark.slow
def test_a_recipe_trains_and_is_resumed_on_the_command_line() -> None:
    def helicon(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, list(arguments))
        return done.exit_code, " ".join((done.output or "").split())

    short = ["num_train_steps=2", "save_model_every=1", "save_results_every=2", "sample_steps=1", "results_folder=run"]
    code, said = helicon("train", "voicebox/voicebox-debug", *short)
    assert code == 0, said
    code, said = helicon("resume", "run", "num_train_steps=3")
    assert code == 0 and "resuming from step 2" in said
    assert Path("run/checkpoints/step-00000003").is_dir()
    code, said = helicon("train", "voicebox/voicebox-debug", "num_epochs=2", "results_folder=other")
    assert code == 1 and "how long shall it learn? Give num_train_steps or num_epochs" in said
