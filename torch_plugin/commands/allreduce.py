"""The benchmark ``gflow bench allreduce``: one tensor, its sum over all ranks, in several sizes.

This is what can be asked for; ``race`` measures it, ``report`` and ``picture`` show it. It must
never decide which contender is worth showing: who is left out is named, with the reason.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gflow.commands import contenders
from gflow.commands.layout import Defaults
from gflow.commands.left_out import LeftOut
from gflow.commands.names import names_of
from gflow.commands.seconds import read_seconds
from gflow.commands.sizes import read_sizes

LAYOUT = Defaults(hosts="1", ranks="2", rate="no limit")

_SIZES, _QUICK_SIZES = "4K,64K,1M,4M,25M,128M", "4K,1M,25M"
_SECONDS, _QUICK_SECONDS = 5.0, 0.5
#: With slow links a size takes at least this many calls of each contender.
_LEAST_CALLS = 7
#: Even a very busy machine sums up this many bytes in a second.
_SLOWEST = 50e6


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what only this benchmark has."""
    parser.add_argument(
        "--sizes",
        type=read_sizes,
        metavar="LIST",
        help=f"bytes of the tensor, with K, M, G as powers of 1024 (default: {_SIZES})",
    )
    parser.add_argument(
        "--seconds",
        type=read_seconds,
        metavar="SECONDS",
        help="time to measure each size, all contenders together; slow links take longer "
        f"(default: {_SECONDS:g})",
    )
    parser.add_argument(
        "--contenders",
        type=names_of("a contender", contenders.LABELS),
        metavar="LIST",
        help=f"who takes part (default: all that can, of {', '.join(contenders.LABELS)})",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"a short run: --sizes {_QUICK_SIZES} --seconds {_QUICK_SECONDS:g}, unless given",
    )


def settle(chosen: argparse.Namespace) -> None:
    """Put the defaults where nothing was asked for."""
    chosen.hosts = 1 if chosen.hosts is None else chosen.hosts
    chosen.ranks = 2 if chosen.ranks is None else chosen.ranks
    if chosen.sizes is None:
        chosen.sizes = read_sizes(_QUICK_SIZES if chosen.quick else _SIZES)
    if chosen.seconds is None:
        chosen.seconds = _QUICK_SECONDS if chosen.quick else _SECONDS
    if chosen.contenders is None:
        chosen.contenders = contenders.usual(chosen.hosts, chosen.device)


def build(
    chosen: argparse.Namespace, folder: Path, addresses: Sequence[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what the race gets, and by contender why it is left out."""
    details, left_out = {}, {}
    for name in chosen.contenders:
        try:
            details[name] = contenders.build(name, folder, list(addresses), chosen.device)
        except LeftOut as reason:
            left_out[name] = str(reason)
    given = {"sizes": chosen.sizes, "seconds": chosen.seconds, "device": chosen.device}
    return {"details": details, **given}, left_out


def seconds(chosen: argparse.Namespace) -> float:
    """How long measuring should take."""
    return sum(max(chosen.seconds, _on_the_link(chosen, size)) for size in chosen.sizes)


def patience(chosen: argparse.Namespace) -> float:
    """How long measuring may take before something must be wrong."""
    ranks = chosen.ranks * chosen.hosts
    crowd = max(1.0, ranks / len(os.sched_getaffinity(0)))
    calls = 2 * _LEAST_CALLS * len(chosen.contenders)
    return 3 * seconds(chosen) + crowd * calls * sum(chosen.sizes) / _SLOWEST


def _on_the_link(chosen: argparse.Namespace, size: int) -> float:
    if chosen.rate is None:
        return 0.0
    bits = 8 * size * 2 * (chosen.hosts - 1) / chosen.hosts
    return bits / chosen.rate * _LEAST_CALLS * len(chosen.contenders)
