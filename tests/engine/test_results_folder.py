"""What a trainer promises about the folder of a run: whose it is, what is never deleted, and what may be."""

import errno
from pathlib import Path
from typing import Any

import pytest

from helicon.engine import checkpoint
from helicon.engine.checkpoint import checkpoints, read_manifest, resolve
from toys import ToyTrainer, line_task


def test_a_folder_that_holds_something_is_neither_wiped_nor_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a trainer must never prompt"))
    Path("run").mkdir()
    Path("run/thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match=r"resume=True.*force_clear_prev_results=True"):
        ToyTrainer(line_task(), results_folder="run")
    assert Path("run/thesis.txt").read_text() == "years of work"
    with pytest.raises(FileExistsError, match=r"holds thesis.txt, which no run has written"):
        ToyTrainer(line_task(), results_folder="run", force_clear_prev_results=True)
    assert Path("run/thesis.txt").read_text() == "years of work"


def test_an_earlier_run_is_cleared_when_asked() -> None:
    ToyTrainer(line_task(), results_folder="run", save_results_every=2).train()
    ToyTrainer(line_task(), results_folder="run", force_clear_prev_results=True)
    assert not any(Path("run").iterdir())


def test_the_folder_of_a_run_that_never_began_is_free() -> None:
    """The mistake is found at the first batch, and the command that puts it right needs no other folder."""
    Path("run").mkdir()
    for name in ("recipe.yaml", ".lock", "bad_files.txt"):
        Path("run", name).write_text("")
    trainer = ToyTrainer(line_task(), results_folder="run", num_train_steps=2)
    with trainer.session(), pytest.raises(BlockingIOError, match="another process is training in run"):
        ToyTrainer(line_task(), results_folder="run")
    trainer.train()
    with pytest.raises(FileExistsError, match="already holds something"):
        ToyTrainer(line_task(), results_folder="run")


def test_save_never_replaces_what_is_no_checkpoint() -> None:
    trainer = ToyTrainer(line_task(), results_folder="run", num_train_steps=2)
    trainer.train()
    Path("pictures").mkdir()
    Path("pictures/cat.png").write_text("a cat")
    for path in ("pictures", "run", "pictures/cat.png"):
        with pytest.raises(ValueError, match="holds something that is no checkpoint"):
            trainer.save(path)
    assert Path("pictures/cat.png").read_text() == "a cat" and checkpoints(Path("run"))
    trainer.save("fresh")
    trainer.save("fresh")  # a checkpoint may be replaced


def test_two_processes_do_not_train_in_one_folder() -> None:
    trainer = ToyTrainer(line_task(), results_folder="run", num_train_steps=3)
    other = ToyTrainer(line_task(), results_folder="run", num_train_steps=3, resume=True)
    with trainer.session(), pytest.raises(BlockingIOError, match="another process is training in run"):
        other.train()
    other.train()


def test_of_two_trainers_made_for_one_folder_the_second_does_not_overwrite_the_first() -> None:
    """Neither had written anything when the other was made."""
    first, second = (ToyTrainer(line_task(), num_train_steps=2) for _ in range(2))
    first.train()
    before = Path("runs/toy/metrics.jsonl").read_bytes(), read_manifest(checkpoints(Path("runs/toy"))[0])
    for begin in (second.train, second.train_step):
        with pytest.raises(FileExistsError, match=r"another trainer has trained in runs/toy .* its own results_folder"):
            begin()
    assert (Path("runs/toy/metrics.jsonl").read_bytes(), read_manifest(checkpoints(Path("runs/toy"))[0])) == before
    first.train()  # which may go on, for what is there is its own


def test_a_folder_that_is_a_link_is_cleared_and_stays_one() -> None:
    Path("elsewhere").mkdir()
    Path("run").symlink_to("elsewhere")
    ToyTrainer(line_task(), results_folder="run", num_train_steps=1).train()
    ToyTrainer(line_task(), results_folder="run", force_clear_prev_results=True)
    assert Path("run").is_symlink() and not checkpoints(Path("run"))


def test_a_path_below_the_home_folder_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    ToyTrainer(line_task(), results_folder="~/run", num_train_steps=1).train()
    assert checkpoints(tmp_path / "run") and not Path("~").exists()
    assert resolve(Path("~/run")) == checkpoints(tmp_path / "run")[0]


def test_a_file_is_no_results_folder() -> None:
    Path("run").touch()
    with pytest.raises(NotADirectoryError, match="run is a file, not a folder: choose another results_folder"):
        ToyTrainer(line_task(), results_folder="run")


def test_a_run_that_goes_on_is_not_cleared_from_under_it() -> None:
    trainer = ToyTrainer(line_task(), results_folder="run", num_train_steps=3)
    with trainer.session():
        trainer.train_step()
        with pytest.raises(BlockingIOError, match="another process is training in run"):
            ToyTrainer(line_task(), results_folder="run", force_clear_prev_results=True)
        trainer.train_step()
        trainer.train_step()
    assert checkpoints(Path("run"))
    ToyTrainer(line_task(), results_folder="run", force_clear_prev_results=True)
    assert not any(Path("run").iterdir())


def test_a_file_system_without_locks_is_a_warning_and_not_a_refusal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(checkpoint.fcntl, "flock", flock)
    ToyTrainer(line_task(), results_folder="run", num_train_steps=2).train()
    assert "run cannot be locked ([Errno 38] Function not implemented)" in caplog.text
    assert checkpoints(Path("run"))
