"""What a trainer promises around the loop: data, validation, samples, saving, loading, tracking."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from torch import Tensor

import helicon
from helicon.engine.checkpoint import checkpoints, read_manifest
from helicon.engine.runtime import Runtime
from helicon.engine.task import Batch, Loss
from toys import GuessingTask, Line, LineTask, Pair, PairTask, Points, ToyTrainer, line_task, pair_task, weights


def test_the_final_step_is_saved_whatever_the_interval() -> None:
    ToyTrainer(line_task(), results_folder="run", num_train_steps=7, save_model_every=5).train()
    assert [folder.name for folder in checkpoints(Path("run"))] == ["step-00000005", "step-00000007"]


def test_resume_refuses_to_start_anew_when_every_checkpoint_is_damaged() -> None:
    ToyTrainer(line_task(), results_folder="run", num_train_steps=2).train()
    (Path("run/checkpoints/step-00000002") / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="none of the 1 checkpoints of run is whole"):
        ToyTrainer(line_task(), results_folder="run", num_train_steps=4, resume=True)


def test_a_sample_that_cannot_be_written_costs_the_run_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Unlucky(LineTask):
        def present(self, batch: Batch, samples: Any) -> dict[str, Any]:
            def write(path: Path) -> None:
                raise OSError("no space left")

            return {"guesses.txt": write}

    torch.manual_seed(3)
    ToyTrainer(Unlucky(Line()), results_folder="run", num_train_steps=2, save_results_every=1).train()
    assert "samples of step 1 could not be written (no space left)" in caplog.text
    assert checkpoints(Path("run"))


def test_init_from_is_not_needed_to_resume() -> None:
    ToyTrainer(line_task(), results_folder="first", num_train_steps=2).train()
    ToyTrainer(line_task(), results_folder="tuned", num_train_steps=2, init_from="first").train()
    Path("first").rename("gone")
    resumed = ToyTrainer(line_task(), results_folder="tuned", num_train_steps=4, init_from="first", resume=True)
    assert resumed.step == 2


def test_a_step_loaded_and_reached_again_is_saved_again() -> None:
    trainer = ToyTrainer(line_task(), results_folder="run", num_train_steps=4, save_model_every=2)
    trainer.train()
    newest = Path("run/checkpoints/step-00000004/manifest.json")
    before = newest.stat().st_mtime_ns
    trainer.load("run/checkpoints/step-00000002")
    trainer.train()
    assert newest.stat().st_mtime_ns > before


def test_every_checkpoint_is_validated_at_its_step_or_a_better_one_would_not_be_kept() -> None:
    options = {"num_train_steps": 10, "val_every": 4, "save_model_every": 3, "valid_frac": 0.2, "keep_last": 0}
    ToyTrainer(line_task(), results_folder="run", **options).train()
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    validated = {line["step"]: line["valid_loss"] for line in lines if "valid_loss" in line}
    assert list(validated) == [3, 4, 6, 8, 9, 10]
    saved = {int(folder.name[5:]): read_manifest(folder)["valid_loss"] for folder in checkpoints(Path("run"))}
    assert saved == {step: validated[step] for step in (3, 6, 9, 10)}


def test_a_missing_tracker_is_an_error_and_not_an_untracked_run() -> None:
    with (
        pytest.warns(UserWarning, match="comet_ml"),
        pytest.raises(ValueError, match=r"trackers asked for \(comet_ml\)"),
    ):
        ToyTrainer(line_task(), results_folder="run", trackers=["comet_ml"])


def test_without_a_results_folder_each_trainer_has_its_own() -> None:
    class Other(ToyTrainer):
        name = "other"

    assert ToyTrainer(line_task()).results_folder == Path("runs/toy")
    assert Other(line_task()).results_folder == Path("runs/other")


def test_fewer_samples_than_a_batch_is_an_error_and_not_a_hang() -> None:
    with pytest.raises(ValueError, match="has 3 samples, fewer than the 4 of one step"):
        ToyTrainer(line_task(), dataset=Points(3))


def test_a_validation_set_smaller_than_a_batch_is_fine() -> None:
    trainer = ToyTrainer(line_task(), val_dataset=Points(2))
    expected = trainer.task.validate({k: torch.stack([Points(2)[i][k] for i in (0, 1)]) for k in ("x", "y", "mask")})
    assert trainer.validate()["valid_loss"] == pytest.approx(float(expected.total.detach()), rel=1e-6)


def test_counts_of_validation_batches_add_up() -> None:
    """Some numbers are no means of batches: how many codes are in use at all, say."""
    seen = torch.stack([Points(10)[index]["x"] for index in range(10)])
    looked = ToyTrainer(GuessingTask(Line()), val_dataset=Points(10), val_num_batches=None).validate()
    negative = int((seen[:, 0] < 0).sum())
    assert (looked["valid_items"], looked["valid_rarest"]) == (10, min(negative, 10 - negative))
    assert 0 < negative < 10


@pytest.mark.parametrize("name", ["train_dataloader", "val_dataloader"])
def test_a_loader_that_accelerate_has_prepared_is_refused_with_the_remedy(name: str) -> None:
    """It failed at the first checkpoint, and of several processes each learned from half of its share alone."""
    prepared = Accelerator(cpu=True).prepare(torch.utils.data.DataLoader(Points(8), batch_size=2))
    given = {"dataset": None} if name == "train_dataloader" else {}
    with pytest.raises(ValueError, match=r"was prepared by Accelerate: give the DataLoader it was made from"):
        ToyTrainer(line_task(), **given, **{name: prepared})


def test_the_given_validation_set_is_the_one_used() -> None:
    class Marked(Points):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return super().__getitem__(index) | {"marked": torch.tensor(1.0)}

    class Watching(LineTask):
        def validate(self, batch: Batch) -> Loss:
            assert "marked" in batch
            return super().validate(batch)

    torch.manual_seed(3)
    trainer = ToyTrainer(Watching(Line()), val_dataset=Marked(8), valid_frac=0.5)
    assert len(trainer.feed.dataset) == 64, "nothing is held out of the training set then"
    trainer.validate()


def test_validation_looks_at_the_number_of_batches_asked_for_whatever_the_accumulation() -> None:
    """D-T8: the reference looks at val_num_batches times grad_accum_every."""
    looked = []

    class Watching(LineTask):
        def validate(self, batch: Batch) -> Loss:
            looked.append(len(batch["x"]))
            return super().validate(batch)

    torch.manual_seed(3)
    trainer = ToyTrainer(Watching(Line()), val_dataset=Points(40), val_num_batches=2, grad_accum_every=3)
    trainer.validate()
    assert looked == [4, 4]


def test_what_the_task_is_given_was_moved_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """D-T3: in the reference validation batches stay where the loader made them."""
    moved = Runtime.to_device
    monkeypatch.setattr(Runtime, "to_device", lambda self, batch: moved(self, batch) | {"moved": torch.ones(())})
    given: dict[str, bool] = {}

    class Watching(LineTask):
        def forward(self, batch: Batch) -> Any:
            given["forward"] = "moved" in batch
            return super().forward(batch)

        def validate(self, batch: Batch) -> Loss:
            given["validate"] = "moved" in batch
            return super().loss(super().forward(batch))

        def sample(self, batch: Batch, seed: int) -> Tensor:
            given["sample"] = "moved" in batch
            return super().sample(batch, seed)

    torch.manual_seed(3)
    ToyTrainer(Watching(Line()), results_folder="run", num_train_steps=1, val_dataset=Points(8)).train()
    assert given == {"forward": True, "validate": True, "sample": True}


def test_steps_are_counted_beyond_what_a_float_can_count() -> None:
    """D-R12: the reference counts in float32, which stays at 2^24 for ever."""
    trainer = ToyTrainer(line_task(), results_folder="run", num_train_steps=2**24 + 9)
    trainer.step = 2**24
    trainer.train_step()
    assert trainer.step == 2**24 + 1


@pytest.mark.parametrize("training", [True, False])
def test_validation_and_sampling_leave_every_mode_as_it_was(training: bool) -> None:
    trainer = ToyTrainer(line_task(dropout=0.5), val_dataset=Points(8))
    model = trainer.task.model
    model.train(training)
    model.dropout.train(not training)  # a user's own choice for one module
    modes = [module.training for module in model.modules()]
    trainer.validate()
    trainer._write_samples()
    assert [module.training for module in model.modules()] == modes


def test_training_runs_in_train_mode_also_after_someone_called_eval() -> None:
    seen = []

    class Watching(LineTask):
        def forward(self, batch: Batch) -> Any:
            seen.append(self.model.training)
            return super().forward(batch)

    torch.manual_seed(3)
    task = Watching(Line())
    task.model.eval()
    ToyTrainer(task, results_folder="run", num_train_steps=2).train()
    assert seen == [True, True]
    assert not task.model.training, "and the mode is put back when the run ends"


def test_frozen_modules_stay_in_evaluation_mode_and_out_of_optimizer_and_checkpoint() -> None:
    teacher = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5))
    before = teacher[0].weight.clone()
    torch.manual_seed(3)
    task = LineTask(Line(), frozen={"teacher": teacher})
    modes = []
    trainer = ToyTrainer(task, results_folder="run", num_train_steps=2)
    trainer.train(lambda logs: modes.append(teacher.training))
    assert modes == [False, False]
    assert torch.equal(teacher[0].weight, before) and not any(p.requires_grad for p in teacher.parameters())
    assert all("teacher" not in name for name in helicon.load("run").own_state())


def test_two_validations_of_one_checkpoint_agree_and_leave_training_untouched() -> None:
    class Noisy(LineTask):
        def validate(self, batch: Batch) -> Loss:
            return Loss(self.loss(self.forward(batch)).total + torch.randn(()))

    torch.manual_seed(3)
    trainer = ToyTrainer(Noisy(Line()), val_dataset=Points(8), results_folder="run")
    before = torch.get_rng_state()
    first = trainer.validate()
    torch.randn(5)
    torch.set_rng_state(before)
    assert trainer.validate() == first
    assert torch.equal(torch.get_rng_state(), before)


def test_validating_more_often_does_not_change_training() -> None:
    results = []
    for every in (1, 1000):
        task = line_task(dropout=0.4)
        ToyTrainer(
            task, results_folder=f"run{every}", valid_frac=0.2, val_every=every, save_results_every=every
        ).train()
        results.append(weights(task))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_validation_uses_the_averaged_weights() -> None:
    trainer = ToyTrainer(line_task(), results_folder="run", val_dataset=Points(8), num_train_steps=5, ema_beta=0.9)
    trainer.train()
    with trainer.ema.swapped_in():
        averaged = float(trainer.task.validate(next(iter(trainer.feed.valid.validation(None)))).total.detach())
    online = float(trainer.task.validate(next(iter(trainer.feed.valid.validation(None)))).total.detach())
    first_batch_only = ToyTrainer.validate
    trainer.options = trainer.options.__class__(**{**trainer.options.__dict__, "val_num_batches": 1})
    assert first_batch_only(trainer)["valid_loss"] == pytest.approx(averaged, rel=1e-6)
    assert averaged != pytest.approx(online, rel=1e-6)


def test_samples_come_from_fixed_inputs_and_seeds_with_online_and_averaged_weights() -> None:
    trainer = ToyTrainer(line_task(), results_folder="run", valid_frac=0.2, num_train_steps=4, save_results_every=2)
    trainer.train()
    files = sorted(path.name for path in Path("run/samples").iterdir())
    assert files == ["step-00000002-guesses.txt", "step-00000004-guesses.txt"]
    text = Path("run/samples/step-00000004-guesses.txt").read_text()
    assert text.splitlines()[0].startswith("online") and text.splitlines()[1].startswith("ema")
    trainer._write_samples()
    assert Path("run/samples/step-00000004-guesses.txt").read_text() == text


def test_sampling_keeps_no_graph() -> None:
    class Watching(LineTask):
        def sample(self, batch: Batch, seed: int) -> Tensor:
            made = super().sample(batch, seed)
            assert not made.requires_grad and not self.model.training
            return made

    torch.manual_seed(3)
    ToyTrainer(Watching(Line()), results_folder="run", num_train_steps=2, save_results_every=1).train()


def test_two_trainers_in_one_process_do_not_disturb_each_other() -> None:
    alone = line_task()
    ToyTrainer(alone, results_folder="alone", num_train_steps=4).train()
    first, second = line_task(), pair_task()
    one = ToyTrainer(first, results_folder="one", num_train_steps=4)
    two = ToyTrainer(second, results_folder="two", num_train_steps=4)
    for _ in range(4):
        one.train_step()
        two.train_step()
    for name, value in weights(alone).items():
        assert torch.equal(weights(first)[name], value)
    assert one.options.accelerate_kwargs == {} and two.options.accelerate_kwargs == {}


def test_save_and_load_take_folders_and_refuse_another_model() -> None:
    trainer = ToyTrainer(line_task(), results_folder="run", num_train_steps=3)
    trainer.train()
    trainer.save("elsewhere/saved")
    other = ToyTrainer(line_task(), results_folder="other", num_train_steps=6)
    other.load("elsewhere/saved")
    assert other.step == 3
    other.load("run")
    assert all(torch.equal(weights(other.task)[n], v) for n, v in weights(trainer.task).items())
    with pytest.raises(ValueError, match="checkpoint of Line, and this trainer trains a Pair"):
        ToyTrainer(pair_task(), results_folder="third").load("run")
    torch.manual_seed(0)
    wider = LineTask(Line(width=9))
    with pytest.raises(ValueError, match="of other sizes than this one"):
        ToyTrainer(wider, results_folder="fourth").load("run")
    torch.save({"model": 1}, "old.pt")
    with pytest.raises(ValueError, match="never unpickled"):
        other.load("old.pt")


def test_helicon_load_rebuilds_the_averaged_network_from_the_folder_alone() -> None:
    trainer = ToyTrainer(line_task(), results_folder="run", num_train_steps=5, ema_beta=0.9)
    trainer.train()
    loaded = helicon.load("run")
    assert isinstance(loaded, Line) and not loaded.training
    with trainer.ema.swapped_in():
        expected = weights(trainer.task)
    assert all(torch.equal(loaded.own_state()[n], v) for n, v in expected.items())
    online = helicon.load("run/checkpoints/step-00000005", use_ema=False)
    assert all(torch.equal(online.own_state()[n], v) for n, v in weights(trainer.task).items())


def test_a_run_whose_validation_loss_has_risen_says_where_it_was_lowest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"num_train_steps": 4, "save_model_every": 1, "val_every": 1, "valid_frac": 0.2, "keep_last": 1}
    for name, losses in {"falling": (4, 3, 2, 1), "rising": (3, 2, 4, 5)}.items():
        trainer = ToyTrainer(line_task(), results_folder=name, **options)
        due = iter(losses)

        def validate(trainer: Any = trainer, due: Any = due) -> dict[str, float]:
            trainer.valid_loss, trainer.valid_step = float(next(due)), trainer.step
            return {"valid_loss": trainer.valid_loss}

        monkeypatch.setattr(trainer, "validate", validate)
        trainer.train()
        said = capsys.readouterr().out
        risen = "the validation loss was lower before, 2 at step-00000002: rising/best means that checkpoint"
        assert (risen in said) == (name == "rising") and ("lower before" in said) == (name == "rising")
    best, last = helicon.load("rising/best").own_state(), helicon.load("rising").own_state()
    with pytest.raises(ValueError, match=r"rising/best is of a run: load it with helicon\.load"):
        Line.from_pretrained("rising/best")
    assert any(not torch.equal(best[key], last[key]) for key in last)
    online = helicon.load("rising/checkpoints/step-00000002").own_state()
    assert all(torch.equal(best[key], online[key]) for key in best)


def test_init_from_starts_from_weights_alone() -> None:
    first = ToyTrainer(line_task(), results_folder="run", num_train_steps=5)
    first.train()
    torch.manual_seed(99)
    tuned = ToyTrainer(LineTask(Line()), results_folder="tuned", init_from="run")
    assert tuned.step == 0
    assert all(torch.equal(weights(tuned.task)[n], v) for n, v in helicon.load("run").own_state().items())
    with pytest.raises(ValueError, match="init_from holds a Line"):
        ToyTrainer(PairTask(Pair()), results_folder="wrong", init_from="run")


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_averaged_samples_are_made_with_the_averaged_weights(precision: str) -> None:
    class Written(LineTask):
        def sample(self, batch: Batch, seed: int) -> torch.Tensor:
            return self.networks["model"](batch["x"]).float()

        def present(self, batch: Batch, samples: Any) -> dict[str, Any]:
            made.update(samples)
            return {}

    made: dict[str, torch.Tensor] = {}
    torch.manual_seed(3)
    trainer = ToyTrainer(Written(Line()), mixed_precision=precision, ema_beta=0.999, lr=0.3, num_train_steps=4)
    trainer.train()
    with trainer.inference():
        expected = trainer.task.sample(trainer._sample_batch, 0)
    assert torch.equal(made["ema"], expected) and not torch.equal(made["online"], expected)


def test_set_model_as_ema_model_gives_the_online_network_the_averaged_weights() -> None:
    trainer = ToyTrainer(line_task(), results_folder="run", num_train_steps=5, ema_beta=0.9)
    trainer.train()
    averaged = [average.clone() for average in trainer.ema.average]
    trainer.set_model_as_ema_model_()
    assert all(torch.equal(a, b) for a, b in zip(trainer.ema.online, averaged, strict=True))


def test_a_trainer_is_no_module_and_keeps_the_words_of_scripts() -> None:
    trainer = ToyTrainer(line_task())
    assert not isinstance(trainer, torch.nn.Module) and not hasattr(trainer, "eval")
    assert trainer.to("cpu") is trainer and trainer.cuda() is trainer
    assert (trainer.steps, trainer.is_main, trainer.is_local_main, trainer.is_distributed) == (0, True, True, False)
    assert trainer.unwrapped_model is trainer.task.model and trainer.device.type == "cpu"
    trainer()  # runs to the end
    assert trainer.steps == 6


def test_train_step_returns_named_tensors_and_log_fn_sees_them() -> None:
    trainer = ToyTrainer(pair_task(), num_train_steps=3)
    logs = trainer.train_step()
    assert logs.keys() == {
        "loss",
        "discriminator_loss",
        "lr",
        "discriminator_lr",
        "grad_norm",
        "discriminator_grad_norm",
    }
    assert all(isinstance(value, Tensor) and value.ndim == 0 for value in logs.values())
    seen: list[Any] = []
    trainer.train(seen.append)
    assert len(seen) == 2


def test_the_signature_shows_every_option_with_the_class_default() -> None:
    parameters = inspect.signature(ToyTrainer).parameters
    assert parameters["batch_size"].default == 4 and parameters["grad_accum_every"].default == 1
    assert next(iter(parameters)) == "task"


def test_a_wrong_option_names_the_nearest() -> None:
    with pytest.raises(TypeError, match="no option 'batchsize'; did you mean 'batch_size'"):
        ToyTrainer(line_task(), batchsize=3)


class Recorder(GeneralTracker):
    """An Accelerate tracker that writes down what it is told."""

    name = "recorder"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, Any]] = []

    @property
    def tracker(self) -> list[tuple[str, Any]]:
        return self.told

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.told.append(("config", values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.told.append(("log", step))

    @on_main_process
    def finish(self) -> None:
        self.told.append(("finish", None))


def test_wandb_tracker_passes_hyper_parameters_on_and_ends_when_training_raises() -> None:
    recorder = Recorder()
    trainer = ToyTrainer(line_task(), results_folder="run", trackers=[recorder], log_every=1)
    with (
        pytest.raises(RuntimeError, match="of the user"),
        trainer.wandb_tracker("project", "run", {"lr": 0.5, "note": "mine"}),
    ):
        trainer.train(lambda logs: (_ for _ in ()).throw(RuntimeError("of the user")))
    assert recorder.told[0] == ("config", {"lr": 0.5, "note": "mine"})
    assert ("log", 1) in recorder.told
    assert recorder.told[-1] == ("finish", None) and recorder.told.count(("finish", None)) == 1


def test_the_tracker_of_one_trainer_is_not_that_of_the_next() -> None:
    """D-T9: the reference writes it into a default that all later trainers share."""
    ToyTrainer(line_task(), results_folder="one", trackers=[Recorder()])
    assert not ToyTrainer(line_task(), results_folder="two").trackers.wanted


def test_trackers_start_on_their_own_with_the_run_s_options() -> None:
    recorder = Recorder()
    ToyTrainer(line_task(), results_folder="run", trackers=[recorder], num_train_steps=2, log_every=1, lr=0.25).train()
    kind, config = recorder.told[0]
    assert kind == "config" and config["lr"] == 0.25 and config["dim"] == 3
    assert [step for kind, step in recorder.told if kind == "log"] == [1, 2]


def test_logged_numbers_are_in_metrics_jsonl() -> None:
    ToyTrainer(line_task(), results_folder="run", num_train_steps=4, log_every=2, valid_frac=0.2).train()
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 4]
    assert {"loss", "grad_norm", "lr", "samples_per_second", "data_wait_fraction", "skipped_steps"} <= lines[0].keys()
    assert "valid_loss" in lines[2]


def test_unreadable_samples_are_skipped_and_listed() -> None:
    from helicon.data.dataset import BadFile

    class Holey(Points):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            if index == 7:
                raise BadFile("seven.png", "truncated")
            return super().__getitem__(index)

    ToyTrainer(line_task(), dataset=Holey(), results_folder="run", num_train_steps=16).train()
    assert Path("run/bad_files.txt").read_text() == "seven.png\ttruncated\n"


def test_gradient_of_bf16_autocast_on_a_cpu_trains() -> None:
    task = line_task()
    before = weights(task)
    ToyTrainer(task, results_folder="run", mixed_precision="bf16").train()
    assert all(torch.isfinite(v).all() and v.dtype == torch.float32 for v in weights(task).values())
    assert any(not torch.equal(v, before[n]) for n, v in weights(task).items())
