"""Who takes part in a comparison: different ways to do the same exchange, in one run and in turn.

Contenders are built before there are ranks, and made and used on ranks. One that is shown as a
competitor must never do less than the others: each leaves the complete sum in the tensor of every
rank. Limits are called limits.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Protocol

from gflow.commands import link_limit, memory_limit, mpi
from gflow.commands.left_out import LeftOut
from gflow.commands.place import Place
from gflow.commands.rank import Rank
from gflow.commands.turns import Racer

#: By name on the command line, how each is shown; in this order.
LABELS = {
    "gflow": "gflow",
    "gflow-bucket": "gflow bucket",
    "gloo": "Gloo",
    "nccl": "NCCL",
    "openmpi": "Open MPI",
    "mpich": "MPICH",
    "memory-limit": "memory limit",
    "link-limit": "link limit",
}
#: What runs in the ranks themselves as it does in a job, so that its use of processors is known.
BACKENDS = ("gflow", "gflow-bucket", "gloo", "nccl")
_ON_ONE_HOST = ("openmpi", "mpich", "memory-limit")
_ON_GPUS = ("gflow", "nccl")


class Contender(Racer, Protocol):
    """One way to add up a tensor over all ranks."""

    def take_size(self, size: int) -> None:
        """Make ready for tensors of that many bytes, do one exchange, and check the sum."""


# --- before the ranks are started


def usual(hosts: int, device: str) -> list[str]:
    """Who takes part when nobody is named."""
    if device != "cpu":
        return list(_ON_GPUS)
    return [name for name in LABELS if name != "nccl" and (hosts > 1 or name != "link-limit")]


def build(name: str, folder: Path, addresses: list[str], device: str) -> dict[str, Any]:
    """Return what :func:`make` needs for this contender, or raise LeftOut.

    Args:
        name: of the contender.
        folder: what is compiled goes there.
        addresses: of the hosts, if there are several.
        device: the type of device that the tensors are on.
    """
    if device != "cpu" and name not in _ON_GPUS:
        raise LeftOut("it is only measured on the CPU")
    if device == "cpu" and name == "nccl":
        raise LeftOut("it is only measured on GPUs: add --device cuda")
    if name in _ON_ONE_HOST and len(addresses) > 1:
        raise LeftOut("it is only measured on one host")
    if name in mpi.FLAVOURS:
        return mpi.build(name, folder)
    if name == "memory-limit":
        return memory_limit.build(folder)
    if name == "link-limit":
        return link_limit.build(addresses)
    return {"device": device}


# --- on the ranks


def make(name: str, rank: Rank, details: dict[str, Any]) -> Contender:
    """Make the contender from what :func:`build` returned; it may still raise LeftOut."""
    if name in mpi.FLAVOURS:
        return mpi.MpiRanks(rank, **details)
    if name == "memory-limit":
        return memory_limit.MemoryLimit(rank, **details)
    if name == "link-limit":
        return link_limit.LinkLimit(rank, **details)
    return TorchGroup(
        rank, name.partition("-")[0], in_bucket=name == "gflow-bucket", device=details["device"]
    )


class TorchGroup:
    """A process group of torch, with the backend of the given name.

    On devices gflow's is one that compresses: what is no gradient is exact there too, but the ranks
    agree on it first, and that is part of its time.
    """

    def __init__(
        self, rank: Rank, backend: str, *, in_bucket: bool = False, device: str = "cpu"
    ) -> None:
        import torch.distributed as dist

        import gflow

        self.about: dict[str, Any] = {}
        self._rank, self._backend, self._in_bucket = rank, backend, in_bucket
        self._place = Place.of_rank(rank, device)
        options = None
        if backend == "gflow" and self._place.is_device:
            options = gflow.Options(compress="on")
        self._group = dist.new_group(backend=backend, pg_options=options)
        self._tensor: Any = None

    def _all_reduce(self) -> None:
        import torch.distributed as dist

        dist.all_reduce(self._tensor, group=self._group)
        self._place.wait()

    def take_size(self, size: int) -> None:
        """Make a tensor of that many bytes, and check its sum."""
        self._tensor = None  # the memory of the size before, first
        self._tensor = self._allocate(size // 4)
        self._tensor.fill_(self._rank.number + 1)
        self._all_reduce()
        expected = sum(range(1, self._rank.world + 1))
        if not bool((self._tensor == expected).all()):
            wrong = int((self._tensor != expected).nonzero()[0])
            raise RuntimeError(
                f"{self._backend}: a wrong sum for a tensor of {size} bytes: element {wrong} is "
                f"{self._tensor[wrong].item()}, not {expected}"
            )
        # A sum of zeros can be repeated for ever without growing.
        self._tensor.zero_()

    def turn(self, skipped: int, counted: int) -> list[float]:
        """Seconds of each call on this rank."""
        for _ in range(skipped):
            self._all_reduce()
        seconds = []
        for _ in range(counted):
            start = time.perf_counter()
            self._all_reduce()
            seconds.append(time.perf_counter() - start)
        return seconds

    def close(self) -> None:
        """Free the tensor; the group ends with all others."""
        self._tensor = None

    def _allocate(self, count: int) -> Any:
        import torch

        if not self._in_bucket:
            return torch.empty(count, dtype=torch.float32, device=self._place.device)
        # As DDP's Reducer does for its buckets.
        cpu = torch.device("cpu")
        backend = self._group._get_backend(cpu)
        return backend.allocate_tensor(count, dtype=torch.float32, device=cpu)
