"""The picture of ``gflow bench ddp``: the time of a step, and what is sent in it.

It must never show less than the table: all contenders, on axes that start at zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gflow.commands.ddp.contenders import LABELS
from gflow.commands.ddp.networks import NETWORKS
from gflow.commands.layout import show_layout

#: A contender has the same colour in every picture.
_COLOURS = {
    "none": "#999999",
    "ddp-only": "#bbbbbb",
    "gloo": "#3182bd",
    "gloo-fp16": "#6baed6",
    "nccl": "#08519c",
    "nccl-fp16": "#4292c6",
    "powersgd": "#756bb1",
    "gflow-exact": "#fd8d3c",
    "gflow": "#e6550d",
}
_WITHOUT = "#555555"


def draw(rows: Sequence[dict[str, Any]], about: dict[str, Any], path: Path) -> None:
    """Draw bars: the time, with the step without communication marked, and the bytes."""
    from matplotlib.figure import Figure

    height = 1.8 + 0.15 * len(about["warnings"]) + 0.42 * len(rows)
    figure = Figure(figsize=(10, height), layout="constrained")
    times, sizes = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
    labels = [LABELS[row["contender"]] for row in rows]
    colours = [_COLOURS[row["contender"]] for row in rows]

    medians = [row["median_ms"] for row in rows]
    below = [row["median_ms"] - row["low_ms"] for row in rows]
    above = [row["high_ms"] - row["median_ms"] for row in rows]
    bars = times.barh(labels, medians, xerr=[below, above], color=colours, ecolor="#333333")
    times.bar_label(bars, [f" {median:.0f}" for median in medians], padding=2)
    without = next((row["median_ms"] for row in rows if row["contender"] == "none"), None)
    if without is not None:
        parts = [min(without, median) for median in medians]
        times.barh(labels, parts, color="none", edgecolor=_WITHOUT, hatch="///", linewidth=0)
        times.axvline(without, color=_WITHOUT, linestyle="--", linewidth=1)
        times.set_xlabel("ms per step (hatched: the step without communication)")
    else:
        times.set_xlabel("ms per step")
    times.margins(x=0.12)
    times.invert_yaxis()

    megabytes = [row["sent_bytes_per_step"] / 1e6 for row in rows]
    bars = sizes.barh(labels, megabytes, color=colours)
    sizes.bar_label(bars, [f" {size:.1f}" for size in megabytes], padding=2)
    where = "by each host" if about["hosts"] > 1 else "over loopback"
    sizes.set_xlabel(f"MB sent per step {where}")
    sizes.margins(x=0.18)
    for axes in (times, sizes):
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("\n".join(_title(about)), fontsize=10)
    figure.savefig(path, dpi=150)


def _title(about: dict[str, Any]) -> list[str]:
    where = show_layout(about["hosts"], about["ranks"], about["rate"])
    what = f"a DDP step of {NETWORKS[about['model']].label}, batch {about['batch']} per rank"
    versions = [f"torch {about['torch']}", f"gflow {about['gflow']}, density {about['density']:g}"]
    title = [f"{what}: {where}, {about['cores']} cores", ", ".join(versions)]
    return title + [f"({text})" for text in about["warnings"]]
