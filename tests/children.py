"""Running a piece of a test in a forked process, which may be killed or limited without harm to the others."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path


def start(work: Callable[[], object], said: str = os.devnull) -> int:
    """Runs `work` in a child, which writes what it says to a file. Returns the process number."""
    child = os.fork()
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
