"""The picture of an allreduce benchmark: how fast each contender is, over the size.

It must never show less than the table: all contenders, all sizes, on axes that start nowhere in
particular, because they are logarithmic.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gflow.commands.contenders import LABELS
from gflow.commands.layout import show_layout
from gflow.commands.sizes import show_size

#: A contender looks the same in every picture; limits are drawn as lines without points.
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


def draw(rows: Sequence[dict[str, Any]], about: dict[str, Any], path: Path) -> None:
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
    axes.set_title("\n".join(_title(about)), fontsize=10)
    figure.savefig(path, dpi=150)


def _title(about: dict[str, Any]) -> list[str]:
    where = show_layout(about["hosts"], about["ranks"], about["rate"])
    versions = [f"torch {about['torch']}", f"gflow {about['gflow']}"]
    versions += [f"{LABELS[name]} {one['version']}" for name, one in about["installed"].items()]
    return [f"allreduce: {where}, {about['cores']} cores", ", ".join(versions)]
