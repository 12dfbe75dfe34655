"""Checkpoints are whole or not there: damage is found, faults and kills at any moment harm nothing."""

import errno
import itertools
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import children
from helicon.engine import checkpoint
from helicon.engine.checkpoint import (
    BackgroundWriter,
    DamagedCheckpoint,
    Loaded,
    Snapshot,
    checkpoints,
    newest_whole,
    prune,
    read_manifest,
    resolve,
    verify,
    write,
)
from helicon.nn.network import load_state
from toys import Line

RUN = Path("run")


def folder(step: int, run: Path = RUN) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def snapshot(step: int, value: float | None = None, **facts: Any) -> Snapshot:
    """A small checkpoint whose weights tell which one it is."""
    tensors = {
        "model.safetensors": {"w": torch.full((3, 2), float(step) if value is None else value)},
        "ema.safetensors": {"w": torch.ones(3, 2)},
        "state/optimizer-model.safetensors": {"w/exp_avg": torch.zeros(3, 2)},
    }
    documents = {"config.json": {"class": "a:B", "arguments": {}}, "state/trainer.json": {"step": step}}
    return Snapshot(step, tensors, documents, facts)


def save(step: int, run: Path = RUN, **facts: Any) -> Path:
    write(snapshot(step, **facts), folder(step, run))
    return folder(step, run)


def weight(path: Path) -> float:
    return float(load_state(path / "model.safetensors")["w"][0, 0])


def hidden(run: Path = RUN) -> list[Path]:
    return list((run / "checkpoints").glob(".*"))


# ---------------------------------------------------------------------- what is written is what is read


def test_a_checkpoint_is_read_back_as_it_was_written() -> None:
    path = save(7, valid_loss=0.25, lineage={"codec": {"path": "../x"}})
    manifest = verify(path)
    assert (manifest["step"], manifest["valid_loss"], manifest["format"]) == (7, 0.25, 1)
    files = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}
    assert files == set(manifest["files"]) | {"manifest.json"}
    loaded = Loaded.open(path)
    assert torch.equal(loaded.weights["w"], torch.full((3, 2), 7.0))
    assert loaded.averaged is not None and torch.equal(loaded.averaged["w"], torch.ones(3, 2))
    assert loaded.document("state/trainer.json") == {"step": 7}
    assert not loaded.has("state/loss_scale.safetensors")
    assert not hidden()


def test_files_that_are_already_written_are_taken_in() -> None:
    shards = RUN / "checkpoints" / ".step-00000004.shards"
    shards.mkdir(parents=True)
    (shards / "rank-00000.json").write_text("{}")
    plain = snapshot(4)
    write(Snapshot(4, plain.tensors, plain.documents, {}, shards), folder(4))
    assert "state/shards/rank-00000.json" in verify(folder(4))["files"]
    assert not shards.exists()


def test_a_folder_of_the_same_name_is_replaced() -> None:
    save(3)
    (folder(3) / "stray.txt").write_text("of the old one")
    write(snapshot(3, value=-1.0), folder(3))
    verify(folder(3))
    assert weight(folder(3)) == -1.0
    assert not (folder(3) / "stray.txt").exists() and not hidden()


