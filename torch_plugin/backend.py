"""The gflow backend behind a process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def group_or_default(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """``group``, or the default group."""
    return dist.distributed_c10d._get_default_group() if group is None else group


def backend_of(group: dist.ProcessGroup | None) -> Any:
    """gflow's backend in ``group``: for CPU tensors if gflow serves those, else for its devices.

    The native library checks that it is gflow's.
    """
    group = group_or_default(group)
    served = sorted(device.type for device in group._device_types)
    # Such as "cpu:gloo,cuda:gflow".
    named = [one.split(":") for one in str(dist.get_backend_config(group)).split(",")]
    ours = [device for device, *name in named if name == ["gflow"] and device in served] or served
    backend = group._get_backend(torch.device("cpu" if "cpu" in ours else ours[0]))
    # TORCH_DISTRIBUTED_DEBUG=DETAIL puts a checking wrapper around every backend.
    return getattr(backend, "wrapped_pg", backend)


def is_served_by_gflow(group: dist.ProcessGroup) -> bool:
    """Whether gflow serves some device in ``group``."""
    named = [one.split(":")[-1] for one in str(dist.get_backend_config(group)).split(",")]
    return "gflow" in named
