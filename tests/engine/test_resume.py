"""A run that is killed, over and over and in the middle of a save, ends as if nothing had happened."""

import fcntl
import itertools
import json
import os
import pty
import random
import signal
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import children
from helicon.data.loader import Position
from helicon.engine import checkpoint
from helicon.engine.checkpoint import checkpoints, newest_whole
from toys import Points, ToyTrainer, line_task, pair_task, weights

TIMES = {"samples_per_second", "data_wait_fraction"}  # what may differ between two runs of the same numbers


def trainer(folder: str | Path, steps: int = 30, name: str = "line", **options: object) -> ToyTrainer:
    task = line_task(dropout=0.3) if name == "line" else pair_task()
    chosen = {
        "save_model_every": 3,
        "log_every": 1,
        "valid_frac": 0.2,
        "save_results_every": 4,
        "warmup_steps": 10,
        "scheduler": "cosine",
    }
    return ToyTrainer(task, results_folder=folder, num_train_steps=steps, resume=True, **(chosen | options))


def numbers(folder: str | Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


@pytest.fixture(params=["line", "pair"])
def unbroken(request: pytest.FixtureRequest) -> tuple[str, ToyTrainer]:
    run = trainer("unbroken", name=request.param)
    run.train()
    return request.param, run


def test_a_stopped_and_resumed_run_equals_the_unbroken_one_bit_for_bit(unbroken: tuple[str, ToyTrainer]) -> None:
    name, whole = unbroken
    for stop in (3, 9, 12, 30):
        half = trainer("broken", name=name, steps=30)
        while half.step < stop:
            half.train_step()
        half.writer.wait()
    assert numbers("broken") == numbers("unbroken")
    for key, value in weights(whole.task).items():
        assert torch.equal(weights(half.task)[key], value)
    for mine, theirs in zip(half.ema.average, whole.ema.average, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["line", "pair"])
def test_ten_kills_at_random_moments_change_nothing(name: str) -> None:
    whole = trainer("unbroken", name=name, save_model_every=1)
    whole.train()
    chance = random.Random(5)
    Path("broken").mkdir()
    for _ in range(10):
        child = children.start(lambda: trainer("broken", name=name, save_model_every=1).train())
        before = len(checkpoints(Path("broken")))
        if before < 30:
            children.wait_for(lambda: len(list(Path("broken").glob("checkpoints/*"))) > 0)
        time.sleep(chance.random() * 0.06)
        children.kill(child)
    last = trainer("broken", name=name, save_model_every=1)
    last.train()
    assert numbers("broken") == numbers("unbroken")
    for key, value in weights(whole.task).items():
        assert torch.equal(weights(last.task)[key], value)


def test_a_kill_at_every_moment_of_a_save_leaves_a_whole_checkpoint() -> None:
    """The process dies at the k-th file operation of its second save, for every k there is."""
    for count in itertools.count():
        folder = Path(f"run{count}")

        def work(folder: Path = folder, count: int = count) -> None:
            run = trainer(folder, steps=6)
            calls = itertools.count()

            def dying(original: object) -> object:
                def operation(*args: object, **kwargs: object) -> object:
                    if checkpoints(folder) and next(calls) == count:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return original(*args, **kwargs)  # type: ignore[operator]

                return operation

            for name in ("save_state", "flush", "sha256", "_replace"):
                setattr(checkpoint, name, dying(getattr(checkpoint, name)))
            run.train()

        outcome = children.run(work)
        newest = newest_whole(folder)
        assert newest is not None
        if outcome == 0:
            assert newest.name == "step-00000006" and count > 10, "every operation of the save has been tried"
            return
        assert outcome == -signal.SIGKILL
        resumed = trainer(folder, steps=6)
        assert resumed.step in (3, 6)
        resumed.train()
        assert newest_whole(folder).name == "step-00000006"
        assert not list(folder.glob("checkpoints/.*")), "what the kill left behind is cleared away"


def test_another_number_of_workers_gives_the_same_run(unbroken: tuple[str, ToyTrainer]) -> None:
    name, whole = unbroken
    half = trainer("broken", name=name)
    while half.step < 9:
        half.train_step()
    half.writer.wait()
    other = trainer("broken", name=name, num_workers=1)
    other.train()
    for key, value in weights(whole.task).items():
        assert torch.equal(weights(other.task)[key], value)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "unfinished"])
