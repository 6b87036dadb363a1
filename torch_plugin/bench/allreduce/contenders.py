"""The contenders of ``gflow bench allreduce``: different ways to do the same exchange.

They are prepared before there are ranks, and made and used on ranks. A competitor never does less
than the others: each leaves the complete sum in the tensor of every rank. Limits, which may do
less, are called limits.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Protocol

from gflow.bench import turns
from gflow.bench.allreduce import limits, mpi
from gflow.bench.turns import Device, Unavailable
from gflow.launch.rank import Rank

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
#: These run in the ranks themselves, as in a job, so their processor time is known.
BACKENDS = ("gflow", "gflow-bucket", "gloo", "nccl")
_ON_ONE_HOST = ("openmpi", "mpich", "memory-limit")
_ON_GPUS = ("gflow", "nccl")


class Contender(turns.Contender, Protocol):
    """One way to sum a tensor over all ranks."""

    def set_size(self, size: int) -> None:
        """Prepare for tensors of that many bytes, do one exchange, and check the sum."""


# --- before the ranks are started


def default_names(hosts: int, device: str) -> list[str]:
    """The contenders if no names are given."""
    if device != "cpu":
        return list(_ON_GPUS)
    return [name for name in LABELS if name != "nccl" and (hosts > 1 or name != "link-limit")]


def prepare(name: str, folder: Path, addresses: list[str], device: str) -> dict[str, Any]:
    """Return what :func:`make` needs for this contender, or raise Unavailable.

    Args:
        name: of the contender.
        folder: for compiled programs.
        addresses: of the hosts, if there are several.
        device: the type of device that the tensors are on.
    """
    if device != "cpu" and name not in _ON_GPUS:
        raise Unavailable("it is only measured on the CPU")
    if device == "cpu" and name == "nccl":
        raise Unavailable("it is only measured on GPUs: add --device cuda")
    if name in _ON_ONE_HOST and len(addresses) > 1:
        raise Unavailable("it is only measured on one host")
    if name in mpi.FLAVOURS:
        return mpi.prepare(name, folder)
    if name == "memory-limit":
        return limits.prepare_memory_limit(folder)
    if name == "link-limit":
        return limits.prepare_link_limit(addresses)
    return {"device": device}


# --- on the ranks


def make(name: str, rank: Rank, details: dict[str, Any]) -> Contender:
    """Make the contender from what :func:`prepare` returned; it may still raise Unavailable."""
    if name in mpi.FLAVOURS:
        return mpi.MpiRanks(rank, **details)
    if name == "memory-limit":
        return limits.MemoryLimit(rank, **details)
    if name == "link-limit":
        return limits.LinkLimit(rank, **details)
    return TorchGroup(
        rank, name.partition("-")[0], in_bucket=name == "gflow-bucket", device=details["device"]
    )


class TorchGroup:
    """A process group of torch, with the backend of the given name.

    On GPUs gflow's group is one that compresses. It still sums other tensors exactly, but the ranks
    agree on that first, and this is part of its time.
    """

    def __init__(
        self, rank: Rank, backend: str, *, in_bucket: bool = False, device: str = "cpu"
    ) -> None:
        import torch.distributed as dist

        import gflow

        self.info: dict[str, Any] = {}
        self._rank, self._backend, self._in_bucket = rank, backend, in_bucket
        self._device = Device.of_rank(rank, device)
        options = None
        if backend == "gflow" and self._device.is_accelerator:
            options = gflow.Options(compress="on")
        group = dist.new_group(backend=backend, pg_options=options)
        assert isinstance(group, dist.ProcessGroup)  # every rank is a member
        self._group = group
        self._tensor: Any = None

    def _all_reduce(self) -> None:
        import torch.distributed as dist

        dist.all_reduce(self._tensor, group=self._group)
        self._device.synchronize()

    def set_size(self, size: int) -> None:
        """Make a tensor of that many bytes, and check its sum."""
        self._tensor = None  # free the memory of the previous size first
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
        # A sum of zeros can be repeated without overflowing.
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
            return torch.empty(count, dtype=torch.float32, device=self._device.name)
        # As DDP's Reducer does for its buckets.
        cpu = torch.device("cpu")
        backend = self._group._get_backend(cpu)
        return backend.allocate_tensor(count, dtype=torch.float32, device=cpu)
