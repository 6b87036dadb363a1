"""Train the same model with Gloo, Gloo + fp16 hook and gflow: who has an equally good one first?

`make demo` runs it. The ranks are on two hosts (network namespaces, which need root) with a link
of an ordinary rate; without root both are on this machine. Everything has its defaults: the
optimizer (torch's AdamW) and gflow. The methods take turns with each seed, because a shared machine
is noisy: only times of the same minutes compare. At the end it prints a table and draws a plot.

    python examples/demo.py --rate 1gbit
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from comparison import plot, report
from comparison.methods import METHODS, Method, read_methods
from comparison.processors import ProcessorTime
from comparison.progress import Progress
from comparison.runs import Result, Run, targets_of
from comparison.testbed import RANKS, Testbed, loopback, two_hosts
from comparison.training import train_all

from gflow.bench.units import read_rate
from gflow.launch import ranks

#: Modules that the ranks and the plot need, and the packages that they are in.
PACKAGES = {"torch": "torch", "sklearn": "scikit-learn", "matplotlib": "matplotlib"}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train a CNN on handwritten digits with each method in turn, on two hosts "
        "made of network namespaces, and compare the time to a held-out loss, bytes and accuracy.",
        epilog="gflow has its defaults; GFLOW_… variables change them, such as "
        "GFLOW_METHOD=int3. "
        "Times compare within one run of the demo only, never between two runs.",
    )

    def number(flag: str, default: int, text: str) -> None:
        parser.add_argument(
            flag, type=positive, default=default, metavar="N", help=f"{text} (default: {default})"
        )

    number("--steps", 500, "training steps")
    number("--seeds", 2, "trainings with each method, in turn")
    number("--timeout", 600, "give up after so many seconds")
    parser.add_argument(
        "--rate",
        type=read_rate,
        default="1gbit",
        help="of each host's link, such as 1gbit or 300mbit (default: %(default)s)",
    )
    parser.add_argument(
        "--loopback", action="store_true", help="make no hosts, even as root: two local ranks"
    )
    parser.add_argument(
        "--methods",
        type=read_methods,
        default=",".join(METHODS),
        metavar="LIST",
        help="the others are measured against the first (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("demo.png"),
        metavar="FILE",
        help="where the plot goes (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements here")
    args = parser.parse_args(argv)
    for path in (args.out, args.json):
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"{path}: no such folder")
    return args


def positive(text: str) -> int:
    """Read a count, at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return value


def in_turn(methods: Sequence[Method], seeds: int) -> list[tuple[Method, int]]:
    """All trainings: every method once per seed, so that a slow minute of the machine hits all.

    Every other seed goes backwards, so that a machine that slows down steadily favours no method.
    """
    return [
        (method, seed)
        for seed in range(seeds)
        for method in (methods if seed % 2 == 0 else reversed(methods))
    ]


def run_all(testbed: Testbed, args: argparse.Namespace) -> dict[str, list[Run]]:
    """Train, and show the progress; returns the trainings of each method."""
    trainings = in_turn(args.methods, args.seeds)
    headings = [f"seed {seed}  {method.label:16}" for method, seed in trainings]
    progress = Progress(headings, args.steps)
    runs: dict[str, list[Run]] = {method.key: [] for method in args.methods}

    def receive(message: dict[str, Any]) -> None:
        if "step" in message:
            progress.update(message["step"])
        if "run" in message:
            run = Run.of(message["run"], testbed.senders)
            runs[run.method].append(run)
            progress.done(
                f"{run.seconds:.1f} s of training, held-out loss {run.loss:.4f}, "
                f"accuracy {run.accuracy:.1%}"
            )

    details = [
        {
            "method": method.key,
            "backend": method.backend,
            "fp16_hook": method.fp16_hook,
            "seed": seed,
        }
        for method, seed in trainings
    ]
    try:
        ranks.run(
            train_all,
            RANKS,
            {"trainings": details, "steps": args.steps, "interface": testbed.interface},
            deadline=args.timeout,
            on_message=receive,
            hosts=testbed.hosts,
        )
    except BaseException:
        progress.leave_line()
        raise
    return runs


def announce(testbed: Testbed, args: argparse.Namespace) -> None:
    """Say what will be compared, and how."""
    own = " ".join(f"{name}={value}" for name, value in gflow_environment().items())
    print(
        f"Comparing {', '.join(method.label for method in args.methods)}: a CNN on handwritten "
        f"digits,\nplain DDP, AdamW with torch's defaults, {args.steps} steps with a cosine, the "
        f"same seeds ({args.seeds}) and data.\n{testbed.note}\n"
        f"gflow's settings: {own or 'its defaults'}\n",
        flush=True,
    )


def set_where_unset(settings: Mapping[str, str]) -> None:
    """Give the ranks these settings, unless the user's environment has them."""
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def gflow_environment() -> dict[str, str]:
    """gflow's settings in the environment, without the secret."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith("GFLOW_") and name != "GFLOW_SECRET"
    }


def show(
    runs: dict[str, list[Run]], testbed: Testbed, share_of_others: float, args: argparse.Namespace
) -> None:
    """Print and draw what was measured."""
    targets = targets_of(next(iter(runs.values())))
    results = {key: Result.of(of_method, targets) for key, of_method in runs.items()}
    print(f"\n{report.result_table(results)}\n")
    print(f"{report.how_it_was_measured(results, args.seeds, testbed.interface)}\n")
    for sentence in report.conclusions(results):
        print(sentence)
    if "gflow" in results:
        print(report.own_count(results["gflow"].counters))
    print(report.trust(share_of_others))
    plot.draw(runs, results, testbed.title, share_of_others, args.out)
    print(f"Plot: {args.out}")
    if args.json is not None:
        document = {
            "place": testbed.title,
            "steps": args.steps,
            "seeds": args.seeds,
            "share_of_other_programs": share_of_others,
            "environment": gflow_environment(),
            "results": {key: asdict(result) for key, result in results.items()},
            "runs": [asdict(run) for of_method in runs.values() for run in of_method],
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")
        print(f"Measurements: {args.json}")


def main() -> int:
    """Run the demo; returns the exit code."""
    args = parse_args()
    missing = [name for module, name in PACKAGES.items() if not find_spec(module)]
    if missing:
        print(
            f"The demo needs {', '.join(missing)}: `make demo` installs all it needs, "
            f"or do it by: pip install {' '.join(missing)}",
            file=sys.stderr,
        )
        return 2
    with contextlib.ExitStack() as cleanup:
        if args.loopback:
            testbed = loopback("--loopback was given")
        else:
            testbed = cleanup.enter_context(two_hosts(args.rate))
        set_where_unset(testbed.settings)
        announce(testbed, args)
        before = ProcessorTime.now()
        try:
            runs = run_all(testbed, args)
        except ranks.RanksFailed as failure:
            print(
                f"A training failed:\n{failure}\n\nTo see it without the demo:  torchrun "
                f"--standalone --nproc-per-node {RANKS} examples/train_digits.py\n"
                "To see whether gflow is well:  gflow doctor\n"
                "On a slow machine:  fewer --steps, or a larger --timeout.",
                file=sys.stderr,
            )
            return 1
        except KeyboardInterrupt:
            print("Stopped.", file=sys.stderr)
            return 130
        share_of_others = ProcessorTime.now().share_of_others_since(before)
    show(runs, testbed, share_of_others, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
