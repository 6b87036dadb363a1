"""The data of ``gflow bench quality``. It imports torch, so it is imported on ranks only.

What is held out does not depend on the seed of a training, and shares nothing with what is trained
on. No loss can reach 0 here: a difference of some percent would then mean nothing.
"""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from gflow.models import CharacterGPT, DigitsCNN, SmallViT


class Text:
    """Which character comes next? The modules of Python's standard library, in ASCII.

    They are read where Python is installed, so the text depends on its version.
    """

    #: One file in this many is held out.
    _HELD_OUT = 10
    #: Folders that hold what was installed later, or is not installed everywhere.
    _NOT_PART = ("site-packages", "dist-packages", "test")
    #: Printable ASCII; every other character is shown as the first.
    _FIRST, _CHARACTERS = 31, 96

    def __init__(self, batch: int = 8, context: int = 32, held_out: int = 2560) -> None:
        """Read the text.

        Args:
            batch: pieces of the text in a sample.
            context: characters in a piece.
            held_out: pieces, from all of the text that is held out.
        """
        self._batch, self._context = batch, context
        folder = Path(sysconfig.get_paths()["stdlib"])
        found = sorted([*folder.glob("*.py"), *folder.glob("*/*.py")])
        sources = [path for path in found if path.parent.name not in self._NOT_PART]
        self._text, other = self._read(
            [path for n, path in enumerate(sources) if n % self._HELD_OUT],
            sources[:: self._HELD_OUT],
        )
        last = len(other) - context - 1
        starts = torch.linspace(0, last, held_out, dtype=torch.float64).long()
        self.held_out = self._pieces(other, starts)

    def network(self, width: int = 64, layers: int = 2, heads: int = 4) -> CharacterGPT:
        """A new network."""
        return CharacterGPT(self._CHARACTERS, self._context, width, layers, heads)

    def batches(self, seed: int, rank: int, world: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces of the text, from anywhere in it."""
        generator = _generator(seed, rank)
        end = len(self._text) - self._context
        while True:
            starts = torch.randint(end, (self._batch,), generator=generator)
            yield self._pieces(self._text, starts)

    def _pieces(self, text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Pieces of the text, and what follows each of their characters."""
        characters = text[starts.unsqueeze(1) + torch.arange(self._context + 1)].long()
        return characters[:, :-1], characters[:, 1:]

    def _read(self, trained_on: Sequence[Path], held_out: Sequence[Path]) -> tuple[Tensor, Tensor]:
        return self._numbers(trained_on), self._numbers(held_out)

    def _numbers(self, paths: Sequence[Path]) -> Tensor:
        text = bytearray(b"\n".join(path.read_bytes() for path in paths))
        numbers = torch.frombuffer(text, dtype=torch.uint8).int() - self._FIRST
        return numbers.where((numbers > 0) & (numbers < self._CHARACTERS), 0).to(torch.uint8)


class Words(Text):
    """Which word comes next? The same text, cut into words, gaps and signs.

    Most words of a vocabulary are rare: the rows of its embedding seldom have a gradient.
    """

    #: The most frequent words; all others are shown as the first number.
    _WORDS = 2048
    _WORD = re.compile(r"\w+|\s+|[^\w\s]")

    def network(self, width: int = 64, layers: int = 2, heads: int = 4) -> CharacterGPT:
        """A new network."""
        return CharacterGPT(self._WORDS, self._context, width, layers, heads)

    def _read(self, trained_on: Sequence[Path], held_out: Sequence[Path]) -> tuple[Tensor, Tensor]:
        words = self._words(trained_on)
        frequent = Counter(words).most_common(self._WORDS - 1)
        numbers = {word: number for number, (word, _) in enumerate(frequent, start=1)}
        some, others = (
            torch.tensor([numbers.get(word, 0) for word in part], dtype=torch.int16)
            for part in (words, self._words(held_out))
        )
        return some, others

    def _words(self, paths: Sequence[Path]) -> list[str]:
        texts = (path.read_text(encoding="ascii", errors="replace") for path in paths)
        return [word for text in texts for word in self._WORD.findall(text)]


class Digits:
    """Which digit is it? 1797 images of 8 x 8 pixels from scikit-learn, shifted and with noise."""

    _HELD_OUT = 500
    #: Each held-out image is shown so often, with other shifts and noise.
    _VIEWS = 8
    _BATCH = 16

    def __init__(self, noise: float = 0.4) -> None:
        from sklearn.datasets import load_digits

        self._noise = noise
        data = load_digits()
        images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16.0
        labels = torch.tensor(data.target, dtype=torch.long)
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(len(labels), generator=generator)
        held_out, trained_on = order[: self._HELD_OUT], order[self._HELD_OUT :]
        self._images, self._labels = images[trained_on], labels[trained_on]
        shown = images[held_out].repeat(self._VIEWS, 1, 1, 1)
        self.held_out = self._disturbed(shown, generator), labels[held_out].repeat(self._VIEWS)

    def network(self, hidden: int = 64) -> DigitsCNN:
        """A new network."""
        return DigitsCNN(channels=(16, 32, 64), hidden=hidden)

    def batches(self, seed: int, rank: int, world: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Any of the images, each time shifted and disturbed anew."""
        generator = _generator(seed, rank)
        while True:
            chosen = torch.randint(len(self._labels), (self._BATCH,), generator=generator)
            yield self._disturbed(self._images[chosen], generator), self._labels[chosen]

    def _disturbed(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Each image shifted by up to one pixel in each direction, with noise on it."""
        padded = functional.pad(images, (1, 1, 1, 1))
        shifts = torch.randint(3, (2, len(images), 1, 1), generator=generator)
        rows = shifts[0] + torch.arange(8).view(1, 8, 1)
        columns = shifts[1] + torch.arange(8).view(1, 1, 8)
        numbers = torch.arange(len(images)).view(-1, 1, 1)
        shifted = padded[numbers, 0, rows, columns].unsqueeze(1)
        return shifted + self._noise * torch.randn(shifted.shape, generator=generator)


class Shapes:
    """Which of ten shapes is it? Images of 16 x 16 pixels, drawn at random without end.

    A shape is a smooth pattern, by default of 8 x 8 pixels. An image has one anywhere, at any
    strength, and the half of another one somewhere over it, and noise.
    """

    CLASSES = 10
    _SIZE = 16

    def __init__(
        self, batch: int = 16, shape: int = 8, noise: float = 0.5, held_out: int = 4000
    ) -> None:
        """Make up the shapes, and what is held out.

        Args:
            batch: images in a sample.
            shape: the height and width of a shape: the larger, the easier it is found.
            noise: the standard deviation of a pixel's.
            held_out: images.
        """
        self._batch, self._shape, self._noise = batch, shape, noise
        generator = torch.Generator().manual_seed(0)
        coarse = torch.randn(self.CLASSES, 1, 4, 4, generator=generator)
        smooth = functional.interpolate(coarse, shape, mode="bilinear", align_corners=True).squeeze(
            1
        )
        smooth = smooth - smooth.mean((1, 2), keepdim=True)
        self._shapes = smooth / smooth.std((1, 2), keepdim=True)
        self.held_out = self._draw(held_out, generator)

    def network(self) -> SmallViT:
        """A new network."""
        return SmallViT(self.CLASSES)

    def batches(self, seed: int, rank: int, world: int) -> Iterator[tuple[Tensor, Tensor]]:
        """New images."""
        generator = _generator(seed, rank)
        while True:
            yield self._draw(self._batch, generator)

    def _draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        labels = torch.randint(self.CLASSES, (count,), generator=generator)
        others = torch.randint(self.CLASSES, (count,), generator=generator)
        images = self._noise * torch.randn(count, self._SIZE, self._SIZE, generator=generator)
        for which, weakest, strongest in ((labels, 0.6, 1.2), (others, 0.3, 0.6)):
            strength = torch.rand(count, 1, 1, generator=generator) * (strongest - weakest)
            self._place(images, self._shapes[which] * (strength + weakest), generator)
        return images.unsqueeze(1), labels

    def _place(self, images: Tensor, shapes: Tensor, generator: torch.Generator) -> None:
        """Add a shape to each image, anywhere where it fits in whole."""
        corners = torch.randint(
            self._SIZE - self._shape + 1, (2, len(images), 1, 1), generator=generator
        )
        rows = corners[0] + torch.arange(self._shape).view(1, -1, 1)
        columns = corners[1] + torch.arange(self._shape).view(1, 1, -1)
        images[torch.arange(len(images)).view(-1, 1, 1), rows, columns] += shapes


def _generator(seed: int, rank: int) -> torch.Generator:
    """Random numbers of this training's rank, none of them drawn by another rank."""
    return torch.Generator().manual_seed(1_000_003 * (seed + 1) + rank)
