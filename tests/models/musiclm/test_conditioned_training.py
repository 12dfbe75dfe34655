"""Stages of AudioLM that learn from the codes of a MuLaN: from sounds, from a cache, from recipes; and the AudioLM they become."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

import helicon
from helicon.data.tokenize import tokenize
from helicon.data.tokens import TokenCache
from helicon.models.audiolm.data import AudioSource, AudioTokenizer, cached_audio
from helicon.models.audiolm.pipeline import AudioLM
from helicon.models.audiolm.trainers import (
    CoarseTransformerTrainer,
    StageTrainer,
    build_coarse,
    build_delayed,
    build_fine,
    build_semantic,
    tokenizer_of,
)
from helicon.models.musiclm.conditioning import MuLaNEmbedQuantizer
from models.audiolm.tiny import KINDS, SIZES, stage_with_codec, wav2vec
from models.musiclm.conditioned import CODEC, CODES, QUANTIZERS, conditioned, quantizer

SECONDS = 0.25
OPTIONS: dict[str, Any] = {
    "num_train_steps": 2,
    "batch_size": 4,
    "lr": 1e-2,
    "save_results_every": 100,
    "save_model_every": 100,
    "val_every": 100,
    "tensorboard": False,
    "end_prob": 0.0,
}


@pytest.fixture(scope="module")
def fitted() -> MuLaNEmbedQuantizer:
    return quantizer()


@pytest.fixture
def recordings() -> str:
    """Of a quarter of a second at 16 kHz, one of them shorter, without any text."""
    Path("sounds").mkdir()
    random = np.random.default_rng(0)
    for number in range(8):
        hz, count = 200 * 1.5**number, 3000 if number == 3 else 4000
        wave = np.sin(2 * np.pi * hz * np.arange(count) / 16000) * 0.3 + random.normal(scale=0.01, size=count)
        soundfile.write(f"sounds/{number}.wav", wave, 16000)
    return "sounds"


def cached(conditioner: MuLaNEmbedQuantizer | None, folder: str = "cache") -> TokenCache:
    tokenizer = AudioTokenizer(CODEC, wav2vec(), conditioner=conditioner)
    data = AudioSource("sounds", data_max_length_seconds=SECONDS)
    tokenize(tokenizer.items(data), tokenizer, Path(folder), source="sounds", arguments={})
    return TokenCache(folder)


def trained(name: str, conditioner: Any, results_folder: str, **options: Any) -> tuple[StageTrainer, list[float]]:
    losses: list[float] = []
    trainer = StageTrainer(conditioned(name, conditioner), results_folder=results_folder, **{**OPTIONS, **options})
    trainer.train(lambda logs: losses.append(logs["loss"].item()))
    return trainer, losses


@pytest.mark.parametrize("name", ["semantic", "coarse", "fine", "delayed"])
def test_embeddings_are_trained_and_saved_codebooks_stay_and_a_cache_is_as_good_as_sounds(
    fitted: MuLaNEmbedQuantizer, recordings: str, name: str
) -> None:
    """64: the reference trains and saves the transformer without them, and moves the codebooks all the while."""
    before = {key: value.clone() for key, value in fitted.own_state().items()}
    first = conditioned(name, fitted).transformer.code_table.embedding.weight.detach().clone()
    trainer, on_waves = trained(name, fitted, "waves", folder=recordings, data_max_length_seconds=SECONDS)
    table = trainer.unwrapped_stage.transformer.code_table.embedding.weight
    assert "transformer.code_table.embedding.weight" in {key for _, key, _ in trainer.optimizers["model"]._owned()}
    assert not torch.equal(table, first)
    loaded: Any = helicon.load("waves")
    assert torch.equal(loaded.transformer.code_table.embedding.weight, table)
    assert torch.equal(loaded.audio_conditioner.codebooks, before["codebooks"])
    assert all(torch.equal(value, before[key]) for key, value in fitted.own_state().items())
    cache = cached(fitted)
    assert cache[0]["condition_ids"].shape == (QUANTIZERS,)
    _, on_tokens = trained(name, fitted, "tokens", folder="cache")
    assert on_tokens == pytest.approx(on_waves, rel=1e-5)
    bare = KINDS[name].stage(
        trainer.unwrapped_stage.transformer
    )  # without a conditioner at hand, and without the sounds
    assert StageTrainer(bare, folder="cache", results_folder="bare", **OPTIONS).train_step()["loss"].isfinite()


def test_lineage_names_the_conditioner(fitted: MuLaNEmbedQuantizer, recordings: str) -> None:
    fitted.save_pretrained("conditioner")
    trained("semantic", helicon.load("conditioner"), "run", folder=recordings, data_max_length_seconds=SECONDS)
    checkpoint = sorted(Path("run/checkpoints").iterdir())[-1]
    lineage = json.loads((checkpoint / "manifest.json").read_text())["lineage"]
    assert (checkpoint / lineage["audio_conditioner"]["path"]).resolve() == Path("conditioner").resolve()


def test_a_cache_must_hold_the_codes_of_this_conditioner(fitted: MuLaNEmbedQuantizer, recordings: str) -> None:
    for name, network in {"mine": fitted, "other": quantizer(seed=1)}.items():
        network.save_pretrained(name)
    mine, other = helicon.load("mine"), helicon.load("other")
    cached(mine)  # type: ignore[arg-type]
    stage = conditioned("semantic", mine)
    assert cached_audio("cache", tokenizer_of(stage))[0].keys() == {"semantic_token_ids", "condition_ids", "is_end"}
    mute = stage_with_codec("semantic")
    assert "condition_ids" not in cached_audio("cache", tokenizer_of(mute))[0], "others need not read them"
    with pytest.raises(ValueError, match=r"the audio_conditioner of this model is .*other .* was made with .*mine"):
        cached_audio("cache", tokenizer_of(conditioned("semantic", other)))
    cached(None, "plain")
    with pytest.raises(ValueError, match=r"holds .* and no condition_ids, .* --conditioner .*mine --data"):
        cached_audio("plain", tokenizer_of(stage))
    with pytest.raises(ValueError, match="a MelKmeans makes no codes to condition on: give what `helicon fit-kmeans"):
        AudioTokenizer(CODEC, conditioner=wav2vec())


def test_a_users_own_trainer_and_batches(fitted: MuLaNEmbedQuantizer) -> None:
    """As other packages write it: the transformer and the quantizer are given to the trainer, and that is all."""
    transformer = KINDS["coarse"].build(codebook_size=16, num_coarse_quantizers=2, audio_text_condition=True)
    options = {**OPTIONS, "results_folder": "run"}
    dataset = [{"raw_wave": torch.randn(8000) * 0.1, "raw_wave_for_codec": torch.randn(4000) * 0.1} for _ in range(8)]
    trainer = CoarseTransformerTrainer(
        transformer, CODEC, wav2vec(), audio_conditioner=fitted, dataset=dataset, **options
    )
    trainer.train()
    assert transformer.code_table is not None and trainer.unwrapped_stage.transformer is transformer
    ids = torch.randint(11, (2, 6))
    named = trainer.prepare({"semantic_token_ids": ids, "condition_ids": ids[:, :3] % CODES})
    assert named.keys() == {"semantic_token_ids", "condition_ids"}
    assert trainer.prepare((ids,)).keys() == {"semantic_token_ids"}, "what has no name is never taken for codes"
    codes = {"semantic_token_ids": ids[0], "token_ids": ids[:, :3].T, "condition_ids": ids[0, :3] % CODES}
    alone = StageTrainer(KINDS["coarse"].stage(transformer), dataset=[codes] * 8, **{**options, "results_folder": "b"})
    assert alone.train_step()["loss"].isfinite()
    with pytest.raises(
        ValueError, match="is conditioned on codes, and the samples have none: give it the audio_conditioner"
    ):
        alone.prepare({"semantic_token_ids": ids})
    for wrong in (CODES, -1):  # which would be read as a code of another quantizer
        with pytest.raises(ValueError, match=f"condition_ids hold {wrong}, and the transformer knows 0 to {CODES - 1}"):
            alone.prepare({"semantic_token_ids": ids, "condition_ids": torch.tensor([[1, wrong, 2], [0, 1, 2]])})


def test_recipes_name_the_conditioner_by_its_folder(fitted: MuLaNEmbedQuantizer) -> None:
    fitted.save_pretrained("conditioner")
    CODEC.save_pretrained("codec")
    wav2vec().save_pretrained("kmeans")
    codec, clusters = {"codec": "codec"}, {"wav2vec": "kmeans"}
    built = [
        build_semantic(SIZES, **clusters, audio_conditioner="conditioner"),
        build_coarse({**SIZES, "num_coarse_quantizers": 2}, **codec, **clusters, audio_conditioner="conditioner"),
        build_fine({**SIZES, "num_coarse_quantizers": 2}, **codec, audio_conditioner="conditioner"),
        build_delayed(SIZES, **codec, **clusters, audio_conditioner="conditioner"),
    ]
    for stage in built:
        assert stage.transformer.code_table.codebook_size == CODES
        assert torch.equal(stage.audio_conditioner.codebooks, fitted.codebooks)
    with pytest.raises(
        ValueError, match=r"model.audio_conditioner='kmeans' holds a MelKmeans, not what makes codes of sounds"
    ):
        build_semantic(SIZES, audio_conditioner="kmeans")


# ------------------------------------------------------------------ all stages as one

SHORT = {"seconds": 8 * 40 / 8000, "seed": 5}
TEXTS = ["a loud tone, high pitch", "a soft pluck, low pitch"]


def audio_lm(conditioner: Any, names: tuple[str, ...] = ("semantic", "coarse", "fine")) -> AudioLM:
    roles = ("semantic_transformer", "coarse_transformer", "fine_transformer")
    stages = {role: conditioned(name, conditioner) for role, name in zip(roles, names, strict=False)}
    return AudioLM(**stages)


@pytest.mark.parametrize("names", [("semantic", "coarse", "fine"), ("semantic", "delayed")])
def test_a_text_is_the_same_codes_in_every_stage_each_through_its_own_table(
    fitted: MuLaNEmbedQuantizer, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """65: in the reference all stages are told the embeddings of the first."""
    model = audio_lm(fitted, names)
    tables = [stage.transformer.code_table.embedding.weight for stage in model._stages()]
    assert len({table.data_ptr() for table in tables}) == len(names)
    assert not any(torch.equal(tables[0], other) for other in tables[1:])
    asked: list[torch.Tensor] = []
    for stage in model._stages():
        monkeypatch.setattr(
            stage.transformer.code_table, "forward",
            lambda ids, own=stage.transformer.code_table.forward: asked.append(ids) or own(ids),
        )  # fmt: skip
    sound = model(text=TEXTS, **SHORT)
    assert len(asked) == len(names) and all(torch.equal(ids, fitted.codes(texts=TEXTS)) for ids in asked)
    ids = fitted.codes(texts=TEXTS)
    told = model(condition_ids=ids, **SHORT)
    assert all(torch.equal(one, other) for one, other in zip(sound, told, strict=True))
    other = model(condition_ids=(ids + 1) % CODES, **SHORT)
    assert not all(one.shape == two.shape and torch.equal(one, two) for one, two in zip(sound, other, strict=True))
    monkeypatch.undo()
    model.save_pretrained(tmp_path / "saved")
    loaded: Any = helicon.load(tmp_path / "saved")
    assert all(torch.equal(one, two) for one, two in zip(sound, loaded(text=TEXTS, **SHORT), strict=True))


def test_stages_of_other_conditioners_are_refused_with_both_names(fitted: MuLaNEmbedQuantizer, tmp_path: Path) -> None:
    for name, network in {"mine": fitted, "other": quantizer(seed=1)}.items():
        network.save_pretrained(tmp_path / name)
    mine, again, other = (helicon.load(tmp_path / name) for name in ("mine", "mine", "other"))
    stages = {"semantic_transformer": conditioned("semantic", mine)}
    assert AudioLM(**stages, coarse_transformer=conditioned("delayed", again)).reads_texts
    with pytest.raises(ValueError, match=r"on another audio_conditioner \(.*other\) than the one of the .* \(.*mine\)"):
        AudioLM(**stages, coarse_transformer=conditioned("delayed", other))


def test_an_audiolm_without_its_conditioner_takes_codes_alone(fitted: MuLaNEmbedQuantizer) -> None:
    model = audio_lm(fitted, ("semantic", "delayed"))
    bare = AudioLM(
        semantic_transformer=model.semantic.transformer,
        coarse_transformer=model.coarse.transformer,
        codec=CODEC,
        wav2vec=wav2vec(),
    )
    sounds = [network(condition_ids=torch.tensor([[1, 2, 3]]), **SHORT) for network in (model, bare)]
    assert torch.equal(*sounds)
    with pytest.raises(
        ValueError, match="has no text encoder: give condition_ids, or the audio_conditioner that makes"
    ):
        bare(text=TEXTS, **SHORT)
