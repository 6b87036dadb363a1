"""The demo's results as a plot.

People pass it on without the text, so it says by itself what was compared and where, and warns if
its times are not to be trusted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from comparison.methods import METHODS
from comparison.processors import QUIET_SHARE
from comparison.runs import SMOOTHING_STEPS, Result, Run


def draw(
    runs: Mapping[str, Sequence[Run]],
    results: Mapping[str, Result],
    title: str,
    share_of_others: float,
    path: Path,
) -> None:
    """Draw the losses over steps and over time, and time and bytes per step."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(14, 5.4), layout="constrained")
        grid = figure.add_gridspec(2, 3, width_ratios=(1.15, 1.15, 1))
        over_steps = figure.add_subplot(grid[:, 0])
        over_time = figure.add_subplot(grid[:, 1], sharey=over_steps)
        _draw_losses(over_steps, over_time, runs)
        times = {key: result.step_ms for key, result in results.items()}
        _draw_bars(figure.add_subplot(grid[0, 2]), times, "Time per step", "ms")
        sizes = {key: result.sent_bytes / 1e6 for key, result in results.items()}
        _draw_bars(figure.add_subplot(grid[1, 2]), sizes, "Sent per step by each rank", "MB")
        figure.suptitle("\n".join(_headline(runs, results, title)), fontsize=13)
        if share_of_others > QUIET_SHARE:
            warning = f"The times are rough: other programs took {share_of_others:.0%} meanwhile."
            figure.supxlabel(warning, fontsize=10, color="#a50f15")
        figure.savefig(path, dpi=150)


def _headline(
    runs: Mapping[str, Sequence[Run]], results: Mapping[str, Result], title: str
) -> list[str]:
    steps = len(next(iter(runs.values()))[0].losses)
    where = f"{title}: a CNN on handwritten digits, {steps} steps"
    if not {"gloo", "gflow"} <= results.keys():
        return [where]
    gloo, gflow = results["gloo"], results["gflow"]
    ratio = gloo.step_ms / gflow.step_ms
    share = gflow.sent_bytes / gloo.sent_bytes
    return [
        f"gflow: {ratio:.1f} times as fast per step as Gloo, with {share:.0%} of its bytes",
        where,
    ]


def _draw_losses(over_steps: Any, over_time: Any, runs: Mapping[str, Sequence[Run]]) -> None:
    # Keep curves visible that coincide: a broad pale line under a thin dark one.
    widths = (6.0, 3.0, 1.5)
    for order, (key, of_method) in enumerate(runs.items()):
        method = METHODS[key]
        style = {"color": method.colour, "zorder": 2 + order}
        losses = of_method[0].losses
        alpha = 0.4 if order == 0 else 1.0
        steps = range(1, len(losses) + 1)
        over_steps.plot(
            steps, losses, label=method.label, linewidth=widths[order], alpha=alpha, **style
        )
        for run in of_method:
            over_time.plot(run.clock, run.losses, linewidth=1.8, **style)
    over_steps.set_yscale("log")
    over_steps.yaxis.set_major_formatter("{x:g}")
    over_steps.set_title("Loss over steps", loc="left")
    over_steps.set_xlabel("step (first round)")
    over_steps.set_ylabel(f"training loss, mean of the last {SMOOTHING_STEPS} steps")
    over_steps.legend(frameon=False)
    over_time.set_title("Loss over time", loc="left")
    over_time.set_xlabel("seconds of training (a line for each round)")
    over_time.tick_params(labelleft=False)
    for axes in (over_steps, over_time):
        axes.set_xlim(left=0)
        axes.grid(alpha=0.25)


def _draw_bars(axes: Any, values: Mapping[str, float], title: str, unit: str) -> None:
    labels = [METHODS[key].label for key in values]
    colours = [METHODS[key].colour for key in values]
    bars = axes.barh(labels, list(values.values()), color=colours, height=0.62)
    axes.bar_label(bars, [f"{value:.3g} {unit}" for value in values.values()], padding=4)
    axes.set_xlim(0, max(values.values()) * 1.22)
    axes.invert_yaxis()
    axes.set_title(title, loc="left")
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="y", length=0)
