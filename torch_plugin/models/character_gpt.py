"""A small decoder-only transformer that predicts the next character of a text.

It has the parts of large ones (embeddings, causal attention, a layer norm before each part) in a
size that a CPU trains in minutes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

#: The spread of the initial weights, relative to that of a layer that preserves signal size.
#: At GPT-2's width this is its 0.02; a narrow network would hardly start to learn with that.
_INITIAL_SPREAD = 0.5


class CharacterGPT(nn.Module):
    """0.8 million parameters by default."""

    def __init__(
        self,
        vocabulary: int = 128,
        context: int = 64,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
    ) -> None:
        super().__init__()
        self.context = context
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=_INITIAL_SPREAD / width**0.5)

    def forward(self, text: Tensor) -> Tensor:
        """Scores of the next character at each position of texts of shape (batch, length)."""
        positions = torch.arange(text.shape[1], device=text.device)
        inputs = self.characters(text) + self.positions(positions)
        scores: Tensor = self.head(self.norm(self.blocks(inputs)))
        return scores


class _Block(nn.Module):
    """Attention over earlier positions, then a two-layer perceptron at each position."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.to_attention = nn.Linear(width, 3 * width)
        self.from_attention = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs + self._attend(self.attention_norm(inputs))
        outputs: Tensor = inputs + self.perceptron(inputs)
        return outputs

    def _attend(self, inputs: Tensor) -> Tensor:
        # (batch, length, 3 * width) -> three of (batch, heads, length, width / heads)
        split = self.to_attention(inputs).unflatten(2, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = self.from_attention(attended.transpose(1, 2).flatten(2))
        return mixed
