"""Rates of a link as people write them. They must never be bytes: a link has bits per second."""

from __future__ import annotations

import argparse
import re

_UNITS = {"mbit": 10**6, "gbit": 10**9}
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([mg]bit)", re.IGNORECASE)
_LEAST, _MOST = 10**6, 100 * 10**9


def read_rate(text: str) -> int:
    """Return the bits per second of ``1gbit``.

    Example:
        >>> read_rate("2.5gbit")
        2500000000
    """
    match = _PATTERN.fullmatch(text.strip())
    rate = round(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if not _LEAST <= rate <= _MOST:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a rate: give bits per second, such as 100mbit, 1gbit or 2.5gbit, "
            f"from {show_rate(_LEAST)} to {show_rate(_MOST)}"
        )
    return rate


def show_rate(rate: int) -> str:
    """Return bits per second as people would write them.

    Example:
        >>> show_rate(10**9), show_rate(10**8)
        ('1 Gbit/s', '100 Mbit/s')
    """
    if rate >= _UNITS["gbit"]:
        return f"{rate / _UNITS['gbit']:g} Gbit/s"
    return f"{rate / _UNITS['mbit']:g} Mbit/s"
