"""The output of ``gflow bench quality``: a line per training, then a table and a plot of each task.

It states facts, such as whether a mean lies within the range of the dense trainings; it does not
judge whether that is good enough. No training is left out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gflow.bench import machine, table
from gflow.bench.arguments import show_layout
from gflow.bench.quality.tasks import TASKS
from gflow.bench.quality.variants import DENSE
from gflow.bench.units import show_rate


def progress(row: dict[str, Any]) -> str:
    """One training, in a line."""
    end = row["curve"][-1]
    return (
        f"  {row['task']}, {row['variant']}, seed {row['seed']}: held-out loss "
        f"{end['held_out_loss']:.4f}, accuracy {end['held_out_accuracy']:.1%} after {row['steps']} "
        f"steps of {row['median_ms']:.0f} ms"
    )


def tables(rows: Sequence[dict[str, Any]], info: dict[str, Any]) -> str:
    """All trainings by variant, and what the columns mean."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    shown = [_table(rows, task) for task in tasks]
    return "\n\n".join([*shown, "\n".join(_words(rows, tasks, info))])


def _table(rows: Sequence[dict[str, Any]], task: str) -> str:
    trainings = _by_variant(rows, task)
    dense = _final(trainings[DENSE], "held_out_loss")
    cells = []
    for variant, own in trainings.items():
        held_out = _final(own, "held_out_loss")
        cells.append(
            [
                variant,
                _losses(_final(own, "train_loss")),
                _losses(held_out),
                "" if variant == DENSE else held_out.compare_to(dense),
                _accuracies(_final(own, "held_out_accuracy")),
                f"{Spread.of([one['median_ms'] for one in own]).mean:.0f}",
                f"{Spread.of([one['sent_bytes_per_step'] for one in own]).mean / 1e6:.2f}",
            ]
        )
    header = [
        task,
        "train loss",
        "held-out loss",
        "dense range",
        "accuracy %",
        "ms/step",
        "MB sent",
    ]
    return table.render(header, cells)


def _words(rows: Sequence[dict[str, Any]], tasks: Sequence[str], info: dict[str, Any]) -> list[str]:
    words = []
    for task in tasks:
        steps = next(row["steps"] for row in rows if row["task"] == task)
        words.append(f"{task}: {TASKS[task].summary}; {steps} steps.")
    words += [
        f"Mean (least..most) over seeds ({info['seeds']}), after the last step; a seed has the "
        "same weights and data in every variant.",
        "dense range: where the mean held-out loss lies, by the least and the most of the dense "
        "trainings.",
        f"Chunks of {info['chunk']} elements; a tenth of the steps is dense, and the density is "
        "reached after another tenth (bytes are the mean of all steps).",
    ]
    words += [_link_share(rows, task, info["rate"]) for task in tasks] if info["rate"] else []
    words.append(f"MB sent: {machine.sent_bytes_meaning(info['hosts'])}")
    if info["hosts"] == 1:
        words.append("One host: compress=on, every rank is a host of its own, over loopback. Loss "
                     "over time is not drawn: there is no link.")  # fmt: skip
    return words + [f"note: {text}" for text in info["warnings"]]


def _link_share(rows: Sequence[dict[str, Any]], task: str, rate: int) -> str:
    """How much of a dense step the link takes: if little, compression gains little."""
    dense = _by_variant(rows, task)[DENSE]
    sent = Spread.of([one["sent_bytes_per_step"] for one in dense]).mean
    step = Spread.of([one["median_ms"] for one in dense]).mean
    return (
        f"{task}: a dense step takes {step:.0f} ms and sends {sent / 1e6:.1f} MB, which is "
        f"{8e3 * sent / rate:.0f} ms at {show_rate(rate)}."
    )


def _losses(spread: Spread) -> str:
    return f"{spread.mean:.4f} ({spread.min:.4f}..{spread.max:.4f})"


def _accuracies(spread: Spread) -> str:
    return f"{100 * spread.mean:.2f} ({100 * spread.min:.2f}..{100 * spread.max:.2f})"


# --- what several trainings ended with


