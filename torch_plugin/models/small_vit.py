"""A small vision transformer (Dosovitskiy et al. 2020, arXiv 2010.11929) for small images.

It has the parts of large ones in a size that a CPU trains in a minute. Patches are averaged at the
end instead of being read through a token of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SmallViT(nn.Module):
    """0.1 million parameters by default, for images of one channel."""

    def __init__(
        self,
        classes: int = 10,
        image: int = 16,
        patch: int = 4,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
    ) -> None:
        super().__init__()
        self.to_patches = nn.Conv2d(1, width, patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn((image // patch) ** 2, width))
        self.blocks = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
                )
                for _ in range(layers)
            )
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores of images of shape (batch, 1, height, width)."""
        patches = self.to_patches(images).flatten(2).transpose(1, 2)
        scores: Tensor = self.head(self.norm(self.blocks(patches + self.positions)).mean(1))
        return scores