def test_a_damaged_checkpoint_is_found_out_and_the_one_before_used(
    damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    half = trainer("run", steps=9)
    while half.step < 6:
        half.train_step()
    half.writer.wait()
    newest = Path("run/checkpoints/step-00000006")
    weights_file = newest / "model.safetensors"
    content = bytearray(weights_file.read_bytes())
    if damage == "truncated":
        weights_file.write_bytes(content[:-7])
    elif damage == "flipped":
        content[-9] ^= 4
        weights_file.write_bytes(content)
    elif damage == "missing":
        (newest / "state" / "random.json").unlink()
    else:
        (newest / "manifest.json").unlink()
    resumed = trainer("run", steps=9)
    assert resumed.step == 3
    assert "trying the one before" in caplog.text
    resumed.train()
    trainer("whole", steps=9).train()
    assert newest_whole(Path("run")).name == "step-00000009"
    assert numbers("run") == numbers("whole")


def test_a_checkpoint_is_hashed_once_when_a_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer("run", steps=3).train()
    hashed: list[Path] = []
    sha256 = checkpoint.sha256
    monkeypatch.setattr(checkpoint, "sha256", lambda path: (hashed.append(path), sha256(path))[1])
    assert trainer("run", steps=6).step == 3
    assert len(hashed) == len(set(hashed)) > 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_and_says_how_to_go_on(number: signal.Signals) -> None:
    def work() -> None:
        trainer("run", steps=10**6, save_model_every=10**6, val_every=10**6, save_results_every=10**6).train()

    child = children.start(work, said="said.txt")
    children.wait_for(
        lambda: Path("run/metrics.jsonl").exists() and len(Path("run/metrics.jsonl").read_text().splitlines()) > 3
    )
    code = children.kill(child, number)
    said = Path("said.txt").read_text().replace("\n", " ")
    assert code == 128 + number
    assert f"stopped by {number.name} at step" in said
    assert "continue with: the same trainer with resume=True" in said
    resumed = trainer("run", steps=10**6)
    assert resumed.step == int(checkpoints(Path("run"))[-1].name.removeprefix("step-")) > 3


def test_a_run_whose_terminal_is_closed_is_saved() -> None:
    """Whatever is written to a terminal that is gone fails."""
    terminal, end = pty.openpty()

    def work() -> None:
        os.close(terminal)
        os.setsid()
        fcntl.ioctl(end, termios.TIOCSCTTY, 0)
        sys.stdout = os.fdopen(end, "w")
        run = trainer("run", steps=10**6, save_model_every=10**6, val_every=10**6, save_results_every=10**6)
        assert run.reporter.console.is_terminal
        run.train()

    child = children.start(work)
    os.close(end)
    os.set_blocking(terminal, False)

    def has_begun() -> bool:
        with suppress(BlockingIOError):
            os.read(terminal, 10**6)  # or the child would wait for its terminal
        return Path("run/metrics.jsonl").exists() and len(Path("run/metrics.jsonl").read_text().splitlines()) > 3

    children.wait_for(has_begun)
    os.close(terminal)
    assert children.finish(child) == 129
    assert newest_whole(Path("run")) is not None


@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGTERM])
def test_a_second_sighup_does_not_cut_the_save_short(first: signal.Signals) -> None:
    """A shell passes on the one it got from its terminal, and a system that logs a user out sends it behind SIGTERM."""
    run = trainer("run", steps=10)

    def hang_up(_: object) -> None:
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), signal.SIGHUP)

    with pytest.raises(SystemExit) as raised:
        run.train(hang_up)
    assert raised.value.code == 128 + first
    assert newest_whole(Path("run")).name == "step-00000002"


def test_a_run_under_nohup_goes_on_without_its_terminal() -> None:
    run = trainer("run", steps=4)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run.train(lambda _: os.kill(os.getpid(), signal.SIGHUP))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert run.step == 4


