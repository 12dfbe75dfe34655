"""Steps as CUDA graphs do what the same steps do one kernel at a time. (Nothing here runs without a CUDA device.)"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helicon.engine.recording import MOST_GRAPHS, TIMES_AS_IT_IS, Recorder
from helicon.engine.task import Task
from toys import MaskedTask, Points, ToyTrainer, line_task, pair_task, weights

pytestmark = pytest.mark.gpu
STEPS = TIMES_AS_IT_IS + 6


def trained(folder: Path, task: Task, graphs: bool, **options: Any) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    task.compiled = {}  # what is recorded is then the same kernels
    chosen = {
        "num_train_steps": STEPS,
        "batch_size": 4,
        "warmup_steps": 4,
        "scheduler": "cosine",
        "lr": 0.05,
        **options,
    }
    trainer = ToyTrainer(task, results_folder=folder, compile="graphs" if graphs else False, **chosen)
    assert (trainer.recorder is not None) == graphs
    logs: list[dict[str, float]] = []
    trainer.train(lambda found: logs.append({name: float(value) for name, value in found.items()}))
    if trainer.recorder is not None:
        assert trainer.recorder._graphs, "nothing was recorded"
    return weights(task), logs


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "lion", "muon"])
@pytest.mark.parametrize("grad_accum_every", [1, 2])
@pytest.mark.parametrize(
    "make", [line_task, pair_task, lambda: line_task(kind=MaskedTask)], ids=["line", "pair", "masked"]
)
def test_recorded_steps_equal_plain_ones(make: Any, grad_accum_every: int, optimizer: str, tmp_path: Path) -> None:
    options = {"optimizer": optimizer, "grad_accum_every": grad_accum_every, "wd": 0.1, "max_grad_norm": 0.1}
    plain, plain_logs = trained(tmp_path / "plain", make(), False, **options)
    recorded, logs = trained(tmp_path / "recorded", make(), True, **options)
    for name, value in plain.items():
        torch.testing.assert_close(recorded[name], value, atol=1e-5, rtol=1e-5, msg=name)
    assert len(logs) == len(plain_logs) == STEPS
    for found, expected in zip(logs, plain_logs, strict=True):
        assert found == pytest.approx(expected, abs=1e-4)


def test_a_step_that_is_not_finite_is_skipped_in_a_graph_too(tmp_path: Path) -> None:
    class Broken(Points):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            sample = super().__getitem__(index)
            return {**sample, "x": sample["x"] * (float("nan") if index % 9 == 5 else 1)}

    found = []
    for graphs in (False, True):
        task = line_task()
        task.compiled = {}
        trainer = ToyTrainer(
            task, dataset=Broken(), results_folder=tmp_path / str(graphs), num_train_steps=20, batch_size=2, lr=0.1,
            compile="graphs" if graphs else False,
        )  # fmt: skip
        trainer.train()
        found.append((weights(task), float(trainer.bad_steps)))
    assert found[0][1] == found[1][1] > 0
    for name, value in found[0][0].items():
        torch.testing.assert_close(found[1][0][name], value, atol=1e-5, rtol=1e-5)


def test_what_was_recorded_is_forgotten_with_the_state_it_read(tmp_path: Path) -> None:
    found = []
    for graphs in (False, True):
        task = line_task()
        task.compiled = {}
        trainer = ToyTrainer(
            task, results_folder=tmp_path / str(graphs), num_train_steps=3 * STEPS, batch_size=4, lr=0.05, optimizer="adam",
            compile="graphs" if graphs else False,
        )  # fmt: skip
        for _ in range(STEPS):
            trainer.train_step()
        trainer.save(tmp_path / f"saved-{graphs}")
        for _ in range(STEPS):
            trainer.train_step()
        trainer.load(tmp_path / f"saved-{graphs}")
        trainer.train()
        found.append(weights(task))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, atol=1e-5, rtol=1e-5)


def test_every_shape_has_its_graph_and_too_many_are_left_as_they_are() -> None:
    recorder, total = Recorder(), torch.zeros((), device="cuda")
    for length in range(1, MOST_GRAPHS + 3):
        for value in range(TIMES_AS_IT_IS + 2):
            batch = {"x": torch.full((length,), float(value), device="cuda")}

            def work(micro: Any) -> dict[str, Tensor]:
                total.add_(micro[0]["x"].sum())
                return {"mean": micro[0]["x"].mean()}

            before = total.item()
            assert recorder("kind", [batch], work)["mean"].item() == pytest.approx(value)
            assert total.item() == pytest.approx(before + length * value)
    assert len(recorder._graphs) == MOST_GRAPHS


def test_what_is_not_there_is_no_reason_not_to_record() -> None:
    recorder = Recorder()
    for value in range(TIMES_AS_IT_IS + 3):
        batch = {"nested": {"x": torch.full((2,), float(value), device="cuda"), "y": None}}
        logs = recorder("kind", [batch], lambda micro: {"sum": micro[0]["nested"]["x"].sum()})
        assert logs["sum"].item() == pytest.approx(2 * value)
    assert len(recorder._graphs) == 1


def test_randomness_goes_on_in_a_graph(tmp_path: Path) -> None:
    recorder = Recorder()
    batch = {"x": torch.zeros(2, device="cuda")}
    drawn = [recorder(0, [batch], lambda micro: {"r": torch.rand((), device="cuda")})["r"].item() for _ in range(9)]
    assert len(set(drawn)) == 9
