"""The demo's AudioLM really learns: the sounds it makes have the pitch and the direction their captions name, to stated numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import helicon
from helicon import registry
from helicon.cli.fit_kmeans import fit_kmeans
from helicon.cli.tokenize import tokenize
from helicon.config import Recipe, load_recipe
from helicon.data.synthetic_sounds import SyntheticSounds
from helicon.metrics.audio import describe_sound
from helicon.models.audiolm.pipeline import AudioLM

NOT_ASKED = ("chirp", "high")  # the demo has no such sounds at all
HOW_DRAWN: dict[str, Any] = {"cond_scale": 2.0, "top_p": 0.7, "filter_thres": None, "seed": 1}


def read(recipe: str, *overrides: str) -> Recipe:
    return load_recipe(recipe, list(overrides), sections=lambda name: registry.entries[name].recipe_sections())


def train(recipe: str, folder: Path, *overrides: str) -> None:
    rarely = ("save_results_every=10000", "save_model_every=10000", "val_every=10000")
    registry.build_trainer(read(recipe, *overrides, *rarely), results_folder=folder).train()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The codec, the semantic tokenizer, the tokens of all sounds and the semantic stage: what both kinds of AudioLM stand on."""
    home = tmp_path_factory.mktemp("demo")
    train("soundstream/demo", home / "codec")
    fit_kmeans(
        data="synthetic",
        out=home / "kmeans",
        clusters=read("audiolm/semantic-demo").model["wav2vec"]["codebook_size"],
        hours=0.1,
    )
    data = {name: value for name, value in read("audiolm/semantic-demo").data.items() if name != "source"}
    tokenize(
        run=home / "codec",
        semantic=home / "kmeans",
        data="synthetic",
        out=home / "tokens",
        overrides=[f"{name}={json.dumps(value)}" for name, value in data.items()],
        workers=0,
    )
    train_stage("semantic", home)
    return home


def train_stage(name: str, home: Path) -> None:
    below = {"codec": name != "semantic", "wav2vec": name != "fine"}
    folders = {"codec": home / "codec", "wav2vec": home / "kmeans"}
    overrides = [f"model.{key}={folders[key]}" for key, is_needed in below.items() if is_needed]
    train(f"audiolm/{name}-demo", home / name, *overrides, f"data.source={home / 'tokens'}")


def audiolm(home: Path, coarse: str, fine: str | None = None) -> AudioLM:
    stages = {"semantic_transformer": "semantic", "coarse_transformer": coarse, "fine_transformer": fine}
    return AudioLM(**{role: helicon.load(home / name) for role, name in stages.items() if name is not None})


def sounds(count: int, are_held_out: bool) -> SyntheticSounds:
    """What may be asked for: captions that the demo learns from, or those that it never sees."""
    data = read("audiolm/semantic-demo").data
    words = dict(data["sounds"])
    held_out = [(kind, pitch) for kind, pitch in words.pop("held_out")]
    never_seen = [pair for pair in held_out if pair != NOT_ASKED]
    words |= {"only": never_seen} if are_held_out else {"held_out": held_out}
    return SyntheticSounds(count, 8000, data["data_max_length_seconds"], seed=12345, **words)


def made(model: AudioLM, asked: SyntheticSounds, has_text: bool = True) -> list[Tensor]:
    text = [asked.attributes(index).caption for index in range(len(asked))] if has_text else None
    return list(model(text=text, batch_size=len(asked), seconds=asked.seconds, **HOW_DRAWN))


def shares_right(waves: list[Tensor], asked: SyntheticSounds) -> tuple[float, float, float]:
    """How many sounds have the pitch, the direction, and both, that were asked for."""
    wanted = [asked.attributes(index) for index in range(len(asked))]
    heard = [describe_sound(wave, asked.sample_hz) for wave in waves]
    pitch = [one.pitch == it.pitch for one, it in zip(heard, wanted, strict=True)]
    direction = [one.direction == it.direction for one, it in zip(heard, wanted, strict=True)]
    both = [a and b for a, b in zip(pitch, direction, strict=True)]
    return tuple(sum(right) / len(right) for right in (pitch, direction, both))  # type: ignore[return-value]


def assert_captions_are_heard(model: AudioLM) -> None:
    """There are seven pairs of a pitch and a direction: chance is one in seven. One answer for all unseen captions is right for at
    most 36 of these 100."""
    seen, never_seen = sounds(100, are_held_out=False), sounds(100, are_held_out=True)
    captions = [{data.attributes(index).caption for index in range(len(data))} for data in (seen, never_seen)]
    assert not captions[0] & captions[1] and len(captions[1]) == 4
    assert shares_right(made(model, seen), seen)[2] >= 0.85
    pitch, direction, both = shares_right(made(model, never_seen), never_seen)
    assert pitch >= 0.9 and direction >= 0.8 and both >= 0.8
    assert shares_right(made(model, never_seen, has_text=False), never_seen)[2] <= 0.4


@pytest.mark.slow
def test_semantic_coarse_and_fine_make_the_sound_the_caption_names_also_captions_never_seen(home: Path) -> None:
    """Measured with three seeds, 100 sounds each: pitch and direction are both right for 94, 99 and 95 % of captions it learned
    from, and for 99, 98 and 92 % of those it never saw; for 10 to 22 % without caption. Two durations of a sound are enough to
    make the third. (Where a direction was held out at a pitch in every duration, none of 60 were right.)"""
    train_stage("coarse", home)
    train_stage("fine", home)
    assert_captions_are_heard(audiolm(home, "coarse", "fine"))


@pytest.mark.slow
def test_a_delayed_transformer_in_the_place_of_two_does_as_well(home: Path) -> None:
    """Measured as above: 96, 100 and 92 % of captions it learned from, 97, 98 and 95 % of those it never saw; 13 to 23 % without."""
    train_stage("delayed", home)
    assert_captions_are_heard(audiolm(home, "delayed"))
