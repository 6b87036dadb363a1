"""What can be asked of ``gflow bench quality``.

It must never let a variant train for longer than another.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gflow.commands import layout
from gflow.commands.counts import at_least
from gflow.commands.hosts import obstacle
from gflow.commands.knobs import read_knob, read_knobs
from gflow.commands.names import names_of
from gflow.commands.quality import variants
from gflow.commands.quality.tasks import TASKS
from gflow.commands.rates import read_rate

_RATE = "1gbit"
LAYOUT = layout.Defaults(
    hosts="2 if they can be made, else 1",
    ranks="1 with several hosts, else 2",
    rate=f"{_RATE} with several hosts",
)

_DENSITIES = "0.1,0.01"
_SEEDS, _QUICK_SEEDS = 3, 2
#: The networks are small: with gflow's own default they would have a few dozen chunks.
_CHUNK = 512
#: Between trainings: groups are made, DDP and the evaluations take time.
_AROUND_SECONDS = 1.5


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what only this benchmark has."""
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
        type=read_knobs("density"),
        default=_DENSITIES,
        metavar="LIST",
        help="parts of the chunks that are sent, each compared with sending all gradients "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--chunk",
        type=read_knob("chunk"),
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


def settle(chosen: argparse.Namespace) -> None:
    """Put the defaults where nothing was asked for."""
    layout.settle(chosen, hosts=2 if obstacle(rate=True) is None else 1)
    if chosen.rate is None and chosen.hosts > 1:
        chosen.rate = read_rate(_RATE)
    if chosen.seeds is None:
        chosen.seeds = _QUICK_SEEDS if chosen.quick else _SEEDS


def build(
    chosen: argparse.Namespace, folder: Path, addresses: Sequence[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what to train, and by task or variant why it is left out."""
    plans, left_out = {}, {}
    for name in chosen.tasks:
        task = TASKS[name]
        reason = task.obstacle()
        if reason is not None:
            left_out[name] = reason
            continue
        kept = []
        for variant in variants.of_densities(chosen.densities, has_momentum=task.has_momentum):
            reason = variants.obstacle(variant)
            if reason is None:
                kept.append(asdict(variant))
            else:
                left_out[f"{name}, {variant.name}"] = reason
        plans[name] = {"steps": _steps(chosen, name), "variants": kept}
    return {
        "plans": plans,
        "seeds": chosen.seeds,
        "chunk": chosen.chunk,
        "hosts": chosen.hosts,
    }, left_out


def seconds(chosen: argparse.Namespace) -> float:
    """How long training should take, if nothing were compressed."""
    crowd = max(1.0, chosen.ranks * chosen.hosts / len(os.sched_getaffinity(0)))
    total = 0.0
    for name in chosen.tasks:
        task = TASKS[name]
        bits = 32 * task.parameters * 2 * (chosen.hosts - 1) / chosen.hosts
        step = crowd * task.step_seconds + (bits / chosen.rate if chosen.rate else 0.0)
        kept = variants.of_densities(chosen.densities, has_momentum=task.has_momentum)
        trainings = chosen.seeds * len([one for one in kept if variants.obstacle(one) is None])
        total += trainings * (_steps(chosen, name) * step + _AROUND_SECONDS)
    return total


def patience(chosen: argparse.Namespace) -> float:
    """How long it may take before something must be wrong."""
    return 60 + 5 * seconds(chosen)


def _steps(chosen: argparse.Namespace, name: str) -> int:
    task = TASKS[name]
    return chosen.steps or (task.quick_steps if chosen.quick else task.steps)


def _steps_of(attribute: str) -> str:
    return ", ".join(f"{name} {getattr(task, attribute)}" for name, task in TASKS.items())
