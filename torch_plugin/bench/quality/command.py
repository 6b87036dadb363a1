"""The command line of ``gflow bench quality``.

Unlike the other benchmarks it is no race: what a training ends with does not depend on what else
the machine does. So its trainings can be spread over days, and the file that keeps them is its
result.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gflow.bench.arguments import at_least, names_of, option_value, option_values
from gflow.bench.benchmark import cores, exit_on_sigterm
from gflow.bench.quality import report, runs, training
from gflow.bench.quality.runs import DENSE, Run
from gflow.bench.quality.tasks import TASKS
from gflow.bench.units import read_rate, read_seconds
from gflow.launch import ranks
from gflow.launch.namespaces import NoHosts, hosts, obstacle
from gflow.launch.ranks import RanksFailed
from gflow.options import OPTION_SPECS

_METHODS = "exact,fp16,int8,int4,int3,quinary,ternary,chunks,auto"
#: The networks are small: with gflow's default they would have only a few chunks.
_CHUNK = 1024
_SEEDS = 3
_SWEEP = "0.5,1,2"
#: Per training, for making groups and DDP, and for evaluations.
_OVERHEAD_SECONDS = 8.0
_START_SECONDS = 60.0


def add_to(benchmarks: Any) -> None:
    """Add this benchmark to the command line."""
    summary = (
        "what training ends with, by what the gradients are sent as, with optimizers as people "
        "use them"
    )
    parser = benchmarks.add_parser("quality", help=summary, description=f"Measure {summary}.")
    _add_options(parser)

    def run(args: argparse.Namespace) -> int:
        _refuse_impossible(parser, args)
        if args.report is not None:
            return _report(runs.read(args.report), args)
        return _run(args)

    parser.set_defaults(command=run)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tasks",
        type=names_of("a task", TASKS),
        default=list(TASKS),
        metavar="LIST",
        help="; ".join(f"{name}: {task.summary}" for name, task in TASKS.items())
        + f" (default: {','.join(TASKS)})",
    )
    parser.add_argument(
        "--methods",
        type=option_values("method"),
        default=_METHODS,
        metavar="LIST",
        help=f"what the gradients are sent as: {OPTION_SPECS['method'].allowed}; the others are "
        f"compared with {DENSE} (default: %(default)s)",
    )
    parser.add_argument(
        "--hosts",
        type=_counts,
        default="2",
        metavar="LIST",
        help="how many hosts, with one rank each; several numbers are measured one after the other "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--rate",
        type=read_rate,
        metavar="RATE",
        help="make the hosts as network namespaces and limit the link of each, such as 1gbit; "
        "needs root (default: every rank is a host of its own, over loopback)",
    )
    parser.add_argument(
        "--seeds",
        type=at_least(1),
        default=_SEEDS,
        metavar="N",
        help="trainings of each method, with other weights and data (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=at_least(1),
        metavar="N",
        help="steps of a training (default: "
        + ", ".join(f"{name} {task.steps}" for name, task in TASKS.items())
        + ")",
    )
    parser.add_argument(
        "--chunk",
        type=option_value("chunk"),
        default=_CHUNK,
        metavar="N",
        help="elements in a chunk, for the method chunks; small, as the networks are "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--sweep",
        type=_factors,
        nargs="?",
        const=_factors(_SWEEP),
        metavar="LIST",
        help=f"instead of comparing methods, train {DENSE} with the task's learning rate times "
        f"each of these (default: {_SWEEP})",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("quality.jsonl"),
        metavar="FILE",
        help="append every training to FILE as soon as it has ended, and leave out those that are "
        "in there (default: %(default)s)",
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="train nothing: print the tables of what is in FILE, as Markdown",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them to FILE (.png, .svg)")
    parser.add_argument(
        "--deadline",
        type=read_seconds,
        metavar="SECONDS",
        help="give up after this long (default: by what is trained)",
    )


def _counts(text: str) -> list[int]:
    return list(dict.fromkeys(at_least(2)(part.strip()) for part in text.split(",")))


def _factors(text: str) -> list[float]:
    return sorted({_factor(part.strip()) for part in text.split(",")})


def _factor(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number over 0")


def _refuse_impossible(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exit with an error now, not after training, if something cannot be done."""
    if args.report is not None and not args.report.is_file():
        parser.error(f"argument --report: there is no file {args.report}")
    if args.rate is not None and args.report is None:
        reason = obstacle(rate=True)
        if reason is not None:
            parser.error(f"argument --rate: {reason}, or leave out --rate")
    for option, path in (("--out", args.out), ("--plot", args.plot)):
        if path is not None and not os.access(path if path.exists() else path.parent, os.W_OK):
            parser.error(f"argument {option}: cannot write {path}")
    if args.plot is not None and args.plot.suffix not in (".png", ".svg"):
        parser.error(f"argument --plot: {args.plot} must end in .png or .svg")
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("argument --plot: needs matplotlib, which is not installed: "
                     "`pip install matplotlib`, or leave out --plot")  # fmt: skip


