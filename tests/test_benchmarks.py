"""Every benchmark script runs, at a size at which its numbers mean nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
SMALL = {
    "decode": ["--tiny"],
    "vqgan": ["--tiny", "--repeats", "1"],
    "engine_overhead": ["--blocks", "1", "--steps", "10"],
    "lfq_entropy": ["--bits", "4", "--tokens", "8", "--repeats", "1"],
}


def test_every_script_is_in_the_list() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} - {"report"} == SMALL.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_prints_a_table_and_writes_its_numbers(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / f"{name}.py"), *SMALL[name], "--out", str(tmp_path / "out.json")]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["rows"] and report["hardware"]["torch"] and "|---|" in done.stdout
