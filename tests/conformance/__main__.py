"""The command: runs PyTorch's backend suite and prints a verdict in its last line.

It fails if a test failed, or if a test that Gloo passes did not run.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from . import case, environment, listing, report

# PyTorch's own deadline comes first, because it shows where the ranks are stuck. Ours comes this
# many seconds later and ends whatever is left.
GRACE = 30.0


def main() -> int:
    options = parse()
    # Everything that the tests leave behind is in one folder, which is removed at the end.
    folder = Path(tempfile.mkdtemp(prefix="conformance-"))
    signal.signal(signal.SIGTERM, stop)
    try:
        environment.prepare(options.backend, options.world_size, options.timeout, folder)
        if options.show_gates:
            return show_gates(options.backend)
        source = environment.find_backend(options.backend)
        if source is None:
            print(f"conformance: no backend named {options.backend} is installed", file=sys.stderr)
            return 2
        print(f"backend: {options.backend}, from {source}", flush=True)
        return run(options, folder)
    finally:
        environment.leave(folder)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance",
        description="PyTorch's own backend suite, with every gate that Gloo passes open for gflow.",
    )
    add = parser.add_argument
    add("--backend", default="gflow", help="the backend under test: gflow (default) or gloo")
    add("--world-size", type=int, default=2, help="the number of ranks, 2 by default")
    add("--quick", action="store_true", help="only the tests in quick.txt")
    add("-k", metavar="PATTERN", help="only tests whose name contains or matches PATTERN")
    add("--timeout", type=int, default=120, help="seconds that a test may take, 120 by default")
    add(
        "--start",
        choices=["auto", "fork", "spawn"],
        default="auto",
        help="how ranks start; auto forks them from one that has torch loaded, but not with a GPU",
    )
    add("--results", type=Path, metavar="FILE", help="write one line for each test to FILE")
    add("--show-gates", action="store_true", help="print every gate and stop")
    add("--write-expected", action="store_true", help="write the expected list, from plain Gloo")
    options = parser.parse_args()
    if options.write_expected and (options.backend != "gloo" or options.quick or options.k):
        parser.error("--write-expected needs --backend gloo and the whole suite")
    return options


def stop(*_: object) -> NoReturn:
    # An exception, so that the running test's processes are ended on the way out.
    raise KeyboardInterrupt


def show_gates(backend: str) -> int:
    from . import gates

    mentions = gates.mentions(backend)
    print(*mentions, sep="\n")
    opened = sum(mention.opened for mention in mentions)
    print(f"gates: {opened} opened for {backend}, {len(mentions) - opened} kept for Gloo alone")
    return 0


def run(options: argparse.Namespace, folder: Path) -> int:
    suite = environment.load_suite(options.start)
    chosen = listing.choose(suite.names(), options.quick, options.k)
    limits = listing.limits(options.backend)
    outcomes: list[case.Outcome] = []
    for number, name in enumerate(chosen, 1):
        outcome = report.apply_limit(run_case(suite, name, folder), limits.get(name))
        report.show(outcome, number, len(chosen))
        outcomes.append(outcome)
    if options.results:
        report.write(outcomes, options.results)
    if options.write_expected:
        listing.write_expected(options.world_size, outcomes)
    narrowed = options.quick or options.k is not None
    expected = listing.expected(options.world_size, chosen if narrowed else None)
    return report.conclude(outcomes, expected, options.backend)


def run_case(suite: ModuleType, name: str, folder: Path) -> case.Outcome:
    return case.run(suite.BackendSuite, name, folder, suite.deadline(name) + GRACE)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("conformance: stopped")