def wanted(args: argparse.Namespace) -> list[Run]:
    """All runs that the command line asks for: every method with the first seed, then the next.

    So a benchmark that is stopped has compared all methods, if with fewer seeds.
    """
    return [
        Run(
            task=name,
            method=method,
            seed=seed,
            hosts=count,
            rate=args.rate,
            steps=args.steps or TASKS[name].steps,
            learning_rate=TASKS[name].learning_rate * factor,
            chunk=args.chunk if method == "chunks" else None,
        )
        for count in args.hosts
        for seed in range(args.seeds)
        for name in args.tasks
        if TASKS[name].obstacle() is None
        for method in ([DENSE] if args.sweep else args.methods)
        for factor in args.sweep or [1.0]
    ]


def _run(args: argparse.Namespace) -> int:
    for name in args.tasks:
        reason = TASKS[name].obstacle()
        if reason is not None:
            print(f"left out: {name}: {reason}", flush=True)
    all_runs = wanted(args)
    missing = runs.left(all_runs, runs.read(args.out))
    progress = _Progress(args.out, len(missing), _expected_seconds(missing))
    print(f"{len(all_runs)} trainings, {len(all_runs) - len(missing)} of them already in "
          f"{args.out}; {progress.time_left()}", flush=True)  # fmt: skip
    try:
        for count in args.hosts:
            _train([run for run in missing if run.hosts == count], progress, args)
    except (RanksFailed, NoHosts) as error:
        print(f"gflow bench quality: {error}", file=sys.stderr)
        return 1
    asked = set(all_runs)
    return _report([row for row in runs.read(args.out) if Run.of(row) in asked], args)


def _train(some: Sequence[Run], progress: _Progress, args: argparse.Namespace) -> None:
    """Train runs with the same number of hosts, in one set of ranks."""
    if not some:
        return
    count = some[0].hosts
    with contextlib.ExitStack() as cleanup:
        cleanup.enter_context(exit_on_sigterm())
        made = cleanup.enter_context(hosts(count, args.rate)) if args.rate else []
        ranks.run(
            training.measure,
            count,
            {"runs": [run.as_json() for run in some]},
            deadline=args.deadline or _START_SECONDS + 10 * _expected_seconds(some),
            on_message=progress.receive,
            hosts=[host.location for host in made],
        )


def _expected_seconds(some: Sequence[Run]) -> float:
    """How long these runs should take, beside each other's ranks."""
    total = 0.0
    for run in some:
        step = TASKS[run.task].step_seconds * max(1.0, run.hosts / cores())
        total += run.steps * step + _OVERHEAD_SECONDS
    return total


@dataclass
class _Progress:
    """Keeps what the ranks tell, and prints it."""

    out: Path
    count: int
    expected: float
    done: int = 0
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._start = self.clock()

    def receive(self, message: dict[str, Any]) -> None:
        """A point of a curve, or a finished training."""
        if "step" in message:
            point = message["step"]
            print(f"    {point['of']}: step {point['step']}, {point['seconds']:.0f} s, "
                  f"held-out loss {point['loss']:.4f}", flush=True)  # fmt: skip
        if "row" in message:
            row = message["row"]
            runs.append(self.out, row)
            self.done += 1
            print(f"  [{self.done}/{self.count}] {Run.of(row).label}: held-out loss "
                  f"{row['loss']:.4f}, accuracy {row['accuracy']:.1%}, {row['step_ms']:.1f} ms per "
                  f"step, {row['ratio']:.1f} x fewer bytes; {self.time_left()}",
                  flush=True)  # fmt: skip

    def time_left(self) -> str:
        """How long the rest will take, at the speed so far."""
        each = (
            (self.clock() - self._start) / self.done
            if self.done
            else self.expected / max(1, self.count)
        )
        minutes = each * (self.count - self.done) / 60
        return f"about {minutes:.0f} min left"


def _report(rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> int:
    if not rows:
        print("gflow bench quality: there are no results", file=sys.stderr)
        return 1
    print(f"\n{report.tables(rows)}")
    if args.plot is not None:
        report.plot(rows, args.plot)
        print(f"\nplot: {args.plot}")
    return 0
