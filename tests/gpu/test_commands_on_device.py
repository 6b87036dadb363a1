"""Tests the GPU side of `gflow doctor` and `gflow bench` on the stand-in, so that the first user
with GPUs gets numbers instead of an error."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from gflow.bench.allreduce import contenders
from gflow.bench.ddp.contenders import Replica
from gflow.cli import selftest
from gflow.launch.rank import Rank
from gflow.registration import register
from tests.gpu import jobs
from tests.gpu.jobs import NAME
from tests.ranks import Team


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def as_command(rank: int, world: int, port: int) -> Rank:
    """The environment in which `gflow.launch.ranks` starts a rank."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    return Rank(rank, world, lambda message: None)


def examine(rank: int, world: int, chosen: jobs.Chosen, port: int) -> dict[str, Any]:
    chosen()
    return jobs.clean(selftest.exchange_on_devices)(as_command(rank, world, port), NAME)


def test_the_doctor_trains_on_devices(on_device: Callable[..., Team]) -> None:
    team = on_device(2)
    alone = Team(team._pool, team.world, None)
    first, second = alone.run(examine, team.group.options, free_port())
    assert first == second
    assert first["compressed"] > 0


def measure(rank: int, world: int, chosen: jobs.Chosen, port: int) -> dict[str, Any]:
    chosen()
    return jobs.clean(race)(as_command(rank, world, port))


def race(rank: Rank) -> dict[str, Any]:
    register()
    dist.init_process_group("gloo")
    try:
        reducing = contenders.make("gflow", rank, {"device": NAME})
        reducing.set_size(4096)
        seen: dict[str, Any] = {"all_reduce": len(reducing.turn(1, 2))}
        plan = {"model": "resnet50", "image": 64, "batch": 1, "bucket_view": True, "hosts": 1}
        plan |= {"density": 0.1, "fusion_bytes": None, "device": NAME}
        replica = Replica("gflow-chunks", rank, plan)
        seen["steps"] = len(replica.turn(3, 2))
        replica.check()
        return seen | replica.counters()
    finally:
        dist.destroy_process_group()


def test_the_benchmarks_measure_devices(on_device: Callable[..., Team]) -> None:
    team = on_device(2)
    alone = Team(team._pool, team.world, None)
    for seen in alone.run(measure, team.group.options, free_port()):
        assert (seen["all_reduce"], seen["steps"]) == (2, 2)
        assert 0 < seen["wire_bytes"] < seen["gradient_bytes"]
