"""Arguments that several benchmarks take: counts, lists of names, gflow's options, and the layout
of ranks on hosts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from gflow.bench.units import show_rate
from gflow.options import OPTION_SPECS


def at_least(least: int) -> Callable[[str], int]:
    """Return a reader of whole numbers that are not smaller.

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


def names_of(noun: str, known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a reader of lists such as ``gloo,gflow``. It keeps the order of the known names.

    Args:
        noun: what one of them is, such as ``a contender``.
        known: all names that are allowed.

    Example:
        >>> names_of("a fruit", ["apple", "pear"])("pear,apple")
        ['apple', 'pear']
    """
    known = list(known)

    def read(text: str) -> list[str]:
        given = {part.strip() for part in text.split(",")}
        unknown = sorted(given - set(known))
        if unknown:
            raise argparse.ArgumentTypeError(
                f"{unknown[0]!r} is not {noun}: choose from {', '.join(known)}"
            )
        return [name for name in known if name in given]

    return read


def option_value(name: str) -> Callable[[str], Any]:
    """Return a reader of values of one of gflow's options; it allows what a group allows.

    Example:
        >>> option_value("density")("0.01")
        0.01
    """
    spec = OPTION_SPECS[name]

    def read(text: str) -> Any:
        try:
            return spec.check(spec.parse(text), name)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} must be {spec.allowed}") from None

    return read


def option_values(name: str) -> Callable[[str], list[Any]]:
    """Return a reader of lists of values of one of gflow's options, without repetitions.

    Example:
        >>> option_values("density")("0.1,0.01")
        [0.1, 0.01]
    """
    read = option_value(name)
    return lambda text: list(dict.fromkeys(read(part.strip()) for part in text.split(",")))


@dataclass(frozen=True)
class LayoutDefaults:
    """The text in ``--help`` about the defaults of these options."""

    hosts: str
    ranks: str
    rate: str


def apply_layout_defaults(args: argparse.Namespace, hosts: int) -> None:
    """Default to ``hosts`` hosts, with one rank on each of several, or two on one."""
    args.hosts = hosts if args.hosts is None else args.hosts
    if args.ranks is None:
        args.ranks = 1 if args.hosts > 1 else 2


def show_layout(hosts: int, ranks: int, rate: int | None) -> str:
    """Return how many ranks run on how many hosts, and what joins these.

    Example:
        >>> show_layout(1, 2, None)
        '2 ranks on one host'
        >>> show_layout(2, 1, 10**9)
        '2 hosts with 1 rank each and links of 1 Gbit/s'
    """
    if hosts == 1:
        return f"{ranks} ranks on one host"
    link = f"links of {show_rate(rate)}" if rate else "links without a limit"
    each = "1 rank" if ranks == 1 else f"{ranks} ranks"
    return f"{hosts} hosts with {each} each and {link}"
