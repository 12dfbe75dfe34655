"""Two real gloo processes equal one, with and without accumulation, for every kind of task; and sharding."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, DistributedSampler

import helicon
from helicon.data.loader import Position
from helicon.engine.checkpoint import checkpoints, read_manifest
from plain_loop import train_one, train_pair, whole_batches
from toys import GuessingTask, Line, MaskedTask, Points, ToyTrainer, line_task, pair_task, weights

STEPS = 5


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    script = Path(__file__).with_name("two_processes.py")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        "--standalone",
        str(script),
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", ["line", "masked", "pair"])
def test_two_processes_equal_a_plain_loop_on_the_concatenated_batch(out: Path, name: str, accumulate: int) -> None:
    batches = whole_batches(STEPS, size=4 * accumulate)
    task = {"line": line_task, "masked": lambda: line_task(kind=MaskedTask), "pair": pair_task}[name]()
    if name == "pair":
        train_pair(task.model, batches, clip=0.5)
    else:
        train_one(task.model, lambda batch: task.loss(task.forward(batch)).total, batches, clip=0.5)
    ranks = [load_file(out / f"{name}-{accumulate}-rank{rank}.safetensors") for rank in (0, 1)]
    for key, expected in weights(task).items():
        torch.testing.assert_close(ranks[0][key], expected, atol=1e-6, rtol=0)
        assert torch.equal(ranks[0][key], ranks[1][key]), "the ranks have drifted apart"


@pytest.mark.slow
def test_validation_is_averaged_over_all_ranks(out: Path, tmp_path: Path) -> None:
    facts = json.loads((out / "facts.json").read_text())
    alone = ToyTrainer(
        line_task(),
        results_folder=tmp_path / "a",
        batch_size=4,
        valid_frac=0.3,
        val_num_batches=None,
        num_train_steps=STEPS,
    )
    alone.train()
    assert facts["valid_loss"] == pytest.approx(alone.validate()["valid_loss"], rel=1e-5)


@pytest.mark.slow
def test_random_losses_and_counts_of_validation_are_the_same_on_any_number_of_processes(
    out: Path, tmp_path: Path
) -> None:
    facts = json.loads((out / "facts.json").read_text())
    alone = ToyTrainer(GuessingTask(Line()), results_folder=tmp_path / "a", batch_size=2, valid_frac=0.3)
    assert facts["guessed"] == pytest.approx(alone.validate(), rel=1e-6)


@pytest.fixture
def facts(out: Path) -> dict[str, Any]:
    return json.loads((out / "facts.json").read_text())


@pytest.mark.slow
def test_gradients_are_synchronised_once_a_step_whatever_the_accumulation(facts: dict[str, Any]) -> None:
    """D-R11: the reference synchronises every micro-batch. (Two networks, one bucket each.)"""
    assert facts["synchronisations"] == [2 * STEPS, 2 * STEPS]


@pytest.mark.slow
def test_a_schedule_advances_once_a_step_on_any_number_of_processes(facts: dict[str, Any], tmp_path: Path) -> None:
    """A scheduler given to Accelerate's `prepare` advances once for each process."""
    alone: list[float] = []
    options = {"num_train_steps": STEPS, "warmup_steps": 2, "scheduler": "cosine"}
    trainer = ToyTrainer(line_task(), results_folder=tmp_path / "a", **options)
    trainer.train(lambda logs: alone.append(float(logs["lr"])))
    assert facts["rates"] == pytest.approx(alone)


@pytest.mark.slow
def test_one_process_alone_clears_and_writes(out: Path, facts: dict[str, Any]) -> None:
    """D-R9 and D-R10: in the reference every process deletes the folder and writes the same picture."""
    assert facts["clears"] == [True, False]
    assert [path.name for path in (out / "signed" / "samples").iterdir()] == ["step-00000002-of-rank-0.txt"]


@pytest.mark.slow
def test_no_search_for_unused_parameters_is_paid_for(facts: dict[str, Any]) -> None:
    """D-T11: the reference has it always on."""
    assert facts["finds_unused_parameters"] is False


@pytest.mark.slow
def test_a_run_of_two_processes_resumes_exactly_on_both(out: Path) -> None:
    """D-T5: the reference loads the names of a bare network into a wrapped one, and has its average on one process alone."""
    for rank in (0, 1):
        resumed, whole = (
            load_file(out / f"resumed/rank{rank}.safetensors"),
            load_file(out / f"line-1-rank{rank}.safetensors"),
        )
        assert all(torch.equal(resumed[key], value) for key, value in whole.items())
    for name in ("model", "ema", "state/optimizer-model"):
        resumed, whole = (
            load_file(out / run / f"checkpoints/step-{STEPS:08d}/{name}.safetensors") for run in ("resumed", "line-1")
        )
        assert all(torch.equal(resumed[key], value) for key, value in whole.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["line", "masked"])
