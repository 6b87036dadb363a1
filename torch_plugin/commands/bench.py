"""``gflow bench``: runs a benchmark on ranks of this host and shows what was measured.

It must never compare numbers of different runs, and never draw a conclusion: it prints what it
measured, and how.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gflow.commands import allreduce, ranks
from gflow.commands.seconds import read_seconds
from gflow.version import __version__

#: Ranks on a busy machine may take this long to start, beyond the time for measuring.
_START_SECONDS = 60.0
_PICTURES = (".png", ".svg")


@dataclass(frozen=True)
class Benchmark:
    """One benchmark: what runs on the ranks, and how its rows are shown.

    Attributes:
        name: the word on the command line.
        summary: what ``--help`` says.
        add_options: adds what only this benchmark has to its parser.
        work: runs on each rank; its first rank tells a row whenever it has one.
        arguments: what ``work`` gets, from what was asked for.
        seconds: how long measuring should take.
        progress: a row in one line, while the others are not there yet.
        report: all rows, at the end.
        plot: draws all rows to a file.
    """

    name: str
    summary: str
    add_options: Callable[[argparse.ArgumentParser], None]
    work: Callable[..., Any]
    arguments: Callable[[argparse.Namespace], dict[str, Any]]
    seconds: Callable[[argparse.Namespace], float]
    progress: Callable[[dict[str, Any]], str]
    report: Callable[[Sequence[dict[str, Any]]], str]
    plot: Callable[[Sequence[dict[str, Any]], dict[str, Any], Path], None]


BENCHMARKS = (
    Benchmark(
        "allreduce",
        "the sum of one tensor over all ranks, by Gloo and by gflow in turn",
        allreduce.add_options,
        allreduce.measure,
        allreduce.arguments,
        allreduce.seconds,
        allreduce.progress,
        allreduce.report,
        allreduce.plot,
    ),
)


def add_to(commands: Any) -> None:
    """Add this command to the command line."""
    parser = commands.add_parser(
        "bench",
        help="measure gflow and Gloo on this machine",
        description="Measure gflow and what it competes with, in one run and in turn.",
    )
    benchmarks = parser.add_subparsers(metavar="BENCHMARK", required=True)
    for benchmark in BENCHMARKS:
        _add_benchmark(benchmarks, benchmark)


def _add_benchmark(benchmarks: Any, benchmark: Benchmark) -> None:
    parser = benchmarks.add_parser(
        benchmark.name, help=benchmark.summary, description=f"Measure {benchmark.summary}."
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=2,
        metavar="N",
        help="processes on this host, at least 2 (default: %(default)s)",
    )
    benchmark.add_options(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them to FILE (.png, .svg)")
    parser.add_argument(
        "--deadline",
        type=read_seconds,
        metavar="SECONDS",
        help="give up after this long (default: a minute, and three times what it should take)",
    )

    def run(chosen: argparse.Namespace) -> int:
        _refuse_what_cannot_work(parser, chosen)
        return _run(benchmark, chosen)

    parser.set_defaults(command=run)


def _refuse_what_cannot_work(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> None:
    """Say now, not after measuring, that a file cannot be written."""
    if chosen.ranks < 2:
        parser.error(f"argument --ranks: {chosen.ranks} is too few: it takes at least 2")
    for option, path in (("--json", chosen.json), ("--plot", chosen.plot)):
        if path is not None and not _can_be_written(path):
            parser.error(f"argument {option}: cannot write {path}")
    if chosen.plot is not None and chosen.plot.suffix not in _PICTURES:
        parser.error(f"argument --plot: {chosen.plot} must end in {' or '.join(_PICTURES)}")
    if chosen.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("argument --plot: needs matplotlib, which is not installed: "
                     "`pip install matplotlib`, or leave out --plot")  # fmt: skip


def _can_be_written(path: Path) -> bool:
    if path.exists():
        return path.is_file() and os.access(path, os.W_OK)
    return os.access(path.parent, os.W_OK)


def _run(benchmark: Benchmark, chosen: argparse.Namespace) -> int:
    seconds = benchmark.seconds(chosen)
    print(f"{benchmark.name} on {chosen.ranks} ranks of this host, about {seconds:.0f} s",
          flush=True)  # fmt: skip
    cores = _cores()
    if cores < chosen.ranks:
        print(f"note: {chosen.ranks} ranks share {cores} cores here: they wait for each other")
    load = os.getloadavg()[0]
    if load > cores / 2:
        print(f"note: this machine is busy (load {load:.1f} on {cores} cores): times are longer")
    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        print(benchmark.progress(row), flush=True)

    try:
        about, *_ = ranks.run(
            benchmark.work,
            chosen.ranks,
            benchmark.arguments(chosen),
            deadline=chosen.deadline or _START_SECONDS + 3 * seconds,
            on_news=keep,
        )
    except ranks.RanksFailed as error:
        print(f"gflow bench {benchmark.name}: {error}", file=sys.stderr)
        return 1
    about = _about_this_run(benchmark, chosen, load) | about
    print(f"\n{benchmark.report(rows)}")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(about | {"rows": rows}, indent=2) + "\n")
        print(f"numbers: {chosen.json}")
    if chosen.plot is not None:
        benchmark.plot(rows, about, chosen.plot)
        print(f"plot: {chosen.plot}")
    return 0


def _about_this_run(
    benchmark: Benchmark, chosen: argparse.Namespace, load: float
) -> dict[str, Any]:
    """What one has to know to read the numbers later."""
    return {
        "benchmark": benchmark.name,
        "ranks": chosen.ranks,
        "gflow": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": _cores(),
        "load_before": load,
    }


def _cores() -> int:
    return len(os.sched_getaffinity(0))
