"""A small CNN for scikit-learn's handwritten digits, images of 8 x 8 pixels.

It learns in seconds on a CPU, yet its gradients are large enough to be worth compressing.
"""

from __future__ import annotations

from torch import Tensor, nn


class DigitsCNN(nn.Module):
    """2.2 million parameters by default, most of them in one fully connected layer."""

    def __init__(
        self,
        classes: int = 10,
        channels: tuple[int, int, int] = (32, 64, 128),
        hidden: int = 1024,
    ) -> None:
        super().__init__()
        first, second, third = channels
        self.features = nn.Sequential(
            nn.Conv2d(1, first, 3, padding=1),
            nn.BatchNorm2d(first),
            nn.ReLU(),
            nn.Conv2d(first, second, 3, padding=1),
            nn.BatchNorm2d(second),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(second, third, 3, padding=1),
            nn.BatchNorm2d(third),
            nn.ReLU(),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(third * 4 * 4, hidden),
            nn.ReLU(),
            nn.Linear(hidden, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Class scores of images of shape (batch, 1, 8, 8)."""
        scores: Tensor = self.classifier(self.features(images))
        return scores
