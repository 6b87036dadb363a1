"""The machine that a benchmark's numbers depend on: its GPUs, and the bytes that its network card
has sent. Missing hardware or programs are reported, never an error.

torch is imported inside the functions: ``--help`` has to answer at once.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gflow.launch.namespaces import INTERFACE

#: A program that comes with the driver says how the GPUs are connected.
_TOPOLOGY_COMMAND = ("nvidia-smi", "topo", "-m")
_COMMAND_SECONDS = 20
LOOPBACK = "lo"


class Finding(NamedTuple):
    """Something that the engine looked for.

    Attributes:
        what: its name.
        found: what was found, or why it was not.
        is_there: whether it was.
    """

    what: str
    found: str
    is_there: bool


def gpu_findings() -> list[Finding]:
    """The engine's findings about what it needs on GPUs."""
    from gflow import native

    return [Finding(*one) for one in native.library.look_for_gpus()]


def gpu_obstacle(wanted: int) -> str | None:
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


def gpu_info(device_type: str) -> dict[str, Any]:
    """What numbers that were measured on GPUs depend on; empty for other devices."""
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
        "found": [one._asdict() for one in gpu_findings()],
        "topology": _output_of(_TOPOLOGY_COMMAND),
    }


def gpu_lines(info: dict[str, Any]) -> list[str]:
    """The result of :func:`gpu_info` as text; empty if it is empty."""
    if "gpus" not in info:
        return []
    shown = [
        f"GPU {number}: {one['name']}, compute capability {one['capability']}, "
        f"{one['memory_bytes'] / 2**30:.1f} GiB, {one['processors']} multiprocessors"
        for number, one in enumerate(info["gpus"])
    ]
    shown.append(f"CUDA {info['cuda']}, torch's NCCL {info['nccl']}")
    shown += [f"{one['what']}: {one['found']}" for one in info["found"]]
    return [*shown, *info["topology"].rstrip().splitlines()]


def _output_of(command: Sequence[str]) -> str:
    """The output of a program, or why there is none."""
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not on PATH"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    return done.stdout if done.returncode == 0 else f"{command[0]}: {done.stderr.strip()}"


def interface_between(hosts: int) -> str:
    """The network interface that ranks exchange over: to other hosts, or if alone, loopback."""
    return INTERFACE if hosts > 1 else LOOPBACK


def sent_bytes(interface: str) -> int:
    """Bytes that an interface has sent so far, as the kernel counts them, headers included.

    It is the same count for every backend, and includes what other programs send.
    """
    # Not in /sys, which shows the interfaces of the namespace that it was mounted in.
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, colon, counts = line.partition(":")
        if colon and name.strip() == interface:
            return int(counts.split()[8])
    raise OSError(f"there is no network interface {interface}")


def sent_bytes_meaning(hosts: int) -> str:
    """Explains the count to the reader."""
    if hosts > 1:
        return "10^6 bytes that a host's network card has sent per step, with headers."
    return (
        "10^6 bytes over this machine's loopback per step, all ranks together; what other programs "
        "send\nover it is in there, and what goes through shared memory is not."
    )


def max_over_ranks(count: float) -> float:
    """The largest of what the ranks have counted; all ranks call it."""
    import torch
    import torch.distributed as dist

    counts = torch.tensor([count], dtype=torch.float64)
    dist.all_reduce(counts, op=dist.ReduceOp.MAX)
    return float(counts)
