"""What ``gflow bench ddp`` prints: a line for each contender, a table at the end.

It must never fit what it shows to what one would like to see: every contender that was measured
is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gflow.commands import gpus, table, wire
from gflow.commands.ddp.contenders import LABELS, RIVALS
from gflow.commands.ddp.networks import NETWORKS

_STEP = (
    "A step: forward, backward, optimizer.step (SGD without momentum), zero_grad; its time is that "
    "of the slowest rank.\nlow, high: a quarter of the steps took less, a quarter more."
)
_MISSING = "-"


def progress(row: dict[str, Any]) -> str:
    """One row, in a line."""
    steps = f"{row['samples']} steps"
    return f"  {LABELS[row['contender']]}: {row['median_ms']:.0f} ms per step (median of {steps})"


def tables(rows: Sequence[dict[str, Any]], about: dict[str, Any]) -> str:
    """All rows, and what the columns mean."""
    rival = RIVALS[about["device"]]
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
    shown = table.render([_setting(about), *header], cells)
    return "\n\n".join([shown, "\n".join(_words(rows, about))])


def _setting(about: dict[str, Any]) -> str:
    size = about["image"]
    return f"{NETWORKS[about['model']].label}, {about['batch']} x {size} x {size}"


def _words(rows: Sequence[dict[str, Any]], about: dict[str, Any]) -> list[str]:
    names = [row["contender"] for row in rows]
    words = [_STEP]
    if "none" in names:
        words.append("÷ none: its time by that of a step without communication.")
    rival = RIVALS[about["device"]]
    if rival in names:
        label = LABELS[rival]
        words.append(f"{label} ÷: {label}'s time by its own; over 1, it takes less than {label}.")
    words.append(f"MB sent: {wire.meaning(about['hosts'])}")
    words.append("CPU s: processor time of all ranks together, per step.")
    if "ddp-only" in names:
        words.append(f"{LABELS['ddp-only']}: DDP whose hook exchanges nothing.")
    if "powersgd" in names:
        words.append(f"{LABELS['powersgd']}: matrices of rank 2, one bucket.")
    if "gflow" in names:
        words.append(_about_gflow(about))
    if about["hosts"] == 1 and "gflow-exact" in names:
        words.append(f"{LABELS['gflow-exact']}: the ranks of one host share memory.")
    view = "are views into" if about["bucket_view"] else "are copied to and from"
    words.append(f"Gradients {view} DDP's buckets (gradient_as_bucket_view), for all alike.")
    words += [line for row in rows for line in _about_overlap(row)]
    return words + gpus.lines(about) + [f"note: {text}" for text in about["warnings"]]


def _about_gflow(about: dict[str, Any]) -> str:
    fusion = about["fusion_bytes"]
    fused = "its default fusion_bytes" if fusion is None else f"fusion_bytes={fusion}"
    said = f"{LABELS['gflow']}: density {about['density']:g}, {fused}"
    if about["hosts"] > 1:
        return f"{said}, compress=auto (what crosses hosts)."
    return f"{said}, compress=on (every rank is a host of its own, over loopback)."


def _about_overlap(row: dict[str, Any]) -> list[str]:
    counted = row.get("counters_per_step", {})
    if "hidden_seconds" not in counted or "exposed_seconds" not in counted:
        return []
    hidden, exposed = (1e3 * counted[f"{word}_seconds"] for word in ("hidden", "exposed"))
    said = (
        f"{LABELS[row['contender']]}, by gflow.metrics() on rank 0: {hidden:.0f} ms of exchange "
        f"per step ran beside the backward pass (hidden), {exposed:.0f} ms after it (exposed)."
    )
    stages = [
        f"{name[len('stage_') : -len('_seconds')].replace('_', ' ')} {1e3 * seconds:.0f}"
        for name, seconds in counted.items()
        if name.startswith("stage_")
    ]
    timed = f"Its stages, in ms (wire runs beside the others): {', '.join(stages)}."
    return [said, timed] if stages else [said]


def _ratio(row: dict[str, Any], key: str) -> str:
    return f"{row[key]:.2f}" if key in row else _MISSING
