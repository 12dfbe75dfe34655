import inspect
import json
import logging
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch.utils.data import DataLoader, StackDataset
from typer.testing import CliRunner

import helicon
from data.sounds import write
from helicon.cli import app
from helicon.config import ConfigError
from helicon.data.synthetic_speech import PHONEMES, SyntheticSpeech
from helicon.engine.options import ALIASES
from helicon.models.voicebox.data import SpeechSource, collate_speech, training_speech
from helicon.models.voicebox.features import CodecLatents, MelVoco
from helicon.models.voicebox.flow import ConditionalFlowMatcherWrapper
from helicon.models.voicebox.model import VoiceBox
from helicon.models.voicebox.speech import SpeechMaker
from helicon.models.voicebox.text import CharacterTokenizer, PhonemeTokenizer
from helicon.models.voicebox.trainers import VoiceBoxTrainer, _num_steps, build_durations, build_voicebox
from helicon.models.voicebox.vocoder import Vocoder
from models.soundstream.tiny import tiny
from models.voicebox.test_task import HZ, MEL, SHORT, SIZES, network

OPTIONS: dict[str, Any] = {
    "num_train_steps": 2,
    "batch_size": 2,
    "lr": 1e-3,
    "tensorboard": False,
    "results_folder": "run",
    "save_results_every": 100,
    "valid_frac": 0.2,
    "sample_steps": 1,
}
LITTLE = {"dim_cond_emb": 8, **SIZES}


def trained(model: Any, is_done: bool = False, **options: Any) -> VoiceBoxTrainer:
    """After two steps; unless it is done, without what comes at the end of a run (samples, mostly, which take long)."""
    trainer = VoiceBoxTrainer(model, **{**OPTIONS, "num_train_steps": 2 if is_done else 100, **options})
    if is_done:
        trainer.train()
    while trainer.step < 2:
        trainer.train_step()
    return trainer


def synthetic(count: int = 12, **options: Any) -> SpeechSource:
    return training_speech("synthetic", num_samples=count, speech=SHORT, **options)


