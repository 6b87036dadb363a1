"""``gflow bench``: runs a benchmark on ranks and shows what was measured.

It must never compare numbers of different runs, and never draw a conclusion: it prints what it
measured, and how.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gflow.commands import (
    allreduce,
    contenders,
    ddp,
    gpus,
    layout,
    picture,
    quality,
    race,
    ranks,
    report,
)
from gflow.commands.hosts import Host, NoHosts, hosts, obstacle
from gflow.commands.rates import read_rate
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
        label: how a contender of some name is shown.
        layout: what ``--help`` says of where the ranks run if nothing is asked for.
        add_options: adds what only this benchmark has to its parser.
        settle: puts defaults where nothing was asked for.
        build: from what was asked for, a folder to compile in and the addresses of several hosts:
            what ``work`` gets, and by contender why it is left out.
        work: runs on each rank; its first rank tells a row whenever it has one, and in between
            notes.
        seconds: how long measuring should take.
        patience: how long it may take.
        progress: a row in one line, while the others are not there yet.
        report: all rows, at the end.
        plot: draws all rows to a file.
        devices: the types of device that its tensors can be on.
    """

    name: str
    summary: str
    label: Callable[[str], str]
    layout: layout.Defaults
    add_options: Callable[[argparse.ArgumentParser], None]
    settle: Callable[[argparse.Namespace], None]
    build: Callable[
        [argparse.Namespace, Path, Sequence[str]], tuple[dict[str, Any], dict[str, str]]
    ]
    work: Callable[..., Any]
    seconds: Callable[[argparse.Namespace], float]
    patience: Callable[[argparse.Namespace], float]
    progress: Callable[[dict[str, Any]], str]
    report: Callable[[Sequence[dict[str, Any]], dict[str, Any]], str]
    plot: Callable[[Sequence[dict[str, Any]], dict[str, Any], Path], None]
    devices: tuple[str, ...] = ("cpu", "cuda")


BENCHMARKS = (
    Benchmark(
        "allreduce",
        "the sum of one tensor over all ranks, by gflow, Gloo, MPI and at the limit, in turn",
        contenders.LABELS.__getitem__,
        allreduce.LAYOUT,
        allreduce.add_options,
        allreduce.settle,
        allreduce.build,
        race.measure,
        allreduce.seconds,
        allreduce.patience,
        report.progress,
        report.tables,
        picture.draw,
    ),
    Benchmark(
        "ddp",
        "a training step of DDP, by gflow, Gloo with and without compression, and without any "
        "communication, in turn",
        ddp.contenders.LABELS.__getitem__,
        ddp.options.LAYOUT,
        ddp.options.add_options,
        ddp.options.settle,
        ddp.options.build,
        ddp.race.measure,
        ddp.options.seconds,
        ddp.options.patience,
        ddp.report.progress,
        ddp.report.tables,
        ddp.picture.draw,
    ),
    Benchmark(
        "quality",
        "what training ends with when gflow sends all of the gradients, and when it sends a part",
        str,  # its variants are called what they are
        quality.options.LAYOUT,
        quality.options.add_options,
        quality.options.settle,
        quality.options.build,
        quality.trainings.measure,
        quality.options.seconds,
        quality.options.patience,
        quality.report.progress,
        quality.report.tables,
        quality.picture.draw,
        devices=("cpu",),
    ),
)


