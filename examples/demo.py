"""Train the same model with Gloo and with gflow, and show both side by side (`make demo`).

Each method trains `train_digits.py` in processes of its own, several rounds in turn, because
a machine that others use too is noisy: only what was measured in the same minutes compares.
The end is a table, a plot, and how far the losses are apart.
"""

import argparse
import importlib.util
import itertools
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TRAINING_SCRIPT = Path(__file__).resolve().parent / "train_digits.py"

# The first steps also allocate memory, and DDP rebuilds its buckets after the first one.
SETTLING_STEPS = 5

MEGABYTE = 1e6

# Above this share of the processors, what other programs do decides which backend looks faster.
QUIET_SHARE = 0.1


@dataclass(frozen=True)
class Method:
    """One way of exchanging gradients, as the training script is to be told about it."""

    name: str
    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    module: str | None = None  # a Python module that must be installed
    colour: str = "black"


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("gloo", ("--backend", "gloo"), colour="#0072b2"),
        Method("gflow", ("--backend", "gflow"), module="gflow", colour="#d55e00"),
    )
}


@dataclass(frozen=True)
class Settings:
    """What holds for every run of one demo."""

    steps: int
    rounds: int
    ranks: int
    seed: int
    timeout: float


@dataclass(frozen=True)
class Step:
    """One line of the training script's log."""

    step: int
    seconds: float
    loss: float
    loopback_bytes_total: int | None


@dataclass
class Run:
    """One training, from start to end, of one method in one round."""

    method: str
    round: int
    steps: list[Step] = field(default_factory=list)
    summary: dict[str, Any] | None = None
    wall_seconds: float = 0.0

    def settled(self) -> list[Step]:
        """The steps that count for time and bytes; all but the last if there are only a few."""
        return self.steps[min(SETTLING_STEPS, len(self.steps) - 1) :]

    def step_ms(self) -> list[float]:
        """Step times in milliseconds."""
        return [step.seconds * 1e3 for step in self.settled()]

    def step_network_bytes(self) -> list[int]:
        """What the loopback interface carried between the ends of neighbouring steps."""
        totals = [
            step.loopback_bytes_total
            for step in self.settled()
            if step.loopback_bytes_total is not None
        ]
        return [after - before for before, after in itertools.pairwise(totals)]

    def gradient_bytes_per_step(self) -> float | None:
        """gflow counts what it is given; for other backends it is the size of the parameters."""
        if self.summary is None:
            return None
        metrics = self.summary.get("metrics")
        if metrics and "gradient_bytes" in metrics:
            return metrics["gradient_bytes"] / self.summary["steps"]
        return self.summary["parameter_bytes"]


@dataclass(frozen=True)
class Result:
    """What all rounds of one method say together."""

    method: str
    step_ms_median: float
    step_ms_by_round: list[float]
    network_bytes_per_step: float | None
    gradient_bytes_per_step: float | None
    final_loss: float
    test_accuracy: float
    total_seconds: float
    metrics: dict[str, Any] | None


@dataclass(frozen=True)
class CpuTimes:
    """Seconds of processor time so far: of the whole machine, and of this demo with its runs."""

    machine: float
    own: float
    clock: float

    @classmethod
    def now(cls) -> "CpuTimes | None":
        """None where Linux does not count."""
        try:
            fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        except OSError:
            return None
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
        # What a hypervisor takes away (steal) hurts as much as a program on this side of it.
        busy = user + nice + system + irq + softirq + steal
        return cls(busy / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4]), time.monotonic())

    def others_since(self, before: "CpuTimes") -> float:
        """Share of all processors that went to anything but this demo since `before`."""
        others = (self.machine - before.machine) - (self.own - before.own)
        return max(0.0, others / ((self.clock - before.clock) * (os.cpu_count() or 1)))


class RunFailed(Exception):
    """A training did not end well; carries what the user needs to see."""

    def __init__(self, run: Run, reason: str, output: str) -> None:
        super().__init__(reason)
        self.run = run
        self.reason = reason
        self.output = output


