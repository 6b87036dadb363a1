"""The demo's results as text: tables, and sentences about what they show in this run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from comparison.methods import METHODS
from comparison.processors import QUIET_SHARE
from comparison.runs import SMOOTHING_STEPS, Result, Run
from gflow.bench.table import render

#: The losses of the second table.
LOSSES = (1.0, 0.3, 0.1, 0.03, 0.01)


def result_table(results: Mapping[str, Result]) -> str:
    """One row per method."""
    baseline = next(iter(results.values()))
    header = [
        *("", "ms per step", "speed", "MB sent per step"),
        *("training s", "final loss", "test accuracy"),
    ]
    rows = [
        [
            METHODS[key].label,
            f"{result.step_ms:.1f}",
            f"{baseline.step_ms / result.step_ms:.2f}x",
            f"{result.sent_bytes / 1e6:.2f}",
            f"{result.training_seconds:.1f}",
            f"{result.train_loss:.5f}",
            f"{result.test_accuracy:.1%}",
        ]
        for key, result in results.items()
    ]
    return render(header, rows)


def loss_table(runs: Mapping[str, Sequence[Run]]) -> str:
    """How many seconds of training each method took to reach certain losses."""
    rows = [
        [METHODS[key].label, *(_seconds_to(loss, of_method) for loss in LOSSES)]
        for key, of_method in runs.items()
    ]
    return render(["seconds until the loss is", *(f"{loss:g}" for loss in LOSSES)], rows)


def _seconds_to(loss: float, runs: Sequence[Run]) -> str:
    times = [run.seconds_to(loss) for run in runs]
    reached = [at for at in times if at is not None]
    return f"{statistics.median(reached):.1f}" if len(reached) == len(times) else "-"


def how_it_was_measured(warmup_steps: int, rounds: int, interface: str) -> str:
    """Explains the columns."""
    sender = "a host" if interface != "lo" else "the loopback interface, shared among the ranks,"
    return "\n".join(
        (
            f"ms, speed, MB: median over all rounds ({rounds}), without the first {warmup_steps} "
            "steps (gflow's warm-up and ramp)",
            f"MB:            all that {sender} sent, headers included",
            "training s:    all steps; final loss: of the training set",
            f"loss in time:  of the batches, the mean over both ranks and {SMOOTHING_STEPS} steps",
        )
    )


def conclusions(results: Mapping[str, Result]) -> list[str]:
    """Each method against the first, in a sentence."""
    (first, baseline), *others = results.items()
    sentences = []
    for key, result in others:
        by_round = [
            theirs / mine
            for mine, theirs in zip(result.step_ms_by_round, baseline.step_ms_by_round, strict=True)
        ]
        sentences.append(
            f"{METHODS[key].label}: {baseline.step_ms / result.step_ms:.2f} times as fast per "
            f"step as {METHODS[first].label} (round by round: "
            f"{', '.join(f'{ratio:.2f}' for ratio in by_round)}), with "
            f"{result.sent_bytes / baseline.sent_bytes:.1%} of its bytes."
        )
    return sentences


def own_count(counters: Mapping[str, float]) -> str | None:
    """gflow's own counters per step."""
    parts = []
    if "gradient_bytes" in counters:
        parts.append(f"{counters['gradient_bytes'] / 1e6:.2f} MB of gradients")
    if "wire_bytes" in counters:
        parts.append(f"{counters['wire_bytes'] / 1e6:.2f} MB sent")
    if "hidden_seconds" in counters:
        parts.append(f"{counters['hidden_seconds'] * 1e3:.1f} ms of exchange behind the backward")
    if "exposed_seconds" in counters:
        parts.append(f"{counters['exposed_seconds'] * 1e3:.1f} ms of waiting for it")
    return f"By gflow's own count, per step: {', '.join(parts)}." if parts else None


def trust(share_of_others: float) -> str:
    """How far the times can be trusted."""
    text = f"Other programs took {share_of_others:.0%} of the processors meanwhile"
    if share_of_others > QUIET_SHARE:
        return text + ": the times are rough, repeat on a quiet machine."
    return text + "."
