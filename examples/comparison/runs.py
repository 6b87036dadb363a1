"""Measurements: one training, and all trainings of one method together.

Times and bytes per step leave out the steps in which a method warms up; the clock of a training
counts all of them.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: A loss is the mean over this many steps, because single batches are noisy.
SMOOTHING_STEPS = 10


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        method: key of the method.
        clock: seconds since the start, after each step.
        losses: after each step, over the last steps and all ranks.
        step_ms: milliseconds of each step after the warm-up.
        sent_bytes: what each rank sent in each step after the warm-up.
        train_loss: over the whole training set, at the end.
        test_accuracy: at the end.
        counters: by gflow's own count, per step of a rank after the warm-up.
    """

    method: str
    clock: list[float]
    losses: list[float]
    step_ms: list[float]
    sent_bytes: list[float]
    train_loss: float
    test_accuracy: float
    counters: dict[str, float]

    @classmethod
    def of(
        cls, method: str, results: Sequence[dict[str, Any]], warmup_steps: int, senders: int
    ) -> Run:
        """Combine what the ranks have returned; clock and counters are those of rank 0."""
        first = results[0]
        by_rank = [one["losses"] for one in results]
        losses = [statistics.fmean(at_step) for at_step in zip(*by_rank, strict=True)]
        clock, sent = first["clock"][warmup_steps:], first["sent"][warmup_steps:]
        return cls(
            method=method,
            clock=first["clock"][1:],
            losses=_smoothed(losses),
            step_ms=[(after - before) * 1e3 for before, after in itertools.pairwise(clock)],
            sent_bytes=[(after - before) / senders for before, after in itertools.pairwise(sent)],
            train_loss=first["train_loss"],
            test_accuracy=first["test_accuracy"],
            counters=first["counters"],
        )

    def seconds_to(self, loss: float) -> float | None:
        """When the loss first reached ``loss``, if it did."""
        steps = zip(self.clock, self.losses, strict=True)
        return next((at for at, now in steps if now <= loss), None)


@dataclass(frozen=True)
class Result:
    """All trainings of one method together: the median of what they measured."""

    step_ms: float
    step_ms_by_round: list[float]
    sent_bytes: float
    training_seconds: float
    train_loss: float
    test_accuracy: float
    counters: dict[str, float]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Result:
        """Combine the trainings of one method."""
        return cls(
            step_ms=statistics.median(ms for run in runs for ms in run.step_ms),
            step_ms_by_round=[statistics.median(run.step_ms) for run in runs],
            sent_bytes=statistics.median(count for run in runs for count in run.sent_bytes),
            training_seconds=statistics.median(run.clock[-1] for run in runs),
            train_loss=statistics.median(run.train_loss for run in runs),
            test_accuracy=statistics.median(run.test_accuracy for run in runs),
            counters=runs[-1].counters,
        )


def _smoothed(losses: Sequence[float]) -> list[float]:
    return [
        statistics.fmean(losses[max(0, end - SMOOTHING_STEPS) : end])
        for end in range(1, len(losses) + 1)
    ]
