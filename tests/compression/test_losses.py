"""Tests that a compressed training whose ranks fail ends with an error that names them, never with
a hang."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gflow
from tests.compression.jobs import (
    SMALL_BUCKETS,
    PrescribedGradients,
    gradients,
    same_bits,
    take_gradients,
)
from tests.ranks import Died, Raised, Returned, Team

# Large enough to take a while to send.
LARGE = (1_500_000, 800_000, 700_000)


def message_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def killed(rank: int, world: int, victim: int, when: str, sizes: tuple[int, ...]) -> list[str]:
    model = DistributedDataParallel(PrescribedGradients(sizes), bucket_cap_mb=SMALL_BUCKETS)

    def end(_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def train() -> None:
        for step in range(1000):
            model.zero_grad()
            given = [torch.full((numel,), 1.0 + step) for numel in sizes]
            loss = model(given)
            if step == 6 and rank == victim:
                if when == "between":
                    end(None)
                # Before the first bucket, or between the first and the last.
                model.module.weights[-1 if when == "before" else 0].register_hook(end)
            loss.backward()

    said = message_of(train)
    # Later calls fail with the same error, and the state can still be saved.
    return [said, message_of(lambda: dist.all_reduce(torch.ones(1))), message_of(gflow.state_dict)]


@pytest.mark.parametrize("fusion_bytes", [0, 1 << 26], ids=["one_by_one", "fused"])
@pytest.mark.parametrize("when", ["between", "before", "in_the_middle"])
def test_a_rank_that_is_killed_is_named_by_the_others(
    compressing: Callable[..., Team], when: str, fusion_bytes: int
) -> None:
    where, victim = ("aabb", 3) if when == "in_the_middle" else ("abc", 1)
    team = compressing(where, {"timeout_s": 600.0}, fusion_bytes=fusion_bytes, chunk=1024)
    outcomes = team.outcomes(killed, victim, when, LARGE, deadline_s=50.0)
    assert isinstance(outcomes[victim], Died)
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        assert isinstance(outcome, Returned), outcome.story()
        assert "lost rank" in outcome.value[0], outcome.value
        assert f"rank {victim} " in outcome.value[0], outcome.value
        assert "lost rank" in outcome.value[1], outcome.value
        assert outcome.value[2] == "no error", outcome.value


def raises_in_backward(rank: int, world: int, where: int) -> str:
    """One rank's own code raises in the middle of a backward pass."""
    model = DistributedDataParallel(PrescribedGradients(), bucket_cap_mb=SMALL_BUCKETS)

    def fail(_: Any) -> None:
        raise ValueError("a user's mistake")

    for step in range(6):
        model.zero_grad()
        loss = model(gradients(rank, step))
        if step == 5 and rank == 1:
            model.module.weights[where].register_hook(fail)
        if step < 5:
            loss.backward()
    return message_of(loss.backward)


@pytest.mark.parametrize("fusion_bytes", [0, 1 << 24], ids=["one_by_one", "fused"])
@pytest.mark.parametrize("where", [4, 0], ids=["at_the_start", "at_the_end"])
def test_a_rank_that_raises_in_a_backward_pass_ends_that_of_the_others(
    compressing: Callable[..., Team], where: int, fusion_bytes: int
) -> None:
    team = compressing(2, {"timeout_s": 600.0}, fusion_bytes=fusion_bytes)
    first, second = team.outcomes(raises_in_backward, where, deadline_s=40.0)
    # Its group is destroyed when it fails; the other rank is told so.
    assert isinstance(second, Raised), second.story()
    assert (second.kind, second.message) == ("ValueError", "a user's mistake")
    assert isinstance(first, Returned), first.story()
    assert "rank 1 " in first.value, first.value


def destroyed_under_way(rank: int, world: int, fails: list[int]) -> str:
    """The pass breaks off after the first bucket; then the group is destroyed."""
    model = DistributedDataParallel(PrescribedGradients(), bucket_cap_mb=SMALL_BUCKETS)

    def fail(_: Any) -> None:
        raise ValueError("a user's mistake")

    for step in range(5):
        model.zero_grad()
        model(gradients(rank, step)).backward()
    if rank in fails:
        model.module.weights[0].register_hook(fail)
    said = "no error"
    try:
        model(gradients(rank, 5)).backward()
    except (ValueError, RuntimeError) as error:
        said = str(error)
    dist.destroy_process_group()
    return said


@pytest.mark.parametrize("fusion_bytes", [0, 1 << 24], ids=["one_by_one", "fused"])
@pytest.mark.parametrize("fails", [[0, 1], [1]], ids=["on_all", "on_one"])
def test_a_group_is_destroyed_with_gradients_under_way(
    compressing: Callable[..., Team], fails: list[int], fusion_bytes: int
) -> None:
    team = compressing(2, {"timeout_s": 600.0}, fusion_bytes=fusion_bytes)
    said = team.run(destroyed_under_way, fails, deadline_s=40.0)
    for rank in fails:
        assert said[rank] == "a user's mistake"
    if fails == [1]:
        assert "rank 1 " in said[0], said[0]


def goes_on_after_an_error(rank: int, world: int) -> list[str]:
    """All ranks make the same mistake, then run another backward pass."""
    model = DistributedDataParallel(PrescribedGradients(), bucket_cap_mb=SMALL_BUCKETS)

    def fail(_: Any) -> None:
        raise ValueError("a user's mistake")

    said = []
    for step in range(9):
        model.zero_grad()
        if step == 5:
            hook = model.module.weights[0].register_hook(fail)
        try:
            model(gradients(rank, step)).backward()
            said.append("")
        except (ValueError, RuntimeError) as error:
            said.append(f"{type(error).__name__}: {error}")
        if step == 5:
            hook.remove()
            del model
            model = DistributedDataParallel(PrescribedGradients(), bucket_cap_mb=SMALL_BUCKETS)
    dist.all_reduce(total := torch.ones(1))
    said.append(str(total.item()))
    return said


@pytest.mark.parametrize("fusion_bytes", [0, 1 << 24], ids=["one_by_one", "fused"])
def test_a_job_goes_on_with_a_new_model_after_an_error_on_all_ranks(
    compressing: Callable[..., Team], fusion_bytes: int
) -> None:
    answers = compressing(2, fusion_bytes=fusion_bytes).run(goes_on_after_an_error)
    expected = [""] * 5 + ["ValueError: a user's mistake"] + [""] * 3 + ["2.0"]
    assert answers == [expected] * 2


def other_steps(rank: int, world: int) -> tuple[str, list[str], list[torch.Tensor]]:
    """Ranks that load states of different steps: the error, what differs, the next gradients."""
    model = DistributedDataParallel(PrescribedGradients(), bucket_cap_mb=SMALL_BUCKETS)
    for step in range(6):
        model.zero_grad()
        model(gradients(rank, step)).backward()
        if step == 4 and rank == 0:
            saved = gflow.state_dict()
    own = saved if rank == 0 else gflow.state_dict()
    refused = message_of(lambda: gflow.load_state_dict(own))
    different = gflow.load_state_dict(own, strict=False).differences
    model.zero_grad()
    model(gradients(rank, 6)).backward()
    return refused, different, take_gradients(model)


def test_ranks_at_different_steps_are_told_so(compressing: Callable[..., Team]) -> None:
    answers = compressing(2).run(other_steps)
    for refused, different, delivered in answers:
        assert "the states are of different steps" in refused, refused
        assert "the states are of different steps" in "; ".join(different)
        # Loaded all the same, the ranks are in step again.
        assert same_bits(delivered, answers[0][2])
