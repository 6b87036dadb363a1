"""What an allreduce benchmark prints: a line for each size while it runs, tables at the end.

It must never fit what it shows to what one would like to see: every contender and every size that
was measured is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gflow.commands import gpus, table
from gflow.commands.contenders import LABELS
from gflow.commands.sizes import show_size

_RATIOS = {"gloo": "Gloo ÷", "nccl": "NCCL ÷", "mpi": "faster MPI ÷"}
_LIMITS = ("memory-limit", "link-limit")


def progress(row: dict[str, Any]) -> str:
    """One row, in a line."""
    parts = [f"{LABELS[name]} {_time(one['median_us'])}" for name, one in row["contenders"].items()]
    samples = min(one["samples"] for one in row["contenders"].values())
    return f"  {show_size(row['bytes'])}: {', '.join(parts)} µs ({samples} samples each)"


def tables(rows: Sequence[dict[str, Any]], about: dict[str, Any]) -> str:
    """All rows: times first, then ratios and cost; and what the columns mean."""
    explained = [
        "µs: median time of one call, on the slowest rank. GB/s: 10^9 bytes of tensor per second.",
    ]
    ratios, words = _ratios(rows)
    installed = [_bindings(name, one) for name, one in about["installed"].items()]
    notes = explained + words + installed + gpus.lines(about)
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
