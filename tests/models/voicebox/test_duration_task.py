import json
from pathlib import Path

import numpy as np
import pytest
import torch

import helicon
from data.sounds import write
from helicon.data.synthetic_speech import PHONEMES
from helicon.models.voicebox.data import collate_speech, training_speech
from helicon.models.voicebox.duration_task import DurationPredictorTrainer, DurationTask
from helicon.models.voicebox.durations import DurationPredictor
from helicon.models.voicebox.text import PhonemeInventory

SMALL = {"dim_phoneme_emb": 16, "dim": 32, "depth": 2, "dim_head": 16, "heads": 2, "conv_pos_embed_kernel_size": 5}
QUIET = {
    "tensorboard": False,
    "compile": False,
    "warmup_steps": 10,
    "scheduler": "cosine",
    "save_results_every": 10_000,
}


def predictor(**changes):
    torch.manual_seed(0)
    return DurationPredictor(tokenizer=PhonemeInventory(list(PHONEMES)), **{**SMALL, **changes})


def batch_of(source, count, model):
    data = source.durations(model.tokenizer)
    return collate_speech([data[index] for index in range(count)])


def test_phonemes_of_another_inventory_are_refused(tmp_path):
    model = DurationPredictor(tokenizer=PhonemeInventory(["x", "y"]), **SMALL)
    options = {"num_train_steps": 1, "batch_size": 2, "results_folder": tmp_path / "run", **QUIET}
    with pytest.raises(
        ValueError, match=r"are not known to the tokenizer, which knows x y: give model.tokenizer the symbols"
    ):
        DurationPredictorTrainer(model, dataset=training_speech("synthetic", num_samples=6), **options)


def test_made_up_durations_are_learned(tmp_path):
    """Vowels last 0.15 to 0.26 s, consonants 0.07 to 0.13 s: someone who always says the mean of all is wrong by 0.051 s, and one who
    knows the mean of each phoneme by 0.026 s, which is all that can be learned where nothing is known."""
    model = predictor()
    trainer = DurationPredictorTrainer(
        model,
        dataset=training_speech("synthetic", num_samples=2000),
        num_train_steps=100,
        batch_size=32,
        lr=3e-3,
        results_folder=tmp_path / "run",
        **QUIET,
    )
    trainer.train()
    unseen = batch_of(training_speech("synthetic", num_samples=100, seed=9), 100, model)
    ids, true = unseen["phonemes"], unseen["durations"]
    is_phoneme = ids >= 0
    error = (model.predict_seconds(ids) - true).abs()[is_phoneme].mean().item()
    always_the_mean = (true[is_phoneme].mean() - true[is_phoneme]).abs().mean().item()
    per_phoneme = torch.stack([true[ids == one].mean() for one in range(len(PHONEMES))])
    best = (per_phoneme[ids.clamp(min=0)] - true).abs()[is_phoneme].mean().item()
    assert always_the_mean > 0.045 and best < 0.03
    assert error < 1.1 * best, (error, best, always_the_mean)
    loaded = helicon.load(tmp_path / "run")
    with trainer.inference():  # the averaged weights
        expected = model.predict_seconds(texts=["_ s a k e _"])
    torch.testing.assert_close(loaded.predict_seconds(texts=["_ s a k e _"]), expected)


