"""Turns: contenders run one after the other, and what each turn took is kept.

Whatever else the machine does meets all of them. Two contenders must never run at the same time,
and nobody may always run after the same other one.
"""

from __future__ import annotations

import contextlib
import random
import resource
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from gflow.commands.left_out import LeftOut
from gflow.commands.rank import Rank


class Racer(Protocol):
    """Who can take turns.

    Making one is a collective operation, and so are its methods: all ranks call them in the same
    order.

    Attributes:
        about: what one has to know about it to read its numbers; on rank 0.
    """

    about: dict[str, Any]

    def turn(self, skipped: int, counted: int) -> list[float]:
        """Do some calls, then some more, and return the seconds of each of those on this rank."""

    def close(self) -> None:
        """Leave nothing behind."""


AnyRacer = TypeVar("AnyRacer", bound=Racer)


def line_up(
    rank: Rank,
    details: dict[str, dict[str, Any]],
    make: Callable[[str, Rank, dict[str, Any]], AnyRacer],
    at_the_end: contextlib.ExitStack,
) -> dict[str, AnyRacer]:
    """Make all contenders; one that a rank cannot make is left out on all.

    Args:
        rank: this rank.
        details: by contender, what ``make`` gets.
        make: makes one; it may raise LeftOut.
        at_the_end: closes them.
    """
    import torch.distributed as dist

    racers = {}
    for name, detail in details.items():
        reason = None
        try:
            racer = make(name, rank, detail)
            at_the_end.callback(racer.close)
            racers[name] = racer
        except LeftOut as left_out:
            reason = str(left_out)
        reasons: list[str | None] = [None] * rank.world
        dist.all_gather_object(reasons, reason)
        reason = next((one for one in reasons if one is not None), None)
        if reason is not None:
            racers.pop(name, None)
            if rank.number == 0:
                rank.tell({"left_out": {name: reason}})
    if not racers:
        raise RuntimeError("all contenders are left out")
    return racers


def orders(names: Sequence[str], seed: int) -> Iterator[list[str]]:
    """For round after round who follows whom, at random and the same on all ranks."""
    order = list(names)
    shuffle = random.Random(seed).shuffle
    while True:
        shuffle(order)
        yield list(order)


@dataclass
class Record:
    """What is known of one contender, on this rank."""

    seconds: list[float] = field(default_factory=list)
    processor_seconds: float = 0.0
    calls: int = 0

    def add_turn(self, racer: Racer, skipped: int, counted: int) -> None:
        """Let the contender take a turn, together with all ranks."""
        import torch.distributed as dist

        # Who waits here sleeps, and so does everybody whose turn it is not.
        dist.barrier()
        before = _processor_seconds()
        self.seconds += racer.turn(skipped, counted)
        self.processor_seconds += _processor_seconds() - before
        self.calls += skipped + counted

    def slowest(self) -> list[float]:
        """The seconds of each call on its slowest rank: then it is over."""
        import torch
        import torch.distributed as dist

        slowest = torch.tensor(self.seconds, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return [float(seconds) for seconds in slowest]

    def quartiles(self) -> list[float]:
        """Seconds of a call: a quarter took less than the first, half less than the second."""
        slowest = self.slowest()
        # Of one call there is not more to say than its time.
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
