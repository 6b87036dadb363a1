"""The race itself, on the ranks: contenders take turns, size after size, and are timed.

Whatever else the machine does meets all of them. It must never time a sum that it has not checked
once, and never let two contenders run at the same time.
"""

from __future__ import annotations

import contextlib
import random
import resource
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from gflow.commands import contenders
from gflow.commands.left_out import LeftOut
from gflow.commands.rank import Rank
from gflow.registration import register

_WARM_UP = 3
_LEAST_ROUNDS = 5
#: All ranks decide together whether to go on, about this often in the time for a size.
_DECISIONS = 10
#: A turn takes about this long, but has calls within these bounds.
_TURN_SECONDS = 0.02
_CALLS = (4, 20)
#: Calls that take longer than this are made one by one.
_LONG_SECONDS = 0.1


def measure(
    rank: Rank, details: dict[str, dict[str, Any]], sizes: list[int], seconds: float
) -> dict[str, Any]:
    """Measure every size; rank 0 tells a row after each. Return what the numbers depend on.

    Args:
        rank: this rank.
        details: by contender, what :func:`contenders.build` has returned.
        sizes: bytes of the tensor.
        seconds: for each size, all contenders together.
    """
    import torch
    import torch.distributed as dist

    register()
    # This group is for agreeing on what to do next. The contenders have their own.
    dist.init_process_group("gloo")
    try:
        with contextlib.ExitStack() as at_the_end:
            racers = _line_up(rank, details, at_the_end)
            for size in sizes:
                row = _measure_size(racers, size, seconds)
                if rank.number == 0:
                    rank.tell({"row": row})
            dist.barrier()
            installed = {name: racer.about for name, racer in racers.items() if racer.about}
            return {"torch": torch.__version__, "installed": installed}
    finally:
        dist.destroy_process_group()


def _line_up(
    rank: Rank, details: dict[str, dict[str, Any]], at_the_end: contextlib.ExitStack
) -> dict[str, contenders.Contender]:
    """Make all contenders; one that a rank cannot make is left out on all."""
    import torch.distributed as dist

    racers = {}
    for name, detail in details.items():
        reason = None
        try:
            racer = contenders.make(name, rank, detail)
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


@dataclass
class _Record:
    """What is known of one contender and size, on this rank."""

    seconds: list[float] = field(default_factory=list)
    processor_seconds: float = 0.0
    calls: int = 0


def _measure_size(
    racers: dict[str, contenders.Contender], size: int, seconds: float
) -> dict[str, Any]:
    import torch.distributed as dist

    for racer in racers.values():
        dist.barrier()
        racer.take_size(size)
    skipped, counted = _calls_per_turn(racers)
    records = {name: _Record() for name in racers}
    order = list(racers)
    # All ranks shuffle in the same way. Nobody always runs after the same other one.
    shuffle = random.Random(size).shuffle
    start = time.perf_counter()
    done = 0
    while rounds := _rounds_to_go(done, time.perf_counter() - start, seconds):
        for _ in range(rounds):
            shuffle(order)
            for name in order:
                _turn(racers[name], records[name], skipped, counted)
        done += rounds
    return {
        "bytes": size,
        "contenders": {name: _sum_up(name, size, records[name]) for name in racers},
    }


def _turn(racer: contenders.Contender, record: _Record, skipped: int, counted: int) -> None:
    import torch.distributed as dist

    # Who waits here sleeps, and so does everybody whose turn it is not.
    dist.barrier()
    before = _processor_seconds()
    record.seconds += racer.turn(skipped, counted)
    record.processor_seconds += _processor_seconds() - before
    record.calls += skipped + counted


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _calls_per_turn(racers: dict[str, contenders.Contender]) -> tuple[int, int]:
    """How many calls to make in a turn: not counted, and counted."""
    import torch
    import torch.distributed as dist

    first = _Record()
    for racer in racers.values():
        _turn(racer, first, 0, 1)
    slowest = torch.tensor(first.seconds, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    longest = float(slowest.max())
    if longest > _LONG_SECONDS:
        return 0, 1
    for racer in racers.values():
        _turn(racer, first, _WARM_UP, 0)
    least, most = _CALLS
    # The first call is not counted: it also waits for ranks that came late out of the turn before.
    return 1, max(least, min(most, int(_TURN_SECONDS / longest)))


def _rounds_to_go(done: int, elapsed: float, seconds: float) -> int:
    """How many rounds to do before asking again; 0 to stop. Rank 0 decides for all."""
    import torch
    import torch.distributed as dist

    if done < _LEAST_ROUNDS:
        rounds = 1
    elif elapsed >= seconds:
        rounds = 0
    else:
        rounds = max(1, int(done / elapsed * min(seconds / _DECISIONS, seconds - elapsed)))
    decision = torch.tensor([rounds])
    dist.broadcast(decision, src=0)
    return int(decision.item())


def _sum_up(name: str, size: int, record: _Record) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    # An exchange is over when it is over on the slowest rank.
    slowest = torch.tensor(record.seconds, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    low, median, high = statistics.quantiles(slowest.tolist(), n=4, method="inclusive")
    result = {
        "samples": len(record.seconds),
        "low_us": low * 1e6,
        "median_us": median * 1e6,
        "high_us": high * 1e6,
        "gb_per_s": size / median / 1e9,
    }
    if name in contenders.BACKENDS:
        used = torch.tensor([record.processor_seconds], dtype=torch.float64)
        dist.all_reduce(used)
        result["cpu_s_per_gb"] = float(used) / (record.calls * size) * 1e9
    return result
