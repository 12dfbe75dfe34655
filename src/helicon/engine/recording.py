"""Training steps as CUDA graphs: a whole step, from the batch to the optimizer, is launched at once.

Where networks are small or the host is slow, the host takes longer to launch a step's thousands of kernels than the device
to run them. A graph is launched in one go. It holds addresses and numbers as they were when it was recorded, so that all
that changes from step to step must be in tensors that stay where they are: the batch is copied into the tensors it was
recorded with, and the learning rate is one too (`NetworkOptimizer.record`). Every set of shapes and every kind of step (with
an adversary or without, say) has a graph of its own.
"""

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from helicon.engine.task import Batch

logger = logging.getLogger(__name__)

Logs = dict[str, Tensor]
Work = Callable[[Sequence[Batch]], Logs]  # named numbers on the device, 0-d, float32

TIMES_AS_IT_IS = 3  # compilers compile, libraries set up, and optimizers make their state, before a step is recorded
MOST_GRAPHS = 16


class Recorder:
    """Does a step's work, from the fourth time on by a graph of it."""

    def __init__(self) -> None:
        self._times: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, _Graph] = {}
        self._pool: Any = None
        self._has_warned = False

    def __call__(self, kind: Hashable, micro: Sequence[Batch], work: Work) -> Logs:
        leaves, structure = tree_flatten(list(micro))
        if not all(leaf is None or (isinstance(leaf, Tensor) and leaf.is_cuda) for leaf in leaves):
            self._warn("their batches hold more than tensors on the device (see Task.read)")
            return work(micro)
        key = kind, str(structure), tuple(leaf if leaf is None else (leaf.shape, leaf.dtype) for leaf in leaves)
        if key not in self._graphs:
            self._times[key] += 1
            if self._times[key] <= TIMES_AS_IT_IS:
                if not self._graphs and len(self._times) > 8 * MOST_GRAPHS:
                    self._warn("shapes of batches hardly ever come again")
                return work(micro)
            if len(self._graphs) == MOST_GRAPHS:
                self._warn(f"there were {MOST_GRAPHS} different shapes of batches already")
                return work(micro)
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            self._graphs[key] = _Graph(micro, work, self._pool)
        return self._graphs[key].replay([leaf for leaf in leaves if leaf is not None])

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            logger.warning('compile="graphs" does not record these steps: %s', why)
        self._has_warned = True


class _Graph:
    def __init__(self, micro: Sequence[Batch], work: Work, pool: Any):
        own = tree_map(lambda leaf: leaf if leaf is None else leaf.clone(), list(micro))
        self.inputs = [leaf for leaf in tree_leaves(own) if leaf is not None]
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # Other threads (one that pins batches, one that writes a checkpoint) may use the device meanwhile.
        try:
            with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
                logs = work(own)
                self.names, self.values = tuple(logs), torch.stack([value.float() for value in logs.values()])
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f'compile="graphs" cannot record this step, in which the host takes part ({reason}): use compile=True'
            ) from error

    def replay(self, leaves: Sequence[Tensor]) -> Logs:
        torch._foreach_copy_(self.inputs, list(leaves))
        self.graph.replay()
        return dict(zip(self.names, self.values.clone().unbind(), strict=True))
