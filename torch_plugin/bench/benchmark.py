"""What a benchmark is, and how one is run on ranks."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from gflow.bench.arguments import LayoutDefaults
from gflow.launch import ranks
from gflow.launch.namespaces import Host, hosts

#: One row of a benchmark's result, and what all rows depend on.
Row = dict[str, Any]
Info = dict[str, Any]

#: Ranks on a busy machine may take this long to start, beyond the time for measuring.
_START_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One benchmark: what runs on the ranks, and how its rows are shown.

    Attributes:
        name: the word on the command line.
        summary: what ``--help`` says.
        label: how a contender of some name is shown.
        layout: what ``--help`` says of where the ranks run by default.
        add_options: adds the options that only this benchmark has.
        apply_defaults: fills in options that were not given.
        prepare: from the options, a folder to compile in and the addresses of several hosts: the
            arguments of ``measure``, and by contender why it is left out.
        measure: runs on each rank; the first tells a row whenever it has one, and notes in between.
            What it returns, all rows depend on.
        expected_seconds: how long measuring should take.
        time_limit: after how many seconds something must be wrong.
        progress: a row in one line, shown at once.
        report: all rows, at the end.
        plot: draws all rows to a file.
        devices: the types of device that its tensors can be on.
    """

    name: str
    summary: str
    label: Callable[[str], str]
    layout: LayoutDefaults
    add_options: Callable[[argparse.ArgumentParser], None]
    apply_defaults: Callable[[argparse.Namespace], None]
    prepare: Callable[
        [argparse.Namespace, Path, Sequence[str]], tuple[dict[str, Any], dict[str, str]]
    ]
    measure: Callable[..., Any]
    expected_seconds: Callable[[argparse.Namespace], float]
    time_limit: Callable[[argparse.Namespace], float]
    progress: Callable[[Row], str]
    report: Callable[[Sequence[Row], Info], str]
    plot: Callable[[Sequence[Row], Info, Path], None]
    devices: tuple[str, ...] = ("cpu", "cuda")


@dataclass
class Result:
    """The measurements of a run.

    Attributes:
        rows: in the order in which they came.
        left_out: by contender, why it was left out.
        info: what the rows depend on.
    """

    rows: list[Row] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    info: Info = field(default_factory=dict)


def run(benchmark: Benchmark, args: argparse.Namespace) -> Result:
    """Run a benchmark, and print its progress."""
    result = Result()

    def receive(message: dict[str, Any]) -> None:
        if "row" in message:
            result.rows.append(message["row"])
            print(benchmark.progress(message["row"]), flush=True)
        if "note" in message:
            print(message["note"], flush=True)
        for name, reason in message.get("left_out", {}).items():
            result.left_out[name] = reason
            print(f"left out: {benchmark.label(name)}: {reason}", flush=True)

    with contextlib.ExitStack() as cleanup:
        cleanup.enter_context(exit_on_sigterm())
        made: list[Host] = []
        if args.hosts > 1:
            made = cleanup.enter_context(hosts(args.hosts, args.rate))
        folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="gflow-bench-"))
        addresses = [host.ipv4() for host in made]
        arguments, absent = benchmark.prepare(args, Path(folder), addresses)
        receive({"left_out": absent})
        result.info, *_ = ranks.run(
            benchmark.measure,
            args.ranks * args.hosts,
            arguments,
            deadline=args.deadline or _START_SECONDS + benchmark.time_limit(args),
            on_message=receive,
            hosts=[host.location for host in made],
        )
    return result


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the program as Ctrl-C does, with all cleanup."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    # Only the main thread may set handlers, and an existing handler is not replaced.
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return
    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
