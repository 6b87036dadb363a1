"""The devices beside the CPU that a group serves, and their inner backends.

A group may never use a device, so nothing here initializes one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store


@dataclass(frozen=True)
class GroupMember:
    """This rank in a group, as an inner backend needs it."""

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
    #: Makes the inner backend, for collectives that the engine does not do.
    make_inner: Callable[[GroupMember], Any]
    #: Whether its raw streams and addresses are CUDA's, which the engine understands. Otherwise the
    #: inner backend exchanges everything.
    is_cuda: bool


def _has_nccl_and_gpu() -> bool:
    return torch.cuda.is_available() and dist.is_nccl_available()


def _inner_nccl(member: GroupMember) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = member.timeout
    options.global_ranks_in_group = member.options.global_ranks_in_group
    options.group_name = member.options.group_id
    store = PrefixStore("nccl", member.store)
    return dist.ProcessGroupNCCL(store, member.rank, member.size, options)


# torch says "cuda" on AMD's GPUs too, but their driver is another one.
CUDA = Accelerator("cuda", _has_nccl_and_gpu, _inner_nccl, is_cuda=torch.version.hip is None)

#: A group serves the first that is available. To add another torch device, put it in front.
KNOWN = [CUDA]


def available() -> Accelerator | None:
    """The kind of device that a new group serves, if there is one."""
    return next((one for one in KNOWN if one.is_available()), None)
