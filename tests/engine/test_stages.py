"""A checkpoint refers to the stage its network stands on, and goes on with that one alone."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import helicon
from helicon.engine.checkpoint import checkpoints
from helicon.nn.network import Network, load_network
from toys import Line, LineTask, ToyTrainer, line_task


class Ruler(Network):
    """A stage without weights."""

    def __init__(self, length: int):
        super().__init__()
        self.length = length


class Measured(Line):
    def __init__(self, ruler: Ruler):
        super().__init__()
        self.ruler = ruler


class Upper(Line):
    """A network that stands on an earlier one."""

    def __init__(self, stage: Line):
        super().__init__()
        self.stage = stage.requires_grad_(False)


def test_a_checkpoint_refers_to_the_stage_it_was_trained_on_also_when_its_folder_has_changed() -> None:
    for name in ("kept", "retrained", "unsaved"):
        stage = Line()
        if name != "unsaved":
            stage.save_pretrained(name)
            stage = Line.from_pretrained(name)
        if name == "retrained":
            Line().save_pretrained(name)  # by someone else, while this one is in use
        trainer = ToyTrainer(
            LineTask(Upper(stage)), results_folder=f"run-{name}", num_train_steps=2, save_model_every=1
        )
        trainer.train()
        for path in checkpoints(Path(f"run-{name}")):
            loaded = load_network(path)
            assert isinstance(loaded, Upper)
            assert torch.equal(loaded.stage.layers[0].weight, stage.layers[0].weight)
        assert Path(f"run-{name}/stages").exists() == (name != "kept"), "a copy is made only where it must be"


def test_a_network_outlives_the_checkpoint_its_stage_was_loaded_from() -> None:
    def first(steps: int) -> None:
        ToyTrainer(line_task(), results_folder="first", num_train_steps=steps, keep_last=1, resume=True).train()

    first(2)
    stage = load_network(checkpoints(Path("first"))[-1])
    ToyTrainer(LineTask(Upper(stage)), results_folder="second", num_train_steps=2).train()
    first(4)
    assert [folder.name for folder in checkpoints(Path("first"))] == ["step-00000004"]
    loaded = load_network(checkpoints(Path("second"))[-1])
    assert torch.equal(loaded.stage.layers[0].weight, stage.layers[0].weight)


def test_a_run_goes_on_with_the_stage_it_was_trained_on_alone(caplog: pytest.LogCaptureFixture) -> None:
    def trainer(stage: Line, steps: int) -> ToyTrainer:
        return ToyTrainer(LineTask(Upper(stage)), results_folder="run", num_train_steps=steps, resume=True)

    for name in ("first", "other"):
        Line().save_pretrained(name)
    trainer(Line.from_pretrained("first"), 2).train()
    with pytest.raises(ValueError, match=r"was trained on the stage at .*/first, and this trainer has another"):
        trainer(Line.from_pretrained("other"), 4)
    same = Line()
    same.load_own_state(Line.from_pretrained("first").own_state())
    trainer(same, 4).train()
    assert [folder.name for folder in Path("run/stages").iterdir()] == ["stage"]
    again = Line()
    again.load_own_state(same.own_state())
    trainer(again, 6).train()
    assert [folder.name for folder in Path("run/stages").iterdir()] == ["stage"], (
        "one copy, however often it is resumed"
    )
    shutil.rmtree("run/stages")
    caplog.clear()
    assert trainer(Line.from_pretrained("first"), 6).step == 6
    assert not caplog.records, "the same weights, from wherever they come"
    assert trainer(Line(), 6).step == 6 and "is not at" in caplog.text


def test_weights_that_start_on_another_stage_are_told_so(caplog: pytest.LogCaptureFixture) -> None:
    first, same, other = Line(), Line(), Line()
    same.load_own_state(first.own_state())
    torch.nn.init.ones_(other.layers[0].weight)
    ToyTrainer(LineTask(Upper(first)), results_folder="first", num_train_steps=2).train()
    for name, stage in {"same": same, "other": other}.items():
        caplog.clear()
        tuned = ToyTrainer(LineTask(Upper(stage)), results_folder=name, init_from="first")
        assert torch.equal(tuned.task.model.layers[0].weight, helicon.load("first").layers[0].weight)
        assert ("were trained on another stage than this run has" in caplog.text) == (name == "other")


def test_a_stage_without_weights_is_known_by_what_it_was_built_with(caplog: pytest.LogCaptureFixture) -> None:
    def trainer(length: int, steps: int, **options: Any) -> ToyTrainer:
        return ToyTrainer(LineTask(Measured(Ruler(length))), num_train_steps=steps, **options)

    trainer(3, 2, results_folder="run").train()
    assert trainer(3, 4, results_folder="run", resume=True).step == 2
    with pytest.raises(ValueError, match=r"was trained on the ruler at .*, and this trainer has another"):
        trainer(4, 4, results_folder="run", resume=True)
    trainer(3, 2, results_folder="same", init_from="run")
    assert not caplog.records
    trainer(4, 2, results_folder="other", init_from="run")
    assert "were trained on another ruler than this run has" in caplog.text


def test_a_stage_that_was_trained_anew_in_its_folder_is_refused_and_its_weights_still_start_a_new_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def trainer(**options: Any) -> ToyTrainer:
        return ToyTrainer(LineTask(Upper(Line.from_pretrained("stage"))), num_train_steps=4, **options)

    first = Line()
    first.save_pretrained("stage")
    run = ToyTrainer(LineTask(Upper(Line.from_pretrained("stage"))), results_folder="run", num_train_steps=2)
    run.train()
    torch.nn.init.ones_(first.layers[0].weight)
    first.save_pretrained("stage")
    with pytest.raises(
        ValueError, match=r"trained on another stage than the one that is now at .*/stage: put that one back"
    ):
        trainer(results_folder="run", resume=True)
    assert not caplog.records
    tuned = trainer(results_folder="tuned", init_from="run")
    assert torch.equal(tuned.task.model.layers[1].weight, run.ema.average[2]) and "on another stage" in caplog.text
    shutil.rmtree("stage")
    again = ToyTrainer(LineTask(Upper(Line())), results_folder="again", init_from="run")
    assert torch.equal(again.task.model.layers[1].weight, tuned.task.model.layers[1].weight)


def test_a_stage_that_was_changed_after_it_was_loaded_is_saved_as_it_is() -> None:
    Line().save_pretrained("stage")
    stage = Line.from_pretrained("stage")
    torch.nn.init.ones_(stage.layers[0].weight)
    ToyTrainer(LineTask(Upper(stage)), results_folder="run", num_train_steps=2).train()
    assert torch.equal(helicon.load("run").stage.layers[0].weight, stage.layers[0].weight)
    assert Path("run/stages/stage").exists()


def test_a_stage_that_cannot_be_copied_is_reported_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = ToyTrainer(LineTask(Upper(Line())), results_folder="run", num_train_steps=4, save_model_every=2)
    save, failing = Line._save_pretrained, [True, False]

    def full(self: Line, folder: Path) -> None:
        save(self, folder)
        if failing.pop(0):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Line, "_save_pretrained", full)
    trainer.train()
    assert "step 2 could not be saved" in caplog.text and "No space left" in caplog.text
    assert [folder.name for folder in checkpoints(Path("run"))] == ["step-00000004"]
    assert [folder.name for folder in Path("run/stages").iterdir()] == ["stage"]
