"""What a process group has done so far, in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gflow import native


@dataclass(frozen=True)
class Metrics:
    """One process group as this rank sees it, and its counters since the group was made.

    Attributes:
        hosts: hosts of the group; ranks that could not share memory count as hosts of their own.
        ranks_here: ranks of the group on this host, this one included.
        gradient_buckets: all-reduces of DDP's gradient buckets.
        gradient_bytes: bytes of gradient in them.
        exact_tensors: tensors of all other collectives on CPU, which are always exact; what is
            sent from one rank to another is not counted.
        exact_bytes: bytes in those.
        collectives: how many collectives of each kind were done.
    """

    hosts: int
    ranks_here: int
    gradient_buckets: int
    gradient_bytes: int
    exact_tensors: int
    exact_bytes: int
    collectives: dict[str, int]


def metrics(group: dist.ProcessGroup | None = None) -> Metrics:
    """Return the counters of ``group``, by default of the whole world's group.

    Example:
        >>> import gflow
        >>> gflow.metrics().gradient_buckets  # doctest: +SKIP
        12
    """
    return Metrics(**native.load().metrics(_backend_of(group)))


def _backend_of(group: dist.ProcessGroup | None) -> Any:
    if group is None:
        group = dist.distributed_c10d._get_default_group()
    backend = group._get_backend(torch.device("cpu"))
    # TORCH_DISTRIBUTED_DEBUG=DETAIL puts a checking wrapper around every backend.
    return getattr(backend, "wrapped_pg", backend)
