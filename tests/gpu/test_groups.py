"""Tests what a group supports: host and device tensors in one program, several devices in one
process, subgroups, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gflow
from tests.compression.jobs import SMALL_BUCKETS, PrescribedGradients, gradients
from tests.gpu import jobs
from tests.gpu.jobs import NAME, same_bits, standin
from tests.ranks import Team
from tests.ranks.membership import rendezvous


@jobs.clean
def collectives(rank: int, world: int) -> dict[str, Any]:
    """Collectives of all kinds in sequence, without waiting in between."""
    own = torch.full((3,), rank + 1.0, device=NAME)
    reduced, sent, on_cpu = own.clone(), own.clone(), torch.full((3,), rank + 1.0)
    gathered = [torch.empty_like(own) for _ in range(world)]
    flat = torch.empty(3 * world, device=NAME)
    part = torch.empty(1, device=NAME)
    whole = torch.arange(world, dtype=torch.float32, device=NAME) + rank
    works = [
        dist.all_reduce(reduced, async_op=True),
        dist.broadcast(sent, src=1, async_op=True),
        dist.all_reduce(on_cpu, async_op=True),
        dist.all_gather(gathered, own, async_op=True),
        dist.all_gather_into_tensor(flat, own, async_op=True),
        dist.reduce_scatter_tensor(part, whole, async_op=True),
    ]
    for work in works:
        work.wait()
    dist.barrier(device_ids=[0])
    return {
        "all_reduce": reduced.tolist(),
        "broadcast": sent.tolist(),
        "on the CPU": on_cpu.tolist(),
        "all_gather": torch.cat(gathered).tolist(),
        "flat": flat.tolist(),
        "part": part.item(),
        "engine": gflow.metrics().collectives,
    }


@pytest.mark.parametrize(("compress", "by_engine"), [("off", 1), ("on", 2)])
def test_each_collective_goes_where_it_belongs(
    on_device: Callable[..., Team], compress: str, by_engine: int
) -> None:
    for rank, seen in enumerate(on_device(2, compress=compress).run(collectives)):
        assert seen["all_reduce"] == seen["on the CPU"] == [3.0] * 3
        assert seen["broadcast"] == [2.0] * 3
        assert seen["all_gather"] == seen["flat"] == [1.0] * 3 + [2.0] * 3
        assert seen["part"] == 2 * rank + 1
        # The engine sees device tensors only if it compresses.
        assert seen["engine"] == {"all_reduce": by_engine}


@jobs.clean
def batches(rank: int, world: int) -> dict[str, Any]:
    """Batched calls: messages in both directions, and what a coalescing manager collects."""
    there, group = torch.device(NAME, 0), dist.group.WORLD
    # NCCL connects in the first call, which must include all ranks.
    dist.broadcast(torch.ones(1, device=there), 0)
    seen: dict[str, Any] = {}
    for where in (there, torch.device("cpu")):
        # More than a connection buffers: a rank that only sends blocks until its peer receives.
        own = torch.full((1 << 21,), rank + 1.0, device=where)
        got = torch.empty_like(own)
        # The engine hasn't started this one yet; it isn't part of the batch.
        before = torch.full((3,), rank + 1.0, device=where)
        pending = dist.all_reduce(before, async_op=True)
        operations = [
            dist.P2POp(dist.isend, own, (rank + 1) % world),
            dist.P2POp(dist.irecv, got, (rank - 1) % world),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        pending.wait()
        seen[where.type] = [*got.unique().tolist(), *before.tolist()]
    first, second = own[:3].to(there), own[:5].to(there)
    with dist._coalescing_manager(group, there, async_ops=True) as manager:
        dist.broadcast(first, 0)
        dist.broadcast(second, 1)
    manager.wait()
    group._start_coalescing(there)
    group.allreduce([first])
    group._end_coalescing(there).wait()
    group._start_coalescing(there)
    seen["nothing"] = group._end_coalescing(there)
    seen["collected"] = [*first.tolist(), *second.tolist()]
    seen["engine"] = gflow.metrics().collectives
    return seen


def test_calls_are_coalesced_by_the_inner_backend(on_device: Callable[..., Team]) -> None:
    for rank, seen in enumerate(on_device(2).run(batches)):
        assert seen[NAME] == seen["cpu"] == [2.0 - rank, 3.0, 3.0, 3.0]
        assert seen["collected"] == [2.0] * 3 + [2.0] * 5
        assert seen["nothing"] is None
        assert seen["engine"] == {"all_reduce": 2}


@jobs.clean
def two_models(rank: int, world: int, first: str, second: str) -> list[Any]:
    """Two models on different devices, trained in turn in one group."""
    models = [
        DistributedDataParallel(PrescribedGradients().to(device), bucket_cap_mb=SMALL_BUCKETS)
        for device in (first, second)
    ]
    delivered = []
    for step in range(6):
        for model, device in zip(models, (first, second), strict=True):
            model([one.to(device) for one in gradients(rank, step)]).backward()
            delivered.append(jobs.delivered_by(model))
    return [delivered, [bucket.wire_bytes > 0 for bucket in gflow.metrics().buckets]]


@pytest.mark.parametrize("second", ["cpu", f"{NAME}:1"], ids=["cpu", "second_device"])
def test_models_on_different_devices_train_in_one_group(
    on_device: Callable[..., Team], second: str
) -> None:
    for delivered, sent in on_device(2, wire="fp32").run(two_models, f"{NAME}:0", second):
        assert same_bits(delivered[::2], delivered[1::2])
        assert sent == [True] * 6


@jobs.clean
def subgroup(rank: int, world: int) -> tuple[float, float]:
    """A group of two of three ranks, and the default group."""
    pair = dist.new_group([0, 2], pg_options=gflow.Options(compress="on"))
    in_pair, everywhere = torch.ones(1, device=NAME), torch.ones(1, device=NAME)
    if rank != 1:
        dist.all_reduce(in_pair, group=pair)
    dist.all_reduce(everywhere)
    return in_pair.item(), everywhere.item()


def test_a_new_group_has_its_own_ranks(on_device: Callable[..., Team]) -> None:
    assert on_device(3).run(subgroup) == [(2.0, 3.0), (1.0, 3.0), (2.0, 3.0)]


def bound(rank: int, world: int, chosen: jobs.Chosen) -> list[Any]:
    """Ranks that name their device."""
    options = chosen()
    device = torch.device(NAME, 1 + rank)
    # Not the current device.
    dist.init_process_group(
        "gflow",
        store=rendezvous(),
        rank=rank,
        world_size=world,
        device_id=device,
        pg_options=options,
    )
    try:
        return jobs.clean(train_there)(rank, device)
    finally:
        dist.destroy_process_group()


def train_there(rank: int, device: torch.device) -> list[Any]:
    model = DistributedDataParallel(PrescribedGradients().to(device), device_ids=[device.index])
    for step in range(5):
        model.zero_grad()
        model([one.to(device) for one in gradients(rank, step)]).backward()
    dist.barrier()
    return jobs.delivered_by(model)


def test_ranks_can_be_bound_to_their_devices(on_device: Callable[..., Team]) -> None:
    team = on_device(2)
    # Without a group: the ranks make their own.
    alone = Team(team._pool, team.world, None)
    first, second = alone.run(bound, team.group.options)
    assert same_bits(first, second)
    assert 0 < sum(int(part.count_nonzero()) for part in first) <= 64 * 9


def captured(rank: int, world: int) -> list[str]:
    dist.all_reduce(torch.ones(1, device=NAME))
    torch.accelerator.synchronize()
    stream = torch.Stream(NAME)
    said = []
    with stream:
        tensor = torch.ones(1, device=NAME)
        standin().capture(stream)
        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:
            said.append(str(error))
        finally:
            standin().capture(stream, False)
        # The ranks are still in step.
        dist.all_reduce(tensor)
        said.append(str(tensor.item()))
    return said


def test_an_all_reduce_cannot_be_captured_into_a_graph(on_device: Callable[..., Team]) -> None:
    for refusal, result in on_device(2).run(captured):
        assert "cannot be captured into a graph" in refusal
        assert 'compress="off"' in refusal
        assert result == "2.0"


@jobs.clean
def with_gaps(rank: int, world: int) -> str:
    tensor = torch.ones(8, device=NAME)
    try:
        dist.all_reduce(tensor[::2])
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "no error"


def test_a_tensor_with_gaps_is_refused(on_device: Callable[..., Team]) -> None:
    for said in on_device(2).run(with_gaps):
        assert "call .contiguous()" in said, said