class Progress:
    """One line that rewrites itself on a terminal; a few lines per run anywhere else."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.live = sys.stdout.isatty()
        self.printed_quarter = -1

    def start(self, run: Run) -> None:
        """Say that a run begins."""
        self.printed_quarter = -1
        if not self.live:
            self._print(f"{self._prefix(run)}  starting {self.settings.ranks} ranks")

    def update(self, run: Run, elapsed: float) -> None:
        """Show where a run is."""
        if not run.steps:
            if self.live:
                self._rewrite(f"{self._prefix(run)}  starting ranks, {elapsed:.0f} s")
            return
        last = run.steps[-1]
        text = (
            f"{self._prefix(run)}  step {last.step:>{len(str(self.settings.steps))}}"
            f"/{self.settings.steps}  loss {last.loss:.4f}  {last.seconds * 1e3:5.1f} ms"
        )
        if self.live:
            self._rewrite(text)
            return
        quarter = 4 * last.step // self.settings.steps
        if quarter > self.printed_quarter:
            self.printed_quarter = quarter
            self._print(text)

    def finish(self, run: Run) -> None:
        """Replace the live line by what came of the run."""
        if run.summary is None:
            return
        text = (
            f"{self._prefix(run)}  done in {run.wall_seconds:.1f} s: "
            f"{statistics.median(run.step_ms()):.1f} ms per step, "
            f"test accuracy {run.summary['test_accuracy']:.1%}"
        )
        if self.live:
            self._rewrite(text)
        self._print("" if self.live else text)

    def interrupt(self) -> None:
        """Leave the live line, so that what follows starts on one of its own."""
        if self.live:
            self._print("")

    def _prefix(self, run: Run) -> str:
        return f"round {run.round}/{self.settings.rounds}  {run.method:<6}"

    def _rewrite(self, text: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\x1b[K{text[:width]}", end="", flush=True)

    @staticmethod
    def _print(text: str) -> None:
        print(text, flush=True)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=(
            "Train a small CNN on handwritten digits with each backend in turn, on this machine, "
            "and compare step time, bytes on the network, loss and accuracy."
        ),
        epilog="Step times compare within one run of the demo only, never between two runs.",
    )

    def number(flag: str, default: int, text: str) -> None:
        parser.add_argument(
            flag, type=positive, default=default, metavar="N", help=f"{text} (default: {default})"
        )

    number("--steps", 100, "training steps per run")
    number("--rounds", 2, "runs of each backend, in turn")
    number("--ranks", 2, "processes per run")
    number("--timeout", 180, "give up on a run after so many seconds")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="the same for every run (default: 0)"
    )
    parser.add_argument(
        "--backends",
        type=method_list,
        default="gloo,gflow",
        metavar="LIST",
        help=f"comma-separated, the first is the yardstick; known: {', '.join(METHODS)} "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("demo.png"),
        metavar="FILE",
        help="where the plot goes (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement here")
    args = parser.parse_args(argv)
    for path in (args.out, args.json):
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"{path}: no such folder")
    return args


def positive(text: str) -> int:
    """Read a count from the command line."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return value


