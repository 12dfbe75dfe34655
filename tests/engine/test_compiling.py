"""Compiled networks compute the same, and survive a compiler that fails."""

import logging
import os
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch import nn

from helicon.engine.compiling import compile_in_place

pytestmark = [
    pytest.mark.slow,  # loads the compiler
    pytest.mark.filterwarnings(
        "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
    ),  # torch's own import
]


def with_analysis() -> AbstractContextManager[None]:
    """Of tiles, by the compiler: switched on, and afterwards as it was."""
    from torch._inductor import config

    return config.patch({"triton.coalesce_tiling_analysis": True})


class Waves(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.project = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(x).sin() * self.scale


def test_a_compiled_network_computes_the_same() -> None:
    network, x = Waves(2.0), torch.randn(2, 5)
    expected = network(x)
    compile_in_place(network)
    torch.testing.assert_close(network(x), expected)
    assert network._compiled_call_impl is not None


def test_a_network_the_compiler_fails_at_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    from torch._inductor.graph import GraphLowering

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("no such tiling")

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # in which nothing is compiled yet
    monkeypatch.setattr(GraphLowering, "compile_to_module", fail)
    network, x = Waves(3.0), torch.randn(2, 5)
    expected = network(x)
    compile_in_place(network)
    with with_analysis(), caplog.at_level(logging.WARNING):
        outputs = [network(x), network(x)]
    assert all(torch.equal(output, expected) for output in outputs)
    outputs[0].sum().backward()
    assert network.project.weight.grad is not None
    assert caplog.text.count("Waves could not be compiled") == 1 and "no such tiling" in caplog.text


def test_a_compiler_that_fails_at_its_analysis_of_tiles_goes_without_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    compile_to_module = GraphLowering.compile_to_module

    def fail_with_analysis(self: GraphLowering) -> object:
        assert not config.triton.coalesce_tiling_analysis
        return compile_to_module(self)

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(GraphLowering, "compile_to_module", fail_with_analysis)
    network, x = Waves(5.0), torch.randn(2, 5)
    expected = network(x)
    compile_in_place(network)
    with with_analysis(), caplog.at_level(logging.WARNING):
        torch.testing.assert_close(network(x), expected)
    assert network._compiled_call_impl is not None and not caplog.text


def test_a_mistake_of_the_caller_is_not_taken_for_the_compiler_s() -> None:
    network = Waves(4.0)
    compile_in_place(network)
    with pytest.raises(RuntimeError):
        network(torch.randn(2, 7))
    assert network._compiled_call_impl is not None
    assert network(torch.randn(2, 5)).shape == (2, 4)


def test_a_process_that_has_loaded_nothing_else_can_compile() -> None:
    code = (
        "from torch import nn\nfrom helicon.engine.compiling import compile_in_place\n"
        "network = nn.Linear(2, 2)\ncompile_in_place(network)\nassert network._compiled_call_impl is not None"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


LENGTHS_VARY = """
import torch
from helicon.engine.compiling import compile_in_place
from helicon.nn.transformer import Transformer

torch.set_num_threads(1)
torch.manual_seed(0)
network = Transformer(8, 1, heads=2, dim_head=4)
compile_in_place(network)
for length in (6, 9, 7, 6, 11):
    x = torch.randn(2, length, 8)
    mask = torch.arange(length) < torch.tensor([[length], [length // 2]])
    found = []
    for run in (network, network._call_impl):  # compiled, and as it is
        given = x.clone().requires_grad_()
        outputs = run(given, mask=mask)
        outputs.square().sum().backward()
        found.append((outputs, given.grad))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
"""


def test_compiled_networks_learn_from_batches_of_any_length(tmp_path: Path) -> None:
    """In a process of its own, where annotations are not checked, and where nothing is compiled yet."""
    nothing_compiled = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", LENGTHS_VARY], env=nothing_compiled, capture_output=True, text=True, timeout=500
    )
    assert run.returncode == 0, run.stderr[-2000:]


NULL_KEYS = """
import torch
from einops import repeat
from torch import nn
from helicon.engine.compiling import compile_in_place

class Keys(nn.Module):
    def __init__(self):
        super().__init__()
        self.null = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return repeat(x, "d -> n d", n=2) + repeat(self.null, "d -> n d", n=2)

network = Keys()
compile_in_place(network)
network(torch.zeros(3))
torch._dynamo.config.error_on_recompile = True
network(torch.zeros(3))
assert network._compiled_call_impl is not None, "compiled again, for nothing new"
"""


def test_a_network_that_rearranges_its_parameters_is_compiled_once() -> None:
    """In a process of its own, where einops has met nothing yet."""
    run = subprocess.run([sys.executable, "-c", NULL_KEYS], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
