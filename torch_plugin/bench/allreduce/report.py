"""The output of ``gflow bench allreduce``: a line per size while it runs, tables and a plot at the
end.

Every contender and every size that was measured is in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gflow.bench import machine, table
from gflow.bench.allreduce.contenders import LABELS
from gflow.bench.arguments import show_layout
from gflow.bench.units import show_size

_RATIOS = {"gloo": "Gloo ÷", "nccl": "NCCL ÷", "mpi": "faster MPI ÷"}
_LIMITS = ("memory-limit", "link-limit")


def progress(row: dict[str, Any]) -> str:
    """One row, in a line."""
    parts = [f"{LABELS[name]} {_time(one['median_us'])}" for name, one in row["contenders"].items()]
    samples = min(one["samples"] for one in row["contenders"].values())
    return f"  {show_size(row['bytes'])}: {', '.join(parts)} µs ({samples} samples each)"


def tables(rows: Sequence[dict[str, Any]], info: dict[str, Any]) -> str:
    """All rows: times first, then ratios and cost; and what the columns mean."""
    explained = [
        "µs: median time of one call, on the slowest rank. GB/s: 10^9 bytes of tensor per second.",
    ]
    ratios, words = _ratios(rows)
    installed = [_bindings(name, one) for name, one in info["installed"].items()]
    notes = explained + words + installed + machine.gpu_lines(info)
    return "\n\n".join([_times(rows), *ratios, "\n".join(notes)])


def _times(rows: Sequence[dict[str, Any]]) -> str:
    names = list(rows[0]["contenders"])
    cells = []
    for row in rows:
        results = [row["contenders"][name] for name in names]
        numbers = [(_time(one["median_us"]), f"{one['gb_per_s']:.3g}") for one in results]
        cells.append([show_size(row["bytes"]), *(text for pair in numbers for text in pair)])
    groups = [("", 1), *((LABELS[name], 2) for name in names)]
    return table.render(["size", *["µs", "GB/s"] * len(names)], cells, groups)


def _ratios(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """The second table, if there is anything to put in, and the words for it."""
    columns: list[tuple[str, str, list[str]]] = []
    words = []
    pairs = [pair.split("/") for pair in rows[0]["ratios"]]
    for one, other in pairs:
        values = [row["ratios"][f"{one}/{other}"] for row in rows]
        if one in _RATIOS:
            columns.append((_RATIOS[one], LABELS[other], [_ratio(value) for value in values]))
        else:
            shown = [f"{100 * value:.3g}" for value in values]
            columns.append((f"% of {LABELS[one]}", LABELS[other], shown))
    if any(one in _RATIOS for one, _ in pairs):
        words.append("÷: time by time; over 1, gflow takes less.")
    if any(one in _LIMITS for one, _ in pairs):
        words.append("% of a limit: the limit's time by the contender's.")
    for name, result in rows[0]["contenders"].items():
        if "cpu_s_per_gb" in result:
            costs = [row["contenders"][name]["cpu_s_per_gb"] for row in rows]
            columns.append(("CPU s/GB", LABELS[name], [_cost(cost) for cost in costs]))
    if any(title == "CPU s/GB" for title, _, _ in columns):
        words.append("CPU s/GB: processor time of all ranks together, per 10^9 bytes of tensor.")
    if not columns:
        return [], []
    titles = [title for title, _, _ in columns]
    groups = [("", 1), *((title, titles.count(title)) for title in dict.fromkeys(titles))]
    header = ["size", *(label for _, label, _ in columns)]
    cells = [
        [show_size(row["bytes"]), *(values[number] for _, _, values in columns)]
        for number, row in enumerate(rows)
    ]
    return [table.render(header, cells, groups)], words


def _time(microseconds: float) -> str:
    return f"{microseconds:.0f}" if microseconds >= 100 else f"{microseconds:.1f}"


def _cost(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 100 else f"{seconds:.3g}"


def _bindings(name: str, installed: dict[str, Any]) -> str:
    bound = "ranks bound to cores" if installed["bound_to_cores"] else "ranks bound to no core"
    return f"{LABELS[name]}: version {installed['version']}, {bound} (its default)."


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


# --- the plot

#: A contender looks the same in every plot; limits are lines without points.
_STYLES: dict[str, dict[str, Any]] = {
    "gflow": {"color": "#e6550d", "marker": "o"},
    "gflow-bucket": {"color": "#a50f15", "marker": "D"},
    "gloo": {"color": "#3182bd", "marker": "s"},
    "nccl": {"color": "#08519c", "marker": "P"},
    "openmpi": {"color": "#31a354", "marker": "^"},
    "mpich": {"color": "#756bb1", "marker": "v"},
    "memory-limit": {"color": "#555555", "linestyle": "--"},
    "link-limit": {"color": "#555555", "linestyle": ":"},
}


def plot(rows: Sequence[dict[str, Any]], info: dict[str, Any], path: Path) -> None:
    """Draw GB/s over the size, with the middle half of the samples as a band."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    sizes = [row["bytes"] for row in rows]
    for name in rows[0]["contenders"]:
        results = [row["contenders"][name] for row in rows]
        style = _STYLES[name]
        speeds = [one["gb_per_s"] for one in results]
        axes.plot(sizes, speeds, label=LABELS[name], markersize=5, **style)
        axes.fill_between(
            sizes,
            [size / one["high_us"] / 1e3 for size, one in zip(sizes, results, strict=True)],
            [size / one["low_us"] / 1e3 for size, one in zip(sizes, results, strict=True)],
            color=style["color"],
            alpha=0.15,
            linewidth=0,
        )
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel("size of the tensor")
    axes.set_ylabel("GB/s (bytes of tensor ÷ median time of a call)")
    axes.set_xticks(sizes, [show_size(size) for size in sizes])
    axes.tick_params(axis="x", which="minor", bottom=False)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(which="major", alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    axes.set_title("\n".join(_title(info)), fontsize=10)
    figure.savefig(path, dpi=150)


def _title(info: dict[str, Any]) -> list[str]:
    where = show_layout(info["hosts"], info["ranks"], info["rate"])
    versions = [f"torch {info['torch']}", f"gflow {info['gflow']}"]
    versions += [f"{LABELS[name]} {one['version']}" for name, one in info["installed"].items()]
    return [f"allreduce: {where}, {info['cores']} cores", ", ".join(versions)]
