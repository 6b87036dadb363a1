"""Proves that a group that does not compress leaves tensors on devices to the backend inside."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

import gflow
from tests.gpu import jobs
from tests.gpu.device import NAME
from tests.ranks import Team


@jobs.clean
def collectives(rank: int, world: int) -> dict[str, list[float]]:
    own = torch.full((3,), rank + 1.0, device=NAME)
    reduced = own.clone()
    dist.all_reduce(reduced)
    sent = own.clone()
    dist.broadcast(sent, src=1)
    gathered = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(gathered, own)
    on_cpu = torch.full((3,), rank + 1.0)
    dist.all_reduce(on_cpu)
    dist.barrier(device_ids=[0])
    return {
        "all_reduce": reduced.tolist(),
        "broadcast": sent.tolist(),
        "all_gather": torch.cat(gathered).tolist(),
        "on the CPU": on_cpu.tolist(),
        "counted": gflow.metrics().collectives,
    }


def test_collectives_on_devices_go_to_the_backend_inside(on_device: Callable[..., Team]) -> None:
    for seen in on_device(2, compress="off").run(collectives):
        assert seen["all_reduce"] == seen["on the CPU"] == [3.0] * 3
        assert seen["broadcast"] == [2.0] * 3
        assert seen["all_gather"] == [1.0] * 3 + [2.0] * 3
        # The engine has only seen the one on the CPU.
        assert seen["counted"] == {"all_reduce": 1}
