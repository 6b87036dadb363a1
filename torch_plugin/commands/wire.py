"""What this host has sent over its network, as the kernel counts it.

It is the same count for every backend, with all headers. It must never be taken from a backend
itself: what that believes to have sent is another number.
"""

from __future__ import annotations

from pathlib import Path

from gflow.commands.hosts import INTERFACE

#: With one host there is only this, and whatever else runs on the machine uses it too.
_LOOPBACK = "lo"


def sent_bytes(hosts: int) -> int:
    """Bytes that this rank's host has sent so far: to other hosts, or if alone, to itself."""
    interface = INTERFACE if hosts > 1 else _LOOPBACK
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def meaning(hosts: int) -> str:
    """What the count is, for those who read it."""
    if hosts > 1:
        return "10^6 bytes that a host's network card has sent per step, with headers."
    return (
        "10^6 bytes over this machine's loopback per step, all ranks together; what other programs "
        "send\nover it is in there, and what goes through shared memory is not."
    )


def of_the_busiest_host(count: float) -> float:
    """The largest of what the ranks have counted; all ranks call it."""
    import torch
    import torch.distributed as dist

    counts = torch.tensor([count], dtype=torch.float64)
    dist.all_reduce(counts, op=dist.ReduceOp.MAX)
    return float(counts)