def test_a_signal_while_the_last_checkpoint_is_written_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer("run", steps=2)
    finish = run.writer.finish

    def interrupted() -> None:
        monkeypatch.setattr(run.writer, "finish", finish)
        os.kill(os.getpid(), signal.SIGTERM)
        finish()

    monkeypatch.setattr(run.writer, "finish", interrupted)
    with pytest.raises(SystemExit) as raised:
        run.train()
    assert raised.value.code == 143
    assert newest_whole(Path("run")).name == "step-00000002"


def test_a_signal_stops_the_run_it_was_sent_to_and_no_later_step() -> None:
    run = trainer("run", steps=10)

    def interrupt(_: object) -> None:
        if run.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run.train(interrupt)
    stopped = run.step
    run.train_step()
    run.train()
    assert stopped < run.step == 10


def test_a_checkpoint_that_is_refused_changes_nothing() -> None:
    other = trainer("other", steps=2, optimizer="lion")
    other.train()
    run = trainer("run", steps=4, optimizer="adamw")
    run.train_step()
    before = {name: value.clone() for name, value in run.task.model.own_state().items()}
    moments = {name: value.clone() for name, value in run.optimizers["model"].state().items()}
    with pytest.raises(ValueError, match="the state of another optimizer than adamw"):
        run.load("other")
    assert all(torch.equal(run.task.model.own_state()[name], value) for name, value in before.items())
    kept = run.optimizers["model"].state()
    assert moments and kept.keys() == moments.keys() and all(torch.equal(kept[name], moments[name]) for name in kept)
    run.train()
    assert run.step == 4


class OneAtATime(torch.utils.data.DataLoader):
    """Keeps its place itself, and has one for all passes over it: as a StatefulDataLoader, or one with persistent workers."""

    def __iter__(self) -> "OneAtATime":
        self.place, self.begin = getattr(self, "begin", 0), 0
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        if self.place == len(self):
            raise StopIteration
        rows = range(self.place * self.batch_size, (self.place + 1) * self.batch_size)
        self.place += 1
        return torch.utils.data.default_collate([self.dataset[row] for row in rows])

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["place"]


def test_samples_do_not_disturb_the_pass_over_a_users_own_loader() -> None:
    def run(folder: str, steps: int, save_results_every: int) -> ToyTrainer:
        made = ToyTrainer(
            line_task(),
            dataset=None,
            train_dataloader=OneAtATime(Points(24), batch_size=4),
            results_folder=folder,
            num_train_steps=steps,
            save_results_every=save_results_every,
            resume=True,
        )
        made.train()
        return made

    whole = run("whole", 10, save_results_every=1000)
    run("broken", 4, save_results_every=2)
    broken = run("broken", 10, save_results_every=2)
    for key, value in weights(whole.task).items():
        assert torch.equal(weights(broken.task)[key], value)


def test_a_run_that_goes_on_with_another_kind_of_source_starts_its_data_over(caplog: pytest.LogCaptureFixture) -> None:
    """A position counts samples of a dataset, and batches of a loader: one is no place in the other."""
    source = torch.utils.data.DataLoader(Points(), batch_size=4)
    options = {"results_folder": "run", "resume": True}
    ToyTrainer(line_task(), num_train_steps=2, **options).train()
    with_loader = ToyTrainer(line_task(), dataset=None, train_dataloader=source, num_train_steps=5, **options)
    assert (with_loader.step, with_loader.position) == (2, Position())
    assert "its data starts over" in caplog.text
    with_loader.train()
    caplog.clear()
    again = ToyTrainer(line_task(), num_train_steps=6, **options)
    assert (again.step, again.position) == (5, Position()) and "its data starts over" in caplog.text


def test_a_foreign_dataloader_resumes_where_it_stood() -> None:
    def run(folder: str, steps: int) -> ToyTrainer:
        source = torch.utils.data.DataLoader(Points(), batch_size=4, shuffle=True)
        made = ToyTrainer(
            line_task(),
            dataset=None,
            train_dataloader=source,
            results_folder=folder,
            num_train_steps=steps,
            resume=True,
            log_every=1,
        )
        made.train()
        return made

    whole = run("whole", 40)
    run("broken", 21)
    broken = run("broken", 40)
    for key, value in weights(whole.task).items():
        assert torch.equal(weights(broken.task)[key], value)
