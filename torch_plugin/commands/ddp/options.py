"""What can be asked of ``gflow bench ddp``.

It must never give one contender options of DDP that another does not have.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gflow.commands import layout
from gflow.commands.counts import at_least
from gflow.commands.ddp import contenders
from gflow.commands.ddp.networks import LEAST_IMAGE, NETWORKS
from gflow.commands.ddp.race import SETTLING_STEPS
from gflow.commands.knobs import read_knob
from gflow.commands.names import names_of
from gflow.options import KNOBS

LAYOUT = layout.Defaults(
    hosts="2, with --device cuda 1", ranks="1 with several hosts, else 2", rate="no limit"
)

_ROUNDS, _STEPS = 8, 2
#: What an exchange takes on links without a limit, about, and DDP's own work.
_EXCHANGE_SECONDS = 0.4


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what only this benchmark has."""
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
        type=at_least(LEAST_IMAGE),
        metavar="PIXELS",
        help=f"height and width of an image (default: {_by_model('image')})",
    )
    parser.add_argument(
        "--density",
        type=read_knob("density"),
        default=KNOBS["density"].default,
        metavar="D",
        help="part of the chunks that the contender gflow sends (default: %(default)s)",
    )
    parser.add_argument(
        "--fusion-bytes",
        type=read_knob("fusion_bytes"),
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
        help=f"who takes part (default: all that can, of {','.join(contenders.LABELS)})",
    )


def settle(chosen: argparse.Namespace) -> None:
    """Put the defaults where nothing was asked for."""
    # GPUs of one machine are joined by more than a network that could be limited.
    layout.settle(chosen, hosts=2 if chosen.device == "cpu" else 1)
    if chosen.contenders is None:
        chosen.contenders = contenders.usual(chosen.device)
    network = NETWORKS[chosen.model]
    chosen.batch = chosen.batch or network.batch
    chosen.image = chosen.image or network.image


def build(
    chosen: argparse.Namespace, folder: Path, addresses: Sequence[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what the race gets, and by contender why it is left out."""
    reasons = {name: contenders.why_not(name, chosen.device) for name in chosen.contenders}
    left_out = {name: reason for name, reason in reasons.items() if reason is not None}
    plan = {
        "model": chosen.model,
        "batch": chosen.batch,
        "image": chosen.image,
        "bucket_view": chosen.bucket_view,
        "density": chosen.density,
        "fusion_bytes": chosen.fusion_bytes,
        "hosts": chosen.hosts,
        "device": chosen.device,
    }
    turns = {"rounds": chosen.rounds, "steps": chosen.steps}
    names = [name for name in chosen.contenders if name not in left_out]
    return {"names": names, "plan": plan, **turns}, left_out


def seconds(chosen: argparse.Namespace) -> float:
    """How long measuring should take."""
    network = NETWORKS[chosen.model]
    crowd = max(1.0, chosen.ranks * chosen.hosts / len(os.sched_getaffinity(0)))
    on_the_link = 0.0
    if chosen.rate is not None:
        bits = 32 * network.parameters * 2 * (chosen.hosts - 1) / chosen.hosts
        on_the_link = bits / chosen.rate
    exchanges = [name for name in chosen.contenders if name not in contenders.WITHOUT_EXCHANGE]
    steps = SETTLING_STEPS + chosen.rounds * chosen.steps
    computing = network.step_seconds(chosen.batch, chosen.image) * len(chosen.contenders)
    exchanging = (_EXCHANGE_SECONDS + on_the_link) * len(exchanges)
    return steps * (crowd * computing + exchanging)


def patience(chosen: argparse.Namespace) -> float:
    """How long measuring may take before something must be wrong."""
    return 60 + 5 * seconds(chosen)


def _by_model(attribute: str) -> str:
    return ", ".join(f"{name} {getattr(one, attribute)}" for name, one in NETWORKS.items())