@pytest.fixture
def speech() -> str:
    """A folder with a manifest: texts, phonemes and durations."""
    data, rows = SyntheticSpeech(10, HZ, syllables=(1, 2)), []
    for index in range(10):
        sample = data[index]
        write(Path(f"speech/{index}.wav"), sample["audio"].numpy(), HZ)
        durations = sample["durations"].tolist()
        rows.append(
            {"path": f"{index}.wav", "text": sample["texts"], "phonemes": sample["phonemes"], "durations": durations}
        )
    Path("speech/manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "speech/manifest.jsonl"


# ---------------------------------------------------------------------- where data comes from


def test_a_manifest_is_learned_from_by_texts_by_phonemes_or_by_sounds_alone(speech: str) -> None:
    models = {
        "texts": (network(), {"captions": "column"}),
        "phonemes": (network("phonemes"), {}),
        "durations": (network("phonemes", alignment="frames"), {}),
        "sounds": (network(None, condition_on_text=False), {}),
    }
    for name, (model, options) in models.items():
        trainer = trained(model, folder=speech, results_folder=name, **options)
        (batch,) = trainer._next_batches()
        read = trainer.task.read(batch)
        assert ("ids" in read) == (name != "sounds"), name
        if name == "durations":
            assert read["ids"].shape == read["mask"].shape, "one for each frame"
    with pytest.raises(ValueError, match=r'learns what is said, and the samples do not tell: .*captions="column"'):
        trained(network(), folder=speech, results_folder="mute")


def test_a_cache_made_on_the_command_line_is_learned_from_as_the_sounds_are(speech: str) -> None:
    MelVoco(**MEL).save("space")
    made = CliRunner().invoke(
        app, ["tokenize", "space", "--data", speech, "-o", "cache", "captions=column", "--workers", "0"]
    )
    assert made.exit_code == 0, made.output
    losses = []
    for folder, options in {
        "sounds": {"folder": speech, "captions": "column"},
        "features": {"folder": "cache"},
    }.items():
        trainer = trained(network(), results_folder=folder, **options)
        losses.append(trainer.validate()["valid_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    with pytest.raises(
        ValueError, match="the frames in cache have hop_length=128, and those of this model hop_length=64"
    ):
        VoiceBoxTrainer(network(space=MelVoco(**{**MEL, "hop_length": 64})), folder="cache", **OPTIONS)


def test_the_documented_cache_is_one_that_the_recipe_takes(speech: str) -> None:
    """Data arguments of the command on the page, and those of the recipe, which refuses a cache of others."""
    page = Path(__file__).parents[3] / "docs/voicebox.md"
    (command,) = re.findall(r"`helicon (tokenize runs/voicebox-vocoder .*?)`", page.read_text("utf-8"))
    MelVoco(**MEL).save("runs/voicebox-vocoder")
    made = CliRunner().invoke(app, [*shlex.split(command), "--workers", "0"])
    assert made.exit_code == 0, made.output
    recipe = yaml.safe_load((page.parents[1] / "recipes/voicebox/voicebox.yaml").read_text("utf-8"))
    data = training_speech(**{**recipe["data"], "source": "features"})
    assert VoiceBoxTrainer(network(), dataset=data, **OPTIONS).feed.dataset is not None


def test_a_vocoder_names_the_frames_it_makes_audible(speech: str) -> None:
    """So a cache can be made before any VoiceBox is built, and serves one with this vocoder or without."""
    vocoder = Vocoder(**MEL, dim=8, depth=1, discr_periods=(), discr_windows=())
    vocoder.save("vocoder")
    made = CliRunner().invoke(
        app, ["tokenize", "vocoder", "--data", speech, "-o", "cache", "captions=column", "--workers", "0"]
    )
    assert made.exit_code == 0, made.output
    trained(network(space=MelVoco.of(helicon.load("vocoder"))), folder="cache")
    assert VoiceBoxTrainer(network(), folder="cache", **OPTIONS | {"results_folder": "other"}).feed.dataset is not None


def test_datasets_of_waves_and_of_features() -> None:
    waves = [torch.randn(n) * 0.1 for n in (2000, 2500, 1800, 3000, 2200)]
    mute = lambda: network(None, condition_on_text=False)
    trained(mute(), dataset=waves, results_folder="waves")
    texts = [f"number {n}" for n in range(5)]
    trained(network(), dataset=StackDataset(waves, texts), results_folder="pairs")
    space = MelVoco(**MEL)
    features = [
        {"features": space.encode(wave[None])[0], "texts": text} for wave, text in zip(waves, texts, strict=True)
    ]
    trained(network(), dataset=features, results_folder="features")
    alone = ConditionalFlowMatcherWrapper(VoiceBox(dim_in=12, num_cond_tokens=6, alignment="frames", **SIZES))
    ids = [{**one, "semantic_token_ids": torch.arange(n + 1)} for n, one in enumerate(features)]
    trained(alone, dataset=[{k: v for k, v in one.items() if k != "texts"} for one in ids], results_folder="ids")


def test_a_loader_of_ones_own() -> None:
    data = synthetic().at(MelVoco(**MEL))
    own = DataLoader([data[index] for index in range(8)], batch_size=2, collate_fn=collate_speech)
    trainer = trained(network(), train_dataloader=own, val_dataloader=own)
    assert trainer.unwrapped_cfm.is_fitted and trainer.validate()["valid_loss"] > 0
    with pytest.raises(ValueError, match="num_epochs needs a dataset"):
        VoiceBoxTrainer(network(), train_dataloader=own, **OPTIONS | {"num_train_steps": None, "num_epochs": 1})


def test_a_folder_or_a_dataset() -> None:
    with pytest.raises(ValueError, match="give a folder or a dataset of utterances, not both"):
        VoiceBoxTrainer(network(), folder="speech", dataset=synthetic(), **OPTIONS)


# ---------------------------------------------------------------------- what cannot be read


def said(*texts: str, seconds: float = 0.5) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    return [{"audio": torch.randn(round(seconds * HZ)) * 0.1, "texts": text} for text in texts]


def features_of(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    space = MelVoco(**MEL)
    return [{"features": space.encode(one["audio"][None])[0], "texts": one["texts"]} for one in samples]


@pytest.mark.parametrize("form", [list, features_of])
@pytest.mark.parametrize("is_fitted", [False, True])
def test_texts_that_cannot_be_read_are_refused(form: Any, is_fitted: bool) -> None:
    model = network()
    if is_fitted:
        model.feature_mean.fill_(1.0)
    with pytest.raises(
        ValueError, match=r"^20 of 24 symbols that are said \(日 本 語 で す\) are not known to the tokenizer, "
    ):
        VoiceBoxTrainer(model, dataset=form(said(*["日本語 です"] * 5)), **OPTIONS)


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        (["sa ke"] * 8 + ["", " "], "2 of 10 utterances have an empty text: fill it in, or leave them out"),
        (
            ["sa ke"] * 9 + ["日a"],
            "1 of 47 symbols that are said (日) are not known to the tokenizer, which knows a b c",
        ),
        (["sa ke"] * 9 + ["a" * 99], "1 of 10 utterances have more tokens than frames, so that some are not learned: "),
    ],
)
def test_what_of_the_texts_is_not_learned_is_told(
    texts: list[str], sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        VoiceBoxTrainer(network(), dataset=said(*texts), **OPTIONS | {"valid_frac": 0.0})
    assert len(caplog.records) == 1 and caplog.text.count(sentence) == 1


@pytest.mark.parametrize(
    ("texts", "seconds", "sentence"),
    [
        ([" "] * 5, 0.5, "4 of 4 utterances have an empty text"),
        (["so be it now"] * 5, 0.1, "4 of 4 utterances have more tokens than frames"),
    ],
)
def test_texts_without_words_or_room_are_refused(texts: list[str], seconds: float, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        VoiceBoxTrainer(network(), dataset=said(*texts, seconds=seconds), **OPTIONS)


def test_phonemes_of_another_inventory_are_refused(speech: str) -> None:
    model = build_voicebox(LITTLE, audio_enc_dec=MEL, tokenizer={"symbols": ["x", "y"]})
    with pytest.raises(
        ValueError, match=r"symbols that are said are not known to the tokenizer, which knows x y: give"
    ):
        VoiceBoxTrainer(model, folder=speech, captions="column", **OPTIONS)
    bare = ConditionalFlowMatcherWrapper(VoiceBox(dim_in=12, num_cond_tokens=6, alignment="frames", **SIZES))
    ids = [{"features": torch.randn(30, 12), "phonemes": torch.tensor([1, 9])} for _ in range(5)]
    with pytest.raises(ValueError, match="the data has the token 9, and the network knows 0 to 5"):
        VoiceBoxTrainer(bare, dataset=ids, **OPTIONS)


# ---------------------------------------------------------------------- standardised features


def test_features_are_standardised_before_the_first_step_and_never_again() -> None:
    options = {"dataset": synthetic(), "save_model_every": 1, "num_train_steps": 100}
    trainer = VoiceBoxTrainer(network(), **OPTIONS | options)
    model = trainer.unwrapped_cfm
    fitted = [model.feature_mean.clone(), model.feature_std.clone()]
    frames = []
    for index in range(len(trainer.feed.dataset)):
        sample = trainer.feed.dataset[index]
        features, lengths = model.features(sample["audio"][None], torch.tensor([sample["audio_lengths"]]))
        frames.append(features[0, : lengths[0]])
    std, mean = torch.std_mean(torch.cat(frames), dim=0, correction=0)
    torch.testing.assert_close(fitted, [mean, std], rtol=1e-4, atol=1e-4)
    before = trainer.validate()["valid_loss"]
    assert before < 20, "the averaged network has them from the start"
    trainer.train_step()
    trainer.writer.wait()
    calls: list[Any] = []
    other = network(seed=1)
    other.fit_normalisation = lambda *inputs: calls.append(inputs)
    resumed = VoiceBoxTrainer(other, **OPTIONS | options | {"dataset": synthetic(seed=5), "resume": True})
    assert resumed.step == 1 and not calls
    resumed.train_step()
    resumed.writer.wait()
    assert torch.equal(resumed.unwrapped_cfm.feature_mean, fitted[0])
    loaded = helicon.load("run")
    assert torch.equal(loaded.feature_mean, fitted[0]) and torch.equal(loaded.feature_std, fitted[1])


def test_the_pace_of_what_is_learned_from_is_kept() -> None:
    """A text was said at 15 tokens a second, English as it is written, whatever the network had learned to speak."""
    trainer = VoiceBoxTrainer(
        network(), **OPTIONS | {"dataset": synthetic(), "save_model_every": 1, "num_train_steps": 1}
    )
    model, data = trainer.unwrapped_cfm, trainer.feed.dataset
    samples = [data[index] for index in range(len(data))]
    lengths = torch.tensor([one["audio_lengths"] for one in samples])
    frames = int(model.audio_enc_dec.frame_lengths(lengths).sum())
    expected = sum(len(one["texts"]) for one in samples) / frames
    assert model.feature_pace.item() == pytest.approx(expected)
    trainer.train()
    loaded: Any = helicon.load("run")  # with the averaged weights
    assert loaded.feature_pace.item() == pytest.approx(expected)
    (plan,) = SpeechMaker(loaded, texts=["saki fo"]).plans
    assert plan.frames == round(7 / expected) and plan.length.endswith("tokens a second, the pace it learned")
    old = {name: value for name, value in model.own_state().items() if name != "feature_pace"}
    loaded.load_own_state(old)
    assert loaded.feature_pace.item() == pytest.approx(expected), "one that was saved before does not know it"
    further = VoiceBoxTrainer(model, **OPTIONS | {"dataset": synthetic(seed=5), "results_folder": "further"})
    assert further.unwrapped_cfm.feature_pace.item() != pytest.approx(expected, rel=1e-6)


def test_what_was_fitted_before_stays() -> None:
    model = network()
    model.fit_normalisation(torch.randn(2, 30, 12))
    mean = model.feature_mean.clone()
    assert torch.equal(VoiceBoxTrainer(model, dataset=synthetic(), **OPTIONS).unwrapped_cfm.feature_mean, mean)


TWO_PROCESSES = """
import sys
import torch, torch.distributed as dist
sys.path.insert(0, sys.argv[1])
from models.voicebox.test_trainers import OPTIONS, network, synthetic
from helicon.models.voicebox.trainers import VoiceBoxTrainer
options = {**OPTIONS, "batch_size": 2, "num_train_steps": None, "num_epochs": 2, "drop_last": True}
trainer = VoiceBoxTrainer(network(seed=dist.is_initialized()), dataset=synthetic(20), **options)
assert trainer.options.num_train_steps == 2 * (16 // 4), trainer.options.num_train_steps
alone = [None, None]
dist.all_gather_object(alone, trainer.unwrapped_cfm.feature_mean.tolist())
assert alone[0] == alone[1] and any(alone[0]), "the same clips on every process"
trainer.train()
weights = torch.cat([p.detach().flatten() for p in trainer.unwrapped_cfm.parameters()])
both = [torch.empty_like(weights) for _ in range(2)]
dist.all_gather(both, weights)
assert torch.equal(*both)
if trainer.is_main:
    open("mean.txt", "w").write(repr(alone[0]))
"""


@pytest.mark.slow
def test_two_processes_standardise_alike_and_stop_when_the_epochs_are_over() -> None:
    Path("two.py").write_text(TWO_PROCESSES)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    subprocess.run([*launch, "two.py", str(Path(__file__).parents[2])], check=True, timeout=600)
    trainer = VoiceBoxTrainer(network(), dataset=synthetic(20), **OPTIONS | {"results_folder": "one"})
    assert Path("mean.txt").read_text() == repr(trainer.unwrapped_cfm.feature_mean.tolist())


# ---------------------------------------------------------------------- how long, how fast


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, 3 * (95 // 8)),
        ({"grad_accum_every": 3}, 3 * (95 // 24)),
        ({"accelerator": SimpleNamespace(num_processes=2)}, 3 * (95 // 16)),
        ({"accelerator": SimpleNamespace(num_processes=2), "split_batches": True}, 3 * (95 // 8)),
        ({"drop_last": False}, -(-3 * 95 // 8)),
        ({"dataloader_drop_last": False, "valid_frac": 0.0}, -(-3 * 100 // 8)),
    ],
)
def test_epochs_are_those_of_the_part_that_is_learned_from(options: dict[str, Any], steps: int) -> None:
    assert _num_steps(None, 3, range(100), True, {"batch_size": 8, **options}, {}) == steps


def test_a_validation_set_of_its_own_leaves_all_to_learn_from() -> None:
    assert _num_steps(None, 3, range(100), False, {"batch_size": 8}, {}) == 3 * (100 // 8)


@pytest.mark.parametrize("given", [{}, {"num_train_steps": 5, "num_epochs": 1}])
def test_how_long_must_be_said_once(given: dict[str, Any]) -> None:
    options = {name: value for name, value in OPTIONS.items() if name != "num_train_steps"}
    with pytest.raises(ValueError, match="how long shall it learn"):
        VoiceBoxTrainer(network(), dataset=synthetic(), **options, **given)


def test_epochs_and_a_warm_up_as_they_are_told() -> None:
    options = {**OPTIONS, "num_train_steps": None, "num_warmup_steps": 2, "initial_lr": 1e-5, "lr": 1e-3}
    trainer = VoiceBoxTrainer(network(), dataset=synthetic(11), num_epochs=1, scheduler="constant", **options)
    assert trainer.options.num_train_steps == 4
    rates = [float(trainer.train_step()["lr"]) for _ in range(3)]
    assert rates == pytest.approx([trainer.warmup(step) for step in range(3)])
    assert rates == pytest.approx([1e-5 + 0.99e-3 / 2, 1e-3, 1e-3])


def test_the_reference_keywords_are_taken() -> None:
    theirs = [
        "batch_size",
        "dataset",
        "num_train_steps",
        "num_warmup_steps",
        "num_epochs",
        "lr",
        "initial_lr",
        "grad_accum_every",
        "wd",
        "max_grad_norm",
        "valid_frac",
        "random_split_seed",
        "log_every",
        "save_results_every",
        "save_model_every",
        "results_folder",
        "force_clear_prev_results",
        "split_batches",
        "drop_last",
        "accelerate_kwargs",
    ]
    known = inspect.signature(VoiceBoxTrainer).parameters
    assert all(ALIASES.get(name, name) in known for name in theirs)
    assert (known["lr"].default, known["initial_lr"].default, known["valid_frac"].default) == (3e-4, 1e-5, 0.05)
    trainer = VoiceBoxTrainer(network(), dataset=synthetic(), num_warmup_steps=None, **OPTIONS)
    assert trainer.options.warmup_steps == 0 and trainer.warmup(0) == OPTIONS["lr"]


def test_it_generates_with_the_averaged_weights() -> None:
    trainer = trained(network(), is_done=True, dataset=synthetic(6), ema_beta=0.9)
    made = trainer.generate(texts=["sa"], seconds=0.3, seed=1, steps=1)
    assert made.shape == (1, round(0.3 * HZ / MEL["hop_length"]) * MEL["hop_length"])
    expected = helicon.load("run").sample(texts=["sa"], seconds=0.3, seed=1, steps=1)
    torch.testing.assert_close(made, expected)
    torch.testing.assert_close(
        trainer.unwrapped_cfm.sample(texts=["sa"], seconds=0.3, seed=1, steps=1).shape, made.shape
    )
    assert not torch.equal(trainer.unwrapped_cfm.sample(texts=["sa"], seconds=0.3, seed=1, steps=1), made)


def test_samples_are_written() -> None:
    trained(network(), is_done=True, dataset=synthetic(6))
    names = {path.name for path in Path("run/samples").iterdir()}
    assert {"step-00000002-00-original.wav", "step-00000002-spectrograms.png", "step-00000002-texts.txt"} <= names
    assert {"step-00000002-00-ema-spoken.wav", "step-00000002-00-online-infilled.wav"} <= names


# ---------------------------------------------------------------------- the `model` section of recipes


def test_what_is_built_from_folders() -> None:
    Vocoder(**MEL, dim=8, depth=1, discr_periods=(), discr_windows=()).save("vocoder")
    tiny().save("codec")
    CharacterTokenizer("abc ").save("letters")
    build_durations(
        {"dim": 8, "depth": 1, "heads": 1, "dim_head": 8, "dim_phoneme_emb": 8}, tokenizer={"phonemes_of": "synthetic"}
    ).save("durations")
    model = build_voicebox(LITTLE, vocoder="vocoder", tokenizer="letters")
    assert model.audio_enc_dec.mel.hop_length == MEL["hop_length"] and model.audio_enc_dec.vocoder is not None
    assert model.voicebox.num_cond_tokens == 5
    model = build_voicebox(LITTLE, audio_enc_dec=MEL, vocoder="vocoder", tokenizer={"symbols": ["a", "b"]})
    assert model.audio_enc_dec.vocoder is not None and isinstance(model.tokenizer, helicon.PhonemeInventory)
    model = build_voicebox(LITTLE, audio_enc_dec="codec", duration_predictor="durations")
    assert isinstance(model.audio_enc_dec, CodecLatents) and set(model.tokenizer.ids) == set(PHONEMES)
    model = build_voicebox(LITTLE, audio_enc_dec=MEL, tokenizer={"language": "de"})
    assert isinstance(model.tokenizer, PhonemeTokenizer) and model.tokenizer.language == "de"
    assert build_voicebox({**LITTLE, "dim_in": 3, "condition_on_text": False}).audio_enc_dec is None
    assert build_voicebox(LITTLE, audio_enc_dec=MEL, tokenizer="characters").tokenizer.num_tokens > 100


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"audio_enc_dec": MEL, "tokenizer": {}},
            "model.tokenizer has nothing: give characters, language, symbols or phonemes_of",
        ),
        (
            {"audio_enc_dec": MEL, "tokenizer": {"phonemes_of": "x", "symbols": ["a"]}},
            "phonemes_of tells all there is to know",
        ),
        (
            {"audio_enc_dec": MEL, "tokenizer": {"phonemes_of": "nowhere"}},
            "model.tokenizer.phonemes_of='nowhere' is not there: name a manifest",
        ),
        ({"audio_enc_dec": MEL, "tokenizer": "vocoder"}, "holds a Vocoder, not a SymbolTokenizer"),
        (
            {"audio_enc_dec": MEL, "tokenizer": "charcters"},
            "model.tokenizer='charcters' is neither characters nor the folder of a saved tokenizer",
        ),
        ({"audio_enc_dec": "letters"}, "holds a CharacterTokenizer, not a feature space, a codec or a vocoder"),
        ({"audio_enc_dec": "codec", "vocoder": "vocoder"}, "makes the frames of a MelVoco audible"),
        ({"audio_enc_dec": MEL, "text_to_semantic": "letters"}, "holds a CharacterTokenizer, not a semantic stage"),
        (
            {"audio_enc_dec": {**MEL, "n_mel": 3}, "tokenizer": "characters"},
            "model.audio_enc_dec has no argument 'n_mel'",
        ),
        ({"audio_enc_dec": MEL}, "condition_on_text=True needs num_cond_tokens"),
        (
            {"audio_enc_dec": MEL, "tokenizer": "characters", "duration_predictor": "durations"},
            r"model.duration_predictor='durations' reads names of phonemes \(a, b \.\.\.\), which model.tokenizer does not: leave out",
        ),
        (
            {"audio_enc_dec": MEL, "tokenizer": {"symbols": ["c"]}, "duration_predictor": "durations"},
            "which model.tokenizer does not",
        ),
    ],
)
def test_what_cannot_be_built_is_said_in_a_sentence(options: dict[str, Any], sentence: str) -> None:
    Vocoder(**MEL, dim=8, depth=1, discr_periods=(), discr_windows=()).save("vocoder")
    tiny().save("codec")
    CharacterTokenizer("abc ").save("letters")
    build_durations({"dim": 8, "depth": 1}, tokenizer={"symbols": ["a", "b"]}).save("durations")
    with pytest.raises((ValueError, ConfigError), match=sentence):
        build_voicebox(LITTLE, **options)


OWN_LOADERS = """
import sys
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
sys.path.insert(0, sys.argv[1])
from models.voicebox.test_trainers import MEL, OPTIONS, MelVoco, collate_speech, network, synthetic
from helicon.models.voicebox.trainers import VoiceBoxTrainer
dist.init_process_group("gloo")
data = synthetic(8).at(MelVoco(**MEL))
clips = [data[index] for index in range(8)]
own = DataLoader(clips, batch_size=2, collate_fn=collate_speech, sampler=DistributedSampler(clips, shuffle=False))
lengths = [None, None]
dist.all_gather_object(lengths, next(iter(own))["audio_lengths"].tolist())
assert lengths[0] != lengths[1], "each has clips of its own"
model = VoiceBoxTrainer(network(), train_dataloader=own, val_dataloader=own, **OPTIONS).unwrapped_cfm
both = [None, None]
dist.all_gather_object(both, [model.feature_mean.tolist(), model.feature_std.tolist()])
assert both[0] == both[1] and model.is_fitted
"""


@pytest.mark.slow
def test_two_processes_with_loaders_of_their_own_standardise_alike() -> None:
    Path("own.py").write_text(OWN_LOADERS)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    subprocess.run([*launch, "own.py", str(Path(__file__).parents[2])], check=True, timeout=600)
