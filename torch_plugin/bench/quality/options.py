"""The command line of ``gflow bench quality``, and how long a run takes.

All variants train for the same number of steps.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gflow.bench.arguments import (
    LayoutDefaults,
    apply_layout_defaults,
    at_least,
    names_of,
    option_value,
    option_values,
)
from gflow.bench.quality import variants
from gflow.bench.quality.tasks import TASKS
from gflow.bench.units import read_rate
from gflow.launch.namespaces import obstacle

_RATE = "1gbit"
LAYOUT = LayoutDefaults(
    hosts="2 if they can be made, else 1",
    ranks="1 with several hosts, else 2",
    rate=f"{_RATE} with several hosts",
)

_DENSITIES = "0.1,0.01"
_SEEDS, _QUICK_SEEDS = 3, 2
#: The networks are small: with gflow's default they would have only a few dozen chunks.
_CHUNK = 512
#: Per training, for making groups, DDP and evaluations.
_OVERHEAD_SECONDS = 1.5


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only this benchmark has."""
    parser.add_argument(
        "--tasks",
        type=names_of("a task", TASKS),
        default=list(TASKS),
        metavar="LIST",
        help="; ".join(f"{name}: {task.summary}" for name, task in TASKS.items())
        + f" (default: {','.join(TASKS)})",
    )
    parser.add_argument(
        "--densities",
        type=option_values("density"),
        default=_DENSITIES,
        metavar="LIST",
        help="parts of the chunks that are sent, each compared with sending all gradients "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--chunk",
        type=option_value("chunk"),
        default=_CHUNK,
        metavar="N",
        help="elements in a chunk; small, as the networks are (default: %(default)s)",
    )
    parser.add_argument(
        "--seeds",
        type=at_least(1),
        metavar="N",
        help=f"trainings of each variant, with other weights and data (default: {_SEEDS})",
    )
    parser.add_argument(
        "--steps",
        type=at_least(1),
        metavar="N",
        help=f"steps of a training (default: {_steps_of('steps')})",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"a short run: --seeds {_QUICK_SEEDS}, and --steps {_steps_of('quick_steps')}, "
        "unless given",
    )


def apply_defaults(args: argparse.Namespace) -> None:
    """Fill in options that were not given."""
    apply_layout_defaults(args, hosts=2 if obstacle(rate=True) is None else 1)
    if args.rate is None and args.hosts > 1:
        args.rate = read_rate(_RATE)
    if args.seeds is None:
        args.seeds = _QUICK_SEEDS if args.quick else _SEEDS


def prepare(
    args: argparse.Namespace, folder: Path, addresses: Sequence[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what to train, and by task or variant why it is left out."""
    plans, left_out = {}, {}
    for name in args.tasks:
        task = TASKS[name]
        reason = task.obstacle()
        if reason is not None:
            left_out[name] = reason
            continue
        kept = []
        for variant in variants.of_densities(args.densities, has_momentum=task.has_momentum):
            reason = variants.obstacle(variant)
            if reason is None:
                kept.append(asdict(variant))
            else:
                left_out[f"{name}, {variant.name}"] = reason
        plans[name] = {"steps": _steps(args, name), "variants": kept}
    return {
        "plans": plans,
        "seeds": args.seeds,
        "chunk": args.chunk,
        "hosts": args.hosts,
    }, left_out


def expected_seconds(args: argparse.Namespace) -> float:
    """How long training should take, if nothing were compressed."""
    ranks_per_core = max(1.0, args.ranks * args.hosts / len(os.sched_getaffinity(0)))
    total = 0.0
    for name in args.tasks:
        task = TASKS[name]
        bits = 32 * task.parameters * 2 * (args.hosts - 1) / args.hosts
        step = ranks_per_core * task.step_seconds + (bits / args.rate if args.rate else 0.0)
        kept = variants.of_densities(args.densities, has_momentum=task.has_momentum)
        trainings = args.seeds * len([one for one in kept if variants.obstacle(one) is None])
        total += trainings * (_steps(args, name) * step + _OVERHEAD_SECONDS)
    return total


def time_limit(args: argparse.Namespace) -> float:
    """After how many seconds something must be wrong."""
    return 60 + 5 * expected_seconds(args)


def _steps(args: argparse.Namespace, name: str) -> int:
    task = TASKS[name]
    return args.steps or (task.quick_steps if args.quick else task.steps)


def _steps_of(attribute: str) -> str:
    return ", ".join(f"{name} {getattr(task, attribute)}" for name, task in TASKS.items())
