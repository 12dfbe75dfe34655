"""On two real gloo processes, every rank has the state of one process on the whole batch, and the same gradients on average."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

Outcome = dict[str, dict[str, Tensor]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Outcome, Outcome]:
    """Of one process, and of both ranks of two."""
    folder = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).with_name("two_processes.py")
    processes = [
        subprocess.Popen([sys.executable, script, rank, world, folder], stderr=subprocess.PIPE, text=True)
        for rank, world in (("0", "1"), ("0", "2"), ("1", "2"))
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    alone, first, second = (torch.load(folder / f"{name}.pt") for name in ("0-of-1", "0-of-2", "1-of-2"))
    return alone, first, second


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["averages", "cosine", "k-means and revival", "more dead codes than rows", "residual", "shared"],
)
def test_ranks_agree_with_each_other_and_with_one_process(
    outcomes: tuple[Outcome, Outcome, Outcome], name: str
) -> None:
    alone, first, second = (outcome[name] for outcome in outcomes)
    if name == "residual":  # each rank drops levels of its own, from the loss and not from the statistics
        for outcome in (alone, first, second):
            del outcome["loss"]
    assert any("codebook" in key for key in first)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_lookup_free_entropy_is_of_all_ranks_rows(outcomes: tuple[Outcome, Outcome, Outcome]) -> None:
    """The mean of the ranks' losses and gradients is that of one process, with unequal numbers of rows."""
    alone, first, second = (outcome["lookup-free"] for outcome in outcomes)
    assert alone["gradient.project_in.weight"].abs().max() > 1e-3
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, alone, rtol=1e-5, atol=1e-6)
