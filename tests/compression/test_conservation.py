"""Tests that nothing is lost but what a codec says: on every layout of hosts, what was delivered
plus what the ranks still keep is everything they ever had, or all but the part that the codec lets
go of."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.compression.jobs import (
    EVERY_FAMILY,
    FEEDBACK,
    SIZES,
    SMALL_BUCKETS,
    Record,
    kept,
    options_of,
    own_sum,
    same_bits,
    sum_of_step,
    train,
)
from tests.ranks import Team

STEPS = 16


def check_that_nothing_is_lost(
    records: list[Any], world: int, steps: int, tolerance: float = 2e-6, **own: Any
) -> None:
    left = kept([record.state for record in records])
    total = own_sum(world, steps, **own)
    assert sorted(left) == [f"weights.{index}" for index in range(len(total))]
    for index in range(len(total)):
        name, residual = f"weights.{index}", left[f"weights.{index}"]
        delivered = sum(step[index].double() for step in records[0].delivered)
        scale = total[index].abs().max()
        assert (delivered + residual - total[index]).abs().max() <= tolerance * scale, name
    # Otherwise this would prove nothing.
    assert sum(residual.abs().sum() for residual in left.values()) > 0


def check_every_step(
    records: list[Record],
    family: str,
    came: Callable[[int], list[torch.Tensor | None]],
    tolerance: float = 2e-6,
) -> None:
    """That all ranks got the same; and that in every step, what arrived and what is kept after it
    are what came in from all ranks, and the codec's part of what was kept before. Where nothing
    came (None), what is kept stays."""
    delivered = max((record.delivered for record in records), key=len)
    assert all(same_bits(one.delivered, delivered[: len(one.delivered)]) for one in records)
    before: dict[str, torch.Tensor] = {}
    for step, states in enumerate(zip(*(record.states for record in records), strict=True)):
        after = kept(list(states))
        for index, gradient in enumerate(came(step)):
            name = f"weights.{index}"
            due, arrived = before.get(name, torch.zeros(())), delivered[step][index].double()
            if gradient is not None:
                due = gradient + FEEDBACK[family] * due
            off = (arrived + after.get(name, torch.zeros(())) - due).abs().max()
            assert off <= tolerance * due.abs().max(), (step, name)
        before = after
    # Otherwise this would prove nothing.
    assert sum(residual.abs().sum() for residual in before.values()) > 0


@pytest.mark.parametrize("where", ["ab", "aab", pytest.param("aabb", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_every_step_loses_only_what_the_codec_says(
    compressing: Callable[..., Team], family: str, where: str
) -> None:
    team = compressing(where, **options_of(family))
    records = team.run(train, STEPS, {"bucket_cap_mb": SMALL_BUCKETS})
    check_every_step(records, family, partial(sum_of_step, len(where)))


@pytest.mark.parametrize(
    ("wire", "fusion_bytes"),
    [("fp16", 0), ("fp16", 1 << 24), ("bf16", 1 << 24)],
    ids=["one_by_one", "fused", "bf16"],
)
@pytest.mark.parametrize("where", ["ab", "abc", "aabb", "aab", "abb", "abab"])
def test_what_was_not_delivered_is_kept(
    compressing: Callable[..., Team], where: str, wire: str, fusion_bytes: int
) -> None:
    team = compressing(where, wire=wire, fusion_bytes=fusion_bytes)
    records = team.run(train, STEPS, {"bucket_cap_mb": SMALL_BUCKETS})
    for record in records:
        assert same_bits(record.delivered, records[0].delivered)
        assert record.layout == records[0].layout
    check_that_nothing_is_lost(records, len(where), STEPS)


def sizes_of_shards(records: list[Any]) -> list[int]:
    buckets = [record.state["models"][0]["buckets"] for record in records]
    return [sum(bucket["residual"].numel() for bucket in mine) for mine in buckets]


def test_ranks_of_a_host_share_what_is_kept_between_them(compressing: Callable[..., Team]) -> None:
    records = compressing("aabb").run(train, 6)
    shards = sizes_of_shards(records)
    assert shards[0] + shards[1] == sum(SIZES)
    assert shards[:2] == shards[2:]
    assert abs(shards[0] - shards[1]) <= 16


def test_of_uneven_hosts_as_many_ranks_carry_as_the_smallest_has(
    compressing: Callable[..., Team],
) -> None:
    assert sizes_of_shards(compressing("aab").run(train, 6)) == [sum(SIZES), 0, sum(SIZES)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_no_more_is_lost_of_gradients_of_16_bits(
    compressing: Callable[..., Team], family: str, dtype: torch.dtype
) -> None:
    records = compressing(2, **options_of(family)).run(train, STEPS, {}, SIZES, dtype)
    # Exact delivery rounds to the type of the gradient; nothing else is lost.
    tolerance = 8 * torch.finfo(dtype).eps
    check_every_step(records, family, partial(sum_of_step, 2, dtype=dtype), tolerance)


def test_numbers_of_every_size_arrive(compressing: Callable[..., Team]) -> None:
    records = compressing(2).run(train_sizes)
    for index in range(3):
        left = kept([record.state for record in records])[f"weights.{index}"]
        delivered = sum(step[index].double() for step in records[0].delivered)
        total = records[0].layout[index] * 12 * torch.ones(64, dtype=torch.float64)
        assert (delivered + left - total).abs().max() <= 1e-6 * total[0].abs()
        # Every chunk gets its turn. In fp16 without a scale these would be zero or infinite.
        assert delivered.abs().max() >= 0.5 * total[0].abs()


LARGE_AND_SMALL = (3e-12, 1.0, 2e7)


def train_sizes(rank: int, world: int) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    import gflow
    from tests.compression.jobs import PrescribedGradients, take_gradients

    sizes = (64, 64, 64)
    # Separate buckets, or the large ones would always win.
    model = DistributedDataParallel(PrescribedGradients(sizes), bucket_cap_mb=0.0001)
    record = Record()
    for _ in range(12):
        model([torch.full((64,), size) for size in LARGE_AND_SMALL]).backward()
        record.delivered.append(take_gradients(model))
    record.layout, record.state = list(LARGE_AND_SMALL), gflow.state_dict()
    return record
