"""What a check of ``gflow doctor`` is, and how it says what it saw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Fine:
    """What a check saw that passed; ``advice`` is what one may still want to know."""

    detail: str
    advice: str = ""


class Wrong(Exception):
    """What a check saw that failed, what to do, and the output of processes that were run."""

    def __init__(self, detail: str, advice: str, output: str = "") -> None:
        super().__init__(detail)
        self.detail, self.advice, self.output = detail, advice, output


@dataclass(frozen=True)
class Check:
    """One check: its name, what it does, and the checks without which it makes no sense."""

    name: str
    look: Callable[[], Fine]
    needs: tuple[str, ...] = ()
