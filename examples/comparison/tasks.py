"""What the demo can train, as far as it can be described without torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        summary: what is learned, by what.
        recipe: how it is trained, in words; it has places for ``steps`` and ``learning_rate``.
        dataset: the name of its function in ``datasets``.
        steps: of a training.
        evaluation_steps: what is held out is evaluated after so many.
        step_limit: so many seconds per step of any method, on average, mean that something is
            wrong.
        learning_rate: of AdamW; torch's default, or the best of a few for dense training (the
            option --learning-rate tries others).
        weight_decay: of AdamW.
        rises: whether the learning rate rises for a short while, and does not fall to 0.
        clips: whether gradients are clipped.
        example: the example that trains something like it.
        packages: further modules that it needs, and the packages that they are in.
    """

    summary: str
    recipe: str
    dataset: str
    steps: int
    evaluation_steps: int
    step_limit: float
    learning_rate: float
    example: str
    weight_decay: float = 0.01
    rises: bool = False
    clips: bool = False
    packages: Mapping[str, str] = field(default_factory=dict)

    def missing_packages(self) -> list[str]:
        """What has to be installed for the ranks and the plot."""
        needed = {"torch": "torch", **self.packages, "matplotlib": "matplotlib"}
        return [name for module, name in needed.items() if not find_spec(module)]

    def load(self) -> Any:
        """Load its data; on a rank, because this imports torch."""
        return getattr(importlib.import_module("comparison.datasets"), self.dataset)()

    def optimizer(self, parameters: Any, learning_rate: float) -> Any:
        """A new optimizer."""
        from torch.optim import AdamW

        # Fused: the same settings and arithmetic, in one pass over the memory instead of ten.
        return AdamW(parameters, lr=learning_rate, weight_decay=self.weight_decay, fused=True)


_WARMED_UP = "{steps} steps with warm-up and a cosine"
TASKS = {
    "digits": Task(
        summary="a CNN on handwritten digits",
        recipe="AdamW with torch's defaults, {steps} steps with a cosine",
        dataset="digits",
        steps=500,
        evaluation_steps=10,
        step_limit=0.2,
        learning_rate=1e-3,
        example="train_digits.py",
        packages={"sklearn": "scikit-learn"},
    ),
    "gpt": Task(
        summary="a character GPT (25 M parameters) on the text of Python's library",
        recipe="AdamW (learning rate {learning_rate:g}, weight decay 0.1), clipped at 1,\n"
        + _WARMED_UP,
        dataset="text",
        steps=800,
        evaluation_steps=20,
        step_limit=3.0,
        learning_rate=2e-4,
        example="train_text.py",
        weight_decay=0.1,
        rises=True,
        clips=True,
    ),
    "alexnet": Task(
        summary="AlexNet (57 M parameters) on shapes made in code",
        recipe="AdamW with torch's defaults but a learning rate of {learning_rate:g},\n"
        + _WARMED_UP,
        dataset="large_shapes",
        steps=400,
        evaluation_steps=20,
        step_limit=6.0,
        learning_rate=1e-4,
        example="train_images.py",
        rises=True,
    ),
}
