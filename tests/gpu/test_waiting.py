"""Tests that waiting for a collective on the device blocks streams and nothing else, and that its
Future runs callbacks on a stream that sees the result."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gflow
from tests.gpu import jobs
from tests.gpu.jobs import NAME, standin
from tests.ranks import Team


@jobs.clean
def exact(rank: int, world: int) -> list[list[float]]:
    """A user's own all_reduce of tensors that are not gradients."""
    results = []
    for tensor, op in [
        (torch.full((5,), 0.1 + rank), dist.ReduceOp.SUM),
        (torch.tensor([3.0, -1.0]) * (rank + 1), dist.ReduceOp.MAX),
        (torch.tensor([1 << 40, rank]), dist.ReduceOp.SUM),
        (torch.tensor([2 + rank], dtype=torch.int32), dist.ReduceOp.PRODUCT),
        (torch.tensor([0.5 + rank], dtype=torch.float16), dist.ReduceOp.AVG),
        (torch.empty(0), dist.ReduceOp.SUM),
    ]:
        tensor = tensor.to(NAME)
        dist.all_reduce(tensor, op)
        asynchronous = tensor.clone()
        dist.all_reduce(asynchronous, async_op=True).wait()
        results += [tensor.tolist(), asynchronous.tolist()]
    return results


def test_what_is_no_gradient_is_exact(on_device: Callable[..., Team]) -> None:
    tenth = torch.tensor(0.1)
    sums = [(tenth + (tenth + 1)).item()] * 5
    once = [sums, [6.0, -1.0], [1 << 41, 1], [6], [1.0], []]
    for came in on_device(2).run(exact):
        assert came[::2] == once
        assert came[1::2] == [[2 * value for value in values] for values in once]


@jobs.clean
def in_the_middle_of_a_pass(rank: int, world: int) -> tuple[list[float], int]:
    """A user's all_reduce and broadcast between the buckets of a backward pass."""
    model = jobs.model_on(NAME)
    reduced = []

    def hook(gradient: torch.Tensor) -> None:
        own = torch.full((3,), rank + 1.0, device=NAME)
        dist.all_reduce(own)
        dist.broadcast(own, src=0)
        reduced.append(own.sum().item())

    model.module.weights[1].register_hook(hook)
    for step in range(6):
        model(jobs.given_on(NAME, rank, step)).backward()
        model.zero_grad()
    return reduced, gflow.metrics().gradient_buckets


@pytest.mark.parametrize("fusion_bytes", [0, 1 << 24], ids=["one_by_one", "fused"])
def test_collectives_of_the_user_keep_their_place_between_buckets(
    on_device: Callable[..., Team], fusion_bytes: int
) -> None:
    for reduced, buckets in on_device(2, fusion_bytes=fusion_bytes).run(in_the_middle_of_a_pass):
        assert reduced == [9.0] * 6
        # In the first step DDP has one bucket, later three.
        assert buckets == 1 + 5 * 3


