"""The networks of ``gflow bench ddp``, and how much there is to compute and to exchange.

torch is not imported here: ``--help`` has to answer at once.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Network:
    """One network.

    Attributes:
        label: how it is shown.
        name: of its class in ``gflow.models``.
        parameters: how many, each of 4 bytes.
        batch: images per rank and step; chosen for a step without communication of about a third
            of a second on one core.
        image: height and width of an image in pixels.
        fixed_seconds: of a step on one core, independent of the images.
        image_seconds: in addition, for each image of 224 x 224 pixels.
    """

    label: str
    name: str
    parameters: int
    batch: int
    image: int
    fixed_seconds: float
    image_seconds: float

    def step_seconds(self, batch: int, image: int) -> float:
        """About how long a step without communication takes on one core."""
        return self.fixed_seconds + self.image_seconds * batch * (image / 224) ** 2


#: The smallest image that all of them accept.
MIN_IMAGE = 64
NETWORKS = {
    "alexnet": Network("AlexNet", "AlexNet", 61_100_840, 4, 224, 0.16, 0.04),
    "resnet50": Network("ResNet-50", "ResNet50", 25_557_032, 2, 128, 0.05, 0.35),
}
