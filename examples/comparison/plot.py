"""The demo's results as a plot.

People pass it on without the text, so it says by itself what was compared and where, and warns if
its times are not to be trusted.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from comparison.methods import METHODS
from comparison.processors import QUIET_SHARE
from comparison.runs import TOLERANCE, Result, Run
from comparison.tasks import Task


def draw(
    runs: Mapping[str, Sequence[Run]],
    results: Mapping[str, Result],
    task: Task,
    place: str,
    share_of_others: float,
    path: Path,
) -> None:
    """Draw the held-out losses over time and over steps, and the time to the target."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(14, 5.4), layout="constrained")
        grid = figure.add_gridspec(2, 3, width_ratios=(1.4, 1, 1))
        over_time = figure.add_subplot(grid[:, 0])
        over_steps = figure.add_subplot(grid[:, 1], sharey=over_time)
        _draw_losses(over_time, runs, "seconds", "seconds of training (a line for each seed)")
        _draw_losses(over_steps, runs, "step", "step")
        over_time.set_title("Held-out loss over time", loc="left")
        over_time.set_ylabel("held-out loss")
        over_steps.set_title("Held-out loss over steps", loc="left")
        over_steps.tick_params(labelleft=False)
        _mark_target(over_time, runs, results)
        over_time.legend(frameon=False)
        times = {
            key: result.time_to_target
            for key, result in results.items()
            if result.time_to_target is not None
        }
        first = METHODS[next(iter(results))].label
        _draw_bars(figure.add_subplot(grid[0, 2]), times, f"Time to {first}'s loss", "s")
        sizes = {key: result.sent_bytes / 1e6 for key, result in results.items()}
        _draw_bars(figure.add_subplot(grid[1, 2]), sizes, "Sent per step by each rank", "MB")
        figure.suptitle("\n".join(_headline(runs, results, task, place)), fontsize=13)
        if share_of_others > QUIET_SHARE:
            warning = f"The times are rough: other programs took {share_of_others:.0%} meanwhile."
            figure.supxlabel(warning, fontsize=10, color="#a50f15")
        figure.savefig(path, dpi=150)


def _headline(
    runs: Mapping[str, Sequence[Run]], results: Mapping[str, Result], task: Task, place: str
) -> list[str]:
    steps = next(iter(runs.values()))[0].curve[-1]["step"]
    where = f"{place}: {task.summary}, {steps:.0f} steps"
    if not {"gloo", "gflow"} <= results.keys():
        return [where]
    gloo, gflow = results["gloo"], results["gflow"]
    accuracy = ", ".join(
        f"{METHODS[key].label} {statistics.fmean(result.accuracies):.1%}"
        for key, result in results.items()
    )
    if gloo.time_to_target is None or gflow.time_to_target is None:
        return [f"gflow did not reach Gloo's held-out loss; accuracy: {accuracy}", where]
    ratio = gloo.time_to_target / gflow.time_to_target
    return [
        f"gflow reaches Gloo's held-out loss {ratio:.1f} times as fast; accuracy: {accuracy}",
        where,
    ]


def _draw_losses(axes: Any, runs: Mapping[str, Sequence[Run]], column: str, label: str) -> None:
    for order, (key, of_method) in enumerate(runs.items()):
        for number, run in enumerate(of_method):
            axes.plot(
                [point[column] for point in run.curve],
                [point["loss"] for point in run.curve],
                color=METHODS[key].colour,
                linewidth=1.6,
                alpha=0.85,
                zorder=2 + order,
                label=METHODS[key].label if number == 0 else None,
            )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel(label)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25, which="both")


def _mark_target(
    axes: Any, runs: Mapping[str, Sequence[Run]], results: Mapping[str, Result]
) -> None:
    """A line at the target (the mean of all seeds'), and a mark where each method reached it."""
    key, baseline = next(iter(runs.items()))
    target = statistics.fmean(run.loss for run in baseline) * (1 + TOLERANCE)
    label = f"target: {METHODS[key].label}'s end + {TOLERANCE:.0%}"
    axes.axhline(target, color="#333333", linestyle=":", linewidth=1.2, label=label)
    for method, result in results.items():
        if result.time_to_target is not None:
            axes.plot(
                [result.time_to_target], [target], "o", color=METHODS[method].colour, zorder=9
            )


def _draw_bars(axes: Any, values: Mapping[str, float], title: str, unit: str) -> None:
    labels = [METHODS[key].label for key in values]
    colours = [METHODS[key].colour for key in values]
    bars = axes.barh(labels, list(values.values()), color=colours, height=0.62)
    axes.bar_label(bars, [f"{value:.3g} {unit}" for value in values.values()], padding=4)
    axes.set_xlim(0, max(values.values(), default=1.0) * 1.22)
    axes.invert_yaxis()
    axes.set_title(title, loc="left")
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="y", length=0)
