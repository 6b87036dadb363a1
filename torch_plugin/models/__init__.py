"""The networks that gflow's benchmarks and examples train, in the usual shapes.

They are here so that a benchmark needs nothing but torch. The backend must never import this
package, and it holds no weights: a network starts from the seed that its caller sets.

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

__all__ = ["AlexNet", "CharacterGPT", "DigitsCNN", "ResNet50"]
