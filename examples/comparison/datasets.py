"""The data of the demo's tasks, and their networks. Imported on ranks only, because of torch.

They are those of ``gflow bench quality``, with larger networks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from gflow.bench.quality.datasets import Digits, Shapes, Text
from gflow.models import AlexNet

Sample = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Data:
    """The data of a task. A sample is a pair of inputs and targets.

    Attributes:
        held_out: one large sample that is never trained on.
        network: makes a new network, from torch's own seed.
        batches: the samples of a seed, rank and number of ranks, without end.
    """

    held_out: Sample
    network: Callable[[], nn.Module]
    batches: Callable[[int, int, int], Iterator[Sample]]


def digits() -> Data:
    """With much less noise than in the benchmark: most digits can be read."""
    data = Digits(noise=0.25)
    images, labels = data.held_out
    # Two views of each image.
    return Data((images[:1000], labels[:1000]), lambda: data.network(hidden=1024), data.batches)


def text() -> Data:
    """A network like a small GPT-2, and one piece of 64 characters at a time."""
    data = Text(batch=1, context=64, held_out=128)
    return Data(data.held_out, lambda: data.network(width=512, layers=8, heads=8), data.batches)


def large_shapes() -> Data:
    """Shapes in the size of photographs, two images at a time."""
    data = Shapes(batch=2, shape=12, held_out=768)

    def batches(seed: int, rank: int, world: int) -> Iterator[Sample]:
        return map(_enlarged, data.batches(seed, rank, world))

    return Data(_enlarged(data.held_out), lambda: AlexNet(data.CLASSES), batches)


def _enlarged(sample: Sample) -> Sample:
    """Grey images of 16 x 16 pixels as such of 224 x 224 in three colours."""
    images, labels = sample
    return functional.interpolate(images, 224, mode="bilinear").expand(-1, 3, -1, -1), labels
