"""The command line of ``gflow bench ddp``, and how long a run takes.

All contenders get the same options of DDP.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gflow.bench.arguments import (
    LayoutDefaults,
    apply_layout_defaults,
    at_least,
    names_of,
    option_value,
)
from gflow.bench.ddp import contenders
from gflow.bench.ddp.networks import MIN_IMAGE, NETWORKS
from gflow.options import OPTION_SPECS

LAYOUT = LayoutDefaults(
    hosts="2, with --device cuda 1", ranks="1 with several hosts, else 2", rate="no limit"
)

_ROUNDS, _STEPS = 8, 2
#: About what an exchange takes on links without a limit, with DDP's own work.
_EXCHANGE_SECONDS = 0.4


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only this benchmark has."""
    parser.add_argument(
        "--model",
        choices=list(NETWORKS),
        default="alexnet",
        help="the network: %(choices)s (default: %(default)s)",
    )
    parser.add_argument(
        "--batch",
        type=at_least(1),
        metavar="N",
        help=f"images per rank and step (default: {_by_model('batch')})",
    )
    parser.add_argument(
        "--image",
        type=at_least(MIN_IMAGE),
        metavar="PIXELS",
        help=f"height and width of an image (default: {_by_model('image')})",
    )
    parser.add_argument(
        "--density",
        type=option_value("density"),
        default=OPTION_SPECS["density"].default,
        metavar="D",
        help="part of the chunks that gflow-chunks sends (default: %(default)s)",
    )
    parser.add_argument(
        "--fusion-bytes",
        type=option_value("fusion_bytes"),
        metavar="N",
        help="how much gradient one exchange of gflow carries (default: gflow's own)",
    )
    parser.add_argument(
        "--bucket-view",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let gradients live in DDP's buckets (gradient_as_bucket_view), for all contenders "
        "alike (default: they do)",
    )
    parser.add_argument(
        "--rounds",
        type=at_least(1),
        default=_ROUNDS,
        metavar="N",
        help="turns of each contender, in random order (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=at_least(1),
        default=_STEPS,
        metavar="N",
        help="steps in a turn (default: %(default)s)",
    )
    parser.add_argument(
        "--contenders",
        type=names_of("a contender", contenders.LABELS),
        metavar="LIST",
        help=f"who takes part, of {','.join(contenders.LABELS)}; gflow has its default method "
        f"(default: {','.join(contenders.default_names('cpu'))}, with --device cuda NCCL for Gloo)",
    )


def apply_defaults(args: argparse.Namespace) -> None:
    """Fill in options that were not given."""
    # GPUs of one machine are connected by more than a network that could be limited.
    apply_layout_defaults(args, hosts=2 if args.device == "cpu" else 1)
    if args.contenders is None:
        args.contenders = contenders.default_names(args.device)
    network = NETWORKS[args.model]
    args.batch = args.batch or network.batch
    args.image = args.image or network.image


def prepare(
    args: argparse.Namespace, folder: Path, addresses: Sequence[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the arguments of the race, and by contender why it is left out."""
    reasons = {name: contenders.why_not(name, args.device) for name in args.contenders}
    left_out = {name: reason for name, reason in reasons.items() if reason is not None}
    plan = {
        "model": args.model,
        "batch": args.batch,
        "image": args.image,
        "bucket_view": args.bucket_view,
        "density": args.density,
        "fusion_bytes": args.fusion_bytes,
        "hosts": args.hosts,
        "device": args.device,
    }
    turns = {"rounds": args.rounds, "steps": args.steps}
    names = [name for name in args.contenders if name not in left_out]
    return {"names": names, "plan": plan, **turns}, left_out


def expected_seconds(args: argparse.Namespace) -> float:
    """How long measuring should take."""
    network = NETWORKS[args.model]
    ranks_per_core: float = max(1.0, args.ranks * args.hosts / len(os.sched_getaffinity(0)))
    link_seconds: float = 0.0
    if args.rate is not None:
        bits = 32 * network.parameters * 2 * (args.hosts - 1) / args.hosts
        link_seconds = bits / args.rate
    exchanges = [name for name in args.contenders if name not in contenders.WITHOUT_EXCHANGE]
    total: float = 0.0
    for name in args.contenders:
        steps = contenders.settling_steps(name) + args.rounds * args.steps
        exchange = _EXCHANGE_SECONDS + link_seconds if name in exchanges else 0.0
        total += steps * (ranks_per_core * network.step_seconds(args.batch, args.image) + exchange)
    return total


def time_limit(args: argparse.Namespace) -> float:
    """After how many seconds something must be wrong."""
    return 60 + 5 * expected_seconds(args)


def _by_model(attribute: str) -> str:
    return ", ".join(f"{name} {getattr(one, attribute)}" for name, one in NETWORKS.items())
