"""The output of ``gflow bench ddp``: a line per contender while it runs, a table and a plot at the
end.

Every contender that was measured is in all of them; the axes of the plot start at zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gflow.bench import machine, table
from gflow.bench.arguments import show_layout
from gflow.bench.ddp.contenders import LABELS, RIVALS
from gflow.bench.ddp.networks import NETWORKS

_STEP = (
    "A step: forward, backward, optimizer.step (SGD without momentum), zero_grad; its time is that "
    "of the slowest rank.\nlow, high: a quarter of the steps took less, a quarter more."
)
_MISSING = "-"


def progress(row: dict[str, Any]) -> str:
    """One row, in a line."""
    steps = f"{row['samples']} steps"
    return f"  {LABELS[row['contender']]}: {row['median_ms']:.0f} ms per step (median of {steps})"


def tables(rows: Sequence[dict[str, Any]], info: dict[str, Any]) -> str:
    """All rows, and what the columns mean."""
    rival = RIVALS[info["device"]]
    header = ["ms/step", "low", "high", "÷ none", f"{LABELS[rival]} ÷", "MB sent", "CPU s"]
    cells = [
        [
            LABELS[row["contender"]],
            *(f"{row[key]:.0f}" for key in ("median_ms", "low_ms", "high_ms")),
            _ratio(row, "ratio_to_none"),
            _ratio(row, f"speedup_over_{rival}"),
            f"{row['sent_bytes_per_step'] / 1e6:.1f}",
            f"{row['cpu_s_per_step']:.2f}",
        ]
        for row in rows
    ]
    shown = table.render([_setting(info), *header], cells)
    counted = [row for row in rows if "hidden_seconds" in row.get("counters_per_step", {})]
    stages = [_stages(counted)] if counted else []
    return "\n\n".join([shown, *stages, "\n".join(_words(rows, info))])


def _setting(info: dict[str, Any]) -> str:
    size = info["image"]
    return f"{NETWORKS[info['model']].label}, {info['batch']} x {size} x {size}"


def _words(rows: Sequence[dict[str, Any]], info: dict[str, Any]) -> list[str]:
    names = [row["contender"] for row in rows]
    words = [_STEP]
    if "none" in names:
        words.append("÷ none: its time by that of a step without communication.")
    rival = RIVALS[info["device"]]
    if rival in names:
        label = LABELS[rival]
        words.append(f"{label} ÷: {label}'s time by its own; over 1, it takes less than {label}.")
    words.append(f"MB sent: {machine.sent_bytes_meaning(info['hosts'])}")
    words.append("CPU s: processor time of all ranks together, per step.")
    if "ddp-only" in names:
        words.append(f"{LABELS['ddp-only']}: DDP whose hook exchanges nothing.")
    if "powersgd" in names:
        words.append(f"{LABELS['powersgd']}: matrices of rank 2, one bucket.")
    if any(name.startswith("gflow") and name != "gflow-exact" for name in names):
        words.append(_gflow_settings(info))
    if info["hosts"] == 1 and "gflow-exact" in names:
        words.append(f"{LABELS['gflow-exact']}: the ranks of one host share memory.")
    view = "are views into" if info["bucket_view"] else "are copied to and from"
    words.append(f"Gradients {view} DDP's buckets (gradient_as_bucket_view), for all alike.")
    return words + machine.gpu_lines(info) + [f"note: {text}" for text in info["warnings"]]


def _gflow_settings(info: dict[str, Any]) -> str:
    fusion = info["fusion_bytes"]
    fused = "its default fusion_bytes" if fusion is None else f"fusion_bytes={fusion}"
    said = "gflow with its default method, or the one named; chunks: density "
    said += f"{info['density']:g}; {fused}"
    if info["hosts"] > 1:
        return f"{said}, compress=auto (what crosses hosts)."
    return f"{said}, compress=on (every rank is a host of its own, over loopback)."


def _stages(rows: Sequence[dict[str, Any]]) -> str:
    """What each of gflow's contenders has counted, in milliseconds per step."""
    counters = [row["counters_per_step"] for row in rows]
    stages = dict.fromkeys(name for one in counters for name in one if name.startswith("stage_"))
    columns = {"hidden_seconds": "hidden", "exposed_seconds": "exposed"} | {
        name: name[len("stage_") : -len("_seconds")].replace("_", " ") for name in stages
    }
    cells = [
        [
            LABELS[row["contender"]],
            *(f"{1e3 * own[name]:.0f}" if name in own else _MISSING for name in columns),
        ]
        for row, own in zip(rows, counters, strict=True)
    ]
    return (
        f"{table.render(['ms/step, by gflow.metrics()', *columns.values()], cells)}\n"
        "On rank 0. hidden: exchange beside the backward pass; exposed: after it, while the job "
        "waited.\nThen the stages of the exchange; wire runs beside the others."
    )


