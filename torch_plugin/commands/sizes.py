"""Amounts of memory as people write them. K, M and G must never be anything but powers of 1024."""

from __future__ import annotations

import argparse
import re

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)


def read_sizes(text: str) -> list[int]:
    """Return the bytes of ``4K,1M,25M``.

    Example:
        >>> read_sizes("4K,1.5M")
        [4096, 1572864]
    """
    return [_read(part.strip()) for part in text.split(",")]


def show_size(size: int) -> str:
    """Return a number of bytes as people would write it.

    Example:
        >>> show_size(25 << 20), show_size(100)
        ('25 MiB', '100 B')
    """
    for unit in "GMK":
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.4g} {unit}iB"
    return f"{size} B"


def _read(text: str) -> int:
    match = _PATTERN.fullmatch(text)
    size = float(match[1]) * _UNITS[match[2].upper()] if match else 0.0
    # The tensors hold 32-bit numbers.
    if size == 0 or size % 4 != 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size: give bytes, a multiple of 4, such as 4096, 4K, 1.5M or 1G"
        )
    return int(size)