def test_a_sharded_run_equals_an_unsharded_one(out: Path, tmp_path: Path, name: str) -> None:
    task = line_task(kind=MaskedTask) if name == "masked" else line_task()
    ToyTrainer(task, results_folder=tmp_path / "a", batch_size=4, valid_frac=0.3, num_train_steps=STEPS).train()
    folder = out / f"sharded-{name}" / "checkpoints" / f"step-{STEPS:08d}"
    sharded = load_file(folder / "model.safetensors")
    for key, expected in weights(task).items():
        torch.testing.assert_close(sharded[key], expected, atol=1e-6, rtol=0)
    assert (folder / "state" / "shards" / "rank-00001.safetensors").exists(), "each process writes its own part"
    assert helicon.load(folder).own_state().keys() == weights(task).keys()


@pytest.mark.slow
def test_a_sharded_run_resumes_exactly(out: Path, tmp_path: Path) -> None:
    facts = json.loads((out / "facts.json").read_text())
    assert facts["sharded_resumed_from"] == STEPS
    task = line_task()
    ToyTrainer(task, results_folder=tmp_path / "a", batch_size=4, valid_frac=0.3, num_train_steps=STEPS + 3).train()
    newest = checkpoints(out / "sharded-line")[-1]
    assert read_manifest(newest)["step"] == STEPS + 3
    for key, value in load_file(newest / "model.safetensors").items():
        torch.testing.assert_close(value, weights(task)[key], atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_sharded_weights_are_the_online_ones_again_after_a_validation(facts: dict[str, Any], optimizer: str) -> None:
    """What a sharded network has gathered in a forward with averaged weights is not what it trains on next."""
    assert facts[f"sharded_{optimizer}"] < 1e-6


@pytest.mark.slow
def test_a_signal_to_one_process_soon_stops_all_of_them_whatever_is_logged(out: Path, facts: dict[str, Any]) -> None:
    assert facts["stopped"] == [[STEPS + 2, 143]] * 2
    assert [folder.name for folder in checkpoints(out / "stopped")] == [f"step-{STEPS + 2:08d}"]


@pytest.mark.slow
def test_every_logged_number_is_the_mean_over_the_ranks(out: Path) -> None:
    (line,) = [json.loads(line) for line in (out / "ranks/metrics.jsonl").read_text().splitlines()]
    assert line["norm_of_rank"] == 0.5


@pytest.mark.slow
def test_sharding_an_adversarial_task_is_refused_in_one_sentence(out: Path) -> None:
    refusal = json.loads((out / "facts.json").read_text())["shard_refusal"]
    assert "generator and discriminator" in refusal


@pytest.mark.slow
def test_a_run_of_two_processes_resumes_on_one_with_the_same_batches(out: Path, tmp_path: Path) -> None:
    """Two processes of batch 2 saved at step 3; one process goes on with 4 samples a step, in the same order."""
    one = line_task()
    resumed = ToyTrainer(one, results_folder=out / "two-then-one", batch_size=2, num_train_steps=6, resume=True)
    assert (resumed.step, resumed.feed.train.global_batch, resumed.feed.grad_accum_every) == (3, 4, 2)
    resumed.train()
    again = ToyTrainer(line_task(), results_folder=out / "two-then-one", batch_size=2, num_train_steps=6, resume=True)
    assert again.feed.train.global_batch == 4, "and it stays so when the run is resumed once more"
    unbroken = line_task()
    ToyTrainer(unbroken, dataset=Points(), results_folder=tmp_path / "b", batch_size=4, num_train_steps=6).train()
    for key, expected in weights(unbroken).items():
        torch.testing.assert_close(weights(one)[key], expected, atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["loader", "split-loader"])
def test_a_users_own_loader_keeps_the_batches_of_a_step_and_its_place_on_another_number_of_processes(
    out: Path, tmp_path: Path, name: str
) -> None:
    """Two batches a step, one of each process, become two micro-batches of one process."""

    def run(folder: Path, **options: Any) -> ToyTrainer:
        sampler = DistributedSampler(Points(), num_replicas=1, rank=0)
        sharing = {"shuffle": True} if name == "loader" else {"sampler": sampler}
        source = DataLoader(Points(), batch_size=2, **sharing)
        made = ToyTrainer(
            line_task(), dataset=None, train_dataloader=source, results_folder=folder, num_train_steps=20, **options
        )
        started_at = made.position
        made.train()
        assert started_at == (Position(0, 6) if options.get("resume") else Position())
        return made

    resumed = run(out / f"{name}-two-then-one", resume=True)
    unbroken = run(tmp_path / "a", grad_accum_every=2)
    for key, expected in weights(unbroken.task).items():
        torch.testing.assert_close(weights(resumed.task)[key], expected, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_processes_seeded_apart_start_from_one_network_and_one_set_of_buffers(out: Path) -> None:
    assert json.loads((out / "facts.json").read_text())["apart"] == 0


@pytest.mark.slow
def test_a_sharded_network_can_be_sampled_part_by_part(out: Path) -> None:
    assert (out / "sharded-parts" / "samples" / "step-00000004-guesses.txt").read_text().startswith("online")
