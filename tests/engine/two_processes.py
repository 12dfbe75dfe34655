"""Run by torchrun on two gloo processes: trains each toy and writes what came out, for tests/engine/test_distributed.py."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from safetensors.torch import save_file

from helicon.engine.trainer import Trainer
from toys import MaskedTask, ToyTrainer, line_task, pair_task, weights

STEPS = 5


def trained(task_name: str, folder: Path, **options: object) -> Trainer:
    tasks = {"line": line_task, "masked": lambda: line_task(kind=MaskedTask), "pair": pair_task}
    trainer = ToyTrainer(tasks[task_name](), results_folder=folder, num_train_steps=STEPS, **options)
    trainer.train()
    return trainer


def main(out: Path) -> None:
    torch.set_num_threads(1)
    facts: dict[str, object] = {}
    for name in ("line", "masked", "pair"):
        for accumulate in (1, 3):
            trainer = trained(name, out / f"{name}-{accumulate}", batch_size=2, grad_accum_every=accumulate)
            assert trainer.runtime.world_size == 2, "torchrun started one process"
            save_file(weights(trainer.task), out / f"{name}-{accumulate}-rank{trainer.runtime.rank}.safetensors")

    trainer = trained(
        "line", out / "validated", batch_size=2, valid_frac=0.3, val_num_batches=None, save_results_every=1
    )
    facts["valid_loss"] = trainer.validate()["valid_loss"]

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
    try:
        ToyTrainer(pair_task(), results_folder=out / "refused", shard=True)
    except ValueError as error:
        facts["shard_refusal"] = str(error)

    # Saved by two processes with dropout, to be resumed by one; and the same run unbroken.
    half = ToyTrainer(line_task(), results_folder=out / "two-then-one", batch_size=2, num_train_steps=3)
    half.train()
    if dist.get_rank() == 0:
        (out / "facts.json").write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
