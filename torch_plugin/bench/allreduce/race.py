"""The race of ``gflow bench allreduce``, on the ranks: contenders take turns, size by size.

A contender is only timed after its sum has been checked once.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from gflow.bench import machine
from gflow.bench.allreduce import contenders
from gflow.bench.allreduce.contenders import Contender
from gflow.bench.turns import Timings, make_contenders, random_orders
from gflow.launch.rank import Rank
from gflow.registration import register

_WARM_UP = 3
_MIN_ROUNDS = 5
#: How many times, in the time for a size, the ranks decide whether to continue.
_DECISIONS = 10
#: A turn takes about this long, within these bounds on its calls.
_TURN_SECONDS = 0.02
_CALLS = (4, 20)
#: Calls that take longer than this are made one per turn.
_LONG_CALL = 0.1


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
        details: by contender, what :func:`contenders.prepare` has returned.
        sizes: bytes of the tensor.
        seconds: for each size, all contenders together.
        device: the type of device that the tensors are on.
    """
    import torch
    import torch.distributed as dist

    register()
    # The ranks agree in this group on what to do next. The contenders have their own.
    dist.init_process_group("gloo")
    try:
        with contextlib.ExitStack() as cleanup:
            competing = make_contenders(rank, details, contenders.make, cleanup)
            for size in sizes:
                row = _measure_size(competing, size, seconds)
                if rank.number == 0:
                    rank.tell({"row": row | {"ratios": ratios(row["contenders"])}})
            dist.barrier()
            installed = {
                name: contender.info for name, contender in competing.items() if contender.info
            }
            return {"torch": torch.__version__, "installed": installed, **machine.gpu_info(device)}
    finally:
        dist.destroy_process_group()


def _measure_size(competing: dict[str, Contender], size: int, seconds: float) -> dict[str, Any]:
    import torch.distributed as dist

    for contender in competing.values():
        dist.barrier()
        contender.set_size(size)
    skipped, counted = _calls_per_turn(competing)
    timings = {name: Timings() for name in competing}
    orders = random_orders(list(competing), seed=size)
    start = time.perf_counter()
    done = 0
    while rounds := _rounds_to_go(done, time.perf_counter() - start, seconds):
        for _ in range(rounds):
            for name in next(orders):
                timings[name].add_turn(competing[name], skipped, counted)
        done += rounds
    return {
        "bytes": size,
        "contenders": {name: _result(name, size, timings[name]) for name in competing},
    }


def _calls_per_turn(competing: dict[str, Contender]) -> tuple[int, int]:
    """How many calls a turn has: first some that do not count, then some that do."""
    first = Timings()
    for contender in competing.values():
        first.add_turn(contender, 0, 1)
    longest = max(first.on_slowest_rank())
    if longest > _LONG_CALL:
        return 0, 1
    for contender in competing.values():
        first.add_turn(contender, _WARM_UP, 0)
    least, most = _CALLS
    # The first call does not count: it also waits for ranks that are late from the previous turn.
    return 1, max(least, min(most, int(_TURN_SECONDS / longest)))


def _rounds_to_go(done: int, elapsed: float, seconds: float) -> int:
    """How many rounds to do before deciding again; 0 to stop. Rank 0 decides for all."""
    import torch
    import torch.distributed as dist

    if done < _MIN_ROUNDS:
        rounds = 1
    elif elapsed >= seconds:
        rounds = 0
    else:
        rounds = max(1, int(done / elapsed * min(seconds / _DECISIONS, seconds - elapsed)))
    decision = torch.tensor([rounds])
    dist.broadcast(decision, src=0)
    return int(decision.item())


def _result(name: str, size: int, timing: Timings) -> dict[str, float]:
    low, median, high = timing.quartiles()
    result = {
        "samples": len(timing.seconds),
        "low_us": low * 1e6,
        "median_us": median * 1e6,
        "high_us": high * 1e6,
        "gb_per_s": size / median / 1e9,
    }
    if name in contenders.BACKENDS:
        result["cpu_s_per_gb"] = timing.processor_seconds_per_call() / size * 1e9
    return result


# --- ratios

#: Ratios to report: the time of the first over the time of the second, if both took part. For a
#: limit, that is the part of the limit that the contender reaches.
_PAIRS = (
    ("gloo", "gflow"),
    ("gloo", "gflow-bucket"),
    ("nccl", "gflow"),
    ("mpi", "gflow"),
    ("mpi", "gflow-bucket"),
    ("memory-limit", "gflow"),
    ("memory-limit", "gflow-bucket"),
    ("link-limit", "gloo"),
    ("link-limit", "gflow"),
    ("link-limit", "gflow-bucket"),
)
_MPI = ("openmpi", "mpich")


def ratios(results: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the ratios of one row, by names such as ``gloo/gflow``; ``mpi`` is the faster one.

    Example:
        >>> ratios({"gloo": {"median_us": 300.0}, "gflow": {"median_us": 100.0}})
        {'gloo/gflow': 3.0}
    """
    times = {name: result["median_us"] for name, result in results.items()}
    by_mpi = [times[name] for name in _MPI if name in times]
    if by_mpi:
        times["mpi"] = min(by_mpi)
    return {
        f"{one}/{other}": times[one] / times[other]
        for one, other in _PAIRS
        if one in times and other in times
    }
