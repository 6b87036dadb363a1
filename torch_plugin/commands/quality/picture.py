"""The picture of ``gflow bench quality``: the held-out loss, over steps and over time.

It must never leave out a training: the line is the mean over all seeds, the band goes from the
least to the most. Time is drawn only if it was measured over a link.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gflow.commands.layout import show_layout
from gflow.commands.quality.report import about_time
from gflow.commands.quality.spread import by_variant
from gflow.commands.quality.variants import DENSE

_DENSE = "#333333"
_COLOURS = ("#e6550d", "#3182bd", "#31a354", "#756bb1", "#a50f15", "#636363")
_STYLES = ("-", "--", ":", "-.")


def draw(rows: Sequence[dict[str, Any]], about: dict[str, Any], path: Path) -> None:
    """Draw a line of panels for each task."""
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(row["task"] for row in rows))
    columns = ["step", "seconds"] if about["hosts"] > 1 else ["step"]
    size = (1.5 + 4.5 * len(columns), 1 + 3.4 * len(tasks))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(tasks), len(columns), squeeze=False, sharey="row")
    for task, line in zip(tasks, grid, strict=True):
        for column, axes in zip(columns, line, strict=True):
            _draw_panel(axes, by_variant(rows, task), column)
        line[0].set_ylabel(f"{task}: held-out loss")
        line[0].legend(frameon=False, fontsize=8)
        if len(line) > 1 and about["rate"]:
            line[1].set_title(about_time(rows, task, about["rate"]), fontsize=8)
    where = show_layout(about["hosts"], about["ranks"], about["rate"])
    title = [f"quality: {where}", _caption(about)]
    title += [f"({text})" for text in about["warnings"]]
    figure.suptitle("\n".join(title), fontsize=10)
    figure.savefig(path, dpi=150)


def _draw_panel(axes: Any, trainings: dict[str, list[dict[str, Any]]], column: str) -> None:
    from matplotlib.ticker import FuncFormatter

    for number, (variant, own) in enumerate(trainings.items()):
        # The points of all seeds are at the same steps, and at about the same times.
        points = list(zip(*(training["curve"] for training in own), strict=True))
        places = [statistics.fmean(one[column] for one in point) for point in points]
        losses = [[one["held_out_loss"] for one in point] for point in points]
        colour = _DENSE if variant == DENSE else _COLOURS[(number - 1) % len(_COLOURS)]
        style = _STYLES[number % len(_STYLES)]
        means = [statistics.fmean(point) for point in losses]
        axes.plot(places, means, label=variant, color=colour, linestyle=style, linewidth=1.5)
        least, most = list(map(min, losses)), list(map(max, losses))
        axes.fill_between(places, least, most, color=colour, alpha=0.15, linewidth=0)
    axes.set_yscale("log")
    least, most = axes.get_ylim()
    # All of them only if they have the room.
    shown = "123456789" if most < 10 * least else "125"
    plain = FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in shown else "")
    axes.yaxis.set_major_formatter(plain)
    axes.yaxis.set_minor_formatter(plain)
    axes.set_xlabel("step" if column == "step" else "seconds of training, as measured")
    axes.grid(which="both", alpha=0.3)


def _caption(about: dict[str, Any]) -> str:
    words = f"mean and range over seeds ({about['seeds']}), chunks of {about['chunk']} elements"
    return f"{words}, torch {about['torch']}, gflow {about['gflow']}"
