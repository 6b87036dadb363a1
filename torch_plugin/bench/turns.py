"""Turns: contenders alternate in random order, so that noise of the machine hits all of them.

Two contenders never run at the same time, and none always runs after the same other one.
"""

from __future__ import annotations

import contextlib
import random
import resource
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from gflow.launch.rank import Rank


class Unavailable(Exception):
    """A contender cannot take part here; the text says why, in one line."""


class Contender(Protocol):
    """Something that takes turns.

    Making one is a collective operation, and so are its methods: all ranks call them in the same
    order.

    Attributes:
        info: what its numbers depend on; on rank 0.
    """

    info: dict[str, Any]

    def turn(self, skipped: int, counted: int) -> list[float]:
        """Do some calls, then some more, and return the seconds of each of those on this rank."""

    def close(self) -> None:
        """Free what it holds."""


AnyContender = TypeVar("AnyContender", bound=Contender)


def make_contenders(
    rank: Rank,
    details: dict[str, dict[str, Any]],
    make: Callable[[str, Rank, dict[str, Any]], AnyContender],
    cleanup: contextlib.ExitStack,
) -> dict[str, AnyContender]:
    """Make all contenders; one that a rank cannot make is left out on all.

    Args:
        rank: this rank.
        details: by contender, what ``make`` gets.
        make: makes one; it may raise Unavailable.
        cleanup: closes them.
    """
    import torch.distributed as dist

    made = {}
    for name, detail in details.items():
        reason = None
        try:
            contender = make(name, rank, detail)
            cleanup.callback(contender.close)
            made[name] = contender
        except Unavailable as error:
            reason = str(error)
        reasons: list[str | None] = [None] * rank.world
        dist.all_gather_object(reasons, reason)
        reason = next((one for one in reasons if one is not None), None)
        if reason is not None:
            made.pop(name, None)
            if rank.number == 0:
                rank.tell({"left_out": {name: reason}})
    if not made:
        raise RuntimeError("all contenders are left out")
    return made


def random_orders(names: Sequence[str], seed: int) -> Iterator[list[str]]:
    """The order of the names in each round: random, but the same on all ranks."""
    order = list(names)
    shuffle = random.Random(seed).shuffle
    while True:
        shuffle(order)
        yield list(order)


@dataclass
class Timings:
    """The time that one contender has taken on this rank."""

    seconds: list[float] = field(default_factory=list)
    processor_seconds: float = 0.0
    calls: int = 0

    def add_turn(self, contender: Contender, skipped: int, counted: int) -> None:
        """Let the contender take a turn, together with all ranks."""
        import torch.distributed as dist

        # Ranks sleep in here: a contender whose turn it is not takes no processor time.
        dist.barrier()
        before = _processor_seconds()
        self.seconds += contender.turn(skipped, counted)
        self.processor_seconds += _processor_seconds() - before
        self.calls += skipped + counted

    def on_slowest_rank(self) -> list[float]:
        """The seconds of each call on its slowest rank, which ends it."""
        import torch
        import torch.distributed as dist

        slowest = torch.tensor(self.seconds, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return [float(seconds) for seconds in slowest]

    def quartiles(self) -> list[float]:
        """Seconds of a call: a quarter took less than the first, half less than the second."""
        slowest = self.on_slowest_rank()
        # One call alone has no quartiles but its time.
        samples = slowest if len(slowest) > 1 else slowest * 2
        return statistics.quantiles(samples, n=4, method="inclusive")

    def processor_seconds_per_call(self) -> float:
        """Processor time of one call on all ranks together."""
        import torch
        import torch.distributed as dist

        used = torch.tensor([self.processor_seconds], dtype=torch.float64)
        dist.all_reduce(used)
        return float(used) / self.calls


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@dataclass(frozen=True)
class Device:
    """The device that a rank's tensors are on.

    Attributes:
        name: as torch spells it, such as ``cpu`` or ``cuda:1``.
    """

    name: str

    @classmethod
    def of_rank(cls, rank: Rank, device_type: str) -> Device:
        """The rank's own device of that type; from now on also torch's current one."""
        if device_type == "cpu":
            return cls(device_type)
        import torch

        number = rank.number % torch.accelerator.device_count()
        torch.accelerator.set_device_index(number)
        return cls(f"{device_type}:{number}")

    @property
    def is_accelerator(self) -> bool:
        """Whether it works beside the CPU, so that there is something to wait for."""
        return self.name != "cpu"

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it, so that it can be timed."""
        if self.is_accelerator:
            import torch

            torch.accelerator.synchronize()
