"""What was measured: one training, and all trainings of one method put together.

Times and bytes per step must never count the steps in which a method is still settling; the clock
of a training counts all of them.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: A loss is the mean over this many steps: that of one batch jumps.
SMOOTHING_STEPS = 10


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        method: key of the method.
        clock: seconds since the start, after each step.
        losses: after each step, over the last steps and all ranks.
        step_ms: milliseconds of each settled step.
        sent_bytes: what each rank sent in each settled step.
        train_loss: over the whole training set, at the end.
        test_accuracy: at the end.
        counters: by gflow's own count, per settled step of a rank.
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
        cls, method: str, results: Sequence[dict[str, Any]], settling_steps: int, senders: int
    ) -> Run:
        """Put together what the ranks have returned; the clock and counters are those of rank 0."""
        first = results[0]
        by_rank = [one["losses"] for one in results]
        losses = [statistics.fmean(at_step) for at_step in zip(*by_rank, strict=True)]
        clock, sent = first["clock"][settling_steps:], first["sent"][settling_steps:]
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
        """When the loss came down to ``loss``, if it did."""
        steps = zip(self.clock, self.losses, strict=True)
        return next((at for at, now in steps if now <= loss), None)


@dataclass(frozen=True)
class Result:
    """What all trainings of one method say together: the median, wherever they differ."""

    step_ms: float
    step_ms_by_round: list[float]
    sent_bytes: float
    training_seconds: float
    train_loss: float
    test_accuracy: float
    counters: dict[str, float]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Result:
        """Put the trainings of one method together."""
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
