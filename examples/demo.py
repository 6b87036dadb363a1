"""Train the same model with Gloo, Gloo + fp16 hook and gflow: who has an equally good one first?

`make demo` runs it. The ranks are on two hosts (network namespaces, which need root) with a link
of an ordinary rate; without root both are on this machine. Everything has its defaults: the
optimizer (torch's AdamW) and gflow. The methods take turns with each seed, because a shared machine
is noisy: only times of the same minutes compare. At the end it prints a table and draws a plot.

By default this takes two minutes. With another task the network is as large as those that need a
fast link; `make bench-loss` runs both of these, which takes hours.

    python examples/demo.py --rate 1gbit
    python examples/demo.py --task gpt
"""

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from comparison import plot, report
from comparison.methods import METHODS, Method, read_methods
from comparison.processors import ProcessorTime
from comparison.progress import Progress
from comparison.runs import Result, Run, targets_of
from comparison.tasks import TASKS, Task
from comparison.testbed import RANKS, Testbed, loopback, two_hosts
from comparison.training import train_all

from gflow.bench.units import read_rate
from gflow.launch import ranks

#: For starting the ranks and loading the data, and for making the groups of a training.
START_SECONDS = 60


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train a network with each method in turn, on two hosts made of network "
        "namespaces, and compare the time to a held-out loss, bytes and accuracy.",
        epilog="gflow has its defaults; GFLOW_… variables change them, such as "
        "GFLOW_METHOD=int3. "
        "Times compare within one run of the demo only, never between two runs.",
    )

    def by_task(show: Callable[[Task], str]) -> str:
        return ", ".join(f"{name} {show(task)}" for name, task in TASKS.items())

    parser.add_argument(
        "--task",
        choices=TASKS,
        default="digits",
        help="; ".join(f"{name}: {task.summary}" for name, task in TASKS.items())
        + " (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=positive,
        metavar="N",
        help=f"training steps (default: {by_task(lambda task: str(task.steps))})",
    )
    parser.add_argument(
        "--seeds",
        type=positive,
        default=2,
        metavar="N",
        help="trainings with each method, in turn (default: %(default)s)",
    )
    parser.add_argument(
        "--learning-rate",
        type=over_0,
        metavar="X",
        help="of all methods, at its highest "
        f"(default: {by_task(lambda task: f'{task.learning_rate:g}')})",
    )
    parser.add_argument(
        "--timeout",
        type=positive,
        metavar="SECONDS",
        help="give up after so long (default: by what is trained)",
    )
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
        metavar="FILE",
        help="where the plot goes (default: demo.png; of another task demo-TASK.png)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements here")
    args = parser.parse_args(argv)
    task = TASKS[args.task]
    args.steps = args.steps or task.steps
    args.learning_rate = args.learning_rate or task.learning_rate
    args.out = args.out or Path("demo.png" if args.task == "digits" else f"demo-{args.task}.png")
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


def over_0(text: str) -> float:
    """Read a number over 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be over 0")
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
    limit = START_SECONDS * (1 + len(trainings))
    limit += len(trainings) * args.steps * TASKS[args.task].step_limit
    try:
        ranks.run(
            train_all,
            RANKS,
            {
                "task": args.task,
                "trainings": details,
                "steps": args.steps,
                "learning_rate": args.learning_rate,
                "interface": testbed.interface,
            },
            deadline=args.timeout or limit,
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
    task = TASKS[args.task]
    recipe = task.recipe.format(steps=args.steps, learning_rate=args.learning_rate)
    if args.learning_rate != task.learning_rate and "{learning_rate" not in task.recipe:
        recipe += f" (learning rate {args.learning_rate:g})"
    print(
        f"Comparing {', '.join(method.label for method in args.methods)}: {task.summary},\n"
        f"plain DDP, {recipe}, the same seeds ({args.seeds}) and data.\n{testbed.note}\n"
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
    task = TASKS[args.task]
    targets = targets_of(next(iter(runs.values())))
    results = {key: Result.of(of_method, targets) for key, of_method in runs.items()}
    print(f"\n{report.result_table(results)}\n")
    explained = report.how_it_was_measured(
        results, args.seeds, task.evaluation_steps, testbed.interface
    )
    print(f"{explained}\n")
    for sentence in report.conclusions(results):
        print(sentence)
    if "gflow" in results:
        print(report.own_count(results["gflow"].counters))
    print(report.trust(share_of_others))
    plot.draw(runs, results, task, testbed.title, share_of_others, args.out)
    print(f"Plot: {args.out}")
    if args.json is not None:
        document = {
            "task": args.task,
            "place": testbed.title,
            "steps": args.steps,
            "seeds": args.seeds,
            "learning_rate": args.learning_rate,
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
    task = TASKS[args.task]
    missing = task.missing_packages()
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
                f"--standalone --nproc-per-node {RANKS} examples/{task.example}\n"
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
