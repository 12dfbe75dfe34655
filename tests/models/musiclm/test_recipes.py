"""The recipes of MuLaN and MusicLM: what they build, that those of one size belong together, and that one runs from the command line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from helicon import registry
from helicon.cli import app
from helicon.config import Recipe, load_recipe
from helicon.data.synthetic_sounds import SyntheticSounds
from helicon.models.audiolm.transformers import (
    CoarseTransformer,
    DelayedTransformer,
    FineTransformer,
    SemanticTransformer,
)
from helicon.models.musiclm.trainers import build_mulan
from helicon.models.soundstream.model import SoundStream

MEANINGS: dict[str, Any] = {"num_semantic_tokens": 500}  # of `helicon fit-kmeans`
CODES: dict[str, Any] = {"codebook_size": 1024}  # of musiclm/codec, which has 12 quantizers
STAGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "semantic": (SemanticTransformer, MEANINGS),
    "coarse": (CoarseTransformer, {**MEANINGS, **CODES}),
    "fine": (FineTransformer, {**CODES, "num_fine_quantizers": 8}),
    "delayed": (DelayedTransformer, {**MEANINGS, **CODES, "num_quantizers": 12}),
}


def read(name: str) -> Recipe:
    return load_recipe(f"musiclm/{name}", sections=lambda trains: registry.entries[trains].recipe_sections())


def test_the_full_size_is_what_its_recipe_says() -> None:
    recipe = read("mulan")
    with torch.device("meta"):  # which allocates nothing
        network = build_mulan(**recipe.model)
    assert [(tower.dim, tower.depth) for tower in (network.audio, network.text)] == [(768, 12)] * 2
    (millions,) = re.findall(r"\((\d+) M parameters\)", recipe.summary)
    assert round(sum(p.numel() for p in network.parameters()) / 1e6) == int(millions)
    assert network.sample_hz == 16000 and recipe.data["data_max_length_seconds"] == 10
    assert recipe.trainer["batch_size"] % recipe.trainer["chunk_size"] == 0, "chunks of one shape"


@pytest.mark.parametrize("name", STAGES)
def test_a_full_size_stage_is_what_its_recipe_says(name: str) -> None:
    recipe = read(name)
    kind, sizes = STAGES[name]
    given = {**recipe.model["transformer"], "audio_text_condition": True, "cond_codes": (8, 500)}
    with torch.device("meta"):  # which allocates nothing
        transformer = kind(**given, **sizes)
    assert transformer.has_condition and transformer.text_encoder is None, "codes of MuLaN stand for texts"
    (millions,) = re.findall(r"\((\d+) M parameters\)", recipe.summary)
    assert round(sum(p.numel() for p in transformer.parameters()) / 1e6) == int(millions)


def test_the_full_sizes_of_musiclm_belong_together() -> None:
    codec, stages = read("codec"), {name: read(name) for name in STAGES}
    with torch.device("meta"):
        network = SoundStream(**codec.model)
    assert codec.data["sample_hz"] == network.sample_hz == 50 * network.downsample_factor == 24000
    (millions,) = re.findall(r"\((\d+ M \+ \d+ M) parameters\)", codec.summary)
    parts: list[Any] = [network.autoencoder, network.discriminators]
    sizes = [sum(p.numel() for p in part.parameters()) for part in parts]
    assert " + ".join(f"{size / 1e6:.0f} M" for size in sizes) == millions
    coarse, fine = (stages[name].model["transformer"]["num_coarse_quantizers"] for name in ("coarse", "fine"))
    assert coarse == fine == codec.model["rq_num_quantizers"] - STAGES["fine"][1]["num_fine_quantizers"]
    assert all(recipe.data == stages["semantic"].data for recipe in stages.values()), "one token cache is for all"
    places = {"codec": "runs/musiclm-codec", "wav2vec": "runs/kmeans", "audio_conditioner": "runs/conditioner"}
    for stage, place in places.items():
        assert {recipe.model.get(stage, place) for recipe in stages.values()} == {place}


def test_every_word_of_the_held_out_captions_of_the_demo_is_learned() -> None:
    words = read("mulan-demo").data["sounds"]
    pairs = [tuple(pair) for pair in words.pop("held_out")]
    captions = [
        {sounds.attributes(index).caption for index in range(1000)}
        for sounds in (SyntheticSounds(1000, held_out=pairs, **words), SyntheticSounds(1000, only=pairs, **words))
    ]
    assert [len(each) for each in captions] == [90 - 2 * len(pairs), 2 * len(pairs)]
    known, new = ({word for caption in each for word in caption.split()} for each in captions)
    assert new <= known and not captions[0] & captions[1]


@pytest.mark.slow
def test_a_recipe_trains_in_chunks_and_is_resumed_on_the_command_line() -> None:
    def helicon(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, list(arguments))
        return done.exit_code, " ".join((done.output or "").split())

    short = ["num_train_steps=2", "save_model_every=1", "save_results_every=2", "results_folder=run", "chunk_size=8"]
    code, said = helicon("train", "musiclm/mulan-debug", *short)
    assert code == 0, said
    line = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])
    assert line["valid_text_to_audio_candidates"] == 51 and 0 < line["valid_text_to_audio_chance_at_1"] < 0.1
    assert line["valid_audio_to_text_candidates"] < 30, "captions that are equal are one"
    assert Path("run/samples/step-00000002-similarities-ema.png").is_file()
    code, said = helicon("resume", "run", "num_train_steps=3")
    assert code == 0 and "resuming from step 2" in said
    code, said = helicon("train", "musiclm/mulan", "data.captions=null", "results_folder=other")
    assert code == 1 and 'say where those of sounds are, with captions="column"' in said
