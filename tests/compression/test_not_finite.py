"""Tests that infinity and NaN reach every rank in the step they occur in, and never stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gflow
from tests.compression.jobs import (
    FAMILIES,
    SIZES,
    SMALL_BUCKETS,
    PrescribedGradients,
    everything_kept,
    gradients,
    kept,
    layout_of,
    options_of,
    own_sum,
    residuals,
    same_bits,
    take_gradients,
)
from tests.ranks import Team

BAD_STEP = 6
STEPS = 16


def train_with_one_bad_element(
    rank: int,
    world: int,
    bad_rank: int,
    place: tuple[int, int],
    value: float,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    plain = PrescribedGradients(dtype=dtype)
    model = DistributedDataParallel(plain, bucket_cap_mb=SMALL_BUCKETS)
    delivered, states = [], []
    for step in range(STEPS):
        given = gradients(rank, step, dtype=dtype)
        if step == BAD_STEP and rank == bad_rank:
            given[place[0]][place[1]] = value
        model(given).backward()
        delivered.append(take_gradients(model))
        if step == BAD_STEP:
            states.append(gflow.state_dict(models=[model]))
    return {
        "delivered": delivered,
        "states": states,
        "end": gflow.state_dict(models=[model]),
        "layout": layout_of(model),
    }


# The first and the last element of the model, the middle of a large one, and a small parameter.
PLACES = [(0, 0), (0, 1555), (4, 9), (1, 30)]


VALUES = [float("inf"), float("-inf"), float("nan"), float("nan")]


TYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize(
    ("where", "fusion_bytes", "family", "dtype"),
    [
        *(("ab", 0, family, dtype) for family in FAMILIES for dtype in TYPES),
        *(("aab", 1 << 24, family, torch.float32) for family in FAMILIES),
        ("abc", 1 << 24, "chunks", torch.float32),
        ("aabb", 0, "chunks", torch.float32),
    ],
    ids=str,
)
def test_it_reaches_every_rank_at_once_and_never_stays(
    compressing: Callable[..., Team],
    where: str,
    fusion_bytes: int,
    family: str,
    dtype: torch.dtype,
) -> None:
    team = compressing(where, {"kept": True}, fusion_bytes=fusion_bytes, **options_of(family))
    # A chunk, or a block.
    most = 64 if family in ("chunks", "fp16") else 640
    for number, (place, value) in enumerate(zip(PLACES, VALUES, strict=True)):
        bad_rank = (number + 1) % len(where)
        answers = team.run(train_with_one_bad_element, bad_rank, place, value, dtype)
        for answer in answers:
            assert same_bits(answer["delivered"], answers[0]["delivered"])
            for step, delivered in enumerate(answer["delivered"]):
                finite = [bool(part.isfinite().all()) for part in delivered]
                if step != BAD_STEP:
                    assert all(finite), f"step {step}"
                else:
                    bad = delivered[place[0]]
                    assert not bad[place[1]].isfinite()
                    # That part and nothing else.
                    assert sum(int((~part.isfinite()).sum()) for part in delivered) <= most
            for state in (*answer["states"], answer["end"]):
                assert all(bool(one.isfinite().all()) for one in everything_kept(state))


def test_only_the_gradient_of_the_bad_chunk_is_given_up(compressing: Callable[..., Team]) -> None:
    place = (0, 1555)
    answers = compressing("ab").run(train_with_one_bad_element, 1, place, float("nan"))
    total = own_sum(2, STEPS)
    left = kept([answer["end"] for answer in answers])
    for index, numel in enumerate(SIZES):
        delivered = sum(
            step[index].nan_to_num(nan=0.0).double() for step in answers[0]["delivered"]
        )
        missing = delivered + left[f"weights.{index}"] - total[index]
        wrong = missing.abs() > 2e-6 * total[index].abs().max()
        if index != place[0]:
            assert not wrong.any()
            continue
        # All that is missing there is the gradient of that one step of that one rank.
        bad = answers[0]["delivered"][BAD_STEP][index].isnan()
        assert bad[place[1]]
        assert int(bad.sum()) <= 64
        assert not (wrong & ~bad).any()
        lost = (gradients(1, BAD_STEP)[index] / 2).double()
        assert (missing + lost)[bad].abs().max() <= 2e-6 * total[index].abs().max()
        assert numel == 3000


def everything_is_bad(rank: int, world: int) -> list[list[bool]]:
    model = DistributedDataParallel(PrescribedGradients())
    finite = []
    for step in range(7):
        given = gradients(rank, step)
        if step in (0, 2, 4):
            given = [torch.full_like(one, float("nan")) for one in given]
        model(given).backward()
        finite.append([bool(part.isfinite().any()) for part in take_gradients(model)])
    return finite


def test_a_step_in_which_nothing_is_finite_delivers_nothing_finite(
    compressing: Callable[..., Team],
) -> None:
    for finite in compressing(2).run(everything_is_bad):
        assert [any(step) for step in finite] == [False, True, False, True, False, True, True]


def too_large_together(rank: int, world: int) -> list[Any]:
    """Finite gradients whose sum with the residual is not finite."""
    model = DistributedDataParallel(PrescribedGradients((128,)))
    delivered = []
    for _ in range(9):
        # The second chunk weighs less, so it is kept and grows.
        given = torch.cat([torch.full((64,), 3.0e38), torch.full((64,), 1.5e38)])
        model([given]).backward()
        delivered.append(take_gradients(model)[0])
    return [delivered, residuals(gflow.state_dict())]


def test_a_residual_never_becomes_infinite(compressing: Callable[..., Team]) -> None:
    answers = compressing(2, density=0.5).run(too_large_together)
    for delivered, left in answers:
        assert same_bits(delivered, answers[0][0])
        assert all(residual.isfinite().all() for residual in left)


def half_precision_that_waits(rank: int, world: int) -> Any:
    """Ten chunks of equal weight; each step sends one."""
    model = DistributedDataParallel(PrescribedGradients((640,), torch.float16))
    delivered = []
    for _ in range(16):
        model([torch.full((640,), 20000.0, dtype=torch.float16)]).backward()
        delivered.append(take_gradients(model)[0])
    return delivered, gflow.state_dict()


def test_finite_gradients_of_half_precision_never_become_infinite_by_waiting(
    compressing: Callable[..., Team],
) -> None:
    answers = compressing(2).run(half_precision_that_waits)
    for delivered, _ in answers:
        assert all(bool(one.isfinite().all()) for one in delivered)
    left = kept([state for _, state in answers])["weights.0"]
    total = sum(one.double() for one in answers[0][0]) + left
    assert (total - 16 * 20000).abs().max() <= 16 * 20000 * 2e-3
