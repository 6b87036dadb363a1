"""AlexNet (Krizhevsky 2014, arXiv 1404.5997): many parameters, little to compute.

Nine in ten of its parameters are in three fully connected layers, whose gradients come first: of
all common networks it has the most to exchange per step. The shapes of its layers are those of
torchvision, so that measurements compare.
"""

from __future__ import annotations

from torch import Tensor, nn


class AlexNet(nn.Module):
    """61.1 million parameters with 1000 classes, for images of 64 x 64 pixels or more."""

    def __init__(self, classes: int = 1000, dropout: float = 0.5) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, kernel_size=11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(64, 192, kernel_size=5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(192, 384, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(256, 256, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.AdaptiveAvgPool2d(6),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Linear(4096, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Class scores of images of shape (batch, 3, height, width)."""
        scores: Tensor = self.classifier(self.features(images))
        return scores
