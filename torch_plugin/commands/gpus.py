"""What this machine has of GPUs and of what drives them, for reports.

It must never fail where something is missing: that is what it reports. It must never be imported
with torch as a need of its own: ``--help`` has to answer at once.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from typing import Any, NamedTuple

#: How the GPUs are joined is asked of a program that comes with the driver.
_TOPOLOGY = ("nvidia-smi", "topo", "-m")
_SECONDS = 20


class Finding(NamedTuple):
    """Something that the engine looked for."""

    what: str
    #: What was found, or why it was not.
    found: str
    is_there: bool


def findings() -> list[Finding]:
    """What the engine finds of what it needs on GPUs."""
    from gflow import native

    return [Finding(*one) for one in native.load().look_for_gpus()]


def obstacle(wanted: int) -> str | None:
    """Why ranks cannot have ``wanted`` GPUs here, if they cannot."""
    import torch
    import torch.distributed as dist

    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is built without CUDA: install one with it"
    if not torch.cuda.is_available():
        return "torch sees no GPU here: it takes one and its driver (`gflow doctor` says more)"
    if not dist.is_nccl_available():
        return f"this torch ({torch.__version__}) has no NCCL: install one with it"
    count = torch.cuda.device_count()
    if count < wanted:
        return f"{wanted} ranks need as many GPUs, and torch sees {count} here: NCCL takes one each"
    return None


def about(device_type: str) -> dict[str, Any]:
    """All that one has to know of the devices to read numbers that were measured on them."""
    import torch

    if device_type != "cuda":
        return {}
    devices = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    return {
        "gpus": [
            {
                "name": one.name,
                "capability": f"{one.major}.{one.minor}",
                "memory_bytes": one.total_memory,
                "processors": one.multi_processor_count,
            }
            for one in devices
        ],
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "found": [one._asdict() for one in findings()],
        "topology": _said_by(_TOPOLOGY),
    }


def lines(about: dict[str, Any]) -> list[str]:
    """The same for people, of what :func:`about` has returned; nothing if there is nothing."""
    if "gpus" not in about:
        return []
    shown = [
        f"GPU {number}: {one['name']}, compute capability {one['capability']}, "
        f"{one['memory_bytes'] / 2**30:.1f} GiB, {one['processors']} multiprocessors"
        for number, one in enumerate(about["gpus"])
    ]
    shown.append(f"CUDA {about['cuda']}, torch's NCCL {about['nccl']}")
    shown += [f"{one['what']}: {one['found']}" for one in about["found"]]
    return [*shown, *about["topology"].rstrip().splitlines()]


def _said_by(command: Sequence[str]) -> str:
    """What a program prints, or why there is nothing."""
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not on PATH"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    return done.stdout if done.returncode == 0 else f"{command[0]}: {done.stderr.strip()}"
