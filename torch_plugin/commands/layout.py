"""Where ranks run: how it is said, and what holds if it is not asked for.

It must never be said in other words in what the benchmarks print and draw.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from gflow.commands.rates import show_rate


@dataclass(frozen=True)
class Defaults:
    """What ``--help`` says of the defaults of these options."""

    hosts: str
    ranks: str
    rate: str


def settle(chosen: argparse.Namespace, hosts: int) -> None:
    """Put ``hosts`` where nothing was asked for: one rank on each of several, or two on one."""
    chosen.hosts = hosts if chosen.hosts is None else chosen.hosts
    if chosen.ranks is None:
        chosen.ranks = 1 if chosen.hosts > 1 else 2


def show_layout(hosts: int, ranks: int, rate: int | None) -> str:
    """Return how many ranks are on how many hosts, and what joins these.

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
