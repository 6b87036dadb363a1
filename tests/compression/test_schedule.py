"""Tests how much is sent in each step: everything exactly at first, then less and less, down to the
density."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gflow
from tests.compression.jobs import (
    PrescribedGradients,
    divided,
    gradients,
    same_bits,
    take_gradients,
)
from tests.ranks import Team

CHUNKS = 100
SIZE = 64 * CHUNKS


def sent_chunks(
    rank: int, world: int, steps: int, find_unused: bool
) -> tuple[list[int], list[bool], list[float]]:
    """For each step: the chunks delivered, whether all is exactly the mean, and the metrics."""
    model = DistributedDataParallel(
        PrescribedGradients((SIZE,)), find_unused_parameters=find_unused
    )
    counts, exact, densities = [], [], []
    for step in range(steps):
        model(gradients(rank, step, (SIZE,))).backward()
        (delivered,) = take_gradients(model)
        counts.append(delivered.view(CHUNKS, 64).any(1).sum().item())
        own = [divided(gradients(peer, step, (SIZE,)), world)[0] for peer in range(world)]
        exact.append(same_bits(delivered, sum(own)))
        densities.append(gflow.metrics().density)
    return counts, exact, densities


def expected(steps: int, warmup: int, ramp: int, density: float) -> list[int]:
    counts = []
    for step in range(steps):
        part = min(1.0, (step - warmup + 1) / ramp) if ramp else 1.0
        fraction = 1.0 if step < warmup else density**part
        counts.append(math.ceil(fraction * CHUNKS - 1e-6))
    return counts


@pytest.mark.parametrize(
    ("warmup", "ramp", "density"), [(2, 0, 0.1), (4, 5, 0.1), (3, 4, 0.015), (2, 3, 1.0)]
)
def test_warm_up_ramp_and_density_follow_each_other(
    compressing: Callable[..., Team], warmup: int, ramp: int, density: float
) -> None:
    steps = warmup + ramp + 4
    team = compressing(2, warmup_steps=warmup, ramp_steps=ramp, density=density)
    # With find_unused_parameters DDP keeps its first buckets, so every step counts.
    (counts, exact, densities), other = team.run(sent_chunks, steps, True)
    assert (counts, exact) == other[:2]
    assert counts == expected(steps, warmup, ramp, density)
    assert all(exact[:warmup])
    # From then on numbers are rounded for the wire.
    assert not any(exact[warmup:])
    for step, measured in enumerate(densities):
        assert math.ceil(measured * CHUNKS - 1e-6) == counts[step]


def test_the_steps_are_counted_from_when_ddp_has_settled(compressing: Callable[..., Team]) -> None:
    for counts, exact, _ in compressing(2).run(sent_chunks, 6, False):
        assert counts == [CHUNKS] * 3 + [CHUNKS // 10] * 3
        assert exact == [True] * 3 + [False] * 3


def test_what_is_switched_off_stays_exact(compressing: Callable[..., Team]) -> None:
    for team in (compressing(2, compress="off"), compressing(2, compress="auto")):
        for counts, exact, _ in team.run(sent_chunks, 6, False):
            assert counts == [CHUNKS] * 6
            assert all(exact)


def a_chunk_larger_than_the_bucket(rank: int, world: int) -> list[bool]:
    model = DistributedDataParallel(PrescribedGradients((100, 7)))
    whole = []
    for step in range(6):
        model(gradients(rank, step, (100, 7))).backward()
        whole.append(all(part.all().item() for part in take_gradients(model)))
    return whole


def test_of_a_bucket_smaller_than_a_chunk_all_is_sent(compressing: Callable[..., Team]) -> None:
    for whole in compressing(2, chunk=32768).run(a_chunk_larger_than_the_bucket):
        assert all(whole)


def chunks_of_one(rank: int, world: int) -> list[int]:
    model = DistributedDataParallel(PrescribedGradients((1000,)))
    counts = []
    for _ in range(6):
        model([torch.arange(1.0, 1001.0)]).backward()
        (delivered,) = take_gradients(model)
        counts.append(int(delivered.count_nonzero()))
    return counts


def test_a_chunk_may_be_one_element(compressing: Callable[..., Team]) -> None:
    for counts in compressing(2, chunk=1, density=0.01).run(chunks_of_one):
        assert counts == [1000] * 3 + [10] * 3
