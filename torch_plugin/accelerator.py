"""The devices beside the CPU that a group serves, and the backend that does there what the engine
does not. It must never touch a device: a group may never use one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store


@dataclass(frozen=True)
class Place:
    """This rank's place in a group, for a backend inside of gflow's."""

    store: Store
    rank: int
    size: int
    timeout: timedelta
    #: Torch's ``_DistributedBackendOptions`` of the group.
    options: Any


@dataclass(frozen=True)
class Accelerator:
    """A kind of device."""

    #: As torch spells it in ``torch.device``.
    device_type: str
    is_available: Callable[[], bool]
    #: Makes the backend for collectives that the engine leaves alone.
    make_inner: Callable[[Place], Any]
    #: Whether its raw streams and addresses are CUDA's, which the engine understands. On others
    #: everything is exchanged by the backend inside.
    is_cuda: bool


def _has_nccl_and_gpu() -> bool:
    return torch.cuda.is_available() and dist.is_nccl_available()


def _inner_nccl(place: Place) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = place.timeout
    options.global_ranks_in_group = place.options.global_ranks_in_group
    options.group_name = place.options.group_id
    store = PrefixStore("nccl", place.store)
    return dist.ProcessGroupNCCL(store, place.rank, place.size, options)


# On AMD's GPUs torch says "cuda" too, but their driver is another one.
CUDA = Accelerator("cuda", _has_nccl_and_gpu, _inner_nccl, is_cuda=torch.version.hip is None)

#: The first that is available is served. A torch device of one's own whose streams are CUDA's can
#: be put in front.
KNOWN = [CUDA]


def available() -> Accelerator | None:
    """The kind of device that a new group serves, if there is one."""
    return next((one for one in KNOWN if one.is_available()), None)
