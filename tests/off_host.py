"""What a GPU can do without the host, checked on a CPU: a step that passes here asks the host for nothing, so it can be recorded as a CUDA
graph and makes nobody wait. (That the kernels themselves can be recorded is for tests on a GPU.)"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# Values that the host reads, shapes that depend on values, and values that the host would have to send.
REFUSED = {
    aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.nonzero, aten.masked_select, aten.bincount, aten._unique, aten._unique2,
    aten.unique_dim, aten.unique_consecutive, aten.repeat_interleave, aten.lift_fresh,
}  # fmt: skip
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


class OffHost(TorchDispatchMode):
    """Refuses what needs the host."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function.overloadpacket not in REFUSED, f"{function} needs the host"
        if function.overloadpacket in INDEXED:
            assert all(index is None or index.dtype != torch.bool for index in args[1]), "indexed by a mask"
        return function(*args, **(kwargs or {}))


def watched(patch: pytest.MonkeyPatch, owner: Any, name: str) -> list[str]:
    """From now on `owner.name` runs off the host; its calls are counted in the list."""
    original: Callable[..., Any] = getattr(owner, name)
    calls: list[str] = []

    def off_host(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        with OffHost():
            return original(*args, **kwargs)

    patch.setattr(owner, name, off_host)
    return calls
