"""Known mistakes of the reference package's trainer: data without texts, a rate that never gets where it should, frozen weights."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from data.sounds import write
from helicon import AudioDataset
from helicon.data.synthetic_speech import PHONEMES, SyntheticSpeech
from helicon.models.voicebox.durations import DurationPredictor
from helicon.models.voicebox.features import MelVoco
from helicon.models.voicebox.flow import ConditionalFlowMatcherWrapper
from helicon.models.voicebox.model import VoiceBox
from helicon.models.voicebox.text import PhonemeInventory
from helicon.models.voicebox.trainers import VoiceBoxTrainer
from helicon.models.voicebox.vocoder import Vocoder
from models.audiolm.tiny import CONDITIONS, stage_with_codec
from models.voicebox.test_task import HZ, MEL, SIZES, network

QUIET: dict[str, Any] = {"tensorboard": False, "compile": False, "valid_frac": 0.0, "num_train_steps": 1}
QUIET |= {"batch_size": 2, "sample_steps": 1, "results_folder": "run"}


def speech(count: int = 6) -> SyntheticSpeech:
    return SyntheticSpeech(count, HZ, syllables=(1, 2))


def utterances(*names: str, count: int = 6) -> list[tuple[Any, ...]]:
    """Tuples, as a user's own dataset may give them."""
    data = speech(count)
    return [tuple(data[index][name] for name in names) for index in range(count)]


def trained(model: Any, data: Any, **options: Any) -> VoiceBoxTrainer:
    return VoiceBoxTrainer(model, dataset=data, **{**QUIET, **options})


# ---------------------------------------------------------------------- 55: what it learns from, and makes


def read(trainer: VoiceBoxTrainer) -> dict[str, Any]:
    batch = trainer.prepare(trainer.feed.first_batch())
    return {**batch, **trainer.task.read(batch)}


def test_texts_come_with_the_waves() -> None:
    model = network()
    found = read(trained(model, utterances("audio", "texts")))
    assert torch.equal(found["ids"], model.tokenizer(found["texts"])) and found["ids"].max() > 0


def test_phonemes_and_durations_come_with_the_waves() -> None:
    model = network("phonemes", alignment="frames")
    names = ("audio", "phonemes", "durations")
    found = read(trained(model, utterances(*names), ds_fields=names))
    assert found["ids"].shape == found["features"].shape[:2] and torch.equal(found["ids"] >= 0, found["mask"])
    for row, phonemes in enumerate(found["phonemes"]):
        said = found["ids"][row][found["mask"][row]].unique_consecutive()
        assert torch.equal(said, phonemes[phonemes >= 0].unique_consecutive())


def test_padding_is_no_sound_to_learn_from() -> None:
    model = network(None, condition_on_text=False)
    data = [torch.randn(length) for length in (1000, 400, 700, 550)]
    found = read(trained(model, data, batch_size=4))
    frames = model.audio_enc_dec.frame_lengths(found["audio_lengths"])
    assert sorted(frames.tolist()) == [4, 5, 6, 8]
    assert torch.equal(found["mask"].sum(dim=1), frames) and not (found["hidden"] & ~found["mask"]).any()


