"""Tests that residuals follow a GradScaler: its scale, and the steps it skips."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gflow
from tests.compression.jobs import (
    EVERY_FAMILY,
    FAMILIES,
    LOSSLESS,
    SMALL_BUCKETS,
    PrescribedGradients,
    everything_kept,
    gradients,
    options_of,
    residuals,
    same_bits,
)
from tests.ranks import Team

BAD_STEP = 8


def train(
    rank: int, world: int, place: tuple[int, int], momentum: float, steps: int = 14
) -> dict[str, Any]:
    """Trains with a scaler that grows every second step; one step has a non-finite element."""
    model = DistributedDataParallel(PrescribedGradients(), bucket_cap_mb=SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    if momentum:
        assert gflow.take_momentum(optimizer)
    scaler = gflow.watch_scaler(torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2))
    seen: dict[str, Any] = {"scales": [], "weights": []}
    for step in range(steps):
        optimizer.zero_grad()
        given = gradients(rank, step)
        if step == BAD_STEP and rank == 1:
            given[place[0]][place[1]] = float("inf")
        if step == BAD_STEP:
            before = gflow.state_dict()
        scaler.scale(model(given)).backward()
        if step == BAD_STEP - 1:
            seen["grown"] = (gflow.state_dict(), scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        seen["scales"].append(scaler.get_scale())
        seen["weights"].append([p.detach().clone() for p in model.parameters()])
        if step == BAD_STEP - 1:
            seen["grown"] += (gflow.state_dict(), scaler.get_scale())
        if step == BAD_STEP:
            seen["skipped"] = (before, gflow.state_dict())
    return seen


@pytest.mark.parametrize("momentum", [0.0, 0.9], ids=["plain", "momentum"])
@pytest.mark.parametrize("place", [(0, 5), (4, 3)], ids=["last_bucket", "first_bucket"])
@pytest.mark.parametrize(
    ("where", "fusion_bytes", "family"),
    [
        *(("ab", 0, family) for family in FAMILIES),
        ("abc", 1 << 24, "chunks"),
        ("abc", 1 << 24, "int3"),
        ("aabb", 0, "chunks"),
        ("aab", 0, "chunks"),
    ],
)
def test_a_skipped_step_leaves_what_is_kept_as_it_was_to_the_bit(
    compressing: Callable[..., Team],
    where: str,
    fusion_bytes: int,
    family: str,
    place: tuple[int, int],
    momentum: float,
) -> None:
    team = compressing(where, fusion_bytes=fusion_bytes, **options_of(family))
    for answer in team.run(train, place, momentum):
        before, after = answer["skipped"]
        assert answer["scales"][BAD_STEP] == answer["scales"][BAD_STEP - 1] / 2
        assert same_bits(answer["weights"][BAD_STEP], answer["weights"][BAD_STEP - 1])
        # The scale has halved, and so has the residual, exactly: a power of two.
        assert same_bits([one * 0.5 for one in everything_kept(before)], everything_kept(after))
        # Training continues.
        assert not same_bits(answer["weights"][-1], answer["weights"][BAD_STEP])


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_a_new_scale_rescales_what_is_kept_exactly(
    compressing: Callable[..., Team], family: str
) -> None:
    for answer in compressing(2, **options_of(family)).run(train, (0, 5), 0.9):
        before, scale, after, new_scale = answer["grown"]
        assert new_scale == 2 * scale
        buckets = before["models"][0]["buckets"]
        assert all(bucket[kind].any() for bucket in buckets for kind in ("residual", "velocity"))
        if family in ("int3", "ternary-adam"):
            assert all(bucket["sizes"].any() for bucket in buckets)
        assert same_bits([one * 2 for one in everything_kept(before)], everything_kept(after))


def total(rank: int, world: int, steps: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Everything subtracted from the weights, and what is still kept, unscaled."""
    model = DistributedDataParallel(PrescribedGradients(), bucket_cap_mb=SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = gflow.watch_scaler(torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3))
    for step in range(steps):
        optimizer.zero_grad()
        given = gradients(rank, step)
        if step in (5, 9):
            given[2][0] = float("nan")
        scaler.scale(model(given)).backward()
        scaler.step(optimizer)
        scaler.update()
    weights = [-p.detach() for p in model.parameters()]
    saved = gflow.state_dict()["models"][0]["buckets"]
    left = {}
    for bucket in saved:
        numels = [model.module.weights[n].numel() for n in bucket["parameters"]]
        parts = bucket["residual"].split(numels)
        left |= dict(zip(bucket["parameters"], parts, strict=True))
    return weights, [left[index] / scaler.get_scale() for index in range(len(weights))]


