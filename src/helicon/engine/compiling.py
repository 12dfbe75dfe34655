"""Networks compiled in place, which run as they are where the compiler fails."""

import logging
import warnings
from typing import Any

import einops
from torch import nn

logger = logging.getLogger(__name__)

MOST_VERSIONS = 64  # of compiled code: parts of different sizes share it, and more would be left uncompiled


def compile_in_place(module: nn.Module) -> None:
    """A compiler that cannot take a network, or not in a new shape, says so once; the run goes on without it."""
    import torch._dynamo  # neither of these comes with torch itself, and runs that do not compile are spared them
    import torch._functorch.config
    import torch._inductor.config
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # The backward pass is compiled with the forward pass, not in the middle of a step.
    if hasattr(torch._functorch.config, "force_non_lazy_backward_lowering"):
        torch._functorch.config.force_non_lazy_backward_lowering = True
    # Before torch 2.15 (pull request 191885) the backward pass took the strides of some saved tensors for those of the first size it
    # was compiled for: batches of a third length ended the run.
    if hasattr(ShapeEnv, "evaluate_symexpr") and hasattr(ShapeEnv, "deserialize_symexpr"):
        ShapeEnv.evaluate_symexpr = ShapeEnv.deserialize_symexpr  # type: ignore[method-assign,assignment]
    torch._dynamo.config.recompile_limit = max(MOST_VERSIONS, torch._dynamo.config.recompile_limit)
    # Compiled code is for the kinds of tensors that einops has met so far, and a kind that it meets later costs a second compilation.
    for kind in (torch.zeros(1), nn.Parameter(torch.zeros(1))):
        einops.rearrange(kind, "one -> one 1")
    # Helicon computes in float32 where it says float32.
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores for float32 matrix multiplication available")
    module.compile()
    compiled = module._compiled_call_impl
    assert compiled is not None

    def call(*inputs: Any, **named: Any) -> Any:
        tiles = torch._inductor.config.triton
        try:
            return compiled(*inputs, **named)
        except torch._dynamo.exc.TorchDynamoException as error:
            if getattr(tiles, "coalesce_tiling_analysis", False):  # stumbles, in torch 2.11, over sizes that vary
                tiles.coalesce_tiling_analysis = False
                return call(*inputs, **named)
            outputs = module._call_impl(*inputs, **named)  # what fails here too is not the compiler's fault
            module._compiled_call_impl = None
            reason = str(error).strip().partition("\n")[0]
            logger.warning(
                "%s could not be compiled (%s: %s) and runs uncompiled, slower, from here on",
                type(module).__name__,
                type(error).__name__,
                reason,
            )
            return outputs

    module._compiled_call_impl = call
