"""What ``gflow bench quality`` prints: a line for each training, a table for each task.

It must never judge: whether a mean lies within what the dense trainings span is a fact, whether
that is good enough is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gflow.commands import table, wire
from gflow.commands.quality.spread import Spread, at_the_end, by_variant
from gflow.commands.quality.tasks import TASKS
from gflow.commands.quality.variants import DENSE
from gflow.commands.rates import show_rate


def progress(row: dict[str, Any]) -> str:
    """One training, in a line."""
    end = row["curve"][-1]
    return (
        f"  {row['task']}, {row['variant']}, seed {row['seed']}: held-out loss "
        f"{end['held_out_loss']:.4f}, accuracy {end['held_out_accuracy']:.1%} after {row['steps']} "
        f"steps of {row['median_ms']:.0f} ms"
    )


def tables(rows: Sequence[dict[str, Any]], about: dict[str, Any]) -> str:
    """All trainings, summed up by variant, and what the columns mean."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    shown = [_table(rows, task) for task in tasks]
    return "\n\n".join([*shown, "\n".join(_words(rows, tasks, about))])


def _table(rows: Sequence[dict[str, Any]], task: str) -> str:
    trainings = by_variant(rows, task)
    dense = at_the_end(trainings[DENSE], "held_out_loss")
    cells = []
    for variant, own in trainings.items():
        held_out = at_the_end(own, "held_out_loss")
        cells.append(
            [
                variant,
                _losses(at_the_end(own, "train_loss")),
                _losses(held_out),
                "" if variant == DENSE else held_out.place_in(dense),
                _accuracies(at_the_end(own, "held_out_accuracy")),
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


def _words(
    rows: Sequence[dict[str, Any]], tasks: Sequence[str], about: dict[str, Any]
) -> list[str]:
    words = []
    for task in tasks:
        steps = next(row["steps"] for row in rows if row["task"] == task)
        words.append(f"{task}: {TASKS[task].summary}; {steps} steps.")
    words += [
        f"Mean (least..most) over seeds ({about['seeds']}), after the last step; a seed has the "
        "same weights and data in every variant.",
        "dense range: where the mean held-out loss lies, by the least and the most of the dense "
        "trainings.",
        f"Chunks of {about['chunk']} elements; a tenth of the steps is dense, and the density is "
        "reached after another tenth (bytes are the mean of all steps).",
    ]
    words += [about_time(rows, task, about["rate"]) for task in tasks] if about["rate"] else []
    words.append(f"MB sent: {wire.meaning(about['hosts'])}")
    if about["hosts"] == 1:
        words.append("One host: compress=on, every rank is a host of its own, over loopback. Loss "
                     "over time is not drawn: there is no link.")  # fmt: skip
    return words + [f"note: {text}" for text in about["warnings"]]


def about_time(rows: Sequence[dict[str, Any]], task: str, rate: int) -> str:
    """How much of a dense step the link takes: with small gradients, sparse ones gain little."""
    dense = by_variant(rows, task)[DENSE]
    sent = Spread.of([one["sent_bytes_per_step"] for one in dense]).mean
    step = Spread.of([one["median_ms"] for one in dense]).mean
    return (
        f"{task}: a dense step takes {step:.0f} ms and sends {sent / 1e6:.1f} MB, which is "
        f"{8e3 * sent / rate:.0f} ms at {show_rate(rate)}."
    )


def _losses(spread: Spread) -> str:
    return f"{spread.mean:.4f} ({spread.least:.4f}..{spread.most:.4f})"


def _accuracies(spread: Spread) -> str:
    return f"{100 * spread.mean:.2f} ({100 * spread.least:.2f}..{100 * spread.most:.2f})"
