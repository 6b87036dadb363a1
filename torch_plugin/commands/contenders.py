"""Who takes part in a comparison: different ways to do the same exchange, in the same processes.

Everything here runs on ranks. A contender must never do less than the others: each leaves the
complete sum in the tensor of every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Contender(Protocol):
    """One way to add up a tensor over all ranks.

    Making one is a collective operation: all ranks make the same ones in the same order.
    """

    def all_reduce(self, tensor: Any) -> None:
        """Put the sum over all ranks into ``tensor``, and return when it is there."""


class TorchGroup:
    """A process group of torch, with the backend of the given name."""

    def __init__(self, backend: str) -> None:
        import torch.distributed as dist

        self._dist = dist
        self._group = dist.new_group(backend=backend)

    def all_reduce(self, tensor: Any) -> None:
        """Put the sum over all ranks into ``tensor``."""
        self._dist.all_reduce(tensor, group=self._group)


#: By name, how each is shown and made. The first is what the others are compared with.
CONTENDERS: dict[str, tuple[str, Callable[[], Contender]]] = {
    "gloo": ("Gloo", lambda: TorchGroup("gloo")),
    "gflow": ("gflow", lambda: TorchGroup("gflow")),
}


def label(name: str) -> str:
    """How the contender is called in text."""
    return CONTENDERS[name][0]


def make(name: str) -> Contender:
    """Make the contender; its process group or the like lives as long as it does."""
    return CONTENDERS[name][1]()
