"""ResNet-50 (He et al. 2015, arXiv 1512.03385): few parameters, much to compute.

As is common, the stride of a block is in its 3 x 3 convolution. The shapes of its layers are those
of torchvision, so that measurements compare.
"""

from __future__ import annotations

from torch import Tensor, nn

#: For each stage: the number of blocks, their inner width, and the stride of the first block.
_STAGES = ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2))
#: A block's output has this many times the channels of its inside.
_EXPANSION = 4


class ResNet50(nn.Module):
    """25.6 million parameters with 1000 classes, for images of 64 x 64 pixels or more."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *_convolution(3, 64, kernel=7, stride=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
        )
        blocks = []
        channels = 64
        for count, width, stride in _STAGES:
            for number in range(count):
                blocks.append(_Bottleneck(channels, width, stride if number == 0 else 1))
                channels = width * _EXPANSION
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Class scores of images of shape (batch, 3, height, width)."""
        scores: Tensor = self.head(self.blocks(self.stem(images)))
        return scores


class _Bottleneck(nn.Module):
    """Narrow, convolve, widen, and add the input."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        widened = width * _EXPANSION
        self.inside = nn.Sequential(
            *_convolution(channels, width, kernel=1),
            nn.ReLU(inplace=True),
            *_convolution(width, width, kernel=3, stride=stride),
            nn.ReLU(inplace=True),
            *_convolution(width, widened, kernel=1),
        )
        self.shortcut: nn.Module = nn.Identity()
        if channels != widened or stride != 1:
            self.shortcut = nn.Sequential(*_convolution(channels, widened, kernel=1, stride=stride))
        self.end = nn.ReLU(inplace=True)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.end(self.inside(inputs) + self.shortcut(inputs))
        return outputs


def _convolution(channels: int, out: int, *, kernel: int, stride: int = 1) -> list[nn.Module]:
    """A convolution and its normalisation, which makes a bias redundant."""
    padding = kernel // 2
    return [nn.Conv2d(channels, out, kernel, stride, padding, bias=False), nn.BatchNorm2d(out)]
