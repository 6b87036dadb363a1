"""A call that may fail, and the error it raised."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Attempt:
    """The outcome of a call."""

    value: Any
    # The names of the error's classes, most specific first; empty if nothing was raised.
    kinds: tuple[str, ...]
    message: str
    seconds: float

    @property
    def failed(self) -> bool:
        return bool(self.kinds)


def attempt(call: Callable[[], Any]) -> Attempt:
    """Makes the call and reports its outcome."""
    start = time.monotonic()
    try:
        value = call()
    except Exception as error:
        kinds = tuple(kind.__name__ for kind in type(error).__mro__)
        return Attempt(None, kinds, str(error), time.monotonic() - start)
    return Attempt(value, (), "", time.monotonic() - start)


def still_works(group: dist.ProcessGroup | None = None) -> bool:
    """Whether the group can still sum: every rank contributes its rank plus one."""
    world = dist.get_world_size(group)
    tensor = torch.full((5,), dist.get_rank(group) + 1, dtype=torch.int64)
    dist.all_reduce(tensor, group=group)
    return tensor.tolist() == [world * (world + 1) // 2] * 5
