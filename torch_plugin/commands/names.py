"""Lists of names on the command line. A name that is unknown must never be passed over."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable


def names_of(what: str, known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return what reads ``gloo,gflow``: some of the known names, in the order of those.

    Args:
        what: one of them is called, such as ``a contender``.
        known: all that there are.

    Example:
        >>> names_of("a fruit", ["apple", "pear"])("pear,apple")
        ['apple', 'pear']
    """
    known = list(known)

    def read(text: str) -> list[str]:
        asked = {part.strip() for part in text.split(",")}
        unknown = sorted(asked - set(known))
        if unknown:
            raise argparse.ArgumentTypeError(
                f"{unknown[0]!r} is not {what}: choose from {', '.join(known)}"
            )
        return [name for name in known if name in asked]

    return read
