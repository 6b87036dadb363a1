"""Train the same model with Gloo, Gloo + fp16 hook and gflow, and show them side by side.

`make demo` runs it. The ranks are on two hosts (network namespaces, which need root) with a link
of an ordinary rate; without root both are on this machine. The methods take turns, in rounds,
because a shared machine is noisy: only times of the same minutes compare. At the end it prints a
table and draws a plot.

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

from comparison import plot, report
from comparison.methods import METHODS, Method, read_methods
from comparison.processors import ProcessorTime
from comparison.progress import Progress
from comparison.runs import Result, Run
from comparison.testbed import RANKS, Testbed, loopback, two_hosts
from comparison.training import train

from gflow.bench.units import read_rate
from gflow.launch import ranks
from gflow.options import OPTION_SPECS

#: Modules that the ranks and the plot need, and the packages that they are in.
PACKAGES = {"torch": "torch", "sklearn": "scikit-learn", "matplotlib": "matplotlib"}

#: gflow's settings, as a user would give them; its defaults are for trainings of many thousand
#: steps and models of many million parameters. Variables that are already set win.
GFLOW_SETTINGS = {
    "GFLOW_DENSITY": "0.1",
    "GFLOW_CHUNK": "1024",
    "GFLOW_WARMUP_STEPS": "10",
    "GFLOW_RAMP_STEPS": "10",
}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train a CNN on handwritten digits with each method in turn, on two hosts "
        "made of network namespaces, and compare time and bytes per step, loss and accuracy.",
        epilog="gflow's settings come from GFLOW_… variables, such as GFLOW_DENSITY=0.01. "
        "Times compare within one run of the demo only, never between two runs.",
    )

    def number(flag: str, default: int, text: str) -> None:
        parser.add_argument(
            flag, type=positive, default=default, metavar="N", help=f"{text} (default: {default})"
        )

    number("--steps", 150, "training steps")
    number("--rounds", 2, "trainings with each method, in turn")
    number("--timeout", 180, "give up on a training after so many seconds")
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
        "--seed", type=int, default=0, metavar="N", help="of the weights (default: %(default)s)"
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


def warmup_steps(steps: int) -> int:
    """How many steps do not count for medians: gflow's warm-up and ramp, and one more.

    It is the same for all methods. A training that is too short keeps its last step.
    """
    specs = [OPTION_SPECS["warmup_steps"], OPTION_SPECS["ramp_steps"]]
    own = sum(spec.read(os.environ[spec.variable]) for spec in specs)
    return min(own + 1, steps - 1)


def run_once(method: Method, number: int, testbed: Testbed, args: argparse.Namespace) -> Run:
    """Train once with one method."""
    warmup = warmup_steps(args.steps)
    progress = Progress(f"round {number}/{args.rounds}  {method.label:16}", args.steps)
    arguments = {
        "backend": method.backend,
        "fp16_hook": method.fp16_hook,
        "steps": args.steps,
        "warmup_steps": warmup,
        "seed": args.seed,
        "interface": testbed.interface,
    }
    try:
        results = ranks.run(
            train,
            RANKS,
            arguments,
            deadline=args.timeout,
            on_message=progress.update,
            hosts=testbed.hosts,
        )
    except BaseException:
        progress.leave_line()
        raise
    run = Run.of(method.key, results, warmup, testbed.senders)
    progress.done(
        f"{Result.of([run]).step_ms:.0f} ms per step, {run.clock[-1]:.1f} s of training, "
        f"test accuracy {run.test_accuracy:.1%}"
    )
    return run


def run_all(testbed: Testbed, args: argparse.Namespace) -> dict[str, list[Run]]:
    """Train with every method once per round, so that a slow minute of the machine hits all of
    them.

    Every other round goes backwards, so that a machine that slows down steadily favours no method.
    """
    runs: dict[str, list[Run]] = {method.key: [] for method in args.methods}
    for number in range(1, args.rounds + 1):
        for method in args.methods if number % 2 else reversed(args.methods):
            runs[method.key].append(run_once(method, number, testbed, args))
    return runs


def announce(testbed: Testbed, args: argparse.Namespace) -> None:
    """Say what will be compared, and how."""
    print(
        f"Comparing {', '.join(method.label for method in args.methods)}: "
        f"a CNN on handwritten digits, 2.2 million parameters,\nplain DDP, the same seed and data; "
        f"rounds: {args.rounds}, steps: {args.steps}.\n{testbed.note}\n"
        f"gflow's settings: {' '.join(f'{k}={v}' for k, v in gflow_environment().items())}\n",
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
    results = {key: Result.of(of_method) for key, of_method in runs.items()}
    print(f"\n{report.result_table(results)}\n\n{report.loss_table(runs)}\n")
    how = report.how_it_was_measured(warmup_steps(args.steps), args.rounds, testbed.interface)
    print(f"{how}\n")
    for sentence in report.conclusions(results):
        print(sentence)
    own_count = report.own_count(results["gflow"].counters) if "gflow" in results else None
    if own_count is not None:
        print(own_count)
    print(report.trust(share_of_others))
    title = f"{testbed.title}, GFLOW_DENSITY={os.environ['GFLOW_DENSITY']}"
    plot.draw(runs, results, title, share_of_others, args.out)
    print(f"Plot: {args.out}")
    if args.json is not None:
        document = {
            "place": testbed.title,
            "steps": args.steps,
            "seed": args.seed,
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
    set_where_unset(GFLOW_SETTINGS)
    try:
        warmup_steps(args.steps)
    except ValueError as error:  # a variable with a value that gflow does not take
        print(error, file=sys.stderr)
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