def method_list(text: str) -> list[Method]:
    """Read the methods from the command line."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in METHODS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(METHODS)}")
    return [METHODS[name] for name in names]


def missing_modules(methods: Sequence[Method]) -> list[str]:
    """What is to be installed first: better said now than after a minute of training."""
    wanted = {"torch": "torch", "sklearn": "scikit-learn", "matplotlib": "matplotlib"}
    wanted |= {method.module: method.module for method in methods if method.module}
    return [name for module, name in wanted.items() if importlib.util.find_spec(module) is None]


def command(method: Method, settings: Settings, log: Path) -> list[str]:
    """How one training is started."""
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--standalone", "--nproc-per-node", str(settings.ranks), "--shutdown-timeout", "5"),
        *(str(TRAINING_SCRIPT), *method.arguments),
        *("--steps", str(settings.steps), "--seed", str(settings.seed), "--log-file", str(log)),
    ]


def environment(method: Method) -> dict[str, str]:
    """The environment of the ranks."""
    # One thread per rank: otherwise the ranks fight for the cores and the times say nothing.
    return os.environ | {"OMP_NUM_THREADS": "1"} | method.environment


def new_records(log: Path, position: int) -> tuple[list[dict[str, Any]], int]:
    """The lines that were added to the log since `position`; a line still half written waits."""
    try:
        with log.open("rb") as stream:
            stream.seek(position)
            added = stream.read()
    except FileNotFoundError:
        return [], position
    complete = added[: added.rfind(b"\n") + 1]
    return [json.loads(line) for line in complete.splitlines()], position + len(complete)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End torchrun and its ranks. It has to be asked: only torchrun can end its ranks."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(timeout=15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def train(method: Method, number: int, settings: Settings, progress: Progress) -> Run:
    """Run one training and follow its log while it goes."""
    run = Run(method.name, number)
    progress.start(run)
    with tempfile.TemporaryDirectory(prefix="gflow-demo-") as folder:
        log, output = Path(folder) / "log.jsonl", Path(folder) / "output.txt"
        begin = time.perf_counter()
        with output.open("wb") as stream:
            process = subprocess.Popen(
                command(method, settings, log),
                env=environment(method),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C comes to this process, which then calls stop()
            )
        position = 0
        timed_out = False
        try:
            running = True
            while running and not timed_out:
                running = process.poll() is None  # before reading, so that the last lines count
                records, position = new_records(log, position)
                for record in records:
                    if record.get("summary"):
                        run.summary = record
                    else:
                        run.steps.append(Step(**record))
                elapsed = time.perf_counter() - begin
                timed_out = running and elapsed > settings.timeout
                if running:
                    progress.update(run, elapsed)
                    time.sleep(0.1)
            # Before stop(), which makes torchrun add a traceback that explains nothing.
            text = output.read_text(errors="replace")
        finally:
            stop(process)
        run.wall_seconds = time.perf_counter() - begin
    if timed_out:
        raise RunFailed(run, f"no end after {settings.timeout:.0f} s", text)
    if process.returncode != 0:
        raise RunFailed(run, f"torchrun ended with code {process.returncode}", text)
    if run.summary is None or not run.steps:
        raise RunFailed(run, "the training ended without a summary", text)
    progress.finish(run)
    return run


def train_all(methods: Sequence[Method], settings: Settings) -> Iterator[Run]:
    """Every method once per round, so that a slow minute of the machine hits all of them.

    Every other round goes backwards: a machine that slows down steadily favours nobody then.
    """
    progress = Progress(settings)
    try:
        for number in range(1, settings.rounds + 1):
            for method in methods if number % 2 else reversed(methods):
                yield train(method, number, settings, progress)
    except BaseException:
        progress.interrupt()
        raise


def summarise(method: str, runs: Sequence[Run]) -> Result:
    """Put the rounds of one method together."""
    summaries = [run.summary for run in runs if run.summary is not None]
    network = [count for run in runs for count in run.step_network_bytes()]
    return Result(
        method=method,
        step_ms_median=statistics.median(ms for run in runs for ms in run.step_ms()),
        step_ms_by_round=[statistics.median(run.step_ms()) for run in runs],
        # The median, because anything else that uses the interface meanwhile is counted too.
        network_bytes_per_step=statistics.median(network) if network else None,
        gradient_bytes_per_step=runs[0].gradient_bytes_per_step(),
        final_loss=statistics.median(summary["train_loss"] for summary in summaries),
        test_accuracy=statistics.median(summary["test_accuracy"] for summary in summaries),
        total_seconds=sum(run.wall_seconds for run in runs),
        metrics=summaries[-1].get("metrics"),
    )


def megabytes(count: float | None) -> str:
    """A number of bytes for the table."""
    return "n/a" if count is None else f"{count / MEGABYTE:.2f}"


def table(results: Sequence[Result]) -> str:
    """One line per method."""
    header = [
        ("backend", ""),
        ("step time", "median ms"),
        ("network", "MB per step"),
        ("gradients", "MB per step"),
        ("final loss", "training set"),
        ("accuracy", "test set"),
        ("total", "seconds"),
    ]
    rows: list[Sequence[str]] = [[top for top, _ in header], [unit for _, unit in header]]
    for result in results:
        rows.append(
            (
                result.method,
                f"{result.step_ms_median:.1f}",
                megabytes(result.network_bytes_per_step),
                megabytes(result.gradient_bytes_per_step),
                f"{result.final_loss:.5f}",
                f"{result.test_accuracy:.1%}",
                f"{result.total_seconds:.1f}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]
    lines.insert(2, "-" * (sum(widths) + 2 * (len(widths) - 1)))
    return "\n".join(lines)


def footnotes(settings: Settings) -> str:
    """How the columns of the table were measured."""
    return "\n".join(
        (
            f"network:   sent over the loopback interface by all ranks together ({settings.ranks});"
            " median over steps.",
            "gradients: one rank's; counted by gflow itself, for others the size of the"
            " parameters.",
            "total:     all rounds of that backend, with the start of the processes.",
        )
    )


def largest_loss_difference(pairs: Iterator[tuple[Run, Run]]) -> float:
    """The largest gap between the losses of two runs at the same step, over all pairs."""
    return max(
        (
            abs(mine.loss - other.loss)
            for left, right in pairs
            for mine, other in zip(left.steps, right.steps, strict=True)
        ),
        default=0.0,
    )


def compare_times(yardstick: Result, other: Result) -> str:
    """The ratio of the step times, and what the single rounds say about how sure it is."""
    ratio = other.step_ms_median / yardstick.step_ms_median
    by_round = [
        mine / theirs
        for mine, theirs in zip(other.step_ms_by_round, yardstick.step_ms_by_round, strict=True)
    ]
    text = f"Step time, {other.method} / {yardstick.method}: {ratio:.2f}"
    if len(by_round) > 1:
        spread = max(yardstick.step_ms_by_round) / min(yardstick.step_ms_by_round)
        text += (
            f" (round by round: {', '.join(f'{value:.2f}' for value in by_round)}; "
            f"{yardstick.method} against itself: up to {spread:.2f})"
        )
        if min(by_round) < 1 < max(by_round):
            text += "; the rounds disagree on which is faster"
    return text + "."


def describe_machine(others: float | None) -> str | None:
    """How far the step times can be trusted."""
    if others is None:
        return None
    text = f"Other programs took {others:.0%} of the processors meanwhile"
    if others > QUIET_SHARE:
        return text + ": the step times say little, repeat on a quiet machine."
    return text + "."


def compare_losses(yardstick: Sequence[Run], other: Sequence[Run], steps: int) -> str:
    """How far two methods drifted apart, and how far one does from itself."""
    between = largest_loss_difference(itertools.product(yardstick, other))
    apart = f"at most {between:.2g} apart" if between else "the same to the last bit"
    text = f"Loss, {other[0].method} and {yardstick[0].method}: {apart} over {steps} steps"
    if len(yardstick) > 1:
        within = largest_loss_difference(itertools.combinations(yardstick, 2))
        text += f" ({yardstick[0].method} differs from round to round by {within:.2g})"
    return text + "."


def plot(
    methods: Sequence[Method],
    runs: dict[str, list[Run]],
    settings: Settings,
    others: float | None,
    out: Path,
) -> None:
    """Draw the losses and the step times side by side."""
    import matplotlib

    matplotlib.use("Agg")  # no window, works without a display
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 4.6), dpi=150, width_ratios=(1.7, 1), layout="constrained"
    )

    # Curves that coincide must still be seen: a broad pale line under a thin dark one.
    for index, method in enumerate(methods):
        steps = runs[method.name][0].steps
        left.plot(
            [step.step for step in steps],
            [step.loss for step in steps],
            label=method.name,
            color=method.colour,
            linewidth=5 if index == 0 else 1.3,
            alpha=0.35 if index == 0 else 1.0,
            zorder=2 + index,
        )
    left.set_yscale("log")
    left.set_xlabel("step")
    left.set_ylabel("training loss of rank 0 (log scale)")
    left.set_title("Loss over steps, first round", loc="left", fontsize=11)
    left.grid(alpha=0.25)
    left.legend(frameon=False)

    times = [[ms for run in runs[method.name] for ms in run.step_ms()] for method in methods]
    boxes = right.boxplot(
        times,
        whis=(5, 95),
        widths=0.4,
        showfliers=False,
        patch_artist=True,
        medianprops={"color": "black", "linewidth": 1.5},
    )
    for number, (method, box, values) in enumerate(
        zip(methods, boxes["boxes"], times, strict=True), start=1
    ):
        box.set(facecolor=method.colour, alpha=0.45)
        right.annotate(
            f"{statistics.median(values):.1f} ms",
            (number + 0.22, statistics.median(values)),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
        )
        medians = [statistics.median(run.step_ms()) for run in runs[method.name]]
        right.plot(
            [number] * len(medians),
            medians,
            "o",
            color="white",
            markeredgecolor="black",
            markersize=6,
            label="median of one round" if number == 1 else None,
        )
    right.set_xticks(range(1, len(methods) + 1), [method.name for method in methods])
    right.set_xlim(0.5, len(methods) + 0.75)
    right.set_ylim(bottom=0)
    right.set_ylabel("step time in ms")
    # A picture travels without the text around it, so the warning has to be in it.
    noisy = others is not None and others > QUIET_SHARE
    title = f"Step time (noisy: other programs took {others:.0%})" if noisy else "Step time"
    right.set_title(title, loc="left", fontsize=11)
    right.set_xlabel("box: middle half of the steps; whiskers: 5 to 95 %", fontsize=10)
    right.grid(axis="y", alpha=0.25)
    right.legend(frameon=False, loc="lower right")

    figure.suptitle(
        f"CNN on handwritten digits: {settings.ranks} ranks on one machine, "
        f"{settings.rounds} rounds of {settings.steps} steps per backend, same seed",
        fontsize=12,
    )
    figure.savefig(out)
    plt.close(figure)


def write_json(
    path: Path,
    settings: Settings,
    results: Sequence[Result],
    runs: dict[str, list[Run]],
    others: float | None,
) -> None:
    """Keep everything that was measured, for other tools."""
    import torch

    document = {
        "settings": asdict(settings),
        "machine": {
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "processor_share_of_other_programs": others,
        },
        # Options that came from outside change what was measured; the secret stays one.
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith("GFLOW_") and name != "GFLOW_SECRET"
        },
        "results": [asdict(result) for result in results],
        "runs": [asdict(run) for method_runs in runs.values() for run in method_runs],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def explain_failure(failure: RunFailed, settings: Settings) -> str:
    """The end of the run's output, without torchrun's own report, and what to try."""
    lines = failure.output.splitlines()
    # torchrun adds its own traceback after the ranks' output; the cause stands before it.
    cut = next((i for i, line in enumerate(lines) if "failed (exitcode" in line), len(lines))
    tail = lines[max(0, cut - 30) : cut + 1]
    done = len(failure.run.steps)
    when = f"after step {done}" if done else "before its first step"
    rerun = " ".join(command(METHODS[failure.run.method], settings, Path("log.jsonl")))
    advice = [f"See it alone:  OMP_NUM_THREADS=1 {rerun}"]
    if METHODS[failure.run.method].module == "gflow":
        advice.append("See without gflow:  add --backends gloo to this demo.")
        advice.append("After a change of torch or of gflow's source, build gflow again.")
    if failure.reason.startswith("no end"):
        advice.append("On a slow machine:  fewer --steps, or a larger --timeout.")
    return "\n".join(
        (
            f"The run of {failure.run.method} in round {failure.run.round} failed {when}: "
            f"{failure.reason}. The end of its output:",
            "",
            *(f"    {line}" for line in tail or ["(nothing was printed)"]),
            "",
            "What to do:",
            *(f"  - {line}" for line in advice),
        )
    )


def main() -> int:
    """Run the demo; returns the exit code."""
    args = parse_args()
    methods: list[Method] = args.backends
    missing = missing_modules(methods)
    if missing:
        print(
            f"The demo needs {', '.join(missing)} in {sys.executable}.\n"
            "`make demo` installs what is missing; without make: pip install the packages named, "
            "and gflow itself with: pip install .",
            file=sys.stderr,
        )
        return 2
    settings = Settings(args.steps, args.rounds, args.ranks, args.seed, args.timeout)
    # Without this, a SIGTERM would leave the ranks running: `finally` would not be reached.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))

    print(
        f"Training a CNN on handwritten digits: {', '.join(m.name for m in methods)}; "
        f"ranks: {settings.ranks}, rounds: {settings.rounds}, steps: {settings.steps}.\n",
        flush=True,
    )
    runs: dict[str, list[Run]] = {method.name: [] for method in methods}
    before = CpuTimes.now()
    try:
        for run in train_all(methods, settings):
            runs[run.method].append(run)
    except RunFailed as failure:
        print(explain_failure(failure, settings), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130

    after = CpuTimes.now()
    others = after.others_since(before) if before and after else None
    results = [summarise(name, method_runs) for name, method_runs in runs.items()]
    print(f"\n{table(results)}\n\n{footnotes(settings)}\n")
    plot(methods, runs, settings, others, args.out)
    print(f"Plot: {args.out}")
    if args.json is not None:
        write_json(args.json, settings, results, runs, others)
        print(f"Measurements: {args.json}")
    for other in results[1:]:
        print(compare_times(results[0], other))
    if (trust := describe_machine(others)) is not None:
        print(trust)
    for method in methods[1:]:
        print(compare_losses(runs[methods[0].name], runs[method.name], settings.steps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
