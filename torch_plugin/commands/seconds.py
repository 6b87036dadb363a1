"""Durations as people write them on the command line. None may ever be endless."""

from __future__ import annotations

import argparse


def read_seconds(text: str) -> float:
    """Return a number of seconds, over 0.

    Example:
        >>> read_seconds("2.5")
        2.5
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds over 0")
    return seconds
