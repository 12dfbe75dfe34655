"""Running a piece of a test in a forked process, which may be killed or limited without harm to the others."""

import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import torch


def fork() -> int:
    """`os.fork`, after which the child has a pool of threads again before two of its threads ask for one at once."""
    child = os.fork()
    if not child:
        torch.set_num_threads(torch.get_num_threads())
    return child


def start(work: Callable[[], object], said: str = os.devnull) -> int:
    """Runs `work` in a child, which writes what it says to a file. Returns the process number."""
    child = fork()
    if child:
        return child
    code = 1
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
    try:
        sys.stdout = Path(said).open("w", buffering=1)  # noqa: SIM115 (until the process ends)
        work()
        code = 0
    except KeyboardInterrupt:
        code = 130
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:  # noqa: BLE001 (a child must never return into pytest)
        traceback.print_exc()
    finally:
        os._exit(code)


def finish(child: int) -> int:
    """Waits; the exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(work: Callable[[], object]) -> int:
    return finish(start(work))


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the child did not get there"
        time.sleep(0.005)


def kill(child: int, number: int = signal.SIGKILL) -> int:
    os.kill(child, number)
    return finish(child)


def run_script(script: Path, *arguments: str | Path) -> CompletedProcess[str]:
    """What `python script arguments` says and returns, without the seconds in which Python imports what is already here."""
    command = [str(script), *map(str, arguments)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = fork()
        if not child:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.stdout, sys.stderr = out, err
            os._exit(_run_here(command))
        code = finish(child)
        said = [(stream.seek(0), stream.read())[1] for stream in (out, err)]
    return CompletedProcess(command, code, *said)


def _run_here(command: list[str]) -> int:
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)  # noqa: T201
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # noqa: BLE001 (a child must never return into pytest)
        traceback.print_exc()
        return 1
    else:
        return 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