@pytest.mark.slow
def test_known_durations_tell_the_pace_of_the_others(tmp_path):
    """Speakers of whom each has a pace, from half to twice the usual: it shows in what is known of an utterance."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, (400, 8), generator=generator)
    pace = 2 ** (2 * torch.rand(400, 1, generator=generator) - 1)
    durations = torch.tensor([0.05, 0.1, 0.2])[ids] * pace
    data = [{"phonemes": one, "durations": seconds} for one, seconds in zip(ids, durations, strict=True)]
    torch.manual_seed(0)
    model = DurationPredictor(num_phoneme_tokens=3, **SMALL)
    options = {"num_train_steps": 300, "batch_size": 32, "lr": 3e-3, "results_folder": tmp_path / "run", **QUIET}
    DurationPredictorTrainer(model, dataset=data[:350], **options).train()
    hidden = (torch.arange(8) >= 3).expand(50, -1)
    knowing = model.predict_seconds(ids[350:], cond=durations[350:], cond_mask=hidden)
    alone = model.predict_seconds(ids[350:])
    errors = [(found.log() - durations[350:].log()).abs()[hidden].mean().item() for found in (knowing, alone)]
    assert errors[0] < 0.08 and errors[1] > 0.25, errors


def test_validation_is_the_same_twice_and_files_are_written(tmp_path):
    model = predictor()
    source = training_speech("synthetic", num_samples=24)
    trainer = DurationPredictorTrainer(
        model,
        dataset=source,
        num_train_steps=2,
        batch_size=4,
        results_folder=tmp_path,
        **{**QUIET, "save_results_every": 2},
    )
    trainer.train()
    first, again = trainer.validate(), trainer.validate()
    assert first == again and {"valid_loss", "valid_seconds", "valid_seconds_alone"} <= first.keys()
    lines = (tmp_path / "samples" / "step-00000002-durations.tsv").read_text().splitlines()
    assert lines[0].split("\t") == ["utterance", "phoneme", "true", "online", "ema"]
    assert lines[1].split("\t")[:2] == ["0", "_"] and all(len(line.split("\t")) == 5 for line in lines)


def test_the_weight_of_a_batch_is_that_of_its_hidden_phonemes():
    """So that the losses of two halves, each with its weight, make that of the whole."""
    model = predictor(p_drop_prob=0.0)
    torch.nn.init.normal_(model.to_duration.weight)
    batch = batch_of(training_speech("synthetic", num_samples=6), 6, model)
    task = DurationTask(model)
    read = task.read(batch)
    halves = [{name: value[rows] for name, value in read.items()} for rows in (slice(0, 2), slice(2, 6))]
    assert 0 < task.weight(read) < (batch["phonemes"] >= 0).sum() < task.units(batch)
    shares = sum(task.weight(half) * task.forward(half) for half in halves)
    torch.testing.assert_close(shares / task.weight(read), task.forward(read))
    assert not torch.equal(task.read(batch)["hidden"], read["hidden"])


def test_a_batch_of_validation_is_judged_by_what_it_is_weighed_by():
    model = predictor(p_drop_prob=0.0)
    torch.nn.init.normal_(model.to_duration.weight)
    batch = batch_of(training_speech("synthetic", num_samples=5), 5, model)
    task = DurationTask(model.eval())
    weight = task.weight(batch)
    first, again = task.validate(batch), task.validate(batch)
    assert torch.equal(first.total, again.total) and weight == batch["hidden"].sum() == task.weight(batch)
    torch.testing.assert_close(first.total, task.forward(batch))


def test_a_manifest_a_cache_and_a_dataloader(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"path": "x.wav", "phonemes": "s a", "durations": [0.1, 0.2]}] * 4
    write(Path("x.wav"), np.zeros(800), 8000)
    Path("m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"num_train_steps": 1, "batch_size": 2, "valid_frac": 0.0, **QUIET}
    trainer = DurationPredictorTrainer(predictor(), folder="m.jsonl", results_folder="a", **options)
    assert "loss" in trainer.train_step()
    batches = [(torch.tensor([[1, 2]]), torch.tensor([[0.1, 0.2]]))] * 3
    trainer = DurationPredictorTrainer(predictor(), train_dataloader=batches, results_folder="b", **options)
    assert "loss" in trainer.train_step()


def test_what_makes_no_sense_is_told(tmp_path):
    options = {"num_train_steps": 1, "batch_size": 1, "results_folder": tmp_path / "run", **QUIET}
    with pytest.raises(ValueError, match="a folder or a dataset"):
        DurationPredictorTrainer(predictor(), folder=tmp_path, dataset=[], **options)
    write(tmp_path / "sounds" / "x.wav", np.zeros(800), 8000)
    with pytest.raises(ValueError, match=r"all of the 1 utterances have no phonemes or no durations"):
        DurationPredictorTrainer(predictor(), folder=tmp_path / "sounds", **options)