def test_every_file_and_folder_is_on_the_disk_before_the_name_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut, a name without the content behind it would be a checkpoint that only looks whole."""
    done: list[tuple[str, bool]] = []  # what was flushed, and whether the checkpoint had its name by then
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        name = str(Path(f"/proc/self/fd/{descriptor}").readlink()).replace(".step-00000003.writing", "step-00000003")
        done.append((os.path.relpath(name), folder(3).exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    save(3)
    inside = {str(path) for path in [folder(3), *folder(3).rglob("*")]}
    assert {name for name, is_named in done if not is_named} == inside
    assert [name for name, is_named in done if is_named] == ["run/checkpoints"], "and then the name itself"


# ---------------------------------------------------------------------- damage


def every_file() -> list[str]:
    return [*snapshot(0).tensors, *snapshot(0).documents, "manifest.json"]


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.parametrize("damage", ["truncated", "emptied", "flipped", "missing"])
@pytest.mark.parametrize("name", every_file())
def test_damage_to_any_file_is_found_and_the_checkpoint_before_is_used(
    name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(3)
    path = save(6) / name
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "emptied":
        path.write_bytes(b"")
    elif damage == "flipped":
        flip(path, 8 * (path.stat().st_size // 2) + 3)
    else:
        path.unlink()
    is_sound = name == "manifest.json" and damage == "truncated"  # only the newline at its end is gone
    if not is_sound:
        with pytest.raises(DamagedCheckpoint, match=Path(name).name):
            verify(folder(6))
    assert newest_whole(RUN) == folder(6 if is_sound else 3)
    assert is_sound or "trying the one before" in caplog.text
    assert resolve(RUN) == folder(6 if is_sound else 3)


def test_no_bit_of_the_manifest_can_change_unseen() -> None:
    """The manifest vouches for the others, and for itself: a flipped digit of the loss or the format is no valid one."""
    write(Snapshot(3, {}, {"config.json": {}}, {"valid_loss": 0.5}), folder(3))
    path = folder(3) / "manifest.json"
    content = path.read_bytes()
    for place in range(len(content) - 1):  # all but the newline at the end
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        with pytest.raises(DamagedCheckpoint, match=r"manifest\.json is damaged"):
            read_manifest(folder(3))
    path.write_bytes(content)
    read_manifest(folder(3))


@pytest.mark.parametrize("content", ["[]", "3", '"x"', "null", '{"files": {}}', '{"sha256": 1}'])
def test_a_manifest_of_another_shape_is_damage(content: str) -> None:
    (save(3) / "manifest.json").write_text(content)
    with pytest.raises(DamagedCheckpoint):
        verify(folder(3))


def test_what_a_kill_left_half_written_is_passed_over_and_cleared_away() -> None:
    save(3)
    save(6).rename(folder(6).with_name(".step-00000006.writing"))
    (folder(6).with_name(".step-00000006.writing") / "manifest.json").unlink()
    assert newest_whole(RUN) == folder(3)
    assert checkpoints(RUN) == [folder(3)]
    writer = BackgroundWriter()
    writer.submit(snapshot(7), RUN, keep_last=3)
    writer.finish()
    assert checkpoints(RUN) == [folder(3), folder(7)] and not hidden()


def test_a_folder_without_a_manifest_was_never_finished(caplog: pytest.LogCaptureFixture) -> None:
    save(3)
    (save(6) / "manifest.json").unlink()
    assert newest_whole(RUN) == folder(3)
    assert "was never finished; trying the one before" in caplog.text


def test_nothing_whole_is_none() -> None:
    assert newest_whole(RUN) is None
    (save(3) / "config.json").unlink()
    assert newest_whole(RUN) is None


def test_a_later_format_is_refused_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    save(3)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "FORMAT", 2)
        save(6)
    for read in (verify, newest_whole_of):
        with pytest.raises(ValueError, match=r"is in checkpoint format 2, .* reads up to 1: upgrade Helicon") as caught:
            read(folder(6))
        assert not isinstance(caught.value, DamagedCheckpoint)


def newest_whole_of(path: Path) -> Path | None:
    return newest_whole(path.parents[1])


# ---------------------------------------------------------------------- faults and kills while writing

OPERATIONS = [(Path, "mkdir"), (Path, "write_text"), (Path, "rename"), (os, "fsync")]
OPERATIONS += [(checkpoint, "save_state"), (checkpoint, "sha256")]


def tiny(step: int, value: float) -> Snapshot:
    """As few files as possible, for the tests that try every operation on them."""
    return Snapshot(step, {"model.safetensors": {"w": torch.full((1, 1), value)}}, {})


@contextmanager
def fault_at(count: int, fault: Callable[[], object], after: bool = False) -> Iterator[None]:
    """The `count`-th of the file operations of a write calls `fault`, before it happens or after."""
    calls = itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in OPERATIONS:
            patch.setattr(owner, name, _faulty(getattr(owner, name), calls, count, fault, after))
        yield


def _faulty(
    original: Callable[..., Any], calls: Iterator[int], count: int, fault: Callable[[], object], after: bool
) -> Callable[..., Any]:
    def operation(*args: Any, **kwargs: Any) -> Any:
        is_due = next(calls) == count
        if is_due and not after:
            fault()
        result = original(*args, **kwargs)
        if is_due and after:
            fault()
        return result

    return operation


def disk_full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("replaces", [False, True])
def test_a_fault_at_every_step_leaves_the_old_or_the_new_one_whole_and_nothing_else(replaces: bool) -> None:
    step = 3 if replaces else 6
    for count in itertools.count():
        run = Path(f"run{count}")
        old = folder(3, run)
        write(tiny(3, 3.0), old)
        try:
            with fault_at(count, disk_full):
                write(tiny(step, -1.0), folder(step, run))
        except OSError as error:
            assert error.errno == errno.ENOSPC
        else:
            break
        newest = newest_whole(run)
        assert newest is not None
        for path in checkpoints(run):
            verify(path)
        assert weight(newest) in (3.0, -1.0)
        assert replaces or weight(old) == 3.0
        assert not hidden(run), "no temporary is left behind"
    assert count > 10, "every operation has been tried"
    assert weight(folder(step, run)) == -1.0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("after", [False, True])
def test_a_kill_while_a_checkpoint_is_replaced_leaves_one_of_the_two(after: bool) -> None:
    """Also between the two renames, when no folder of that name is there."""
    for count in itertools.count():
        run = Path(f"run{count}")
        write(tiny(3, 3.0), folder(3, run))

        def work(run: Path = run, count: int = count) -> None:
            with fault_at(count, die, after):
                write(tiny(3, -1.0), folder(3, run))

        outcome = children.run(work)
        newest = newest_whole(run)
        assert newest is not None and weight(newest) in (3.0, -1.0)
        assert weight(resolve(folder(3, run))) in (3.0, -1.0)
        if outcome == 0:
            break
        assert outcome == -signal.SIGKILL
        write(tiny(3, -2.0), folder(3, run))
        assert weight(resolve(folder(3, run))) == -2.0 and not hidden(run), "and the next write clears up"
    assert count > 10, "every operation has been tried"


def test_a_file_that_grows_past_the_limit_is_reported_and_the_checkpoint_before_stays() -> None:
    """A real limit of the operating system, as a full disk or a quota would be."""
    save(3)
    large = Snapshot(6, {"model.safetensors": {"w": torch.zeros(100_000)}}, {})

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
        writer = BackgroundWriter()
        writer.submit(large, RUN, keep_last=1)
        try:
            writer.finish()
        except OSError as error:
            Path("said.txt").write_text(str(error))

    assert children.run(work) == 0
    said = Path("said.txt").read_text()
    assert "the last checkpoint could not be written" in said
    assert "File too large" in said and "free some space and resume" in said
    assert newest_whole(RUN) == folder(3) and checkpoints(RUN) == [folder(3)] and not hidden()


# ---------------------------------------------------------------------- keeping the last and the best


def test_pruning_keeps_the_last_and_the_best() -> None:
    for step, loss in ((1, 0.9), (2, 0.4), (3, 0.7), (4, 0.6), (5, 0.5)):
        save(step, valid_loss=loss)
    prune(RUN, 2, folder(5))
    assert checkpoints(RUN) == [folder(2), folder(4), folder(5)]
    save(6, valid_loss=0.1)
    prune(RUN, 2, folder(6))
    assert checkpoints(RUN) == [folder(5), folder(6)]
    assert not hidden()


def test_pruning_without_validation_keeps_the_last_alone() -> None:
    for step in range(1, 5):
        save(step, valid_loss=None)
    prune(RUN, 1, folder(4))
    assert checkpoints(RUN) == [folder(4)]


def test_keep_last_0_keeps_all() -> None:
    for step in range(1, 6):
        save(step, valid_loss=0.5)
    prune(RUN, 0, folder(5))
    assert len(checkpoints(RUN)) == 5


def test_a_loss_that_is_not_a_number_is_never_the_best() -> None:
    for step, loss in ((1, float("nan")), (2, 0.5), (3, float("nan")), (4, float("-inf")), (5, float("nan"))):
        save(step, valid_loss=loss)
    prune(RUN, 1, folder(5))
    assert checkpoints(RUN) == [folder(2), folder(5)]


def test_best_means_the_whole_checkpoint_of_the_lowest_validation_loss(caplog: pytest.LogCaptureFixture) -> None:
    for step, loss in ((1, 0.2), (2, 0.4), (3, None), (4, float("nan")), (5, 0.5)):
        save(step, valid_loss=loss)
    assert resolve(RUN / "best") == folder(1) and resolve(RUN) == folder(5)
    (folder(1) / "model.safetensors").write_bytes(b"")
    assert resolve(RUN / "best") == folder(2) and "is damaged" in caplog.text
    (RUN / "best").mkdir()  # a user's own folder of that name is what it is
    with pytest.raises(FileNotFoundError, match="is neither a run, a checkpoint nor a saved network"):
        resolve(RUN / "best")


def test_a_run_without_validation_has_no_best_checkpoint() -> None:
    save(1, valid_loss=None)
    with pytest.raises(FileNotFoundError, match="has no whole checkpoint with a validation loss: run means its newest"):
        resolve(RUN / "best")


def test_pruning_never_deletes_what_was_just_written() -> None:
    """A run that fell back from two damaged checkpoints and is stopped early saves a step that lies before them."""
    for step in (3, 6, 9):
        save(step)
    for step in (6, 9):
        (folder(step) / "model.safetensors").write_bytes(b"")
    save(4)
    prune(RUN, 2, folder(4))
    assert newest_whole(RUN) == folder(4)


def test_a_damaged_manifest_does_not_stop_the_pruning() -> None:
    for step in (1, 2, 3):
        save(step, valid_loss=0.1 * step)
    (folder(1) / "manifest.json").write_text("{")
    prune(RUN, 1, folder(3))
    assert checkpoints(RUN) == [folder(2), folder(3)]


# ---------------------------------------------------------------------- what a user's path means


def test_a_file_of_another_package_is_refused_in_one_sentence() -> None:
    Path("vae.pt").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"vae\.pt is a file, and Helicon loads folders .* never unpickled"):
        resolve(Path("vae.pt"))


def test_a_path_that_is_not_there_is_named() -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint or run folder at nowhere/step-1"):
        resolve(Path("nowhere/step-1"))


def test_an_empty_folder_is_no_checkpoint() -> None:
    Path("empty").mkdir()
    with pytest.raises(
        FileNotFoundError, match=r"empty is neither a run, a checkpoint nor a saved network.*config\.json"
    ):
        resolve(Path("empty"))


def test_a_run_without_a_checkpoint_says_so() -> None:
    (RUN / "checkpoints").mkdir(parents=True)
    with pytest.raises(
        FileNotFoundError, match=r"the run run has no whole checkpoint .it was stopped before the first"
    ):
        resolve(RUN)
    (save(3) / "model.safetensors").write_bytes(b"")
    with pytest.raises(
        FileNotFoundError, match=r"the run run has no whole checkpoint .none of its 1 is whole: put one"
    ):
        resolve(RUN)


def test_a_damaged_checkpoint_named_by_the_user_is_refused_not_replaced() -> None:
    save(3)
    flip(save(6) / "model.safetensors", 900)
    with pytest.raises(
        DamagedCheckpoint, match=r"step-00000006 is damaged: the content of model\.safetensors has changed"
    ):
        resolve(folder(6))


def test_a_run_a_checkpoint_and_a_saved_network_are_found() -> None:
    save(3)
    Line().save_pretrained("line")
    assert resolve(RUN) == resolve(folder(3)) == folder(3)
    assert resolve(Path("line")) == Path("line")


def test_a_saved_network_cannot_be_resumed_and_says_what_to_do() -> None:
    Line().save_pretrained("line")
    with pytest.raises(
        ValueError, match="network without training state: start from its weights with init_from='line'"
    ):
        Loaded.open(Path("line"))


# ---------------------------------------------------------------------- writing in the background


def test_a_write_that_fails_is_reported_and_the_next_one_works(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = BackgroundWriter()
    Path("blocked").write_text("a file where the run's folder should be")
    writer.submit(snapshot(2), Path("blocked"), keep_last=3)
    writer.wait()
    assert isinstance(writer.failure, OSError)
    assert "step 2 could not be saved" in caplog.text and "; there is no checkpoint before it" in caplog.text
    assert "are whole" not in caplog.text
    with pytest.raises(OSError, match=r"the last checkpoint could not be written .*free some space and resume"):
        writer.finish()
    writer.submit(snapshot(3), RUN, keep_last=3)
    writer.finish()
    assert newest_whole(RUN) == folder(3)
    with monkeypatch.context() as full:
        full.setattr(checkpoint, "write", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        writer.submit(snapshot(4), RUN, keep_last=3)
        writer.wait()
    assert "step 4 could not be saved" in caplog.text and "; the checkpoints before it are whole" in caplog.text


def test_submitting_waits_for_the_write_before_and_prunes() -> None:
    writer = BackgroundWriter()
    for step in range(1, 6):
        writer.submit(snapshot(step), RUN, keep_last=2)
    writer.finish()
    assert checkpoints(RUN) == [folder(4), folder(5)]
    writer.finish()  # nothing under way: nothing to wait for


def test_a_script_that_changes_its_folder_does_not_take_the_checkpoint_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def write_after_a_change(snapshot: Snapshot, folder: Path) -> None:
        os.chdir(tmp_path / "there")
        write(snapshot, folder)

    monkeypatch.setattr(checkpoint, "write", write_after_a_change)
    writer = BackgroundWriter()
    writer.submit(snapshot(4), Path("run"), keep_last=3)
    writer.finish()
    assert [path.name for path in checkpoints(tmp_path / "here" / "run")] == ["step-00000004"]
    assert not any((tmp_path / "there").iterdir())


def test_what_cannot_be_deleted_is_a_warning_not_a_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = BackgroundWriter()
    writer.submit(snapshot(1), RUN, keep_last=1)
    writer.finish()
    monkeypatch.setattr(checkpoint, "prune", lambda *_: disk_full())
    writer.submit(snapshot(2), RUN, keep_last=1)
    writer.finish()
    assert f"old checkpoints of {RUN.absolute()} could not be deleted" in caplog.text
    assert newest_whole(RUN) == folder(2)
