"""Shared by all tests: GPU tests skip elsewhere, and every test runs in a folder of its own, on one thread."""

import gc
import importlib
import os
from itertools import islice
from pathlib import Path

import pytest

import typecheck

typecheck.install()

# What checked modules import. From within one it would be compiled anew each time: jaxtyping's hook looks for bytecode under
# names of its own, for all that is imported meanwhile.
OUTSIDE = (
    "accelerate",
    "huggingface_hub.hf_api",
    "PIL.Image",
    "rich.progress",
    "torch._dynamo",
    "torch.distributed.tensor",
    "yaml",
)


def pytest_collectstart() -> None:
    gc.disable()  # while everything is imported, nothing goes away
    for name in OUTSIDE:
        importlib.import_module(name)


def pytest_collection_finish() -> None:
    gc.freeze()  # later collections need not look at what stays anyway
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    items[:] = slow_first(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def slow_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """The tests in as many equal pieces as there are workers, each of which begins with its share of the slow ones: what is left over
    at the end, for the workers to steal from each other, is short. The slow tests of a file, which share what they trained, stay together."""
    slow = [item for item in items if item.get_closest_marker("slow")]
    files = list(dict.fromkeys(item.path for item in slow))
    shares = [[item for item in slow if files.index(item.path) % workers == worker] for worker in range(workers)]
    rest = iter([item for item in items if item not in set(slow)])
    ordered: list[pytest.Item] = []
    for worker, share in enumerate(shares):
        end = len(items) * (worker + 1) // workers
        ordered += share
        ordered += islice(rest, max(0, end - len(ordered)))
    return [*ordered, *rest]


def pytest_runtest_setup() -> None:
    import torch

    typecheck.begin_test()
    torch.manual_seed(0)  # whatever ran before


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
