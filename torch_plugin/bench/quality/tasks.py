"""The tasks of ``gflow bench quality``, as far as they can be described without torch.

Their data comes with Python or with an installed package: nothing is downloaded.
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
        dataset: the name of its class in ``datasets``.
        needs: a module that its data comes with, if any.
        has_momentum: whether its optimizer has momentum that gflow can take over.
        parameters: of its network, each of 4 bytes.
        step_seconds: about how long a step takes on one core, without communication.
        steps: of a training.
        quick_steps: of a training with ``--quick``.
    """

    summary: str
    dataset: str
    needs: str | None
    has_momentum: bool
    parameters: int
    step_seconds: float
    steps: int
    quick_steps: int

    def obstacle(self) -> str | None:
        """Why it cannot be trained here, or None."""
        if self.needs is None or importlib.util.find_spec(self.needs) is not None:
            return None
        return f"its data comes with {self.needs}, which is not installed"

    def load(self) -> Dataset:
        """Load its data; on a rank, because this imports torch."""
        datasets = importlib.import_module("gflow.bench.quality.datasets")
        dataset: Dataset = getattr(datasets, self.dataset)()
        return dataset


class Dataset(Protocol):
    """The data of a task, with its network and optimizer. A sample is a pair of inputs and targets.

    Attributes:
        train_sample: some of the training data, the same in every training.
        held_out: what is never trained on.
    """

    train_sample: Any
    held_out: Any

    def network(self) -> Any:
        """A new network, from torch's own seed."""

    def optimizer(self, parameters: Any) -> Any:
        """A new optimizer of these parameters."""

    def batches(self, seed: int, rank: int, world: int) -> Iterator[Any]:
        """This rank's samples, without end; the seed alone decides what all ranks have together."""


TASKS = {
    "digits": Task(
        "scikit-learn's digits, DigitsCNN, SGD with momentum 0.9",
        "Digits",
        "sklearn",
        has_momentum=True,
        parameters=2_201_546,
        step_seconds=0.02,
        steps=300,
        quick_steps=25,
    ),
    "text": Task(
        "the text of Python's standard library, CharacterGPT, AdamW with beta1 0.5",
        "Text",
        None,
        has_momentum=False,
        parameters=834_304,
        step_seconds=0.02,
        steps=1500,
        quick_steps=30,
    ),
}
