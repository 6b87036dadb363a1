"""Tests that the counters match what was done, and that the user is told once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gflow
from tests.compression.jobs import Listener, PrescribedGradients, gradients
from tests.ranks import Team

SIZES = (64_000, 6_400)
BYTES = 4 * sum(SIZES)
STEPS = 8


def counted(rank: int, world: int, steps: int) -> list[dict[str, Any]]:
    """The counters after each step."""
    model = DistributedDataParallel(PrescribedGradients(SIZES), find_unused_parameters=True)
    snapshots = []
    for step in range(steps):
        model.zero_grad()
        model(gradients(rank, step, SIZES)).backward()
        now = gflow.metrics()
        snapshots.append(vars(now) | {"density": now.density, "ratio": now.ratio})
    return snapshots


@pytest.mark.parametrize(("wire", "bytes_each"), [("fp16", 2), ("fp32", 4)])
@pytest.mark.parametrize(("where", "world"), [("ab", 2), ("abc", 3), ("aabb", 4)])
def test_bytes_are_those_of_the_density_and_the_wire(
    compressing: Callable[..., Team], where: str, world: int, wire: str, bytes_each: int
) -> None:
    hosts = len(set(where))
    carriers = world // hosts
    for snapshots in compressing(where, wire=wire).run(counted, STEPS):
        last, before = snapshots[-1], snapshots[-2]
        assert last["hosts"] == hosts
        assert last["ranks_here"] == carriers
        assert last["compresses"]
        assert last["gradient_bytes"] == STEPS * BYTES
        assert last["carried_bytes"] == STEPS * BYTES // carriers
        # A ring sends all but one of the shard's parts twice; there is one part per host.
        ring = 2 * (hosts - 1) / hosts
        exact = snapshots[1]["wire_bytes"] - snapshots[0]["wire_bytes"]
        assert exact == pytest.approx(ring * BYTES / carriers, rel=0.02)
        sparse = last["wire_bytes"] - before["wire_bytes"]
        chosen = 0.1 * BYTES / carriers / 4 * bytes_each
        norms = (hosts - 1) * (BYTES / carriers / 256) * 4
        assert sparse == pytest.approx(ring * chosen + norms, rel=0.05)
        assert last["ratio"] == pytest.approx(
            ring * last["carried_bytes"] / last["wire_bytes"], rel=1e-6
        )


def test_what_is_counted_makes_sense(compressing: Callable[..., Team]) -> None:
    for snapshots in compressing(2).run(counted, STEPS):
        assert [snapshot["density"] for snapshot in snapshots] == [1.0] * 2 + [0.1] * (STEPS - 2)
        for step, snapshot in enumerate(snapshots):
            (bucket,) = snapshot["buckets"]
            assert bucket.steps == step + 1
            assert bucket.gradient_bytes == bucket.carried_bytes == (step + 1) * BYTES
            assert set(snapshot["stage_seconds"]) == {
                "agree",
                "within_host",
                "accumulate",
                "norms",
                "pack",
                "wire",
                "sum",
                "wait",
                "unpack",
            }
            assert all(seconds >= 0 for seconds in snapshot["stage_seconds"].values())
            assert snapshot["hidden_seconds"] >= 0
            assert snapshot["exposed_seconds"] >= 0
        ratios = [snapshot["buckets"][0].residual_ratio for snapshot in snapshots]
        assert ratios[:2] == [0.0, 0.0]
        # The first time, everything that was not sent is one step old.
        assert 0.5 < ratios[2] < 1.0
        assert ratios[2] < ratios[4] < 10
        for stage in ("accumulate", "norms", "pack", "wire", "unpack"):
            assert snapshots[-1]["stage_seconds"][stage] > 0


def test_where_nothing_is_compressed_nothing_is_claimed(compressing: Callable[..., Team]) -> None:
    for snapshots in compressing(2, compress="off").run(counted, 4):
        assert not snapshots[-1]["compresses"]
        assert (snapshots[-1]["wire_bytes"], snapshots[-1]["ratio"]) == (0, 1.0)
        assert snapshots[-1]["density"] == 1.0
        assert snapshots[-1]["gradient_bytes"] == 4 * BYTES


def listen(rank: int, world: int, steps: list[int]) -> list[list[tuple[int, str]]]:
    """The output after each of several trainings, each with a new model."""
    heard = []
    with Listener() as listener:
        for count in steps:
            model = DistributedDataParallel(PrescribedGradients(SIZES))
            for step in range(count):
                model.zero_grad()
                model(gradients(rank, step, SIZES)).backward()
                dist.all_reduce(torch.ones(3))
            heard.append(list(listener.heard))
    return heard


@pytest.mark.parametrize(
    ("where", "options", "words"),
    [
        ("ab", {}, ["2 hosts", "10%", "fp16", "20x"]),
        ("aab", {"wire": "bf16"}, ["2 hosts", "10%", "bf16"]),
        ("abc", {"density": 0.015, "ramp_steps": 2}, ["3 hosts", "1.5%", "ramp of 2 steps"]),
    ],
)
def test_the_user_is_told_once_what_happens_and_how_to_switch_it_off(
    compressing: Callable[..., Team], where: str, options: dict[str, Any], words: list[str]
) -> None:
    first, *others = compressing(where, **options).run(listen, [3, 6, 6])
    # Nothing while all is exact, one line when compression begins, nothing after that.
    assert [len(heard) for heard in first] == [0, 1, 1]
    level, text = first[-1][0]
    assert level == logging.WARNING
    for word in [*words, "GFLOW_COMPRESS=off", 'gflow.Options(compress="off")']:
        assert word in text, text
    assert all(heard == [[], [], []] for heard in others)


def test_where_nothing_is_compressed_nothing_is_said(compressing: Callable[..., Team]) -> None:
    for heard in compressing(2, compress="off").run(listen, [6]):
        assert heard == [[]]
