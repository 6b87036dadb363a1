"""Tests that a failing device or peer ends the training with an error that says what happened,
never with a hang."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.compression.test_losses import message_of
from tests.gpu import jobs
from tests.gpu.jobs import NAME, standin
from tests.ranks import Died, Returned, Team

NCCL_SYSTEM_ERROR = 2
CUDA_OUT_OF_MEMORY = 2


def killed(rank: int, world: int, when: str) -> list[str]:
    model = jobs.model_on(NAME)

    def end(_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def train() -> None:
        for step in range(1000):
            model.zero_grad()
            loss = model(jobs.given_on(NAME, rank, step))
            if step == 6 and rank == 1:
                if when == "between":
                    end(None)
                model.module.weights[0].register_hook(end)
            loss.backward()

    said = message_of(train)
    return [said, message_of(lambda: dist.all_reduce(torch.ones(1, device=NAME)))]


@pytest.mark.parametrize("when", ["between", "in_the_middle"])
def test_a_rank_that_is_killed_is_named(on_device: Callable[..., Team], when: str) -> None:
    team = on_device(2, {"timeout_s": 600.0}, fusion_bytes=0)
    survivor, victim = team.outcomes(killed, when, deadline_s=50.0)
    assert isinstance(victim, Died)
    assert isinstance(survivor, Returned), survivor.story()
    for said in survivor.value:
        # Either our own connection or NCCL's may notice first.
        assert "lost rank" in said or "NCCL says" in said, survivor.value
        assert "rank 1 " in said, survivor.value


def nccl_fails(rank: int, world: int) -> list[str]:
    model = jobs.model_on(NAME)

    def train() -> None:
        for step in range(50):
            model.zero_grad()
            if step == 6 and rank == 1:
                standin().fail_next("ncclAllReduce", NCCL_SYSTEM_ERROR)
            model(jobs.given_on(NAME, rank, step)).backward()

    said = message_of(train)
    # The broadcasts do not go through the engine: they must not wait in the inner backend.
    reduce = message_of(lambda: dist.all_reduce(torch.ones(1, device=NAME)))
    spread = [message_of(lambda: dist.broadcast(torch.ones(1, device=NAME), 0)) for _ in range(3)]
    return [said, reduce, *spread]


def test_an_error_of_nccl_ends_the_group_on_all_ranks(on_device: Callable[..., Team]) -> None:
    team = on_device(2, {"timeout_s": 600.0})
    first, second = team.outcomes(nccl_fails, deadline_s=40.0)
    assert isinstance(second, Returned), second.story()
    assert "ncclAllReduce" in second.value[0], second.value
    assert isinstance(first, Returned), first.story()
    assert "rank 1 " in first.value[0], first.value
    assert all("gflow:" in said for said in first.value + second.value), (first, second)


def lost_elsewhere(rank: int, world: int) -> list[str]:
    """A rank is lost during a collective on the CPU, while the device is idle."""
    spread = lambda: dist.broadcast(torch.ones(1, device=NAME), 0)  # noqa: E731
    spread()
    torch.accelerator.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return [message_of(lambda: dist.all_reduce(torch.ones(4))), message_of(spread)]


def test_a_failed_group_lets_nobody_into_the_inner_backend(on_device: Callable[..., Team]) -> None:
    team = on_device(2, {"timeout_s": 600.0})
    survivor, _ = team.outcomes(lost_elsewhere, deadline_s=40.0)
    assert isinstance(survivor, Returned), survivor.story()
    assert all("lost rank 1" in said for said in survivor.value), survivor.value


def stuck(rank: int, world: int) -> list[str]:
    """A stream of one rank never reaches the event that the exchange waits for."""
    model = jobs.model_on(NAME)
    for step in range(5):
        model.zero_grad()
        model(jobs.given_on(NAME, rank, step)).backward()
    torch.accelerator.synchronize()
    stream = torch.Stream(NAME)
    if rank == 1:
        standin().freeze(stream)
    try:

        def train() -> None:
            for step in range(5, 1000):
                with stream:
                    model.zero_grad()
                    model(jobs.given_on(NAME, rank, step)).backward()

        return [message_of(train)]
    finally:
        standin().freeze(stream, False)


def test_a_device_that_is_stuck_ends_the_group_at_its_timeout(
    on_device: Callable[..., Team],
) -> None:
    team = on_device(2, {"timeout_s": 3.0})
    for outcome in team.outcomes(stuck, deadline_s=40.0):
        assert isinstance(outcome, Returned), outcome.story()
        said = outcome.value[0]
        assert "imed out" in said or "lost rank" in said or "gave up" in said, said


def unable(rank: int, world: int) -> list[str]:
    """The kernels cannot be loaded on one rank alone."""
    if rank == 1:
        standin().fail_next("cuModuleLoadData", CUDA_OUT_OF_MEMORY)
    reduce = lambda: dist.all_reduce(torch.ones(4, device=NAME))  # noqa: E731
    return [message_of(reduce), message_of(reduce)]


def test_a_device_that_one_rank_cannot_use_is_told_to_all(on_device: Callable[..., Team]) -> None:
    for first, second in on_device(2, {"timeout_s": 600.0}).run(unable):
        assert "rank 1 " in first, first
        assert "cannot be used: cuModuleLoadData" in first, first
        # The second attempt succeeds.
        assert second == "no error", second


def blocking(rank: int, world: int) -> str:
    """The environment of one rank makes NCCL calls blocking."""
    if rank == 1:
        os.environ["NCCL_COMM_BLOCKING"] = "1"
    try:
        model = jobs.model_on(NAME)
        return message_of(lambda: model(jobs.given_on(NAME, rank, 0)).backward())
    finally:
        os.environ.pop("NCCL_COMM_BLOCKING", None)


def test_an_nccl_that_would_wait_in_its_calls_is_refused_on_all_ranks(
    on_device: Callable[..., Team],
) -> None:
    for said in on_device(2, {"timeout_s": 600.0}).run(blocking):
        assert "rank 1 " in said, said
        assert "NCCL_COMM_BLOCKING=1 makes NCCL wait" in said, said


def mistaken(rank: int, world: int) -> list[str]:
    """Ranks that ask for different things."""
    tensor = torch.ones(4 + rank, device=NAME)
    said = [message_of(lambda: dist.all_reduce(tensor))]
    where = NAME if rank else "cpu"
    return [*said, message_of(lambda: dist.all_reduce(torch.ones(4, device=where)))]


def test_ranks_that_ask_for_different_things_are_told_so(on_device: Callable[..., Team]) -> None:
    for sizes, places in on_device(2).run(mistaken):
        assert "4 elements" in sizes, sizes
        assert "5 elements" in sizes, sizes
        assert "on its GPU" in places, places
