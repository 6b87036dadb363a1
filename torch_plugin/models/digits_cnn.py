"""A small CNN for scikit-learn's handwritten digits, images of 8 x 8 pixels.

It learns in seconds on a CPU, yet its gradients are large enough to be worth compressing.
"""

from __future__ import annotations

from torch import Tensor, nn


class DigitsCNN(nn.Module):
    """2.2 million parameters, most of them in one fully connected layer."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 128, 3, padding=1),
            nn.BatchNorm2d(128),
            nn.ReLU(),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(128 * 4 * 4, 1024),
            nn.ReLU(),
            nn.Linear(1024, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Class scores of images of shape (batch, 1, 8, 8)."""
        scores: Tensor = self.classifier(self.features(images))
        return scores