@pytest.mark.parametrize("family", LOSSLESS)
def test_with_a_changing_scale_and_skipped_steps_nothing_is_lost(
    compressing: Callable[..., Team], family: str
) -> None:
    steps, team = 14, compressing(2, **options_of(family))
    (weights, left), (_, other_left) = team.run(total, steps)
    for index, weight in enumerate(weights):
        # Nobody uses a skipped step's gradients.
        used = [step for step in range(steps) if step not in (5, 9)]
        own = sum(gradients(rank, step)[index].double() / 2 for step in used for rank in range(2))
        found = weight.double() + left[index].double() + other_left[index].double()
        assert (found - own).abs().max() <= 4e-6 * own.abs().max()


def watch_twice_or_wrongly(rank: int, world: int) -> list[str]:
    scaler = torch.amp.GradScaler("cpu")
    assert gflow.watch_scaler(scaler) is scaler
    messages = []
    for wrong in (scaler, "scaler"):
        try:
            gflow.watch_scaler(wrong)
        except (RuntimeError, TypeError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    switched_off = torch.amp.GradScaler("cpu", enabled=False)
    assert gflow.watch_scaler(switched_off) is switched_off
    assert gflow.watch_scaler(switched_off) is switched_off
    return messages


def test_a_scaler_is_watched_once(compressing: Callable[..., Team]) -> None:
    for twice, wrong in compressing(2).run(watch_twice_or_wrongly):
        assert twice == "RuntimeError: gflow.watch_scaler: this scaler is watched already"
        assert wrong == "TypeError: gflow.watch_scaler: expected a GradScaler, got str"


def a_scale_that_the_user_sets(rank: int, world: int) -> list[list[torch.Tensor]]:
    model = DistributedDataParallel(PrescribedGradients())
    scaler = gflow.watch_scaler(torch.amp.GradScaler("cpu", init_scale=64.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(model(gradients(rank, step))).backward()
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()
    scaler.scale(model(gradients(rank, 6))).backward()
    scaler.step(optimizer)
    before = residuals(gflow.state_dict())
    scaler.update(16.0)
    return [before, residuals(gflow.state_dict())]


def test_a_smaller_scale_that_the_user_sets_is_no_skipped_step(
    compressing: Callable[..., Team],
) -> None:
    for before, after in compressing(2).run(a_scale_that_the_user_sets):
        assert same_bits([one * 0.25 for one in before], after)


def skip_in_the_warm_up(rank: int, world: int) -> tuple[Any, Any, float]:
    model = DistributedDataParallel(PrescribedGradients(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert gflow.take_momentum(optimizer)
    scaler = gflow.watch_scaler(torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000))
    for step in range(6):
        if step == 5:
            before = gflow.state_dict()
        optimizer.zero_grad()
        given = gradients(rank, step)
        if step == 5 and rank == 1:
            given[0][5] = float("inf")
        scaler.scale(model(given)).backward()
        scaler.step(optimizer)
        scaler.update()
    return before, gflow.state_dict(), scaler.get_scale()


@pytest.mark.parametrize("where", ["ab", "aabb"])
def test_a_step_that_is_skipped_in_the_warm_up_leaves_the_velocity_as_it_was(
    compressing: Callable[..., Team], where: str
) -> None:
    for before, after, scale in compressing(where, warmup_steps=20).run(skip_in_the_warm_up):
        assert scale == 32.0
        assert any(one.any() for one in everything_kept(before))
        assert same_bits([one * 0.5 for one in everything_kept(before)], everything_kept(after))


def accumulate_two_passes(rank: int, world: int, bad: int) -> tuple[Any, Any, float]:
    """Two exchanged backward passes per step; in the last step one is not finite."""
    model = DistributedDataParallel(PrescribedGradients(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = gflow.watch_scaler(torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000))
    for step in range(6):
        if step == 5:
            before = gflow.state_dict()
        optimizer.zero_grad()
        for part in range(2):
            given = gradients(rank, 2 * step + part)
            if step == 5 and part == bad and rank == 1:
                given[0][5] = float("inf")
            scaler.scale(model(given)).backward()
        scaler.step(optimizer)
        scaler.update()
    return before, gflow.state_dict(), scaler.get_scale()


@pytest.mark.parametrize("bad", [0, 1], ids=["the_first_is_bad", "the_second_is_bad"])
def test_a_skipped_step_of_two_backward_passes_is_undone_whole(
    compressing: Callable[..., Team], bad: int
) -> None:
    for before, after, scale in compressing(2).run(accumulate_two_passes, bad):
        assert scale == 32.0
        assert same_bits([one * 0.5 for one in everything_kept(before)], everything_kept(after))
