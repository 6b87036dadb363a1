"""The command line of ``gflow bench allreduce``, and how long a run takes."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gflow.bench.allreduce import contenders
from gflow.bench.arguments import LayoutDefaults, names_of
from gflow.bench.turns import Unavailable
from gflow.bench.units import read_seconds, read_sizes

LAYOUT = LayoutDefaults(hosts="1", ranks="2", rate="no limit")

_SIZES, _QUICK_SIZES = "4K,64K,1M,4M,25M,128M", "4K,1M,25M"
_SECONDS, _QUICK_SECONDS = 5.0, 0.5
#: On slow links, a size takes at least this many calls of each contender.
_MIN_CALLS = 7
#: Even a very busy machine sums this many bytes in a second.
_MIN_BYTES_PER_SECOND = 50e6


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only this benchmark has."""
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


def apply_defaults(args: argparse.Namespace) -> None:
    """Fill in options that were not given."""
    args.hosts = 1 if args.hosts is None else args.hosts
    args.ranks = 2 if args.ranks is None else args.ranks
    if args.sizes is None:
        args.sizes = read_sizes(_QUICK_SIZES if args.quick else _SIZES)
    if args.seconds is None:
        args.seconds = _QUICK_SECONDS if args.quick else _SECONDS
    if args.contenders is None:
        args.contenders = contenders.default_names(args.hosts, args.device)


def prepare(
    args: argparse.Namespace, folder: Path, addresses: Sequence[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the arguments of the race, and by contender why it is left out."""
    details, left_out = {}, {}
    for name in args.contenders:
        try:
            details[name] = contenders.prepare(name, folder, list(addresses), args.device)
        except Unavailable as reason:
            left_out[name] = str(reason)
    given = {"sizes": args.sizes, "seconds": args.seconds, "device": args.device}
    return {"details": details, **given}, left_out


def expected_seconds(args: argparse.Namespace) -> float:
    """How long measuring should take."""
    return float(sum(max(args.seconds, _link_seconds(args, size)) for size in args.sizes))


def time_limit(args: argparse.Namespace) -> float:
    """After how many seconds something must be wrong."""
    ranks = args.ranks * args.hosts
    ranks_per_core = max(1.0, ranks / len(os.sched_getaffinity(0)))
    calls = 2 * _MIN_CALLS * len(args.contenders)
    summing: float = ranks_per_core * calls * sum(args.sizes) / _MIN_BYTES_PER_SECOND
    return 3 * expected_seconds(args) + summing


def _link_seconds(args: argparse.Namespace, size: int) -> float:
    if args.rate is None:
        return 0.0
    bits = 8 * size * 2 * (args.hosts - 1) / args.hosts
    per_call: float = bits / args.rate
    return per_call * _MIN_CALLS * len(args.contenders)