def test_files_of_any_rate_sound_alike() -> None:
    """In the reference package a file of twice the rate is heard an octave lower, and twice as long."""
    for number, hz in enumerate((HZ, 2 * HZ, 3 * HZ)):
        write(Path("sounds") / f"{number}.flac", 0.5 * np.sin(2 * np.pi * 440 * np.arange(hz // 4) / hz), hz)
    found = read(trained(network(None, condition_on_text=False), AudioDataset("sounds"), batch_size=3))
    assert found["audio"].shape == (3, HZ // 4)
    tone = 0.5 * torch.sin(2 * torch.pi * 440 * torch.arange(HZ // 4) / HZ)
    torch.testing.assert_close(found["audio"][:, 100:-100], tone[100:-100].expand(3, -1), atol=2e-3, rtol=0)


def test_generate_speaks_with_the_averaged_weights() -> None:
    model = network()
    trainer = trained(model, utterances("audio", "texts"), num_train_steps=3, lr=0.05, ema_beta=0.5)
    trainer.train()
    wish = {"texts": ["sa"], "seconds": 0.3, "steps": 2, "seed": 0}
    online = model.sample(**wish)
    made = trainer.generate(**wish)
    with trainer.inference():
        expected = model.sample(**wish)
    assert made.shape == (1, 19 * MEL["hop_length"]) and torch.equal(made, expected)
    assert not torch.equal(made, online) and torch.equal(model.sample(**wish), online)


# ---------------------------------------------------------------------- 56: the rate, and how long


def rates(trainer: VoiceBoxTrainer) -> list[float]:
    """Of each step, as the optimizer takes it."""
    (optimizer,), found = trainer.optimizers["model"].optimizers, []
    optimizer.register_step_pre_hook(
        lambda optimizer, *_: found.append({float(group["lr"]) for group in optimizer.param_groups})
    )
    trainer.train()
    assert all(len(one) == 1 for one in found)
    return [one.pop() for one in found]


def test_the_rate_rises_to_lr_and_falls_to_nothing() -> None:
    lr, low, warmup, steps = 0.01, 0.001, 3, 8
    options = {"lr": lr, "initial_lr": low, "num_warmup_steps": warmup, "num_train_steps": steps}
    trainer = trained(network(), utterances("audio", "texts"), **options)
    cosine = [lr * (1 + math.cos(math.pi * step / steps)) / 2 for step in range(steps)]
    expected = [low + (rate - low) * min(1, (step + 1) / warmup) for step, rate in enumerate(cosine)]
    assert rates(trainer) == pytest.approx(expected)
    assert trainer.optimizers["model"].schedule.lr == pytest.approx(0.0, abs=1e-12)
    assert [trainer.warmup(step) for step in range(4)] == pytest.approx([0.004, 0.007, 0.01, 0.01])


def test_without_a_warm_up_the_first_step_has_the_full_rate() -> None:
    options = {"lr": 0.01, "num_warmup_steps": None, "num_train_steps": 2}
    assert rates(trained(network(), utterances("audio", "texts"), **options)) == pytest.approx([0.01, 0.005])


def test_epochs_are_of_what_is_learned_from_and_count_the_accumulation() -> None:
    model, data = network(), utterances("audio", "texts", count=20)
    told = {"num_train_steps": None, "num_epochs": 3, "valid_frac": 0.4, "random_split_seed": 5}
    part = trained(model, data, **told)
    learned_from = len(part.feed.dataset)
    assert 8 <= learned_from < 20
    assert part.options.num_train_steps == 3 * (learned_from // 2)
    several = trained(model, data, **told, grad_accum_every=2, results_folder="several")
    assert several.options.num_train_steps == 3 * (learned_from // 4)
    whole = trained(model, data, **told, val_dataset=data[:2], results_folder="whole")
    assert whole.options.num_train_steps == 3 * 10
    filled = trained(model, data, **{**told, "valid_frac": 0.0}, batch_size=3, drop_last=False, results_folder="filled")
    assert filled.options.num_train_steps == 20  # of 60 utterances, whatever the epochs' ends are


TWO_PROCESSES = """
import json, sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from models.voicebox.test_task import network
from models.voicebox.test_trainer_defects import rates, trained, utterances

told = {"num_train_steps": None, "num_epochs": 2, "grad_accum_every": 2, "lr": 0.01}
trainer = trained(network(), utterances("audio", "texts", count=24), **told)
found = rates(trainer)
if trainer.is_main:
    Path("found.json").write_text(json.dumps([found, trainer.optimizers["model"].schedule.lr, trainer.runtime.world_size]))
"""


@pytest.mark.slow
def test_two_processes_share_an_epoch_and_end_at_the_same_rate(tmp_path: Path) -> None:
    script = tmp_path / "two_processes.py"
    script.write_text(TWO_PROCESSES)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    subprocess.run([*launch, str(script), str(Path(__file__).parents[2])], check=True, timeout=300, cwd=tmp_path)
    found, last, processes = json.loads((tmp_path / "found.json").read_text())
    assert processes == 2
    steps = 6  # of 2 epochs of 24, 2 x 2 x 2 at a time
    assert found == pytest.approx([0.01 * (1 + math.cos(math.pi * step / steps)) / 2 for step in range(steps)])
    assert last == pytest.approx(0.0, abs=1e-12)


# ---------------------------------------------------------------------- 57: only what learns


def with_stages(kind: str) -> ConditionalFlowMatcherWrapper:
    """Every stage that there can be, all of them with weights."""
    vocoder = Vocoder(**MEL, dim=8, depth=1, discr_periods=(), discr_windows=())
    space = MelVoco(**MEL, vocoder=vocoder)
    if kind == "semantic":
        stage = stage_with_codec("semantic", options=CONDITIONS["text"], unique_consecutive=False)
        voicebox = VoiceBox(audio_enc_dec=space, num_cond_tokens=stage.wav2vec.codebook_size, **SIZES)
        return ConditionalFlowMatcherWrapper(voicebox, text_to_semantic=stage)
    inventory = PhonemeInventory(list(PHONEMES))
    sizes = {name: SIZES[name] for name in ("dim", "depth", "heads", "dim_head", "conv_pos_embed_kernel_size")}
    predictor = DurationPredictor(tokenizer=inventory, dim_phoneme_emb=6, **sizes)
    voicebox = VoiceBox(audio_enc_dec=space, num_cond_tokens=inventory.num_tokens, alignment="frames", **SIZES)
    return ConditionalFlowMatcherWrapper(voicebox, duration_predictor=predictor)


@pytest.mark.parametrize("kind", ["semantic", "durations"])
def test_frozen_networks_are_neither_optimised_nor_saved(kind: str) -> None:
    torch.manual_seed(0)
    model = with_stages(kind)
    stages = list(model.frozen.values())
    before = [{name: value.clone() for name, value in stage.state_dict().items()} for stage in stages]
    trainer = trained(model, speech(), lr=0.1)
    learning = {id(parameter) for parameter in trainer.optimizers["model"].parameters}
    assert learning == {id(parameter) for parameter in model.voicebox.parameters()}
    assert any(parameter.requires_grad for stage in stages for parameter in stage.parameters())
    trainer.train()
    for stage, state in zip(stages, before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in stage.state_dict().items())
    saved = {name for path in Path("run/checkpoints").rglob("*.safetensors") for name in load_file(path)}
    known = {name for name, _ in model.voicebox.named_parameters()}
    named = {name.partition("/")[0].removeprefix("voicebox.") for name in saved}
    assert known <= named and not [name for name in named - known if not name.startswith("feature_")]
