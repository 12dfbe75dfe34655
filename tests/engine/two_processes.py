"""Run by torchrun on two gloo processes: trains each toy and writes what came out, for tests/engine/test_distributed.py."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).parents[1]))

from safetensors.torch import save_file

from helicon.engine import runtime
from helicon.engine.task import Loss
from helicon.engine.trainer import Trainer
from helicon.nn.network import Network
from toys import GuessingTask, Line, LineTask, MaskedTask, Points, ToyTrainer, line_task, pair_task, weights

STEPS = 5


class SampledByParts(LineTask):
    """Samples by calling parts of the network, as a token loop does."""

    def sample(self, batch: Any, seed: int) -> torch.Tensor:
        first, second = self.model.layers
        return second(torch.tanh(first(batch["x"])))


def trained(task_name: str, folder: Path, **options: object) -> Trainer:
    tasks = {"line": line_task, "masked": lambda: line_task(kind=MaskedTask), "pair": pair_task}
    tasks["parts"] = lambda: line_task(kind=SampledByParts)
    trainer = ToyTrainer(tasks[task_name](), results_folder=folder, num_train_steps=STEPS, **options)
    trainer.train()
    return trainer


class Rooted(Network):
    """Has weights outside of its layers, as every real network has."""

    def __init__(self, dim: int = 3, width: int = 5):
        super().__init__()
        self.first = nn.Linear(dim, width)
        self.layers = nn.ModuleList([nn.Linear(width, width)])
        self.last = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.layers[0](torch.tanh(self.first(x))))).squeeze(-1)


class RankNamed(LineTask):
    """One part of the loss is the number of the rank."""

    def loss(self, outputs: Any) -> Loss:
        return Loss(super().loss(outputs).total, {"norm_of_rank": torch.tensor(float(dist.get_rank()))})


class Signed(LineTask):
    """Samples bear the rank that wrote them."""

    def present(self, batch: Any, samples: Any) -> dict[str, Any]:
        return {f"of-rank-{dist.get_rank()}.txt": lambda path: path.write_text("")}


def of_every_rank(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def synchronisations(folder: Path, accumulate: int) -> int:
    """How often the gradients of the two networks went over the wire."""
    trainer = ToyTrainer(
        pair_task(), results_folder=folder, num_train_steps=STEPS, batch_size=2, grad_accum_every=accumulate
    )
    count = 0

    def counted(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        nonlocal count
        count += 1
        return allreduce_hook(group, bucket)

    for network in trainer.wrapped.values():
        network.register_comm_hook(None, counted)
    trainer.train()
    return count


def rates(folder: Path) -> list[float]:
    """The learning rate of every step, warmed up and then lowered."""
    found: list[float] = []
    trainer = ToyTrainer(
        line_task(), results_folder=folder, num_train_steps=STEPS, warmup_steps=2, scheduler="cosine", batch_size=2
    )
    trainer.train(lambda logs: found.append(float(logs["lr"])))
    return found


def who_clears(folder: Path) -> list[bool]:
    """Which ranks delete what an earlier run left."""
    folder.mkdir(exist_ok=True)
    (folder / "samples").mkdir(exist_ok=True)
    (folder / "bad_files.txt").write_text("an earlier run")
    dist.barrier()
    with mock.patch.object(shutil, "rmtree", wraps=shutil.rmtree) as spied:
        ToyTrainer(line_task(), results_folder=folder, force_clear_prev_results=True)
    assert not (folder / "bad_files.txt").exists() and not (folder / "samples").exists()
    return of_every_rank(any(call.args[0] == folder / "samples" for call in spied.call_args_list))


def resumed_on_both(folder: Path) -> None:
    """Stopped after two steps and resumed, with the numbers of the unbroken run `line-1`."""
    for steps in (2, STEPS):
        trainer = ToyTrainer(line_task(), results_folder=folder, num_train_steps=steps, batch_size=2, resume=True)
        assert trainer.step == (0 if steps == 2 else 2)
        trainer.train()
    save_file(weights(trainer.task), folder / f"rank{trainer.runtime.rank}.safetensors")


def rooted(folder: Path, optimizer: str, **options: Any) -> dict[str, torch.Tensor]:
    """Validated at each step with averaged weights that are far from the online ones, and never sampled between."""
    torch.manual_seed(3)
    task = LineTask(Rooted())
    trainer = ToyTrainer(
        task,
        results_folder=folder,
        num_train_steps=STEPS,
        batch_size=2,
        lr=0.05,
        optimizer=optimizer,
        ema_beta=0.9,
        valid_frac=0.3,
        val_every=1,
        save_results_every=1000,
        **options,
    )
    trainer.train()
    whole = {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in weights(task).items()}
    return {name: value.clone() for name, value in whole.items()}


def stopped_by_one(folder: Path) -> list[Any]:
    """The second process alone gets a signal after step 5, long before a step that logs."""
    trainer = ToyTrainer(line_task(), results_folder=folder, num_train_steps=100, batch_size=2, log_every=1000)

    def give(logs: Any) -> None:
        if trainer.step == STEPS and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        trainer.train(give)
    except SystemExit as ended:
        return of_every_rank([trainer.step, ended.code])
    return of_every_rank([trainer.step, None])


def main(out: Path) -> None:
    torch.set_num_threads(1)
    facts: dict[str, object] = {}
    for name in ("line", "masked", "pair"):
        for accumulate in (1, 3):
            trainer = trained(name, out / f"{name}-{accumulate}", batch_size=2, grad_accum_every=accumulate)
            assert trainer.runtime.world_size == 2, "torchrun started one process"
            facts["finds_unused_parameters"] = trainer.wrapped[next(iter(trainer.raw))].find_unused_parameters
            save_file(weights(trainer.task), out / f"{name}-{accumulate}-rank{trainer.runtime.rank}.safetensors")

    trainer = trained(
        "line", out / "validated", batch_size=2, valid_frac=0.3, val_num_batches=None, save_results_every=1
    )
    facts["valid_loss"] = trainer.validate()["valid_loss"]
    guessing = ToyTrainer(GuessingTask(Line()), results_folder=out / "guessing", batch_size=2, valid_frac=0.3)
    facts["guessed"] = guessing.validate()
    torch.manual_seed(3)
    ToyTrainer(Signed(line_task().model), results_folder=out / "signed", num_train_steps=2, batch_size=2).train()
    facts["synchronisations"] = [synchronisations(out / f"synchronised-{n}", n) for n in (1, 3)]
    facts["rates"] = rates(out / "rates")
    facts["clears"] = who_clears(out / "cleared")
    resumed_on_both(out / "resumed")

    trained("parts", out / "sharded-parts", batch_size=2, shard=True, valid_frac=0.3, save_results_every=2)
    for name in ("masked", "line"):
        trained(name, out / f"sharded-{name}", batch_size=2, shard=True, valid_frac=0.3, save_model_every=2)
    resumed = ToyTrainer(
        line_task(),
        results_folder=out / "sharded-line",
        batch_size=2,
        shard=True,
        valid_frac=0.3,
        num_train_steps=STEPS + 3,
        resume=True,
    )
    facts["sharded_resumed_from"] = resumed.step
    resumed.train()
    for optimizer in ("adamw", "muon"):
        apart, together = (
            rooted(out / f"rooted-{optimizer}-{shard}", optimizer, shard=shard) for shard in (True, False)
        )
        facts[f"sharded_{optimizer}"] = max(float((apart[name] - together[name]).abs().max()) for name in together)
    try:
        ToyTrainer(pair_task(), results_folder=out / "refused", shard=True)
    except ValueError as error:
        facts["shard_refusal"] = str(error)

    # A script that seeds its processes differently: they must start from one network all the same.
    torch.manual_seed(100 + dist.get_rank())
    apart = LineTask(Line())
    apart.model.register_buffer("running", torch.randn(3))
    ToyTrainer(apart, results_folder=out / "apart", batch_size=2, num_train_steps=1).train()
    everything = torch.cat([value.flatten() for value in apart.model.state_dict().values()])
    gathered = [torch.empty_like(everything) for _ in range(2)]
    dist.all_gather(gathered, everything)
    facts["apart"] = float((gathered[0] - gathered[1]).abs().max())

    torch.manual_seed(3)
    ToyTrainer(RankNamed(Line()), results_folder=out / "ranks", batch_size=2, num_train_steps=1).train()
    facts["stopped"] = stopped_by_one(out / "stopped")

    # Saved by two processes, to be resumed by one: a dataset, a loader of the user's own, and one that is split already.
    half = ToyTrainer(line_task(), results_folder=out / "two-then-one", batch_size=2, num_train_steps=3)
    half.train()
    sampler = DistributedSampler(Points(), num_replicas=2, rank=dist.get_rank())
    for name, sharing in (("loader", {"shuffle": True}), ("split-loader", {"sampler": sampler})):
        ToyTrainer(
            line_task(),
            dataset=None,
            train_dataloader=DataLoader(Points(), batch_size=2, **sharing),
            results_folder=out / f"{name}-two-then-one",
            num_train_steps=3,
        ).train()
    if dist.get_rank() == 0:
        (out / "facts.json").write_text(json.dumps(facts))
    dist.barrier()
    runtime._end_gloo()  # as at the end of every process of a run
    assert not dist.is_initialized()
    sys.stdout.flush()
    os._exit(0)  # a process that made many groups may hold one still


if __name__ == "__main__":
    main(Path(sys.argv[1]))
