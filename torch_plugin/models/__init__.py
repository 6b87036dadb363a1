"""The networks that gflow's benchmarks and examples train, in the usual shapes.

With them a benchmark needs nothing but torch. There are no weights here: a network starts from the
seed that its caller sets. The backend does not import this package.

Example:
    >>> from gflow.models import AlexNet
    >>> sum(parameter.numel() for parameter in AlexNet().parameters())
    61100840
"""

from __future__ import annotations

from gflow.models.alexnet import AlexNet
from gflow.models.character_gpt import CharacterGPT
from gflow.models.digits_cnn import DigitsCNN
from gflow.models.resnet50 import ResNet50
from gflow.models.small_vit import SmallViT

__all__ = ["AlexNet", "CharacterGPT", "DigitsCNN", "ResNet50", "SmallViT"]
