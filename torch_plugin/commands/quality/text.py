"""The task ``text``: which character comes next? Python's own sources. Imported on ranks only.

They are read where Python is installed, so the text depends on its version. What is held out must
never share a file with what is learned.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gflow.models import CharacterGPT

_BATCH = 2
_CONTEXT = 64
_SAMPLE = 128
#: One file of so many is held out.
_HELD_OUT = 10
_LEARNING_RATE = 2e-3
#: The first is less than usual. With batches this small a dense training ends lower with it, and
#: what is sent late is not averaged over ten further steps: see docs/gradients.md.
_BETAS = (0.5, 0.999)


class Text:
    """The modules at the top of the standard library, in ASCII."""

    def __init__(self) -> None:
        sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        learned = [path for number, path in enumerate(sources) if number % _HELD_OUT != 0]
        self._text = _read(learned)
        self.train_sample = _spread(self._text)
        self.held_out = _spread(_read(sources[::_HELD_OUT]))

    def network(self) -> CharacterGPT:
        """A new network."""
        return CharacterGPT(context=_CONTEXT)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(parameters, lr=_LEARNING_RATE, betas=_BETAS)

    def batches(self, seed: int, rank: int, world: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces of the text, from anywhere in it."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            most = len(self._text) - _CONTEXT
            starts = torch.randint(most, (world * _BATCH,), generator=generator)
            yield _pieces(self._text, starts[rank * _BATCH : (rank + 1) * _BATCH])


def _read(paths: Sequence[Path]) -> Tensor:
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)
    return torch.frombuffer(bytearray(text.encode("ascii", errors="replace")), dtype=torch.uint8)


def _spread(text: Tensor) -> tuple[Tensor, Tensor]:
    """Pieces of the text at even distances."""
    return _pieces(text, torch.linspace(0, len(text) - _CONTEXT - 1, _SAMPLE).long())


def _pieces(text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Pieces of the text, and the character that follows each place of them."""
    places = starts.unsqueeze(1) + torch.arange(_CONTEXT + 1)
    characters = text[places].long()
    return characters[:, :-1], characters[:, 1:]
