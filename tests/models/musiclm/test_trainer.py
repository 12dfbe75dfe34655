import inspect
import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, StackDataset

import children
import helicon
from data.sounds import ramp, write
from helicon.config import ConfigError
from helicon.data.audio import audio_data
from helicon.data.synthetic_sounds import SyntheticSounds
from helicon.models.musiclm import task
from helicon.models.musiclm.data import training_captioned
from helicon.models.musiclm.pretrained import PretrainedAudioTransformer
from helicon.models.musiclm.search import SoundIndex
from helicon.models.musiclm.task import MuLaNTask
from helicon.models.musiclm.towers import TextTransformer
from helicon.models.musiclm.trainers import MuLaNTrainer, build_mulan
from models.musiclm import two_trainers
from models.musiclm.test_pretrained import write_ast
from models.musiclm.tiny import HZ, mulan

OPTIONS: dict[str, Any] = {
    "num_train_steps": 100,
    "batch_size": 2,
    "lr": 1e-3,
    "tensorboard": False,
    "results_folder": "run",
    "valid_frac": 0.4,
}
REFERENCE = (
    "num_train_steps batch_size data_max_length folder lr grad_accum_every betas max_grad_norm valid_frac random_split_seed "
    "save_model_every results_folder accelerate_kwargs use_lion force_clear_prev_results"
)


def own(count: int = 6) -> StackDataset[Any]:
    return StackDataset([torch.randn(1000) * 0.1 for _ in range(count)], [f"number {n}" for n in range(count)])


def stepped(*arguments: Any, **options: Any) -> MuLaNTrainer:
    trainer = MuLaNTrainer(mulan(), *arguments, **{**OPTIONS, **options})
    before = trainer.unwrapped_mulan.text.embed.weight.clone()
    assert trainer.train_step()["loss"].isfinite()
    assert not before.equal(trainer.unwrapped_mulan.text.embed.weight)
    return trainer


# ---------------------------------------------------------------------- where data comes from


def test_a_folder_is_really_learned_from() -> None:
    """62: in the package that it replaces `folder` is never looked at."""
    for number in range(5):
        write(Path(f"music/{number}.wav"), ramp(0.5 + number, HZ), HZ)
        Path(f"music/{number}.txt").write_text(f"ramp {number}")
    trainer = stepped(folder="music", captions="beside", data_max_length=1500)
    (batch,) = trainer._next_batches()
    assert batch["audio"].shape == (2, 1500) and all(text.startswith("ramp") for text in batch["texts"])
    assert len(trainer.feed.dataset) == 3 and len(trainer.feed.val_dataset) == 2
    with pytest.raises(ValueError, match="give a folder or a dataset of sounds, not both"):
        MuLaNTrainer(mulan(), own(), folder="music", **OPTIONS)
    with pytest.raises(ValueError, match=r'where those of music are, with captions="column"'):
        MuLaNTrainer(mulan(), folder="music", data_max_length=1500, **OPTIONS)


def test_datasets_and_loaders_of_ones_own() -> None:
    stepped(own(), results_folder="pairs")
    made_up = training_captioned("synthetic", num_samples=8, data_max_length=4000)
    stepped(made_up, results_folder="made-up")
    loader = DataLoader(own(), batch_size=3)
    trainer = stepped(train_dataloader=loader, val_dataloader=loader, results_folder="loader")
    assert trainer.validate()["valid_audio_to_text_candidates"] == 6
    named = trainer.data_tuple_to_kwargs({"wavs": torch.randn(2, 9), "raw_texts": ["a", "b"]})
    assert named.keys() == {"audio", "texts"}
    with pytest.raises(ValueError, match="Of a train_dataloader give num_train_steps"):
        MuLaNTrainer(mulan(), train_dataloader=loader, **OPTIONS | {"num_train_steps": None})


