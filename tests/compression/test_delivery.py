"""Tests that DDP delivers what the method prescribes, step by step: the same chunks, with the same
numbers up to the rounding of the wire."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.compression.jobs import (
    CHUNK,
    DENSITY,
    SIZES,
    SMALL_BUCKETS,
    WARMUP,
    divided,
    gradients,
    same_bits,
    train,
)
from tests.compression.method import Bucket
from tests.ranks import Team

STEPS = 14
LARGE = 1 << 24


def check_against_method(
    world: int, delivered: list[list[torch.Tensor]], layout: list[list[int]], wire: str
) -> list[int]:
    """Compares every step with the method; returns how many chunks each sent."""
    buckets = [
        Bucket(
            world,
            sum(SIZES[index] for index in bucket),
            chunk=CHUNK,
            density=DENSITY,
            warmup=WARMUP,
            wire=wire,
        )
        for bucket in layout
    ]
    sent = []
    # In the first step DDP still has its initial buckets, and everything is exact.
    for step in range(1, len(delivered)):
        sent.append(0)
        own = [divided(gradients(rank, step), world) for rank in range(world)]
        for bucket, indices in zip(buckets, layout, strict=True):
            seen = torch.cat([delivered[step][index] for index in indices])
            given = [torch.cat([one[index] for index in indices]) for one in own]
            expected = bucket.exchange(given, seen)
            nonzero = [index for index, c in enumerate(bucket.chunks) if seen[c].any()]
            assert nonzero == expected.chosen, f"step {step}, parameters {indices}"
            excess = (seen - expected.gradient).abs() - expected.tolerance
            assert excess.max() <= 0, f"step {step}, parameters {indices}: off by {excess.max()}"
            sent[-1] += len(nonzero)
    return sent


@pytest.mark.parametrize("fusion_bytes", [0, LARGE], ids=["one_by_one", "fused"])
@pytest.mark.parametrize("wire", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("world", [2, 3])
def test_every_step_delivers_what_the_method_says(
    compressing: Callable[..., Team], world: int, wire: str, fusion_bytes: int
) -> None:
    team = compressing(world, wire=wire, fusion_bytes=fusion_bytes)
    records = team.run(train, STEPS, {"bucket_cap_mb": SMALL_BUCKETS})
    layout = records[0].layout
    assert len(layout) == 3
    for record in records:
        assert record.layout == layout
        assert same_bits(record.delivered, records[0].delivered)
    sent = check_against_method(world, records[0].delivered, layout, wire)
    # 24, 11 and 48 chunks in three buckets: a tenth of each, rounded up.
    assert sent[WARMUP:] == [3 + 2 + 5] * (STEPS - 1 - WARMUP)


def test_one_large_bucket_is_one_choice(compressing: Callable[..., Team]) -> None:
    records = compressing(2).run(train, STEPS)
    assert [sorted(bucket) for bucket in records[0].layout] == [[0, 1, 2, 3, 4]]
    sent = check_against_method(2, records[0].delivered, records[0].layout, "fp16")
    assert sent[WARMUP:] == [9] * (STEPS - 1 - WARMUP)  # of 83


def test_the_first_steps_are_exact(compressing: Callable[..., Team]) -> None:
    for record in compressing(2).run(train, WARMUP + 1):
        for step, delivered in enumerate(record.delivered):
            own = [divided(gradients(rank, step), 2) for rank in range(2)]
            mean = [a + b for a, b in zip(*own, strict=True)]
            assert same_bits(delivered, mean)