@dataclass(frozen=True)
class Spread:
    """Mean and range of some numbers: what several trainings of one variant ended with."""

    mean: float
    min: float
    max: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Spread:
        """Mean and range of at least one number.

        Example:
            >>> Spread.of([1.0, 2.0, 6.0])
            Spread(mean=3.0, min=1.0, max=6.0)
        """
        return cls(statistics.fmean(numbers), min(numbers), max(numbers))

    def compare_to(self, other: Spread) -> str:
        """Whether this mean lies within the range of the other.

        Example:
            >>> Spread(3.0, 1.0, 6.0).compare_to(Spread(4.0, 3.5, 5.0))
            'below'
        """
        if math.isnan(self.mean + other.mean):
            return "no number"
        if self.mean < other.min:
            return "below"
        return "above" if self.mean > other.max else "within"


def _by_variant(rows: Sequence[dict[str, Any]], task: str) -> dict[str, list[dict[str, Any]]]:
    """The trainings of one task, by variant."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["task"] == task:
            found.setdefault(row["variant"], []).append(row)
    return found


def _final(trainings: Sequence[dict[str, Any]], what: str) -> Spread:
    """Mean and range of ``what``, such as ``held_out_loss``, after the last step."""
    return Spread.of([training["curve"][-1][what] for training in trainings])


# --- the plot

_DENSE = "#333333"
_COLOURS = ("#e6550d", "#3182bd", "#31a354", "#756bb1", "#a50f15", "#636363")
_STYLES = ("-", "--", ":", "-.")


def plot(rows: Sequence[dict[str, Any]], info: dict[str, Any], path: Path) -> None:
    """Draw a row of panels for each task: the held-out loss over steps and, over a link, over time.

    A line is the mean over all seeds; the band goes from the least to the most.
    """
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(row["task"] for row in rows))
    columns = ["step", "seconds"] if info["hosts"] > 1 else ["step"]
    size = (1.5 + 4.5 * len(columns), 1 + 3.4 * len(tasks))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(tasks), len(columns), squeeze=False, sharey="row")
    for task, line in zip(tasks, grid, strict=True):
        for column, axes in zip(columns, line, strict=True):
            _plot_panel(axes, _by_variant(rows, task), column)
        line[0].set_ylabel(f"{task}: held-out loss")
        line[0].legend(frameon=False, fontsize=8)
        if len(line) > 1 and info["rate"]:
            line[1].set_title(_link_share(rows, task, info["rate"]), fontsize=8)
    where = show_layout(info["hosts"], info["ranks"], info["rate"])
    title = [f"quality: {where}", _caption(info)]
    title += [f"({text})" for text in info["warnings"]]
    figure.suptitle("\n".join(title), fontsize=10)
    figure.savefig(path, dpi=150)


def _plot_panel(axes: Any, trainings: dict[str, list[dict[str, Any]]], column: str) -> None:
    from matplotlib.ticker import FuncFormatter

    for number, (variant, own) in enumerate(trainings.items()):
        # The points of all seeds are at the same steps, and at about the same times.
        points = list(zip(*(training["curve"] for training in own), strict=True))
        positions = [statistics.fmean(one[column] for one in point) for point in points]
        losses = [[one["held_out_loss"] for one in point] for point in points]
        colour = _DENSE if variant == DENSE else _COLOURS[(number - 1) % len(_COLOURS)]
        style = _STYLES[number % len(_STYLES)]
        means = [statistics.fmean(point) for point in losses]
        axes.plot(positions, means, label=variant, color=colour, linestyle=style, linewidth=1.5)
        least, most = list(map(min, losses)), list(map(max, losses))
        axes.fill_between(positions, least, most, color=colour, alpha=0.15, linewidth=0)
    axes.set_yscale("log")
    least, most = axes.get_ylim()
    # Label all digits only if there is room.
    shown = "123456789" if most < 10 * least else "125"
    plain = FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in shown else "")
    axes.yaxis.set_major_formatter(plain)
    axes.yaxis.set_minor_formatter(plain)
    axes.set_xlabel("step" if column == "step" else "seconds of training, as measured")
    axes.grid(which="both", alpha=0.3)


def _caption(info: dict[str, Any]) -> str:
    words = f"mean and range over seeds ({info['seeds']}), chunks of {info['chunk']} elements"
    return f"{words}, torch {info['torch']}, gflow {info['gflow']}"
