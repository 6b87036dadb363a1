"""The tasks of ``gflow bench quality``, as far as they can be described without torch.

Their data is made here, or comes with Python or an installed package: nothing is downloaded.
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
        learning_rate: the best for dense training, as ``--sweep`` finds it.
        steps: of a training.
        step_seconds: about how long a step takes on two cores with two ranks, all in all.
        needs: a module that its data comes with, if any.
        betas: of AdamW; None: the task takes SGD with momentum.
    """

    summary: str
    dataset: str
    learning_rate: float
    steps: int
    step_seconds: float
    needs: str | None = None
    betas: tuple[float, float] | None = None

    @property
    def clips(self) -> bool:
        """Whether its gradients are clipped, as is usual for transformers."""
        return self.betas is not None

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

    def optimizer(self, parameters: Any, learning_rate: float) -> Any:
        """A new optimizer, with the settings that people use."""
        from torch.optim import SGD, AdamW

        if self.betas is None:
            return SGD(parameters, lr=learning_rate, momentum=0.9)
        # Fused: the same arithmetic, in one pass over the memory instead of ten.
        return AdamW(parameters, lr=learning_rate, betas=self.betas, weight_decay=0.1, fused=True)


class Dataset(Protocol):
    """The data of a task, and its network. A sample is a pair of inputs and targets.

    Attributes:
        held_out: what is never trained on; so much that chance hardly moves its mean loss.
    """

    held_out: Any

    def network(self) -> Any:
        """A new network, from torch's own seed."""

    def batches(self, seed: int, rank: int, world: int) -> Iterator[Any]:
        """This rank's samples, without end. They depend on these numbers alone."""


_GPT = "CharacterGPT (114 k parameters) on the text of Python's standard library"
TASKS = {
    "gpt": Task(
        f"{_GPT}, AdamW (0.9, 0.999)",
        "Text",
        learning_rate=4e-3,
        steps=4000,
        step_seconds=0.012,
        betas=(0.9, 0.999),
    ),
    "gpt-beta2-95": Task(
        f"{_GPT}, AdamW (0.9, 0.95)",
        "Text",
        learning_rate=4e-3,
        steps=4000,
        step_seconds=0.012,
        betas=(0.9, 0.95),
    ),
    "words": Task(
        "the same GPT with a vocabulary of 2048 words (364 k parameters), AdamW (0.9, 0.999)",
        "Words",
        learning_rate=4e-3,
        steps=4000,
        step_seconds=0.015,
        betas=(0.9, 0.999),
    ),
    "digits": Task(
        "DigitsCNN (90 k parameters) on scikit-learn's digits, shifted and noisy, SGD with "
        "momentum 0.9",
        "Digits",
        learning_rate=0.025,
        steps=1500,
        step_seconds=0.012,
        needs="sklearn",
    ),
    "vit": Task(
        "SmallViT (103 k parameters) on shapes made in code, AdamW (0.9, 0.999)",
        "Shapes",
        learning_rate=2e-3,
        steps=1500,
        step_seconds=0.012,
        betas=(0.9, 0.999),
    ),
}