def _ratio(row: dict[str, Any], key: str) -> str:
    return f"{row[key]:.2f}" if key in row else _MISSING


# --- the plot

#: A contender has the same colour in every plot.
_COLOURS = {
    "none": "#999999",
    "ddp-only": "#bbbbbb",
    "gloo": "#3182bd",
    "gloo-fp16": "#6baed6",
    "nccl": "#08519c",
    "nccl-fp16": "#4292c6",
    "powersgd": "#756bb1",
}
_OF_GFLOW, _OF_ITS_METHODS = "#e6550d", "#fd8d3c"
_WITHOUT_EXCHANGE = "#555555"


def plot(rows: Sequence[dict[str, Any]], info: dict[str, Any], path: Path) -> None:
    """Draw bars: the time, with the step without communication marked, and the bytes."""
    from matplotlib.figure import Figure

    height = 1.8 + 0.15 * len(info["warnings"]) + 0.42 * len(rows)
    figure = Figure(figsize=(10, height), layout="constrained")
    times, sizes = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
    labels = [LABELS[row["contender"]] for row in rows]
    colours = [_colour(row["contender"]) for row in rows]

    medians = [row["median_ms"] for row in rows]
    below = [row["median_ms"] - row["low_ms"] for row in rows]
    above = [row["high_ms"] - row["median_ms"] for row in rows]
    bars = times.barh(labels, medians, xerr=[below, above], color=colours, ecolor="#333333")
    times.bar_label(bars, [f" {median:.0f}" for median in medians], padding=2)
    without = next((row["median_ms"] for row in rows if row["contender"] == "none"), None)
    if without is not None:
        parts = [min(without, median) for median in medians]
        times.barh(
            labels, parts, color="none", edgecolor=_WITHOUT_EXCHANGE, hatch="///", linewidth=0
        )
        times.axvline(without, color=_WITHOUT_EXCHANGE, linestyle="--", linewidth=1)
        times.set_xlabel("ms per step (hatched: the step without communication)")
    else:
        times.set_xlabel("ms per step")
    times.margins(x=0.12)
    times.invert_yaxis()

    megabytes = [row["sent_bytes_per_step"] / 1e6 for row in rows]
    bars = sizes.barh(labels, megabytes, color=colours)
    sizes.bar_label(bars, [f" {size:.1f}" for size in megabytes], padding=2)
    where = "by each host" if info["hosts"] > 1 else "over loopback"
    sizes.set_xlabel(f"MB sent per step {where}")
    sizes.margins(x=0.18)
    for axes in (times, sizes):
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("\n".join(_title(info)), fontsize=10)
    figure.savefig(path, dpi=150)


def _colour(contender: str) -> str:
    if contender.startswith("gflow-"):
        return _OF_ITS_METHODS
    return _COLOURS.get(contender, _OF_GFLOW)


def _title(info: dict[str, Any]) -> list[str]:
    where = show_layout(info["hosts"], info["ranks"], info["rate"])
    what = f"a DDP step of {NETWORKS[info['model']].label}, batch {info['batch']} per rank"
    versions = [f"torch {info['torch']}", f"gflow {info['gflow']}"]
    title = [f"{what}: {where}, {info['cores']} cores", ", ".join(versions)]
    return title + [f"({text})" for text in info["warnings"]]
