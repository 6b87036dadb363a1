"""The race of ``gflow bench ddp``, on the ranks: replicas take turns of a few steps.

No step is timed before DDP has its final buckets and gflow sends by its method, nor of a contender
whose replicas have drifted apart.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

from gflow.bench import machine
from gflow.bench.ddp import contenders
from gflow.bench.ddp.contenders import Replica
from gflow.bench.turns import Timings, make_contenders, random_orders
from gflow.launch.rank import Rank
from gflow.registration import register


@dataclass
class _StepTimings(Timings):
    """Also what was sent, and what gflow has counted."""

    sent_bytes: int = 0
    counters: dict[str, float] = field(default_factory=dict)


def measure(
    rank: Rank, names: list[str], plan: dict[str, Any], rounds: int, steps: int
) -> dict[str, Any]:
    """Measure; rank 0 tells a row for each contender. Return what the numbers depend on.

    Args:
        rank: this rank.
        names: of the contenders.
        plan: what :func:`contenders.make` gets for each.
        rounds: in each, every contender has one turn.
        steps: in each turn.
    """
    import torch
    import torch.distributed as dist

    register()
    # The ranks agree in this group on what to do next. The contenders have their own.
    dist.init_process_group("gloo")
    try:
        with contextlib.ExitStack() as cleanup:
            details = dict.fromkeys(names, plan)
            replicas = make_contenders(rank, details, contenders.make, cleanup)
            warnings = {text for one in replicas.values() for text in one.info["warnings"]}
            for text in sorted(warnings) if rank.number == 0 else []:
                rank.tell({"note": f"note: {text}"})
            timings = _race(rank, replicas, plan["hosts"], rounds, steps)
            rows = [_result(name, timing) for name, timing in timings.items()]
            rival = contenders.RIVALS[plan["device"]]
            for row in _compared(rows, rival) if rank.number == 0 else []:
                rank.tell({"row": row})
            dist.barrier()
            info: dict[str, Any] = {
                "settling_steps": {name: contenders.settling_steps(name) for name in replicas},
                "rounds": rounds,
                "steps": steps,
            }
            info |= {"warnings": sorted(warnings), **machine.gpu_info(plan["device"])}
            return {"torch": torch.__version__, **plan, **info}
    finally:
        dist.destroy_process_group()


def _race(
    rank: Rank, replicas: dict[str, Replica], hosts: int, rounds: int, steps: int
) -> dict[str, _StepTimings]:
    import torch.distributed as dist

    for replica in replicas.values():
        dist.barrier()
        replica.settle()
        replica.check()
    timings = {name: _StepTimings() for name in replicas}
    for number, order in zip(
        range(1, rounds + 1), random_orders(list(replicas), seed=0), strict=False
    ):
        for name in order:
            _add_turn(timings[name], replicas[name], hosts, steps)
        if rank.number == 0:
            times = [f"{name} {1e3 * timings[name].seconds[-1]:.0f}" for name in replicas]
            rank.tell({"note": f"  round {number} of {rounds}: {', '.join(times)} ms"})
    for replica in replicas.values():
        replica.check()
    return timings


def _add_turn(timing: _StepTimings, replica: Replica, hosts: int, steps: int) -> None:
    import torch.distributed as dist

    # Wait until what the previous turn sent has arrived everywhere; after the turn likewise.
    dist.barrier()
    interface = machine.interface_between(hosts)
    sent, counted = machine.sent_bytes(interface), replica.counters()
    timing.add_turn(replica, 0, steps)
    dist.barrier()
    timing.sent_bytes += machine.sent_bytes(interface) - sent
    for name, count in replica.counters().items():
        timing.counters[name] = timing.counters.get(name, 0.0) + count - counted[name]


def _result(name: str, timing: _StepTimings) -> dict[str, Any]:
    low, median, high = timing.quartiles()
    row = {
        "contender": name,
        "samples": len(timing.seconds),
        "low_ms": low * 1e3,
        "median_ms": median * 1e3,
        "high_ms": high * 1e3,
        "sent_bytes_per_step": machine.max_over_ranks(timing.sent_bytes) / timing.calls,
        "cpu_s_per_step": timing.processor_seconds_per_call(),
    }
    if timing.counters:
        counters = {key: count / timing.calls for key, count in timing.counters.items()}
        row["counters_per_step"] = counters
    return row


def _compared(rows: list[dict[str, Any]], rival: str) -> list[dict[str, Any]]:
    """Add to each row its time over a step without communication, and its speed-up over the
    rival."""
    times = {row["contender"]: row["median_ms"] for row in rows}
    compared = []
    for row in rows:
        ratios = {}
        if "none" in times:
            ratios["ratio_to_none"] = row["median_ms"] / times["none"]
        if rival in times:
            ratios[f"speedup_over_{rival}"] = times[rival] / row["median_ms"]
        compared.append(row | ratios)
    return compared
