"""Whole numbers on the command line. None may ever be so small that nothing is left to measure."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def at_least(least: int) -> Callable[[str], int]:
    """Return what reads a whole number that is not smaller.

    Example:
        >>> at_least(1)("8")
        8
    """

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return number

    return read
