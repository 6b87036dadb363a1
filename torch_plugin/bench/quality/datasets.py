"""The data of ``gflow bench quality``. It imports torch, so it is imported on ranks only.

What is held out does not depend on the seed of a training, and shares nothing with what is trained
on.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from gflow.models import CharacterGPT, DigitsCNN


class Digits:
    """Which digit is it? 1797 images of 8 x 8 pixels from scikit-learn, a fifth held out."""

    _HELD_OUT = 360
    _BATCH = 32

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        data = load_digits()
        images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16.0
        labels = torch.tensor(data.target, dtype=torch.long)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        held_out, trained_on = order[: self._HELD_OUT], order[self._HELD_OUT :]
        self._images, self._labels = images[trained_on], labels[trained_on]
        self.held_out = images[held_out], labels[held_out]
        self.train_sample = self._images[: self._HELD_OUT], self._labels[: self._HELD_OUT]

    def network(self) -> DigitsCNN:
        """A new network."""
        return DigitsCNN()

    def optimizer(self, parameters: Iterable[Parameter]) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    def batches(self, seed: int, rank: int, world: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All images in a new order, epoch after epoch."""
        generator = torch.Generator().manual_seed(seed)
        size = self._BATCH
        while True:
            order = torch.randperm(len(self._labels), generator=generator)
            for of_all_ranks in order.split(world * size):
                if len(of_all_ranks) == world * size:
                    own = of_all_ranks[rank * size : (rank + 1) * size]
                    yield self._images[own], self._labels[own]


class Text:
    """Which character comes next? The top modules of Python's standard library, in ASCII.

    They are read where Python is installed, so the text depends on its version.
    """

    _BATCH = 2
    _CONTEXT = 64
    _SAMPLE = 128
    #: One file in this many is held out.
    _HELD_OUT = 10
    #: beta1 is smaller than usual: with batches this small a dense training ends lower with it, and
    #: what is sent late is not averaged over ten further steps; see docs/gradients.md.
    _BETAS = (0.5, 0.999)

    def __init__(self) -> None:
        sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        trained_on = [path for n, path in enumerate(sources) if n % self._HELD_OUT != 0]
        self._text = _read(trained_on)
        self.train_sample = self._evenly_spaced(self._text)
        self.held_out = self._evenly_spaced(_read(sources[:: self._HELD_OUT]))

    def network(self) -> CharacterGPT:
        """A new network."""
        return CharacterGPT(context=self._CONTEXT)

    def optimizer(self, parameters: Iterable[Parameter]) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(parameters, lr=2e-3, betas=self._BETAS)

    def batches(self, seed: int, rank: int, world: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces of the text, from anywhere in it."""
        generator = torch.Generator().manual_seed(seed)
        size = self._BATCH
        while True:
            end = len(self._text) - self._CONTEXT
            starts = torch.randint(end, (world * size,), generator=generator)
            yield self._pieces(self._text, starts[rank * size : (rank + 1) * size])

    def _evenly_spaced(self, text: Tensor) -> tuple[Tensor, Tensor]:
        last = len(text) - self._CONTEXT - 1
        return self._pieces(text, torch.linspace(0, last, self._SAMPLE).long())

    def _pieces(self, text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Pieces of the text, and the character that follows each of theirs."""
        characters = text[starts.unsqueeze(1) + torch.arange(self._CONTEXT + 1)].long()
        return characters[:, :-1], characters[:, 1:]


def _read(paths: Sequence[Path]) -> Tensor:
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)
    return torch.frombuffer(bytearray(text.encode("ascii", errors="replace")), dtype=torch.uint8)
