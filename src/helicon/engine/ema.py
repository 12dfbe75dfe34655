"""Averaged weights (EMA), kept on every rank and swapped in for as long as a `with` block lasts."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


class EMA:
    """An exponential moving average of the parameters of some networks; buffers (running statistics) are copied.

    The decay n steps after `update_after_step` grows as 1 - (1 + n)^(-2/3) up to `beta`, so the average forgets the initial weights quickly.
    """

    def __init__(
        self, networks: Mapping[str, nn.Module], beta: float, update_after_step: int = 0, update_every: int = 1
    ):
        self.networks = dict(networks)
        self.beta, self.update_after_step, self.update_every = beta, update_after_step, update_every
        self.online = _tensors(self.networks.values())
        self.average = [t.detach().clone() for t in self.online]
        self._is_parameter = [isinstance(t, nn.Parameter) and t.is_floating_point() for t in self.online]
        self._is_swapped_in = False

    def decay(self, step: int) -> float:
        """The decay of the update after `step` steps; 0 (a plain copy) until `update_after_step`."""
        updates = step - self.update_after_step
        return min(self.beta, 1 - (1 + updates) ** (-2 / 3)) if updates > 0 else 0.0

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Called after each step, with the number of steps done."""
        if step % self.update_every and step > self.update_after_step:
            return
        decay = self.decay(step)
        pairs = list(zip(self.average, self.online, self._is_parameter, strict=True))
        averages = [a for a, _, is_parameter in pairs if is_parameter]
        torch._foreach_lerp_(averages, [o.detach() for _, o, is_parameter in pairs if is_parameter], 1 - decay)
        for average, online, is_parameter in pairs:
            if not is_parameter:
                average.copy_(online)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The networks carry the averaged weights inside this block, and their own again after it."""
        if self._is_swapped_in:  # inside another such block: a second exchange would bring the online weights back
            yield
            return
        self._swap()
        self._is_swapped_in = True
        try:
            yield
        finally:
            self._swap()
            self._is_swapped_in = False

    @torch.no_grad()
    def _swap(self) -> None:
        self._forget_whole_copies()
        # Contents are exchanged, not storage: optimizers, gradient buckets and compiled code hold on to the storage.
        for average, online in zip(self.average, self.online, strict=True):
            kept = online.detach().clone()
            online.copy_(average)
            average.copy_(kept)

    @torch.no_grad()
    def copy_to_online(self) -> None:
        self._forget_whole_copies()
        for average, online in zip(self.average, self.online, strict=True):
            online.copy_(average)

    def _forget_whole_copies(self) -> None:
        """A sharded network may still hold weights that its last forward gathered, and would go on to use them."""
        for network in self.networks.values():
            for module in network.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def by_identity(self) -> dict[int, Tensor]:
        """The averaged tensor of each online tensor, by `id`: how a checkpoint finds the names of a whole model."""
        assert not self._is_swapped_in, "a checkpoint taken now would have online and averaged weights exchanged"
        return {id(online): average for online, average in zip(self.online, self.average, strict=True)}


def _tensors(networks: Iterable[nn.Module]) -> list[Tensor]:
    """Parameters and saved buffers, tied or shared ones once (swapping one twice would undo the swap)."""
    return list({id(t): t for network in networks for t in network.state_dict(keep_vars=True).values()}.values())
