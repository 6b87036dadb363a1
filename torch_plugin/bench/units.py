"""Sizes, rates and durations as people write them on a command line, and as they are shown.

K, M and G of bytes are powers of 1024; rates are bits per second; no duration is endless.
"""

from __future__ import annotations

import argparse
import re

_SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)

_RATE_UNITS = {"mbit": 10**6, "gbit": 10**9}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([mg]bit)", re.IGNORECASE)
_MIN_RATE, _MAX_RATE = 10**6, 100 * 10**9


def read_sizes(text: str) -> list[int]:
    """Return the bytes of ``4K,1M,25M``.

    Example:
        >>> read_sizes("4K,1.5M")
        [4096, 1572864]
    """
    return [_read_size(part.strip()) for part in text.split(",")]


def _read_size(text: str) -> int:
    match = _SIZE.fullmatch(text)
    size = float(match[1]) * _SIZE_UNITS[match[2].upper()] if match else 0.0
    # The tensors hold 32-bit numbers.
    if size == 0 or size % 4 != 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size: give bytes, a multiple of 4, such as 4096, 4K, 1.5M or 1G"
        )
    return int(size)


def show_size(size: int) -> str:
    """Return a number of bytes as people would write it.

    Example:
        >>> show_size(25 << 20), show_size(100)
        ('25 MiB', '100 B')
    """
    for unit in "GMK":
        if size >= _SIZE_UNITS[unit]:
            return f"{size / _SIZE_UNITS[unit]:.4g} {unit}iB"
    return f"{size} B"


def read_rate(text: str) -> int:
    """Return the bits per second of ``1gbit``.

    Example:
        >>> read_rate("2.5gbit")
        2500000000
    """
    match = _RATE.fullmatch(text.strip())
    rate = round(float(match[1]) * _RATE_UNITS[match[2].lower()]) if match else 0
    if not _MIN_RATE <= rate <= _MAX_RATE:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a rate: give bits per second, such as 100mbit, 1gbit or 2.5gbit, "
            f"from {show_rate(_MIN_RATE)} to {show_rate(_MAX_RATE)}"
        )
    return rate


def show_rate(rate: int) -> str:
    """Return bits per second as people would write them.

    Example:
        >>> show_rate(10**9), show_rate(10**8)
        ('1 Gbit/s', '100 Mbit/s')
    """
    if rate >= _RATE_UNITS["gbit"]:
        return f"{rate / _RATE_UNITS['gbit']:g} Gbit/s"
    return f"{rate / _RATE_UNITS['mbit']:g} Mbit/s"


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
