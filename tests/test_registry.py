"""The contract every registered family joins by being registered, and every shipped recipe by being shipped."""

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

import helicon
from helicon import registry
from helicon.config import load_recipe, recipe_names, signature_without
from helicon.engine.trainer import Trainer


def build(name: str, folder: str, resume: bool = False, **options: object) -> Trainer:
    overrides = [f"trainer.{key}={json.dumps(value)}" for key, value in options.items()]
    recipe = load_recipe(
        registry.entries[name].debug_recipe, overrides, sections=lambda n: registry.entries[n].recipe_sections()
    )
    return registry.build_trainer(recipe, results_folder=Path(folder), resume=resume)


def state(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in trainer.task.model.own_state().items()}


@pytest.mark.parametrize("recipe", recipe_names())
def test_every_shipped_recipe_is_read_and_checked(recipe: str) -> None:
    read = load_recipe(recipe, sections=lambda name: registry.entries[name].recipe_sections())
    assert read.trains in registry.entries
    assert (
        read.summary and read.note("command") == f"helicon train {recipe}" and read.note("time") and read.note("result")
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", registry.entries)
def test_the_validation_loss_falls(name: str) -> None:
    trainer = build(name, "run")
    before = trainer.validate()["valid_loss"]
    trainer.train()
    assert trainer.validate()["valid_loss"] < before


@pytest.mark.parametrize(
    ("recipe", "key", "how"),
    [
        ("muse/maskgit", "vae", "train muse/vqgan"),
        ("meshgpt/transformer", "autoencoder", "train meshgpt/autoencoder"),
        ("audiolm/coarse", "codec", "train soundstream/soundstream"),
        ("audiolm/semantic", "wav2vec", "fit-kmeans"),
        ("musiclm/semantic", "audio_conditioner", "fit-kmeans --model RUN, of a MuLaN"),
        ("voicebox/voicebox-debug", "vocoder", "train voicebox/vocoder"),
        ("voicebox/voicebox-debug", "audio_enc_dec", "train voicebox/vocoder"),
        ("voicebox/voicebox-debug", "duration_predictor", "train voicebox/durations"),
        ("voicebox/voicebox-debug", "text_to_semantic", "train audiolm/semantic"),
    ],
)
def test_a_stage_that_is_not_there_is_told_with_its_key_and_how_to_make_one(recipe: str, key: str, how: str) -> None:
    others = {"codec", "wav2vec", "audio_conditioner", "vocoder"} - {key}
    sections = registry.entries[load_recipe(recipe).trains].recipe_sections()
    nothing = [f"model.{other}=null" for other in others if other in signature_without(sections["model"]).parameters]
    read = load_recipe(recipe, [f"model.{key}=absent", *nothing])
    sentence = f"model.{key}: there is no checkpoint or run folder at absent; make one first (helicon {how}), or"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        registry.build_trainer(read)


@pytest.mark.parametrize(
    ("recipe", "key"),
    [
        ("soundstream/demo", "sounds"),
        ("muse/vqgan-demo", "shapes"),
        ("voicebox/voicebox-debug", "speech"),
        ("meshgpt/autoencoder-debug", "meshes"),
    ],
)
def test_a_recipe_of_made_up_samples_says_how_it_takes_a_users_own(recipe: str, key: str) -> None:
    """What chooses among made-up samples stands in the recipe: to leave it out is not in the user's hands."""
    read = load_recipe(recipe, ["data.source=own"])
    sentence = f"and the source is own: leave it out, or write data.{key}=null where a recipe has it"
    with pytest.raises(ValueError, match=rf"data\.{key} chooses among made-up .*{re.escape(sentence)}"):
        registry.build_trainer(read)
    with pytest.raises((ValueError, FileNotFoundError), match="own does not exist"):
        registry.build_trainer(load_recipe(recipe, ["data.source=own", f"data.{key}=null"]))


class Own(Dataset):
    """A user's own samples."""

    def __init__(self, samples: list[object]):
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> object:
        return self.samples[index]


@pytest.mark.parametrize("name", registry.entries)
def test_what_a_trainer_makes_of_a_users_own_dataset_can_be_sent_to_another_process(name: str) -> None:
    """Processes that read data are spawned on some systems: what they read from is pickled."""
    debug = build(name, "debug")
    made = [debug.feed.dataset[index] for index in range(4)]
    samples = [{key: value for key, value in sample.items() if not key.endswith("_lengths")} for sample in made]
    options = {"num_train_steps": 1, "batch_size": 2, "grad_accum_every": 1, "valid_frac": 0.5}
    if name == "vqgan":
        options["image_size"] = 32
    trainer = type(debug)(debug.task.model, dataset=Own(samples), results_folder="own", **options)
    for loader in (trainer.feed.train, trainer.feed.valid):
        dataset, collate = pickle.loads(pickle.dumps((loader.dataset, loader.collate)))
        assert collate([dataset[0]]).keys() == loader.collate([loader.dataset[0]]).keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", registry.entries)
def test_a_run_stopped_and_resumed_equals_the_unbroken_one(name: str) -> None:
    often = {"save_model_every": 2, "num_train_steps": 6, "save_results_every": 3}
    whole = build(name, "whole", **often)
    whole.train()
    half = build(name, "broken", **often)
    while half.step < 4:
        half.train_step()
    half.writer.wait()
    resumed = build(name, "broken", resume=True, **often)
    assert resumed.step == 4
    resumed.train()
    assert all(torch.equal(state(resumed)[key], value) for key, value in state(whole).items())
    averages = [[] if trainer.ema is None else trainer.ema.average for trainer in (resumed, whole)]
    assert all(torch.equal(a, b) for a, b in zip(*averages, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", registry.entries)
def test_recorded_steps_equal_plain_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, *_, **__: None
    )  # the same kernels, one by one or at once
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    losses = []
    for run, chosen in enumerate((False, False, "graphs")):
        never = dict.fromkeys(("num_train_steps", "save_results_every", "save_model_every"), 1000)
        trainer = build(name, f"run-{run}", compile=chosen, mixed_precision="no", **never)
        losses.append(torch.tensor([float(trainer.train_step()["loss"]) for _ in range(12)]))
        assert trainer.recorder is None or trainer.recorder._graphs, "nothing was recorded"
    # Some kernels add in any order, so that plain steps do not quite equal themselves.
    plain, again, recorded = losses
    assert ((recorded - plain).abs() <= 5 * (plain - again).abs() + 1e-3 * plain.abs() + 1e-4).all(), losses


STEPS_OF_EVERY_SIZE = """
import torch
from helicon import registry
from test_registry import build

compiled = torch.nn.Module.compile
torch.nn.Module.compile = lambda self: compiled(self, backend="eager")  # reads the code, and writes none
for name in registry.entries:
    for size in (2, 3, 4):
        print(f"{name}, {size} at a time", flush=True)
        build(name, f"{name}-{size}", compile=True, batch_size=size, grad_accum_every=1, num_train_steps=9).train_step()
"""


@pytest.mark.slow
def test_the_compiler_follows_batches_of_any_size() -> None:
    """In a process of its own, where annotations are not checked: the compiler would have to follow the checks, too."""
    python_path = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", STEPS_OF_EVERY_SIZE]
    run = subprocess.run(
        command, env=python_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600
    )
    assert run.returncode == 0, run.stdout
    assert f"{list(registry.entries)[-1]}, 4 at a time" in run.stdout and "could not be compiled" not in run.stdout, (
        run.stdout
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", registry.entries)
def test_what_is_loaded_is_what_was_saved(name: str) -> None:
    trainer = build(name, "run", num_train_steps=2)
    trainer.train()
    loaded = helicon.load("run")
    assert type(loaded) is type(trainer.task.model)
    batch = next(iter(trainer.feed.valid.validation(1)))
    with trainer.inference(seed=0):
        expected = trainer.task.validate(batch).total
    again = build(name, "again", num_train_steps=2)
    again.task.model.load_own_state(loaded.own_state())
    with again._mode(False), torch.no_grad():
        torch.manual_seed(0)
        assert torch.equal(again.task.validate(batch).total, expected)
    loaded.save_pretrained("exported")
    exported = type(loaded).from_pretrained("exported")
    assert all(torch.equal(exported.own_state()[key], value) for key, value in loaded.own_state().items())
