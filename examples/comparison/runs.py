"""Measurements: one training, and all trainings of one method together.

Times and bytes per step leave out the first half of the steps, in which gflow may still be warming
up; the clock of a training counts all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: A training has reached the target once it is this close to what Gloo ended with. Two trainings of
#: one seed that differ in nothing but how they round do not end closer than that to each other.
TOLERANCE = 0.03


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        method: key of the method.
        seed: of weights and data.
        curve: at each evaluation ``step``, ``seconds`` since the start, held-out ``loss`` and
            ``accuracy``.
        step_ms: milliseconds of each step in the second half.
        sent_bytes: what each rank sent in each of these steps.
        parameters: of the network.
        counters: by gflow's own count, per step of the first rank.
        sent_as: what gflow sent gradients as at the end.
    """

    method: str
    seed: int
    curve: list[dict[str, float]]
    step_ms: list[float]
    sent_bytes: list[float]
    parameters: int
    counters: dict[str, float]
    sent_as: str | None = None

    @classmethod
    def of(cls, measured: Mapping[str, Any], senders: int) -> Run:
        """From what a rank has told; ``senders`` ranks share the counted interface."""
        half = len(measured["step_ms"]) // 2
        later = {
            "step_ms": measured["step_ms"][half:],
            "sent_bytes": [count / senders for count in measured["sent_bytes"][half:]],
        }
        return cls(**{**measured, **later})

    @property
    def loss(self) -> float:
        """Held out, at the end."""
        return self.curve[-1]["loss"]

    @property
    def accuracy(self) -> float:
        """Held out, at the end."""
        return self.curve[-1]["accuracy"]

    @property
    def seconds(self) -> float:
        """Of all steps."""
        return self.curve[-1]["seconds"]

    def seconds_to(self, loss: float) -> float | None:
        """When an evaluation first found ``loss`` or less, if one did after the first step."""
        return next((one["seconds"] for one in self.curve[1:] if one["loss"] <= loss), None)


@dataclass(frozen=True)
class Result:
    """All trainings of one method together.

    Attributes:
        step_ms: median.
        sent_bytes: per step, median.
        seconds: of a training, mean.
        losses: held out at the end, by seed.
        accuracies: likewise.
        seconds_to_target: of each training, None where it was not reached.
        counters: of the last training.
    """

    step_ms: float
    sent_bytes: float
    seconds: float
    losses: list[float]
    accuracies: list[float]
    seconds_to_target: list[float | None]
    counters: dict[str, float]

    @classmethod
    def of(cls, runs: Sequence[Run], targets: Mapping[int, float]) -> Result:
        """Combine the trainings of one method, with the target of each seed."""
        return cls(
            step_ms=statistics.median(ms for run in runs for ms in run.step_ms),
            sent_bytes=statistics.median(count for run in runs for count in run.sent_bytes),
            seconds=statistics.fmean(run.seconds for run in runs),
            losses=[run.loss for run in runs],
            accuracies=[run.accuracy for run in runs],
            seconds_to_target=[run.seconds_to(targets[run.seed]) for run in runs],
            counters=runs[-1].counters,
        )

    @property
    def time_to_target(self) -> float | None:
        """Mean over the seeds; None if not all reached it."""
        reached = [seconds for seconds in self.seconds_to_target if seconds is not None]
        return statistics.fmean(reached) if len(reached) == len(self.seconds_to_target) else None


def targets_of(baseline: Sequence[Run]) -> dict[int, float]:
    """For each seed the held-out loss to be reached: what the baseline ends with, and a little."""
    return {run.seed: run.loss * (1 + TOLERANCE) for run in baseline}
