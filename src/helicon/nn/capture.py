"""For loops whose steps have static shapes: weights at fixed addresses, functions compiled for one loop, steps as CUDA graphs.

A captured graph holds addresses: everything a step reads and writes stays where it was when it was captured.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend

# All but cuDNN's: with it, two runs of one decode differed (32 rows, more than 128 keys, torch 2.11 on an H200).
REPRODUCIBLE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@contextmanager
def lasting() -> Iterator[None]:
    """Inside, tensors are made that later calls write into: those of inference mode would refuse it outside of that."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class Weights:
    """The weights of a model in the type a loop runs in: bf16 on CUDA by default, elsewhere the model's own."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None):
        self.parameters = list(model.parameters())
        own = self.parameters[0]
        self.device, self.own_dtype = own.device, own.dtype
        self.dtype = dtype or (torch.bfloat16 if own.is_cuda else own.dtype)
        self.copies: list[nn.Parameter] = []
        if own.is_cuda or self.dtype != own.dtype:
            with lasting():
                empty = (torch.empty_like(parameter, dtype=self.dtype) for parameter in self.parameters)
                self.copies = [nn.Parameter(copy, requires_grad=False) for copy in empty]
        copies = {id(parameter): copy for parameter, copy in zip(self.parameters, self.copies, strict=False)}
        self._places = [
            (module, name, parameter, copies[id(parameter)])
            for module in (model.modules() if copies else ())
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]

    def are_of(self, model: nn.Module) -> bool:
        """Whether these are still the model's weights, where and as they were."""
        now = list(model.parameters())
        same = len(now) == len(self.parameters) and all(a is b for a, b in zip(now, self.parameters, strict=True))
        return same and (now[0].device, now[0].dtype) == (self.device, self.own_dtype)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model's weights of this moment, in this type, for as long as the context lasts.

        The parameters themselves stay as they are, out of sight. (Given data of another type, they would lose the hooks by
        which distributed training hears of their gradients.)
        """
        if not self.copies:
            yield
            return
        with torch.no_grad():
            torch._foreach_copy_(tuple(self.copies), tuple(self.parameters))
        try:
            for module, name, _, copy in self._places:
                module._parameters[name] = copy
            yield
        finally:
            for module, name, parameter, _ in self._places:
                module._parameters[name] = parameter


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; after it every module has the mode it had."""
    before = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, was_training in before:
            part.training = was_training


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function compiled as one graph, apart from all other uses of it.

    The compiler counts recompilations and notes which sizes vary by code object: what other loops did would make the
    code of this one general and slow, and in the end refuse to compile it. So it gets a code object of its own.
    """
    assert isinstance(function, FunctionType)
    code, defaults, closure = function.__code__.replace(), function.__defaults__, function.__closure__
    own = FunctionType(code, function.__globals__, function.__name__, defaults, closure)
    # The compiler would warn where it cannot use its online softmax.
    return torch.compile(own, fullgraph=True, options={"online_softmax": False})


def captured(step: Callable[[], object], pool: Any) -> torch.cuda.CUDAGraph:
    """A step as a graph. It really runs, before it is captured: what it changes must be set anew.

    `pool` (`torch.cuda.graph_pool_handle()`) may be shared by graphs that are never replayed at the same time.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # lets the libraries allocate their workspaces before the capture
        step()
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Other threads (one that pins batches, one that writes a checkpoint) may use the device meanwhile.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        step()
    return graph
