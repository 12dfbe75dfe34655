"""On a GPU: a training step never makes the host wait, can be captured in a CUDA graph, and does what the CPU does."""

from collections.abc import Iterator
from copy import deepcopy

import pytest
import torch
from torch import nn

from helicon.quantize import ResidualQuantizer
from quantize.builders import BUILD, RANDOM

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _exact_products() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("name", BUILD | RANDOM)
def test_no_host_synchronisation_from_the_first_step_on(name: str) -> None:
    torch.manual_seed(0)
    quantizer = (BUILD | RANDOM)[name]().cuda()
    features, mask = torch.randn(3, 13, 6, device="cuda"), torch.rand(3, 13, device="cuda") > 0.2
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            leaf = features.clone().requires_grad_()
            result = quantizer(leaf, mask)
            (result.values.square().sum() + result.loss).backward()
        quantizer.decode(quantizer.encode(features))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def without_dropout(name: str) -> nn.Module:
    """Levels to drop are drawn by each device's own generator, which would tell two runs apart."""
    torch.manual_seed(0)
    quantizer = BUILD[name]()
    for module in quantizer.modules():
        if isinstance(module, ResidualQuantizer):
            module.quantize_dropout = False
    return quantizer


@pytest.mark.parametrize("name", BUILD)
def test_cuda_is_cpu(name: str) -> None:
    slow = without_dropout(name)
    fast = deepcopy(slow).cuda()
    for _ in range(3):
        features, mask = torch.randn(3, 13, 6), torch.rand(3, 13) > 0.2
        left, right = slow(features, mask), fast(features.cuda(), mask.cuda())
        assert torch.equal(left.codes, right.codes.cpu())
        torch.testing.assert_close(left.values, right.values.cpu(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(left.loss, right.loss.cpu(), rtol=1e-4, atol=1e-4)
        state = {key: value.cpu() for key, value in fast.state_dict().items()}
        torch.testing.assert_close(dict(slow.state_dict()), state, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", BUILD)
def test_a_step_can_be_captured_in_a_graph(name: str) -> None:
    quantizer = without_dropout(name).cuda()
    features = torch.randn(3, 13, 6, device="cuda", requires_grad=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            result = quantizer(features)
            torch.autograd.grad(result.values.square().sum() + result.loss, features)
    torch.cuda.synchronize()
    eager = deepcopy(quantizer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = quantizer(features)
        torch.autograd.grad(result.values.square().sum() + result.loss, features)
    quantizer.load_state_dict(eager.state_dict())
    graph.replay()
    expected = eager(features)
    torch.cuda.synchronize()
    torch.testing.assert_close(dict(quantizer.state_dict()), dict(eager.state_dict()))
    torch.testing.assert_close(result.values, expected.values)
    torch.testing.assert_close(result.loss, expected.loss)
