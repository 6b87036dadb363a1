"""The race of ``gflow bench ddp``, on the ranks: replicas take turns of a few steps.

It must never time a step of a contender whose replicas have drifted apart, nor one before DDP has
its final buckets and gflow its density.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

from gflow.commands import gpus, wire
from gflow.commands.ddp import contenders
from gflow.commands.rank import Rank
from gflow.commands.turns import Record, line_up, orders
from gflow.registration import register

#: DDP rebuilds its buckets after the first step, dense steps follow, and the first step after
#: these makes what is kept from then on.
SETTLING_STEPS = 6


@dataclass
class _StepRecord(Record):
    """Of one contender, on this rank: also what was sent, and what gflow has counted."""

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
    # This group is for agreeing on what to do next. The contenders have their own.
    dist.init_process_group("gloo")
    try:
        with contextlib.ExitStack() as at_the_end:
            details = dict.fromkeys(names, plan)
            racers = line_up(rank, details, contenders.make, at_the_end)
            warnings = {text for one in racers.values() for text in one.about["warnings"]}
            for text in sorted(warnings) if rank.number == 0 else []:
                rank.tell({"note": f"note: {text}"})
            records = _race(rank, racers, plan["hosts"], rounds, steps)
            rows = [_sum_up(name, record) for name, record in records.items()]
            rival = contenders.RIVALS[plan["device"]]
            for row in _compared(rows, rival) if rank.number == 0 else []:
                rank.tell({"row": row})
            dist.barrier()
            about = {"settling_steps": SETTLING_STEPS, "rounds": rounds, "steps": steps}
            about |= {"warnings": sorted(warnings), **gpus.about(plan["device"])}
            return {"torch": torch.__version__, **plan, **about}
    finally:
        dist.destroy_process_group()


def _race(
    rank: Rank, racers: dict[str, contenders.Replica], hosts: int, rounds: int, steps: int
) -> dict[str, _StepRecord]:
    for racer in racers.values():
        Record().add_turn(racer, SETTLING_STEPS, 0)
        racer.check()
    records = {name: _StepRecord() for name in racers}
    for number, order in zip(range(1, rounds + 1), orders(list(racers), seed=0), strict=False):
        for name in order:
            _add_turn(records[name], racers[name], hosts, steps)
        if rank.number == 0:
            times = [f"{name} {1e3 * records[name].seconds[-1]:.0f}" for name in racers]
            rank.tell({"note": f"  round {number} of {rounds}: {', '.join(times)} ms"})
    for racer in racers.values():
        racer.check()
    return records


def _add_turn(record: _StepRecord, racer: contenders.Replica, hosts: int, steps: int) -> None:
    import torch.distributed as dist

    # What the turn before has sent has arrived everywhere; after this turn, so has its own.
    dist.barrier()
    sent, counted = wire.sent_bytes(hosts), racer.counters()
    record.add_turn(racer, 0, steps)
    dist.barrier()
    record.sent_bytes += wire.sent_bytes(hosts) - sent
    for name, count in racer.counters().items():
        record.counters[name] = record.counters.get(name, 0.0) + count - counted[name]


def _sum_up(name: str, record: _StepRecord) -> dict[str, Any]:
    low, median, high = record.quartiles()
    row = {
        "contender": name,
        "samples": len(record.seconds),
        "low_ms": low * 1e3,
        "median_ms": median * 1e3,
        "high_ms": high * 1e3,
        "sent_bytes_per_step": wire.of_the_busiest_host(record.sent_bytes) / record.calls,
        "cpu_s_per_step": record.processor_seconds_per_call(),
    }
    if record.counters:
        counters = {key: count / record.calls for key, count in record.counters.items()}
        row["counters_per_step"] = counters
    return row


def _compared(rows: list[dict[str, Any]], rival: str) -> list[dict[str, Any]]:
    """The rows with their time by that of a step without communication, and a rival's by theirs."""
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