def add_to(commands: Any) -> None:
    """Add this command to the command line."""
    parser = commands.add_parser(
        "bench",
        help="measure gflow and its competitors on this machine",
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
        metavar="N",
        help="processes on each host, at least 2 with one host "
        f"(default: {benchmark.layout.ranks})",
    )
    parser.add_argument(
        "--hosts",
        type=int,
        metavar="H",
        help="hosts; more than one are network namespaces on this machine, joined by a switch, "
        f"and need root (default: {benchmark.layout.hosts})",
    )
    parser.add_argument(
        "--rate",
        type=read_rate,
        metavar="RATE",
        help="limit the link of each host, in each direction, such as 1gbit or 100mbit; "
        f"with --hosts 2 or more (default: {benchmark.layout.rate})",
    )
    parser.add_argument(
        "--device",
        choices=benchmark.devices,
        default="cpu",
        help="where the tensors are: %(choices)s; cuda takes a GPU for each rank (default: "
        "%(default)s)",
    )
    benchmark.add_options(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them to FILE (.png, .svg)")
    parser.add_argument(
        "--deadline",
        type=read_seconds,
        metavar="SECONDS",
        help="give up after this long (default: by what is measured; over a minute)",
    )

    def run(chosen: argparse.Namespace) -> int:
        benchmark.settle(chosen)
        _refuse_what_cannot_work(parser, chosen)
        return _run(benchmark, chosen)

    parser.set_defaults(command=run)


def _refuse_what_cannot_work(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> None:
    """Say now, not after measuring, what cannot be done."""
    if chosen.hosts < 1:
        parser.error(f"argument --hosts: {chosen.hosts} is too few: it takes at least 1")
    least = 2 if chosen.hosts == 1 else 1
    if chosen.ranks < least:
        parser.error(f"argument --ranks: {chosen.ranks} is too few: it takes at least {least}")
    if chosen.rate is not None and chosen.hosts == 1:
        parser.error("argument --rate: one host has no link to limit: add --hosts 2")
    in_the_way = obstacle(rate=chosen.rate is not None) if chosen.hosts > 1 else None
    if in_the_way is not None:
        parser.error(f"argument --hosts: {in_the_way}, or stay on one host: --hosts 1 --ranks 2")
    if chosen.device == "cuda":
        in_the_way = gpus.obstacle(chosen.ranks * chosen.hosts)
        if in_the_way is not None:
            parser.error(f"argument --device: {in_the_way}")
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
    load = os.getloadavg()[0]
    _say_what_begins(benchmark, chosen, load)
    try:
        rows, left_out, about = _measure(benchmark, chosen)
    except (ranks.RanksFailed, NoHosts) as error:
        print(f"gflow bench {benchmark.name}: {error}", file=sys.stderr)
        return 1
    about = _about_this_run(benchmark, chosen, load) | about | {"left_out": left_out}
    print(f"\n{benchmark.report(rows, about)}")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(about | {"rows": rows}, indent=2) + "\n")
        print(f"numbers: {chosen.json}")
    if chosen.plot is not None:
        benchmark.plot(rows, about, chosen.plot)
        print(f"plot: {chosen.plot}")
    return 0


def _say_what_begins(benchmark: Benchmark, chosen: argparse.Namespace, load: float) -> None:
    where = layout.show_layout(chosen.hosts, chosen.ranks, chosen.rate)
    print(f"{benchmark.name} on {where}, about {benchmark.seconds(chosen):.0f} s", flush=True)
    cores, world = _cores(), chosen.ranks * chosen.hosts
    if cores < world:
        print(f"note: {world} ranks share {cores} cores here: they wait for each other")
    if load > cores / 2:
        print(f"note: this machine is busy (load {load:.1f} on {cores} cores): times are longer")


def _measure(
    benchmark: Benchmark, chosen: argparse.Namespace
) -> tuple[list[dict[str, Any]], dict[str, str], dict[str, Any]]:
    """Run it; return the rows, by contender why it was left out, and what rank 0 returned."""
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}

    def hear(news: dict[str, Any]) -> None:
        if "row" in news:
            rows.append(news["row"])
            print(benchmark.progress(rows[-1]), flush=True)
        if "note" in news:
            print(news["note"], flush=True)
        for name, reason in news.get("left_out", {}).items():
            left_out[name] = reason
            print(f"left out: {benchmark.label(name)}: {reason}", flush=True)

    with contextlib.ExitStack() as at_the_end:
        places: list[Host] = []
        if chosen.hosts > 1:
            places = at_the_end.enter_context(hosts(chosen.hosts, chosen.rate))
        folder = at_the_end.enter_context(tempfile.TemporaryDirectory(prefix="gflow-bench-"))
        addresses = [host.address for host in places]
        arguments, absent = benchmark.build(chosen, Path(folder), addresses)
        hear({"left_out": absent})
        about, *_ = ranks.run(
            benchmark.work,
            chosen.ranks * chosen.hosts,
            arguments,
            deadline=chosen.deadline or _START_SECONDS + benchmark.patience(chosen),
            on_news=hear,
            hosts=places,
        )
    return rows, left_out, about


def _about_this_run(
    benchmark: Benchmark, chosen: argparse.Namespace, load: float
) -> dict[str, Any]:
    """What one has to know to read the numbers later."""
    return {
        "benchmark": benchmark.name,
        "ranks": chosen.ranks,
        "hosts": chosen.hosts,
        "rate": chosen.rate,
        "device": chosen.device,
        "gflow": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": _cores(),
        "load_before": load,
    }


def _cores() -> int:
    return len(os.sched_getaffinity(0))
