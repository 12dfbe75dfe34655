"""Puts known defects back, one at a time, and looks whether the tests that stand against them fail.

    python tests/defects.py              all of them (about half an hour)
    python tests/defects.py D-R1 D-V2    those alone
    python tests/defects.py --write      writes the table of DEFECTS.md anew from the list

The list is in defect_list/, one file a family. Each defect is put into a copy of the package, so the working tree stays as
it is. Prints a line for each test; the exit code is 1 if a defect goes unnoticed.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from defect_list import audio, audiolm, codec, engine, image, mesh, muse, musiclm, voicebox
from defect_list.entry import Defect

DEFECTS = [
    *engine.DEFECTS,
    *image.DEFECTS,
    *muse.DEFECTS,
    *audio.DEFECTS,
    *codec.DEFECTS,
    *audiolm.DEFECTS,
    *mesh.DEFECTS,
    *voicebox.DEFECTS,
    *musiclm.DEFECTS,
]
ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "tests" / "DEFECTS.md"
HEADER = "| id | what went wrong | test |\n|---|---|---|\n"
TIMEOUT_SECONDS = 60  # of one test: some defects are hangs


class DidNotRunError(RuntimeError):
    """The tests neither passed nor failed."""


def table() -> str:
    """The defects as a table of DEFECTS.md, tests as links into this folder."""
    rows = []
    for defect in DEFECTS:
        tests = "<br>".join(f"[{name}]({path})" for path, _, name in (test.partition("::") for test in defect.tests))
        rows.append(f"| {defect.id} | {defect.what} | {tests} |\n")
    return HEADER + "".join(rows)


def put_back(defect: Defect, package: Path) -> None:
    """Puts a defect into the package at `package`."""
    for edit in defect.edits:
        path = package / edit.file
        text = path.read_text()
        assert text.count(edit.old) == 1, f"{defect.id}: the text to change is {text.count(edit.old)} times in {path}"
        text = text.replace(edit.old, edit.new)
        compile(text, path, "exec")  # a defect is no syntax error, which every test would notice
        path.write_text(text)


def failures(tests: Iterable[str], source: Path) -> dict[str, str]:
    """The tests that fail on the package below `source`, each with its first reason."""
    environment = _environment(source)
    nodes = [f"tests/{test}" for test in tests]
    options = ["-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", f"--timeout={TIMEOUT_SECONDS}"]
    command = [sys.executable, "-m", "pytest", *options, *nodes]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1):  # 1: some test failed; anything else means that they did not run
        raise DidNotRunError(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    found: dict[str, str] = {}
    for line in done.stdout.splitlines():
        outcome, _, rest = line.partition(" ")
        node, _, reason = rest.partition(" - ")
        name = node.partition("[")[0].removeprefix("tests/")
        if outcome in ("FAILED", "ERROR") and "::" in node:
            found.setdefault(name, reason)
    return found


def check_copy(source: Path) -> None:
    """Raises unless the tests would import the package below `source`."""
    command = [sys.executable, "-c", "import helicon; print(helicon.__file__)"]
    done = subprocess.run(command, cwd=ROOT, env=_environment(source), capture_output=True, text=True, check=True)
    if not Path(done.stdout.strip()).is_relative_to(source):
        raise RuntimeError(f"the tests would import {done.stdout.strip()}, and not the copy in {source}")


def _environment(source: Path) -> dict[str, str]:
    # Without bytecode: a file that is changed twice within a second would be taken for the one before.
    own = {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "240"}
    return {**os.environ, **own}


def look(defects: Sequence[Defect], source: Path) -> int:
    """Prints what each test did; returns how many did not notice their defect."""
    package = source / "helicon"
    tests = sorted({test for defect in defects for test in defect.tests})
    already = failures(tests, source)
    if already:
        raise RuntimeError(f"these fail without any defect: {already}")
    say(f"{len(tests)} tests pass on the package as it is; {len(defects)} defects to put back\n")
    say("id | test | failed as it should")
    survived = 0
    for defect in defects:
        kept = {edit.file: (package / edit.file).read_text() for edit in defect.edits}
        try:
            put_back(defect, package)
            failed = failures(defect.tests, source)
        except DidNotRunError as error:
            failed = {}
            say(str(error))
        finally:
            for file, text in kept.items():
                (package / file).write_text(text)
        for test in defect.tests:
            survived += test not in failed
            say(
                f"{defect.id} | {test} | " + (f"yes: {failed[test][:120]}" if test in failed else f"NO ({defect.what})")
            )
    return survived


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ids", nargs="*", metavar="ID", help="defects to put back; all by default")
    parser.add_argument("--write", action="store_true", help="write the table of DEFECTS.md from the list")
    arguments = parser.parse_args()
    if arguments.write:
        text = PAGE.read_text()
        PAGE.write_text(text[: text.index(HEADER)] + table())
        return 0
    known = {defect.id for defect in DEFECTS}
    unknown = sorted(set(arguments.ids) - known)
    if unknown:
        parser.error(f"no defect {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    chosen = [defect for defect in DEFECTS if not arguments.ids or defect.id in arguments.ids]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder).resolve() / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        check_copy(source)
        survived = look(chosen, source)
    say(f"\n{survived} tests did not notice their defect" if survived else "\nevery defect was noticed by every test")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