@jobs.clean
def wait_with_a_frozen_stream(rank: int, world: int) -> dict[str, Any]:
    dist.all_reduce(torch.ones(1, device=NAME))  # does all one-time set-up
    torch.accelerator.synchronize()
    busy, other = torch.Stream(NAME), torch.Stream(NAME)
    seen: dict[str, Any] = {}
    waits = standin().host_waits()
    standin().freeze(busy)
    with busy:
        tensor = torch.full((4,), 1.0 + rank, device=NAME)
        work = dist.all_reduce(tensor, async_op=True)
        future = work.get_future()
        streams = []

        def double(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            streams.append(torch.accelerator.current_stream())
            return done.value()[0] * 2

        doubled = future.then(double)
        # Neither of these waits for the frozen stream.
        seen["waited"] = work.wait()
        seen["completed while frozen"] = work.is_completed()
    with other:
        work.wait()
        copied = tensor + 1
        twice = doubled.wait() + 1
    seen["host waits"] = standin().host_waits() - waits
    try:
        work.wait(timedelta(milliseconds=300))
        seen["with a timeout"] = "waited"
    except RuntimeError as error:
        seen["with a timeout"] = str(error)
    seen["callbacks' stream is one of its own"] = streams[0] not in (busy, other)
    standin().freeze(busy, False)
    other.synchronize()
    seen["with more time"] = work.wait(timedelta(seconds=20))
    seen["completed"] = work.is_completed()
    seen["sum"], seen["copied"], seen["twice"] = tensor[0].item(), copied[0].item(), twice[0].item()
    return seen


def test_waiting_makes_the_stream_wait_and_not_the_host(on_device: Callable[..., Team]) -> None:
    for seen in on_device(2).run(wait_with_a_frozen_stream):
        assert "Timed out" in seen["with a timeout"], seen
        del seen["with a timeout"]
        assert seen == {
            "waited": True,
            "completed while frozen": False,
            "host waits": 0,
            "callbacks' stream is one of its own": True,
            "with more time": True,
            "completed": True,
            "sum": 3.0,
            "copied": 4.0,
            "twice": 7.0,
        }


def forget_to_wait(rank: int, world: int, waits: bool) -> str:
    standin().clear()
    tensor = torch.ones(1000, device=NAME)
    work = dist.all_reduce(tensor, async_op=True)
    if waits:
        work.wait()
    tensor.add_(1)
    work.wait()
    torch.accelerator.synchronize()
    seen = standin().races()
    standin().clear()
    return seen


def test_a_program_that_forgets_to_wait_is_noticed(on_device: Callable[..., Team]) -> None:
    """Shows that a race would be seen, so that its absence elsewhere means something."""
    team = on_device(2)
    assert team.run(forget_to_wait, True) == ["", ""]
    for seen in team.run(forget_to_wait, False):
        assert "ncclAllReduce" in seen, seen
        assert "aten::add" in seen, seen


@jobs.clean
def step_without_waiting(rank: int, world: int, options: dict[str, Any]) -> list[int]:
    """How often each step has waited for the device."""
    model = jobs.model_on(NAME, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = [jobs.given_on(NAME, rank, step) for step in range(8)]
    torch.accelerator.synchronize()
    waits = []
    for gradients in given:
        before = standin().host_waits()
        model(gradients).backward()
        optimizer.step()
        optimizer.zero_grad()
        waits.append(standin().host_waits() - before)
    return waits


@pytest.mark.parametrize("fusion_bytes", [0, 1 << 24], ids=["one_by_one", "fused"])
def test_a_step_waits_for_no_device(on_device: Callable[..., Team], fusion_bytes: int) -> None:
    options = {"gradient_as_bucket_view": True}
    for waits in on_device(2, fusion_bytes=fusion_bytes).run(step_without_waiting, options):
        # In the first steps DDP lays out its buckets and residuals are allocated.
        assert waits[4:] == [0] * 4, waits


@jobs.clean
def let_go(rank: int, world: int) -> list[float]:
    """Drops tensors while they are being exchanged."""
    stream = torch.Stream(NAME)
    results = []
    for number in range(20):
        with stream:
            tensor = torch.full((1000,), 1.0 + rank + number, device=NAME)
            work = dist.all_reduce(tensor, async_op=True)
            del tensor
            # The same size, so that it would reuse memory that was freed too early.
            torch.full((1000,), -7.0, device=NAME)
            work.wait()
            results.append(work.result()[0][-1].item())
    return results


def test_tensors_that_were_let_go_of_are_exchanged(on_device: Callable[..., Team]) -> None:
    assert on_device(2).run(let_go) == [[3.0 + 2 * number for number in range(20)]] * 2


@jobs.clean
def nobody_waits(rank: int, world: int) -> float:
    """Neither the tensor nor the Work is kept, so only the allocator can keep the memory."""
    for _ in range(10):
        tensor = torch.full((1000,), 1.0, device=NAME)
        dist.all_reduce(tensor, async_op=True)
        del tensor
        dist.all_reduce(torch.ones(1))  # once this returns, the engine is done with it
        torch.full((1000,), -7.0, device=NAME)
    last = torch.ones(1, device=NAME)
    dist.all_reduce(last)
    return last.item()


def test_memory_is_not_handed_out_before_the_exchange_is_over(
    on_device: Callable[..., Team],
) -> None:
    assert on_device(2).run(nobody_waits) == [2.0, 2.0]


@jobs.clean
def hooked(rank: int, world: int) -> list[torch.Tensor]:
    """A user's communication hook, whose callback uses the result."""
    model = jobs.model_on(NAME)

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses hints that are not its own
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0].div_(4))

    model.register_comm_hook(None, hook)
    for step in range(5):
        model.zero_grad()
        model(jobs.given_on(NAME, rank, step)).backward()
    return jobs.delivered_by(model)


def test_the_callbacks_of_a_hook_see_the_sum(on_device: Callable[..., Team]) -> None:
    from tests.compression.jobs import gradients

    expected = [(a + b) / 4 for a, b in zip(gradients(0, 4), gradients(1, 4), strict=True)]
    for came in on_device(2).run(hooked):
        assert jobs.same_bits(came, expected)
