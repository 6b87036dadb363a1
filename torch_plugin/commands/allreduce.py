"""The benchmark ``gflow bench allreduce``: one tensor, its sum over all ranks, in several sizes.

The contenders take turns in the same processes, so whatever else the machine does meets all of
them. It must never time a sum that it has not checked once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gflow.commands import contenders, table
from gflow.commands.rank import Rank
from gflow.commands.seconds import read_seconds
from gflow.commands.sizes import read_sizes, show_size
from gflow.registration import register

_DEFAULT_SIZES = "4K,32K,256K,1M,4M,25M"
_WARM_UP = 3
_CALLS_PER_TURN = 4
_LEAST_ROUNDS = 3
#: All ranks decide together whether to go on, about this often in the time for a size.
_DECISIONS = 10


# --- the command line


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what only this benchmark has."""
    parser.add_argument(
        "--sizes",
        type=read_sizes,
        default=_DEFAULT_SIZES,
        metavar="LIST",
        help="bytes of the tensor, with K, M, G as powers of 1024 (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=read_seconds,
        default=3.0,
        metavar="SECONDS",
        help="time to measure each size, all contenders together (default: %(default)g)",
    )


def arguments(chosen: argparse.Namespace) -> dict[str, Any]:
    """What :func:`measure` gets."""
    return {
        "names": list(contenders.CONTENDERS),
        "sizes": chosen.sizes,
        "seconds": chosen.seconds,
    }


def seconds(chosen: argparse.Namespace) -> float:
    """How long measuring should take."""
    return float(chosen.seconds * len(chosen.sizes))


# --- on the ranks


def measure(rank: Rank, names: list[str], sizes: list[int], seconds: float) -> dict[str, Any]:
    """Measure every size; rank 0 tells a row after each. Return what the numbers depend on."""
    import torch
    import torch.distributed as dist

    register()
    # This group is for agreeing on what to do next. The contenders have their own.
    dist.init_process_group("gloo")
    try:
        racers = {name: contenders.make(name) for name in names}
        for size in sizes:
            row = _measure_size(rank, racers, size, seconds)
            if rank.number == 0:
                rank.tell(row)
        dist.barrier()
        return {"torch": torch.__version__}
    finally:
        dist.destroy_process_group()


def _measure_size(
    rank: Rank, racers: dict[str, contenders.Contender], size: int, seconds: float
) -> dict[str, Any]:
    import torch

    tensor = torch.empty(size // 4, dtype=torch.float32)
    for name, racer in racers.items():
        _check(rank, name, racer, tensor)
    # A sum of zeros can be repeated for ever without growing.
    tensor.zero_()
    for racer in racers.values():
        for _ in range(_WARM_UP):
            racer.all_reduce(tensor)

    samples: dict[str, list[float]] = {name: [] for name in racers}
    order = list(racers)
    start = time.perf_counter()
    done = 0
    while rounds := _rounds_to_go(rank, done, time.perf_counter() - start, seconds):
        for _ in range(rounds):
            for name in order:
                samples[name] += _turn(racers[name], tensor)
            # Nobody always runs after the same other one.
            order.reverse()
        done += rounds
    results = {name: _sum_up(size, samples[name]) for name in racers}
    base, *others = racers
    ratios = {
        f"{base}/{name}": results[base]["median_us"] / results[name]["median_us"] for name in others
    }
    return {"bytes": size, "contenders": results, "ratios": ratios}


def _check(rank: Rank, name: str, racer: contenders.Contender, tensor: Any) -> None:
    tensor.fill_(rank.number + 1)
    racer.all_reduce(tensor)
    expected = sum(range(1, rank.world + 1))
    if not bool((tensor == expected).all()):
        raise RuntimeError(f"{name} gave a wrong sum for {tensor.numel()} elements")


def _turn(racer: contenders.Contender, tensor: Any) -> list[float]:
    """Seconds of each of some calls in a row."""
    # The first call is not counted: it also waits for ranks that came late out of the turn before.
    racer.all_reduce(tensor)
    samples = []
    for _ in range(_CALLS_PER_TURN):
        start = time.perf_counter()
        racer.all_reduce(tensor)
        samples.append(time.perf_counter() - start)
    return samples


def _rounds_to_go(rank: Rank, done: int, elapsed: float, seconds: float) -> int:
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


def _sum_up(size: int, samples: list[float]) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    # An exchange is over when it is over on the slowest rank.
    slowest = torch.tensor(samples, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    low, median, high = statistics.quantiles(slowest.tolist(), n=4, method="inclusive")
    return {
        "samples": len(samples),
        "low_us": low * 1e6,
        "median_us": median * 1e6,
        "high_us": high * 1e6,
        "gb_per_s": size / median / 1e9,
    }


# --- what was measured


def progress(row: dict[str, Any]) -> str:
    """One row, in a line."""
    parts = [
        f"{contenders.label(name)} {_time(one['median_us'])} µs"
        for name, one in row["contenders"].items()
    ]
    samples = min(one["samples"] for one in row["contenders"].values())
    return f"  {show_size(row['bytes']):>8}: {', '.join(parts)} ({samples} samples each)"


def report(rows: Sequence[dict[str, Any]]) -> str:
    """All rows as a table, and what its columns mean."""
    names = list(rows[0]["contenders"])
    base, *others = names
    header = [
        "size",
        *(f"{contenders.label(name)} µs" for name in names),
        *(f"{contenders.label(name)} GB/s" for name in names),
        *(f"{contenders.label(base)}/{contenders.label(name)}" for name in others),
    ]
    text = table.render(header, [_cells(row, names) for row in rows])
    return (
        f"{text}\n\n"
        "µs: median time of one call, on the slowest rank. GB/s: 10^9 bytes of tensor per second.\n"
        f"Over 1 in the last column: {contenders.label(base)} takes longer."
    )


def _cells(row: dict[str, Any], names: list[str]) -> list[str]:
    results = [row["contenders"][name] for name in names]
    return [
        show_size(row["bytes"]),
        *(_time(one["median_us"]) for one in results),
        *(f"{one['gb_per_s']:.3g}" for one in results),
        *(f"{ratio:.2f}" for ratio in row["ratios"].values()),
    ]


def _time(microseconds: float) -> str:
    return f"{microseconds:.0f}" if microseconds >= 100 else f"{microseconds:.1f}"


def plot(rows: Sequence[dict[str, Any]], about: dict[str, Any], path: Path) -> None:
    """Draw the time of a call over the size, with the middle half of the samples as a band."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    sizes = [row["bytes"] for row in rows]
    for name in rows[0]["contenders"]:
        results = [row["contenders"][name] for row in rows]
        (line,) = axes.plot(
            sizes, [one["median_us"] for one in results], marker="o", label=contenders.label(name)
        )
        axes.fill_between(
            sizes,
            [one["low_us"] for one in results],
            [one["high_us"] for one in results],
            color=line.get_color(),
            alpha=0.2,
        )
    axes.set(xscale="log", yscale="log", ylabel="median time of one call, µs")
    axes.set_xticks(sizes, [show_size(size) for size in sizes])
    axes.tick_params(axis="x", which="minor", bottom=False)
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title(
        f"allreduce, {about['ranks']} ranks on one host, {about['cores']} cores, "
        f"torch {about['torch']}, gflow {about['gflow']}"
    )
    figure.savefig(path, dpi=150)
