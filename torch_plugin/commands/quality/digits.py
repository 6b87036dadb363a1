"""The task ``digits``: which digit is it? Images come with scikit-learn. Imported on ranks only.

What is held out must never depend on the seed of a training.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gflow.models import DigitsCNN

_HELD_OUT = 360
_BATCH = 32
_LEARNING_RATE, _MOMENTUM = 0.01, 0.9


class Digits:
    """1797 images of 8 x 8 pixels, a fifth of them held out."""

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        data = load_digits()
        images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16.0
        labels = torch.tensor(data.target, dtype=torch.long)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        held_out, learned = order[:_HELD_OUT], order[_HELD_OUT:]
        self._images, self._labels = images[learned], labels[learned]
        self.held_out = images[held_out], labels[held_out]
        self.train_sample = self._images[:_HELD_OUT], self._labels[:_HELD_OUT]

    def network(self) -> DigitsCNN:
        """A new network."""
        return DigitsCNN()

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(parameters, lr=_LEARNING_RATE, momentum=_MOMENTUM)

    def batches(self, seed: int, rank: int, world: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All images in a new order, epoch after epoch."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(self._labels), generator=generator)
            for together in order.split(world * _BATCH):
                if len(together) == world * _BATCH:
                    own = together[rank * _BATCH : (rank + 1) * _BATCH]
                    yield self._images[own], self._labels[own]
