"""What several trainings of one variant ended with. Seeds must never be left out of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Spread:
    """Some numbers, summed up."""

    mean: float
    least: float
    most: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Spread:
        """Sum up at least one number.

        Example:
            >>> Spread.of([1.0, 2.0, 6.0])
            Spread(mean=3.0, least=1.0, most=6.0)
        """
        return cls(statistics.fmean(numbers), min(numbers), max(numbers))

    def place_in(self, other: Spread) -> str:
        """Where the mean of this one lies: within what the other one spans, or not.

        Example:
            >>> Spread(3.0, 1.0, 6.0).place_in(Spread(4.0, 3.5, 5.0))
            'below'
        """
        if math.isnan(self.mean + other.mean):
            return "no number"
        if self.mean < other.least:
            return "below"
        return "above" if self.mean > other.most else "within"


def by_variant(rows: Sequence[dict[str, Any]], task: str) -> dict[str, list[dict[str, Any]]]:
    """The trainings of one task, by variant."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["task"] == task:
            found.setdefault(row["variant"], []).append(row)
    return found


def at_the_end(trainings: Sequence[dict[str, Any]], what: str) -> Spread:
    """What these trainings ended with, such as ``held_out_loss``."""
    return Spread.of([training["curve"][-1][what] for training in trainings])
