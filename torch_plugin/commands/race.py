"""The race itself, on the ranks: contenders take turns, size after size, and are timed.

It must never time a sum that it has not checked once.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from gflow.commands import contenders, gpus
from gflow.commands.rank import Rank
from gflow.commands.ratios import with_ratios
from gflow.commands.turns import Record, line_up, orders
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
    rank: Rank,
    details: dict[str, dict[str, Any]],
    sizes: list[int],
    seconds: float,
    device: str = "cpu",
) -> dict[str, Any]:
    """Measure every size; rank 0 tells a row after each. Return what the numbers depend on.

    Args:
        rank: this rank.
        details: by contender, what :func:`contenders.build` has returned.
        sizes: bytes of the tensor.
        seconds: for each size, all contenders together.
        device: the type of device that the tensors are on.
    """
    import torch
    import torch.distributed as dist

    register()
    # This group is for agreeing on what to do next. The contenders have their own.
    dist.init_process_group("gloo")
    try:
        with contextlib.ExitStack() as at_the_end:
            racers = line_up(rank, details, contenders.make, at_the_end)
            for size in sizes:
                row = _measure_size(racers, size, seconds)
                if rank.number == 0:
                    rank.tell({"row": with_ratios(row)})
            dist.barrier()
            installed = {name: racer.about for name, racer in racers.items() if racer.about}
            return {"torch": torch.__version__, "installed": installed, **gpus.about(device)}
    finally:
        dist.destroy_process_group()


def _measure_size(
    racers: dict[str, contenders.Contender], size: int, seconds: float
) -> dict[str, Any]:
    import torch.distributed as dist

    for racer in racers.values():
        dist.barrier()
        racer.take_size(size)
    skipped, counted = _calls_per_turn(racers)
    records = {name: Record() for name in racers}
    rounds_of_turns = orders(list(racers), seed=size)
    start = time.perf_counter()
    done = 0
    while rounds := _rounds_to_go(done, time.perf_counter() - start, seconds):
        for _ in range(rounds):
            for name in next(rounds_of_turns):
                records[name].add_turn(racers[name], skipped, counted)
        done += rounds
    return {
        "bytes": size,
        "contenders": {name: _sum_up(name, size, records[name]) for name in racers},
    }


def _calls_per_turn(racers: dict[str, contenders.Contender]) -> tuple[int, int]:
    """How many calls to make in a turn: not counted, and counted."""
    first = Record()
    for racer in racers.values():
        first.add_turn(racer, 0, 1)
    longest = max(first.slowest())
    if longest > _LONG_SECONDS:
        return 0, 1
    for racer in racers.values():
        first.add_turn(racer, _WARM_UP, 0)
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


def _sum_up(name: str, size: int, record: Record) -> dict[str, float]:
    low, median, high = record.quartiles()
    result = {
        "samples": len(record.seconds),
        "low_us": low * 1e6,
        "median_us": median * 1e6,
        "high_us": high * 1e6,
        "gb_per_s": size / median / 1e9,
    }
    if name in contenders.BACKENDS:
        result["cpu_s_per_gb"] = record.processor_seconds_per_call() / size * 1e9
    return result