def test_how_much_is_heard_at_a_time_is_kept_with_the_network() -> None:
    """So that a search listens to as much, also of a copy that no run is beside."""
    made_up = lambda **length: training_captioned("synthetic", num_samples=8, **length)
    sources: tuple[tuple[dict[str, Any], float | None], ...] = (
        ({"dataset": made_up(data_max_length=HZ * 3 // 4)}, 0.75),
        ({"dataset": made_up(data_max_length_seconds=0.5)}, 0.5),
        ({"dataset": own(), "data_max_length_seconds": 0.1}, 0.1),
        ({"train_dataloader": DataLoader(own(), batch_size=3), "data_max_length_seconds": 0.125}, 0.125),
        ({"dataset": made_up()}, 1.0),
        ({"dataset": SyntheticSounds(8, HZ, 0.625)}, 0.625),
        ({"dataset": audio_data(own(), HZ, max_length=HZ // 2)}, 0.5),
        ({"dataset": own()}, None),
    )
    for number, (source, seconds) in enumerate(sources):
        trainer = MuLaNTrainer(mulan(), **source, **OPTIONS | {"results_folder": f"run-{number}"})
        trainer.save(f"saved-{number}")
        network = helicon.load(f"saved-{number}")
        assert network.clip_seconds == seconds and SoundIndex(network).seconds == (seconds or 10.0)


def test_a_loader_of_unequal_batches_is_refused_by_several_processes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = stepped(train_dataloader=DataLoader(own(5), batch_size=3), valid_frac=0)
    assert trainer.train_step()["loss"].isfinite()
    monkeypatch.setattr(task, "num_ranks", lambda: 2)
    told = MuLaNTask(mulan())
    assert told.weight({"audio": torch.zeros(3, 9)}) == 3.0
    with pytest.raises(ValueError, match=r"a batch of 2 pairs follows one of 3.*drop_last=True"):
        told.weight({"audio": torch.zeros(2, 9)})


def test_what_a_batch_cannot_be_is_told_before_the_first_step() -> None:
    with pytest.raises(ValueError, match="batch_size=1 leaves a pair nothing to be told from"):
        MuLaNTrainer(mulan(), own(), **OPTIONS | {"batch_size": 1})
    with pytest.raises(ValueError, match="chunk_size=0 must be at least 1"):
        MuLaNTrainer(mulan(), own(), chunk_size=0, **OPTIONS)


def test_a_mulan_that_takes_spectra_is_refused() -> None:
    with pytest.raises(ValueError, match=r"takes spectra \(accept_spec=True\), and its trainer reads sounds: build it"):
        MuLaNTrainer(mulan(audio={"accept_spec": True}), own(), **OPTIONS)


def test_captions_that_are_all_equal_are_refused() -> None:
    for number in range(5):
        write(Path(f"music/song/{number}.wav"), ramp(0.5 + number, HZ), HZ)
    of = {"folder": "music", "captions": "folder", "data_max_length": 1500}
    with pytest.raises(
        ValueError, match=r"all 5 sounds have the caption 'song', and MuLaN learns what tells sounds apart"
    ):
        MuLaNTrainer(mulan(), **of, **OPTIONS)
    Path("music/other").mkdir()
    Path("music/song/4.wav").rename("music/other/4.wav")
    stepped(**of)


def test_ids_that_the_network_does_not_know_never_reach_it() -> None:
    pairs = StackDataset([torch.randn(1000) for _ in range(6)], [torch.tensor([5, 300]) for _ in range(6)])
    with pytest.raises(ValueError, match="build it with num_tokens=301"):
        stepped(pairs)


# ---------------------------------------------------------------------- options


def test_every_keyword_of_the_reference_is_known() -> None:
    known = inspect.signature(MuLaNTrainer).parameters
    assert not set(REFERENCE.split()) - known.keys()
    assert [name for name, entry in known.items() if entry.kind is entry.POSITIONAL_OR_KEYWORD] == ["mulan", "dataset"]
    expected = {"lr": 3e-4, "betas": (0.9, 0.99), "max_grad_norm": 0.5, "valid_frac": 0.05, "save_model_every": 1000}
    assert {name: known[name].default for name in expected} == expected


def test_without_a_number_of_steps_it_is_one_epoch() -> None:
    """62: in the package that it replaces "one epoch" is as many steps as there are samples, whatever the batch."""
    trainer = MuLaNTrainer(mulan(), own(10), **OPTIONS | {"num_train_steps": None})
    assert trainer.options.num_train_steps == 6 // 2


def test_lion() -> None:
    assert stepped(own(), use_lion=True).options.optimizer == "lion"
    with pytest.raises(ValueError, match="are two optimizers: give one"):
        MuLaNTrainer(mulan(), own(), use_lion=True, optimizer="muon", **OPTIONS)


def test_chunks_are_not_recorded() -> None:
    with pytest.raises(ValueError, match="use compile=True, or no chunk_size"):
        MuLaNTrainer(mulan(), own(), chunk_size=2, compile="graphs", **OPTIONS)


# ---------------------------------------------------------------------- validation


def test_recall_is_over_all_held_out_pairs_and_chance_stands_beside_it() -> None:
    """62: in the package that it replaces the held-out part is never looked at."""
    trainer = stepped(own(10), val_dataset=own(7), save_results_every=1)  # batches of 2, 2, 2 and 1
    line = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])
    assert line["valid_audio_to_text_candidates"] == line["valid_text_to_audio_candidates"] == 7
    assert line["valid_audio_to_text_chance_at_1"] == pytest.approx(1 / 7)
    assert line["valid_text_to_audio_recall_at_10"] == 1.0
    with trainer.inference(seed=0):
        batches = list(trainer.feed.valid.validation())
        losses = [trainer.task.validate(batch).total.item() for batch in batches]
    assert [len(batch["texts"]) for batch in batches] == [2, 2, 2, 1]
    assert line["valid_loss"] == pytest.approx(sum(losses[:3]) / 3), "without the pair that is alone"


def test_one_pair_is_nothing_to_validate_on() -> None:
    with pytest.raises(ValueError, match=r"hold out more with valid_frac=0.33 \(it is 0.1\), or none with 0"):
        MuLaNTrainer(mulan(), own(), **OPTIONS | {"valid_frac": 0.1})
    loader = DataLoader(own(1), batch_size=1)
    trainer = MuLaNTrainer(mulan(), own(), val_dataloader=loader, **OPTIONS)
    with pytest.raises(ValueError, match="nothing that a loss is over: give a larger one"):
        trainer.validate()


def test_a_run_in_chunks_is_resumed_exactly() -> None:
    options = {**OPTIONS, "chunk_size": 2, "batch_size": 3, "save_model_every": 1}
    source = training_captioned("synthetic", num_samples=16, data_max_length=4000)
    whole = MuLaNTrainer(mulan(), source, **options)
    losses = [whole.train_step()["loss"].item() for _ in range(3)]
    whole.writer.wait()
    Path("other/checkpoints").mkdir(parents=True)
    Path("run/checkpoints/step-00000001").rename("other/checkpoints/step-00000001")
    resumed = MuLaNTrainer(mulan(), source, **{**options, "results_folder": "other", "resume": True})
    assert resumed.step == 1 and [resumed.train_step()["loss"].item() for _ in range(2)] == losses[1:]
    resumed.writer.wait()


# ---------------------------------------------------------------------- several processes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Of one process on whole batches, and of both of two."""
    folder = tmp_path_factory.mktemp("trainers")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [(0, 1), (0, 2), (1, 2)]
    started = [
        children.start(
            lambda rank=rank, world=world: two_trainers.main(rank, world, port, folder), str(folder / f"{world}{rank}")
        )
        for rank, world in ranks
    ]
    assert [children.finish(child) for child in started] == [0, 0, 0]
    return [torch.load(folder / f"{rank}-of-{world}.pt") for rank, world in ranks]


@pytest.mark.slow
@pytest.mark.parametrize("name", two_trainers.RUNS)
def test_two_processes_learn_what_one_does(outcomes: list[Any], name: str) -> None:
    """61: in the package that it replaces what a pair is told from are those of its own process."""
    alone, first, second = (outcome[name] for outcome in outcomes)
    torch.testing.assert_close(first["losses"], alone["losses"], atol=1e-4, rtol=1e-4)
    for key, value in alone["state"].items():
        torch.testing.assert_close(first["state"][key], value, atol=2e-4, rtol=1e-3, msg=key)
        torch.testing.assert_close(second["state"][key], first["state"][key], atol=0, rtol=0)
    assert first["valid"] == second["valid"] == pytest.approx(alone["valid"])
    assert alone["valid"]["valid_audio_to_text_candidates"] == 7


# ---------------------------------------------------------------------- the `model` section of recipes


def test_towers_of_a_recipe(tmp_path: Path) -> None:
    text = {"dim": 16, "depth": 1, "heads": 2, "dim_head": 8}
    folder = str(write_ast(tmp_path / "ast"))
    model = build_mulan({"pretrained": folder, "dim": 12, "heads": 2, "dim_head": 4}, text, dim_latent=8)
    assert isinstance(model.audio, PretrainedAudioTransformer) and isinstance(model.text, TextTransformer)
    assert model.audio.dim == 12 and model.dim_latent == 8 and model.loss.bias is None
    with pytest.raises(ConfigError, match=r"model\.audio has no argument 'patch_size'"):
        build_mulan({"pretrained": folder, "dim": 12, "patch_size": 8}, text)
    with pytest.raises(ConfigError, match=r"model\.text has no argument 'heds'"):
        build_mulan({"dim": 16, "depth": 1}, {**text, "heds": 2})
