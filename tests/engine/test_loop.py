"""The loop equals a plain torch loop on the concatenated batch, touches only what it should, and skips what is not finite."""

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helicon.engine.checkpoint import checkpoints
from helicon.engine.runtime import Runtime
from helicon.engine.task import Batch, Loss, Task, Update
from helicon.engine.trainer import TrainingDiverged
from plain_loop import train_one, train_pair, whole_batches
from toys import Line, LineTask, MaskedTask, PairTask, Points, ToyTrainer, line_task, pair_task, weights

STEPS = 5


def trained(task: Task, **options: object) -> ToyTrainer:
    trainer = ToyTrainer(task, results_folder="run", num_train_steps=STEPS, **options)
    trainer.train()
    return trainer


def assert_same(task: Task, other: Task, tolerance: float = 1e-6) -> None:
    for name, expected in weights(other).items():
        torch.testing.assert_close(weights(task)[name], expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("kind", [LineTask, MaskedTask])
def test_one_network_equals_the_plain_loop(kind: type[LineTask], accumulate: int) -> None:
    task, plain = line_task(kind=kind), line_task(kind=kind)
    trained(task, batch_size=4, grad_accum_every=accumulate)
    batches = whole_batches(STEPS, size=4 * accumulate)
    train_one(plain.model, lambda batch: plain.loss(plain.forward(batch)).total, batches, clip=0.5)
    assert_same(task, plain)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_two_networks_equal_the_plain_loop(accumulate: int) -> None:
    task, plain = pair_task(), pair_task()
    trained(task, batch_size=4, grad_accum_every=accumulate)
    train_pair(plain.model, whole_batches(STEPS, size=4 * accumulate), clip=0.5)
    assert_same(task, plain)


def test_accumulation_does_not_change_the_logged_loss() -> None:
    """The logged loss is that of the whole step, not of its last micro-batch."""
    losses = []
    for accumulate, size in ((1, 12), (3, 4)):
        logged: list[float] = []
        trainer = ToyTrainer(
            line_task(kind=MaskedTask), results_folder=f"run{size}", batch_size=size, grad_accum_every=accumulate
        )
        trainer.train(lambda logs, logged=logged: logged.append(float(logs["loss"])))
        losses.append(logged)
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_an_update_moves_its_own_network_alone() -> None:
    class GeneratorOnly(PairTask):
        def updates(self, step: int) -> list[Update]:
            return [Update("generator", self.loss)]

    torch.manual_seed(3)
    task = GeneratorOnly(pair_task().model)
    before = weights(task)
    trainer = trained(task)
    moved = {name for name, value in weights(task).items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if name.startswith("generator")}
    assert all(p.grad is None for p in task.model.discriminator.parameters()), (
        "no gradient is kept for a frozen network"
    )
    assert all(p.requires_grad for p in task.model.discriminator.parameters()), "and it is trainable again afterwards"
    assert trainer.optimizers["discriminator"].schedule.step == 0


def test_each_network_is_clipped_by_its_own_norm() -> None:
    """The norm that clips the generator is of its own gradients, though it was differentiated through the discriminator."""
    norms: dict[str, float] = {}
    trainer = ToyTrainer(pair_task(), results_folder="norms", num_train_steps=1)
    trainer.train(lambda logs: norms.update({k: float(v) for k, v in logs.items() if k.endswith("grad_norm")}))
    pair, batch = pair_task().model, whole_batches(1, 4)[0]
    fake, real = pair.generator(batch["x"]), batch["x"]
    own = (fake - real).square().mean() - 0.1 * pair.discriminator(fake).mean()
    gradients = torch.autograd.grad(own, list(pair.generator.parameters()))
    assert norms["grad_norm"] == pytest.approx(float(torch.stack([g.norm() for g in gradients]).norm()), rel=1e-5)
    assert norms["discriminator_grad_norm"] != norms["grad_norm"]


class Poisoned(LineTask):
    """The loss is not a number at the given steps."""

    bad = frozenset({2, 3})

    def updates(self, step: int) -> list[Update]:
        def loss(outputs: object) -> Loss:
            clean = self.loss(outputs)
            return Loss(clean.total * float("nan"), clean.parts) if step in self.bad else clean

        return [Update("model", loss)]


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted() -> None:
    torch.manual_seed(3)
    task = Poisoned(Line())
    seen = []
    trainer = ToyTrainer(task, results_folder="run", num_train_steps=STEPS)
    trainer.train(lambda logs: seen.append(weights(task)))
    assert float(trainer.bad_steps) == 2
    for name in weights(task):
        assert torch.equal(seen[1][name], seen[3][name]), "steps 3 and 4 were skipped"
        assert torch.isfinite(seen[-1][name]).all()
    assert any(not torch.equal(seen[3][name], seen[4][name]) for name in weights(task)), "and the run went on"


def test_a_run_that_stays_bad_stops_with_its_step_and_keeps_the_last_good_checkpoint() -> None:
    class Doomed(Poisoned):
        bad = frozenset(range(4, 1000))

    torch.manual_seed(3)
    task = Doomed(Line())
    trainer = ToyTrainer(
        task, results_folder="run", num_train_steps=100, max_bad_steps=6, log_every=2, save_model_every=3
    )
    with pytest.raises(
        TrainingDiverged,
        match=r"since step 5 .*resume from run/checkpoints/step-00000003, the last good checkpoint",
    ):
        trainer.train()
    assert trainer.step == 10
    assert [path.name for path in Path("run/checkpoints").glob("step-*")] == ["step-00000003"], (
        "bad steps are not saved"
    )
    newest = sorted(Path("run/checkpoints").glob("step-*"))[-1]
    resumed = ToyTrainer(line_task(), results_folder="other", num_train_steps=20)
    resumed.load(newest)
    assert all(torch.isfinite(value).all() for value in weights(resumed.task).values())


def test_a_checkpoint_due_at_a_step_that_is_not_finite_is_made_at_the_next_one_that_is() -> None:
    torch.manual_seed(3)
    trainer = ToyTrainer(
        Poisoned(Line()), results_folder="run", num_train_steps=9, save_model_every=3
    )  # 3 and 4 are bad
    trainer.train()
    assert [folder.name for folder in checkpoints(Path("run"))] == [f"step-0000000{step}" for step in (5, 6, 9)]


def test_a_bad_last_checkpoint_is_not_taken_for_a_good_one() -> None:
    """A run that is stopped while its steps are not finite is saved; resumed, it still knows which checkpoint was good."""

    class Doomed(Poisoned):
        bad = frozenset(range(4, 1000))

    def run(steps: int, max_bad_steps: int) -> ToyTrainer:
        torch.manual_seed(3)
        return ToyTrainer(
            Doomed(Line()),
            results_folder="run",
            num_train_steps=steps,
            max_bad_steps=max_bad_steps,
            log_every=1,
            save_model_every=3,
            resume=True,
        )

    stopped = run(steps=20, max_bad_steps=100)
    with pytest.raises(SystemExit):
        stopped.train(lambda _: os.kill(os.getpid(), signal.SIGTERM) if stopped.step == 6 else None)
    assert [folder.name for folder in checkpoints(Path("run"))] == ["step-00000003", "step-00000007"]
    with pytest.raises(TrainingDiverged, match=r"since step 5 .*resume from run/checkpoints/step-00000003"):
        run(steps=20, max_bad_steps=5).train()


def test_a_run_that_ends_with_bad_steps_has_diverged() -> None:
    """And its folder means the last good checkpoint: the bad end is not saved."""

    class Doomed(Poisoned):
        bad = frozenset(range(4, 1000))

    torch.manual_seed(3)
    trainer = ToyTrainer(Doomed(Line()), results_folder="run", num_train_steps=7, save_model_every=3)
    expected = r"since step 5 \(3 steps, all skipped\); resume from run/checkpoints/step-00000003"
    with pytest.raises(TrainingDiverged, match=expected):
        trainer.train()
    assert [folder.name for folder in checkpoints(Path("run"))] == ["step-00000003"]


def test_a_single_bad_step_at_the_end_loses_nothing() -> None:
    """It was skipped: what was learned before it is whole."""

    class Unlucky(Poisoned):
        bad = frozenset([5])

    torch.manual_seed(3)
    trainer = ToyTrainer(Unlucky(Line()), results_folder="run", num_train_steps=6, save_model_every=3)
    trainer.train()
    assert [folder.name for folder in checkpoints(Path("run"))] == ["step-00000003", "step-00000006"]


def test_a_network_that_starts_late_follows_the_schedule_of_the_run() -> None:
    class Late(PairTask):
        def updates(self, step: int) -> list[Update]:
            both = [Update("discriminator", self.adversary_loss), Update("generator", self.loss)]
            return both if step >= 4 else both[1:]

    def rates(*stops: int) -> list[dict[str, float]]:
        found: list[dict[str, float]] = []
        for stop in stops:
            trainer = ToyTrainer(
                Late(pair_task().model),
                results_folder=f"run-{len(stops)}-{stop}",
                num_train_steps=8,
                scheduler="cosine",
                discr_warmup_steps=2,
            )
            if stop > stops[0]:
                trainer.load("stopped")
            while trainer.step < stop:
                logs = trainer.train_step()
                found.append({name: float(value) for name, value in logs.items() if name.endswith("lr")})
            trainer.save("stopped")
        return found

    unbroken = rates(8)
    assert [len(step) for step in unbroken] == [1] * 4 + [2] * 4
    ratios = [step["discriminator_lr"] / step["lr"] for step in unbroken[4:]]
    assert ratios == pytest.approx([0.5, 1.0, 1.0, 1.0]), "its own warm-up, and then the rate of the first network"
    assert rates(3, 5, 8) == unbroken


def test_the_steps_outside_logging_never_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a tensor on the host (item, float, bool, tolist, cpu) happens on steps that log, and on no other."""
    trainer = ToyTrainer(pair_task(), results_folder="run", num_train_steps=20, log_every=10, save_model_every=1000)
    trainer.train_step()
    reads = []
    for name in ("item", "__float__", "__bool__", "tolist", "cpu"):
        original = getattr(torch.Tensor, name)

        def spy(self: torch.Tensor, *args: object, _original: object = original, **kwargs: object) -> object:
            reads.append(trainer.step)
            return _original(self, *args, **kwargs)  # type: ignore[operator]

        monkeypatch.setattr(torch.Tensor, name, spy)
    while trainer.step < 12:
        trainer._optimize([trainer.runtime.to_device(b) for b in [Points()[0] | {"x": torch.randn(4, 3)}]])
        trainer.step += 1
    assert reads == []


def test_steps_outside_logging_wait_for_no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """D-T11: the reference has four barriers a step."""
    trainer = ToyTrainer(pair_task(), results_folder="run", num_train_steps=20, log_every=10, save_model_every=1000)
    waits = []
    monkeypatch.setattr(Runtime, "wait", lambda self: waits.append(trainer.step))
    for _ in range(5):
        trainer.train_step()
    assert waits == []


def test_every_loss_is_computed_in_autocast_and_differentiated_outside_of_it() -> None:
    """D-R11: the reference's discriminator step is outside. D-T11: its backward is inside."""
    seen: dict[str, list[bool]] = {"losses": [], "backward": []}
    is_on = lambda: torch.is_autocast_enabled("cpu")

    class Watching(PairTask):
        def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
            seen["losses"].append(is_on())
            return super().forward(batch)

        def adversary_loss(self, outputs: tuple[Tensor, Tensor]) -> Loss:
            return self.watched(super().adversary_loss(outputs))

        def loss(self, outputs: tuple[Tensor, Tensor]) -> Loss:
            return self.watched(super().loss(outputs))

        def watched(self, loss: Loss) -> Loss:
            seen["losses"].append(is_on())
            loss.total.register_hook(lambda gradient: seen["backward"].append(is_on()))
            return loss

    trained(Watching(pair_task().model), mixed_precision="bf16")
    assert seen == {"losses": [True] * 3 * STEPS, "backward": [False] * 2 * STEPS}
