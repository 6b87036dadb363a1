"""What is learned in ``gflow bench quality``, as far as it can be told without torch.

Their data must never have to be downloaded.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        summary: what is learned, by what, in a few words.
        home: the module and the class of its :class:`Lesson`.
        needs: a module that its data comes with, besides what torch needs.
        has_momentum: whether its optimizer has a momentum that gflow could take over.
        parameters: of its network, each of 4 bytes.
        step_seconds: about how long a step takes on one core, without communication.
        steps: of a training.
        quick_steps: of a training if it has to be short.
    """

    summary: str
    home: tuple[str, str]
    needs: str | None
    has_momentum: bool
    parameters: int
    step_seconds: float
    steps: int
    quick_steps: int

    def obstacle(self) -> str | None:
        """Why it cannot be learned here, or None."""
        if self.needs is None or importlib.util.find_spec(self.needs) is not None:
            return None
        return f"its data comes with {self.needs}, which is not installed"

    def lesson(self) -> Lesson:
        """Load its data; on a rank."""
        module, name = self.home
        lesson: Lesson = getattr(importlib.import_module(module), name)()
        return lesson


class Lesson(Protocol):
    """A task with its data, on a rank. A sample is a pair of inputs and what should come out.

    Attributes:
        train_sample: some of what is learned from, the same in every training.
        held_out: what is never learned from.
    """

    train_sample: Any
    held_out: Any

    def network(self) -> Any:
        """A new network, from torch's own seed."""

    def optimizer(self, parameters: Any) -> Any:
        """What changes these parameters."""

    def batches(self, seed: int, rank: int, world: int) -> Iterator[Any]:
        """This rank's samples, without end; the seed alone says what all ranks have together."""


TASKS = {
    "digits": Task(
        "scikit-learn's digits, DigitsCNN, SGD with momentum 0.9",
        ("gflow.commands.quality.digits", "Digits"),
        "sklearn",
        has_momentum=True,
        parameters=2_201_546,
        step_seconds=0.02,
        steps=300,
        quick_steps=25,
    ),
    "text": Task(
        "the text of Python's standard library, CharacterGPT, AdamW with beta1 0.5",
        ("gflow.commands.quality.text", "Text"),
        None,
        has_momentum=False,
        parameters=834_304,
        step_seconds=0.02,
        steps=1500,
        quick_steps=30,
    ),
}
