"""``gflow bench``: runs a benchmark and prints what was measured, and how.

Numbers of different runs are never compared here, and no conclusions drawn.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from gflow.bench import allreduce, benchmark, ddp, machine, quality
from gflow.bench.arguments import show_layout
from gflow.bench.benchmark import Benchmark, Info, cores
from gflow.bench.units import read_rate, read_seconds
from gflow.launch.namespaces import NoHosts, obstacle
from gflow.launch.ranks import RanksFailed
from gflow.version import __version__

BENCHMARKS = (allreduce.BENCHMARK, ddp.BENCHMARK)

_PLOT_SUFFIXES = (".png", ".svg")


def add_to(commands: Any) -> None:
    """Add this command to the command line."""
    parser = commands.add_parser(
        "bench",
        help="measure gflow and its competitors on this machine",
        description="Measure gflow and what it competes with, in one run and in turn.",
    )
    benchmarks = parser.add_subparsers(metavar="BENCHMARK", required=True)
    for one in BENCHMARKS:
        _add_benchmark(benchmarks, one)
    quality.add_to(benchmarks)


def _add_benchmark(benchmarks: Any, chosen: Benchmark) -> None:
    parser = benchmarks.add_parser(
        chosen.name, help=chosen.summary, description=f"Measure {chosen.summary}."
    )
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help=f"processes on each host, at least 2 with one host (default: {chosen.layout.ranks})",
    )
    parser.add_argument(
        "--hosts",
        type=int,
        metavar="H",
        help="hosts; more than one are network namespaces on this machine, joined by a switch, "
        f"and need root (default: {chosen.layout.hosts})",
    )
    parser.add_argument(
        "--rate",
        type=read_rate,
        metavar="RATE",
        help="limit the link of each host, in each direction, such as 1gbit or 100mbit; "
        f"with --hosts 2 or more (default: {chosen.layout.rate})",
    )
    parser.add_argument(
        "--device",
        choices=chosen.devices,
        default="cpu",
        help="where the tensors are: %(choices)s; cuda takes a GPU for each rank (default: "
        "%(default)s)",
    )
    chosen.add_options(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them to FILE (.png, .svg)")
    parser.add_argument(
        "--deadline",
        type=read_seconds,
        metavar="SECONDS",
        help="give up after this long (default: by what is measured; over a minute)",
    )

    def run(args: argparse.Namespace) -> int:
        chosen.apply_defaults(args)
        _refuse_impossible(parser, args)
        return _run(chosen, args)

    parser.set_defaults(command=run)


def _refuse_impossible(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exit with an error now, not after measuring, if something cannot be done."""
    if args.hosts < 1:
        parser.error(f"argument --hosts: {args.hosts} is too few: it takes at least 1")
    least = 2 if args.hosts == 1 else 1
    if args.ranks < least:
        parser.error(f"argument --ranks: {args.ranks} is too few: it takes at least {least}")
    if args.rate is not None and args.hosts == 1:
        parser.error("argument --rate: one host has no link to limit: add --hosts 2")
    reason = obstacle(rate=args.rate is not None) if args.hosts > 1 else None
    if reason is not None:
        parser.error(f"argument --hosts: {reason}, or stay on one host: --hosts 1 --ranks 2")
    if args.device == "cuda":
        reason = machine.gpu_obstacle(args.ranks * args.hosts)
        if reason is not None:
            parser.error(f"argument --device: {reason}")
    for option, path in (("--json", args.json), ("--plot", args.plot)):
        if path is not None and not _is_writable(path):
            parser.error(f"argument {option}: cannot write {path}")
    if args.plot is not None and args.plot.suffix not in _PLOT_SUFFIXES:
        parser.error(f"argument --plot: {args.plot} must end in {' or '.join(_PLOT_SUFFIXES)}")
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("argument --plot: needs matplotlib, which is not installed: "
                     "`pip install matplotlib`, or leave out --plot")  # fmt: skip


def _is_writable(path: Path) -> bool:
    if path.exists():
        return path.is_file() and os.access(path, os.W_OK)
    return os.access(path.parent, os.W_OK)


def _run(chosen: Benchmark, args: argparse.Namespace) -> int:
    load = os.getloadavg()[0]
    _announce(chosen, args, load)
    try:
        result = benchmark.run(chosen, args)
    except (RanksFailed, NoHosts) as error:
        print(f"gflow bench {chosen.name}: {error}", file=sys.stderr)
        return 1
    info = _run_info(chosen, args, load) | result.info | {"left_out": result.left_out}
    print(f"\n{chosen.report(result.rows, info)}")
    if args.json is not None:
        args.json.write_text(json.dumps(info | {"rows": result.rows}, indent=2) + "\n")
        print(f"numbers: {args.json}")
    if args.plot is not None:
        chosen.plot(result.rows, info, args.plot)
        print(f"plot: {args.plot}")
    return 0


def _announce(chosen: Benchmark, args: argparse.Namespace, load: float) -> None:
    where = show_layout(args.hosts, args.ranks, args.rate)
    print(f"{chosen.name} on {where}, about {chosen.expected_seconds(args):.0f} s", flush=True)
    world = args.ranks * args.hosts
    if cores() < world:
        print(f"note: {world} ranks share {cores()} cores here: they wait for each other")
    if load > cores() / 2:
        print(f"note: this machine is busy (load {load:.1f} on {cores()} cores): times are longer")


def _run_info(chosen: Benchmark, args: argparse.Namespace, load: float) -> Info:
    """The information needed to interpret the numbers later."""
    return {
        "benchmark": chosen.name,
        "ranks": args.ranks,
        "hosts": args.hosts,
        "rate": args.rate,
        "device": args.device,
        "gflow": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": cores(),
        "load_before": load,
    }
