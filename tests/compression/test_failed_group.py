"""Tests that what is kept can still be saved after a rank has died in the middle of a step: it is
that of the last complete step, of every bucket."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gflow
from tests.compression.jobs import (
    REPEATED,
    SMALL_BUCKETS,
    PrescribedGradients,
    gradients,
    options_of,
    same_bits,
)
from tests.ranks import Died, Returned, Team

STEPS = 9
BUCKETS = 3


def exchanged() -> int:
    return gflow.metrics().gradient_buckets


def wait_until_exchanged(count: int) -> None:
    deadline = time.monotonic() + 20.0
    while exchanged() < count and time.monotonic() < deadline:
        time.sleep(0.001)


def with_a_rank_that_dies(rank: int, world: int, ddp_options: dict[str, Any]) -> dict[str, Any]:
    """Rank 1 dies when some buckets of a step are exchanged and the last is not."""
    model = DistributedDataParallel(
        PrescribedGradients(), bucket_cap_mb=SMALL_BUCKETS, **ddp_options
    )
    for step in range(STEPS):
        model(gradients(rank, step)).backward()
        model.zero_grad()
    before, count = gflow.state_dict(), exchanged()

    def in_the_last_bucket(gradient: torch.Tensor) -> None:
        # Of the other buckets, the engine completes one when the next is on its way.
        wait_until_exchanged(count + 1)
        if rank == 1:
            os._exit(9)

    model.module.weights[0].register_hook(in_the_last_bucket)
    error = ""
    try:
        model(gradients(rank, STEPS)).backward()
    except RuntimeError as raised:
        error = str(raised)
    return {
        "error": error,
        "went on": exchanged() - count,
        "before": before,
        "after": gflow.state_dict(),
        "again": gflow.state_dict(),
    }


def survivors(team: Team, *arguments: Any) -> list[dict[str, Any]]:
    outcomes = team.outcomes(with_a_rank_that_dies, *arguments)
    assert isinstance(outcomes[1], Died)
    answers = [one for rank, one in enumerate(outcomes) if rank != 1]
    assert all(isinstance(one, Returned) for one in answers), [one.story() for one in answers]
    return [one.value for one in answers if isinstance(one, Returned)]


def steps_of(state: dict[str, Any]) -> list[int]:
    return [bucket["step"] for bucket in state["models"][0]["buckets"]]


@pytest.mark.parametrize("family", REPEATED)
def test_the_state_of_the_last_complete_step_survives_a_rank_that_dies(
    compressing: Callable[..., Team], family: str
) -> None:
    team = compressing(3, **options_of(family), keep_last_step="on", fusion_bytes=0)
    for answer in survivors(team, {}):
        assert "rank 1" in answer["error"]
        # Otherwise nothing would have to be taken back.
        assert 0 < answer["went on"] < BUCKETS
        before, after = answer["before"], answer["after"]
        assert len(set(steps_of(before))) == 1
        assert len(steps_of(before)) == BUCKETS
        assert same_bits(before, after)
        assert same_bits(after, answer["again"])
        assert any(bool(one["residual"].any()) for one in after["models"][0]["buckets"])
