"""Options of gflow on the command line of a benchmark: what is allowed is what a group allows.

It must never have defaults or bounds of its own: ``gflow.options`` has them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from gflow.options import KNOBS


def compress_between(hosts: int) -> str:
    """The ``compress`` that lets gflow compress something with so many hosts.

    One host alone would be exact: then every rank counts as a host of its own.
    """
    return "auto" if hosts > 1 else "on"


def read_knob(name: str) -> Callable[[str], Any]:
    """Return what reads a value of this option.

    Example:
        >>> read_knob("density")("0.01")
        0.01
    """
    knob = KNOBS[name]

    def read(text: str) -> Any:
        try:
            return knob.check(knob.parse(text), name)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} must be {knob.allowed}") from None

    return read


def read_knobs(name: str) -> Callable[[str], list[Any]]:
    """Return what reads a list of values of this option, each of them once.

    Example:
        >>> read_knobs("density")("0.1,0.01")
        [0.1, 0.01]
    """
    read = read_knob(name)
    return lambda text: list(dict.fromkeys(read(part.strip()) for part in text.split(",")))
