"""What a run says: lines that can be read again, a bar on a terminal, and trackers that are always finished."""

import io
import json
import resource
import threading
from pathlib import Path
from typing import Any

import accelerate.tracking
import pytest
from accelerate.tracking import GeneralTracker
from rich.console import Console

from helicon.engine import tracking
from helicon.engine.tracking import Clock, Reporter, plain_hyper_parameters
from toys import ToyTrainer, line_task

RUN = Path("run")


def reporter(active: bool = True, tensorboard: bool = False, title: str = "toy") -> Reporter:
    RUN.mkdir(exist_ok=True)
    return Reporter(RUN, title, "tokens", 10, active, tensorboard)


def lines() -> list[dict[str, Any]]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not json")

    text = (RUN / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def log_steps(report: Reporter, start: int, end: int) -> None:
    for step in range(start, end):
        report.log(step, {"loss": 1.0 / step})


# ---------------------------------------------------------------------- throughput


def test_throughput_counts_the_time_of_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report inside a pause ends one count and begins the next: what was before it is taken from neither twice."""
    now = 0.0
    monkeypatch.setattr(tracking.time, "perf_counter", lambda: now)
    clock = Clock()

    def train(seconds: float, waiting: float) -> None:
        nonlocal now
        with clock.waiting_for_data():
            now += waiting
        now += seconds - waiting
        clock.count(units=10, flops=30.0)

    train(4.0, waiting=1.0)
    with clock.paused():  # the numbers are read, which takes a second, and then there is a validation
        now += 1.0
        assert clock.read("tokens", processes=2, peak=3.0) == {
            "tokens_per_second": 4.0,
            "data_wait_fraction": 0.2,
            "flop_utilisation": 2.0,
        }
        now += 7.0
    train(2.0, waiting=0.0)
    with clock.paused():
        now += 100.0
    assert clock.read("tokens", processes=1, peak=None) == {"tokens_per_second": 5.0, "data_wait_fraction": 0.0}


# ---------------------------------------------------------------------- metrics.jsonl


def test_each_report_is_a_line() -> None:
    report = reporter()
    report.start(0)
    report.log(1, {"loss": 0.5, "lr": 1e-3})
    report.log(2, {"valid_loss": 0.25})
    report.stop()
    assert lines() == [{"step": 1, "loss": 0.5, "lr": 1e-3}, {"step": 2, "valid_loss": 0.25}]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_written_as_valid_json(value: float) -> None:
    report = reporter()
    report.log(1, {"loss": value, "lr": 0.5})
    assert lines() == [{"step": 1, "loss": str(value), "lr": 0.5}]


def test_what_an_interrupted_run_logged_after_its_checkpoint_is_taken_back() -> None:
    log_steps(reporter(), 1, 8)
    resumed = reporter()
    resumed.start(4)
    assert [line["step"] for line in lines()] == [1, 2, 3, 4]
    log_steps(resumed, 5, 7)
    assert [line["step"] for line in lines()] == [1, 2, 3, 4, 5, 6]
    assert {path.name for path in RUN.iterdir()} == {"metrics.jsonl"}


@pytest.mark.parametrize("unfinished", ['{"step": 3, "lo', '{"ste', "{", "3", "\x00\x00", '{"loss": 1.0}'])
def test_an_unfinished_line_is_dropped_with_a_warning(unfinished: str, caplog: pytest.LogCaptureFixture) -> None:
    log_steps(reporter(), 1, 3)
    with (RUN / "metrics.jsonl").open("a") as file:
        file.write(unfinished)
    report = reporter()
    report.start(5)
    report.log(6, {"loss": 2.0})
    assert [line["step"] for line in lines()] == [1, 2, 6]
    assert "an unfinished line of the interrupted run was dropped" in caplog.text


def test_a_process_that_is_not_the_main_one_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    report = reporter(active=False, tensorboard=True)
    report.start(0)
    report.log(1, {"loss": 0.5})
    report.say("hello")
    report.advance(2)
    report.stop()
    assert list(RUN.iterdir()) == [] and capsys.readouterr().out == ""


# ---------------------------------------------------------------------- the console


def test_a_pipe_gets_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    report = reporter()
    report.start(0)
    report.advance(1)
    report.log(1, {"loss": 0.51239, "tokens_per_second": 12345.6, "lr": 0.1})
    report.log(2, {"valid_loss": 0.25, "skipped_steps": 3.0})
    report.stop()
    first, second = capsys.readouterr().out.splitlines()
    assert first == "toy step 1/10 loss 0.5124  12,346 tokens/s"
    assert second == "toy step 2/10 loss 0.5124  valid loss 0.25  12,346 tokens/s  3 steps skipped"


def test_a_message_is_said_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """A path in brackets is no markup, and a long line is not broken."""
    message = "saved to [runs/a] " + "x" * 300
    reporter().say(message)
    assert capsys.readouterr().out == message + "\n"


def test_a_title_in_brackets_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    reporter(title="[bold]toy").log(1, {"loss": 1.0})
    assert capsys.readouterr().out == "[bold]toy step 1/10 loss 1\n"


def test_a_terminal_gets_a_progress_bar() -> None:
    report = reporter()
    shown = io.StringIO()
    report.console = Console(file=shown, force_terminal=True, width=100, _environ={})
    report.start(2)
    report.advance(3)
    report.log(4, {"loss": 0.5})
    report.say("a message above the bar")
    report.stop()
    text = shown.getvalue()
    assert "4/10" in text and "loss 0.5" in text and "━" in text
    assert "a message above the bar" in text
    assert "toy step 4/10" not in text, "no plain line beside the bar"
    assert lines() == [{"step": 4, "loss": 0.5}]


def test_a_report_can_be_opened_again_after_it_was_stopped() -> None:
    report = reporter()
    for step in (1, 2):
        report.start(step - 1)
        report.log(step, {"loss": 1.0})
        report.stop()
    report.stop()
    assert len(lines()) == 2


# ---------------------------------------------------------------------- tensorboard


def test_tensorboard_gets_the_numbers_and_a_resumed_run_takes_its_own_back() -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    report = reporter(tensorboard=True)
    report.start(0)
    log_steps(report, 1, 7)
    report.stop()
    resumed = reporter(tensorboard=True)
    resumed.start(4)
    resumed.log(5, {"loss": 100.0})
    resumed.stop()
    events = EventAccumulator(str(RUN / "tensorboard"))
    events.Reload()
    found = {event.step: event.value for event in events.Scalars("loss")}
    assert found == pytest.approx({1: 1.0, 2: 1 / 2, 3: 1 / 3, 4: 1 / 4, 5: 100.0})


def test_a_line_that_a_full_disk_cuts_off_is_taken_back(caplog: pytest.LogCaptureFixture) -> None:
    report = reporter()
    log_steps(report, 1, 3)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((RUN / "metrics.jsonl").stat().st_size + 5, most))
    try:
        report.log(3, {"loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    log_steps(report, 4, 6)
    assert "the numbers of step 3 could not be written" in caplog.text
    assert [line["step"] for line in lines()] == [1, 2, 4, 5]


def test_a_disk_that_is_full_ends_tensorboard_and_not_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch.utils.tensorboard import SummaryWriter

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    report = reporter(tensorboard=True)
    report.start(0)
    writers = [report._tensorboard]
    with monkeypatch.context() as disk:
        disk.setattr(SummaryWriter, "add_scalar", full)
        log_steps(report, 1, 4)
    report.stop()
    assert [line["step"] for line in lines()] == [1, 2, 3] and caplog.text.count("goes on without it") == 1
    report = reporter(tensorboard=True)
    report.start(3)
    writers.append(report._tensorboard)
    with monkeypatch.context() as disk:
        disk.setattr(SummaryWriter, "close", full)
        report.stop()
    assert "could not be written ([Errno 28]" in caplog.text
    for writer in writers:  # whose threads would write on, minutes later, into a folder that is gone
        writer.close()


def test_without_tensorboard_there_is_none() -> None:
    report = reporter(tensorboard=False)
    report.start(0)
    report.log(1, {"loss": 1.0})
    report.stop()
    assert not (RUN / "tensorboard").exists()


# ---------------------------------------------------------------------- trackers


class Notebook(GeneralTracker):
    """A tracker that remembers all that it is told."""

    name = "notebook"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.started = self.finished = 0
        self.hyper_parameters: dict[str, Any] = {}
        self.logged: list[tuple[int | None, dict[str, Any]]] = []

    @property
    def tracker(self) -> "Notebook":
        return self

    def start(self) -> None:
        self.started += 1

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.hyper_parameters = values

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        assert self.started > self.finished, "told something before its start or after its end"
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished += 1


def tracked(**options: Any) -> tuple[ToyTrainer, Notebook]:
    notebook = Notebook()
    return ToyTrainer(line_task(), trackers=[notebook], results_folder=RUN, log_every=2, **options), notebook


def test_a_tracker_gets_the_hyper_parameters_and_every_report_with_its_step() -> None:
    trainer, notebook = tracked(num_train_steps=4, wd=0.25, valid_frac=0.2)
    trainer.train()
    assert (notebook.started, notebook.finished) == (1, 1)
    told = notebook.hyper_parameters
    assert (told["wd"], told["batch_size"], told["num_train_steps"]) == (0.25, 4, 4)
    assert (told["dim"], told["width"]) == (3, 5), "the network's own arguments too"
    assert all(isinstance(value, (bool, int, float, str)) for value in told.values())
    reports = [{"step": step, **values} for step, values in notebook.logged]
    assert [report["step"] for report in reports] == [2, 4, 4]
    assert reports == lines(), "what metrics.jsonl holds"


def test_a_tracker_is_finished_also_when_training_raises() -> None:
    trainer, notebook = tracked(num_train_steps=4)

    def fail(logs: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trainer.train(fail)
    assert (notebook.started, notebook.finished) == (1, 1)
    assert trainer.accelerator.trackers == []


def test_trackers_asked_for_in_several_ways_are_all_told() -> None:
    """One that holds a lock cannot be copied, as a part of the hyper-parameters say."""
    through_accelerate, second = Notebook(), Notebook()
    through_accelerate.lock, second.name = threading.Lock(), "second"  # type: ignore[attr-defined]
    trainer = ToyTrainer(
        line_task(),
        trackers=[second],
        accelerate_kwargs={"log_with": through_accelerate},
        results_folder=RUN,
        num_train_steps=2,
    )
    trainer.train()
    assert [step for step, _ in through_accelerate.logged] == [step for step, _ in second.logged] == [2]


@pytest.mark.parametrize(
    "asked",
    [
        {"accelerate_kwargs": {"log_with": "wandb"}},
        {"accelerate_kwargs": {"log_with": ["wandb"]}, "use_wandb_tracking": True},
        {"trackers": "wandb"},
    ],
)
@pytest.mark.filterwarnings("ignore:.*no supported trackers are currently installed")
def test_a_tracker_that_is_not_installed_is_named_however_it_was_asked_for(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerate.tracking, "get_available_trackers", lambda: [])
    with pytest.raises(ValueError, match=r"not all of the trackers asked for \(wandb\) are installed"):
        ToyTrainer(line_task(), results_folder=RUN, **asked)


def test_a_second_training_starts_its_trackers_again() -> None:
    trainer, notebook = tracked(num_train_steps=2)
    trainer.train()
    trainer.train()
    assert (notebook.started, notebook.finished) == (2, 2)


@pytest.mark.parametrize("spelling", ["wandb_tracker", "wandb_tracking"])
def test_a_block_names_the_project_and_the_hyper_parameters(spelling: str) -> None:
    trainer, notebook = tracked(num_train_steps=2)
    with pytest.raises(ZeroDivisionError), getattr(trainer, spelling)("project", hps={"mine": 3, "none": None}):
        trainer.train()
        assert notebook.hyper_parameters == {"mine": 3}
        raise ZeroDivisionError
    assert notebook.started == notebook.finished == 1
    assert [step for step, _ in notebook.logged] == [2]


def test_a_block_without_a_tracker_says_how_to_get_one() -> None:
    trainer = ToyTrainer(line_task(), results_folder=RUN)
    with (
        pytest.raises(ValueError, match="has no tracker: build it with use_wandb_tracking=True"),
        trainer.wandb_tracker("project"),
    ):
        raise AssertionError("the block must not run")


def test_hyper_parameters_are_plain() -> None:
    values = {"a": None, "b": True, "c": (1, 2), "d": Path("x"), "e": 0.5, "f": {"g": 1}}
    assert plain_hyper_parameters(values) == {"b": True, "c": "(1, 2)", "d": "x", "e": 0.5, "f": "{'g': 1}"}
