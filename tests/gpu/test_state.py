"""Tests that gradient state on the device is saved, loaded, rescaled and counted as on the CPU."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gflow
from tests.compression.jobs import CHUNK, SIZES
from tests.gpu import jobs
from tests.gpu.jobs import CPU, NAME, delivered_by, given_on, model_on, same_bits
from tests.ranks import Team

STEPS, HALF, BAD = 10, 5, 7
#: What does not depend on the order in which NCCL sums.
METHODS = pytest.mark.parametrize("options", [{"wire": "fp32"}, {"method": "int3"}], ids=str)


@jobs.clean
def go_on(rank: int, world: int, device: str, interrupted: bool) -> Any:
    """Trains without interruption, or saves halfway and resumes with a new model."""
    model = model_on(device)
    for step in range(STEPS):
        if interrupted and step == HALF:
            file = io.BytesIO()
            torch.save(gflow.state_dict(), file)
            del model
            model = model_on(device)
            file.seek(0)
            loaded = gflow.load_state_dict(torch.load(file))
            assert not loaded.differences, loaded
        model.zero_grad()
        model(given_on(device, rank, step)).backward()
    return delivered_by(model), gflow.state_dict()


@METHODS
def test_a_training_goes_on_from_a_saved_state(
    on_device: Callable[..., Team], options: dict[str, str]
) -> None:
    team = on_device(2, **options)
    expected = team.run(go_on, NAME, False)
    assert same_bits(team.run(go_on, NAME, True), expected)
    assert same_bits(team.run(go_on, CPU, False), expected)


@METHODS
def test_a_state_of_the_cpu_is_one_of_the_device(
    on_device: Callable[..., Team], options: dict[str, str]
) -> None:
    team = on_device(2, **options)
    assert same_bits(team.run(move, CPU, NAME), team.run(move, NAME, NAME))


@jobs.clean
def move(rank: int, world: int, before: str, after: str) -> Any:
    """Half of the steps on one device, the others on another."""
    state: dict[str, Any] = {}
    for first, device in ((0, before), (HALF, after)):
        model = model_on(device)
        if state:
            gflow.load_state_dict(state)
        for step in range(first, first + HALF):
            model.zero_grad()
            model(given_on(device, rank, step)).backward()
        state = gflow.state_dict()
        delivered = delivered_by(model)
        del model
    return delivered, state


@jobs.clean
def scaled(rank: int, world: int, device: str) -> Any:
    """A scaler that grows, and a step with infinity in it, which is skipped."""
    model = model_on(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert gflow.take_momentum(optimizer)
    scaler = gflow.watch_scaler(torch.amp.GradScaler(device, init_scale=64.0, growth_interval=2))
    scales, states = [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        given = given_on(device, rank, step)
        if step == BAD and rank == 1:
            given[0][5] = float("inf")
        scaler.scale(model(given)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if step in (BAD - 1, BAD, STEPS - 1):
            states[step] = gflow.state_dict()
    return scales, states, jobs.to_host(list(model.parameters()))


@METHODS
def test_a_scaler_is_followed(on_device: Callable[..., Team], options: dict[str, str]) -> None:
    team = on_device(2, **options)
    came = team.run(scaled, NAME)
    assert same_bits(came, team.run(scaled, CPU))
    for scales, states, _ in came:
        assert scales[BAD] == scales[BAD - 1] / 2
        before, after = (
            [bucket["residual"] for bucket in states[step]["models"][0]["buckets"]]
            for step in (BAD - 1, BAD)
        )
        # A skipped step's gradients go back into the residual, in units of the new scale.
        assert same_bits(after, [residual * 0.5 for residual in before])


@jobs.clean
def counted(rank: int, world: int, device: str) -> Any:
    model = model_on(device)
    for step in range(STEPS):
        model.zero_grad()
        model(given_on(device, rank, step)).backward()
    metrics = gflow.metrics()
    buckets = [
        (one.steps, one.gradient_bytes, one.carried_bytes, one.density) for one in metrics.buckets
    ]
    sent = [one.wire_bytes for one in metrics.buckets]
    return buckets, metrics.gradient_buckets, metrics.gradient_bytes, metrics.compresses, sent


def test_the_counters_are_those_of_the_cpu(on_device: Callable[..., Team]) -> None:
    team = on_device(2, wire="fp32")
    on_devices, on_cpus = team.run(counted, NAME), team.run(counted, CPU)
    for (*came, sent), (*expected, least) in zip(on_devices, on_cpus, strict=True):
        assert came == expected
        assert came[1:] == [1 + 3 * (STEPS - 1), STEPS * 4 * sum(SIZES), True]
        # On the device, a bucket's short last chunk is padded to a full one.
        padding = STEPS * CHUNK * 4
        assert all(0 <= one - other <= padding for one, other in zip(sent, least, strict=True))
