"""Tests that audits tell the truth: what a certificate says is what this test computes itself, from
what was delivered and from exact gradients, which it knows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gflow
from tests.compression.jobs import (
    EVERY_FAMILY,
    SMALL_BUCKETS,
    Listener,
    PrescribedGradients,
    gradients,
    layout_of,
    options_of,
    sum_of_step,
    take_gradients,
)
from tests.ranks import Team

AUDIT_STEPS = 10
# The bucket's second audit ends with its eighteenth step.
STEPS = 20


def warnings_of_noise(listener: Listener) -> list[str]:
    return [text for _, text in listener.heard if "noise" in text]


def train(
    rank: int, world: int, steps: int, ddp_options: dict[str, Any], chosen: str, opposed: float
) -> dict[str, Any]:
    """A training with audits.

    Args:
        rank, world: of the group.
        steps: how many.
        ddp_options: of DDP.
        chosen: what "auto" stands for from the start; nothing to leave that to it.
        opposed: the first two ranks add so many times the same to their gradients, with opposite
            signs, so that the sum is much smaller than what each of them sends.
    """
    with Listener() as listener:
        model = DistributedDataParallel(PrescribedGradients(), **ddp_options)
        if chosen:
            gflow.load_state_dict(gflow.state_dict() | {"chosen_method": chosen})
        delivered, certificates = [], []
        for step in range(steps):
            given = gradients(rank, step)
            if opposed and rank < 2:
                common = gradients(17, step)
                sign = opposed if rank == 0 else -opposed
                given = [own + sign * more for own, more in zip(given, common, strict=True)]
            model(given).backward()
            delivered.append(take_gradients(model))
            found = gflow.metrics().certificate
            certificates.append(None if found is None else vars(found))
        if opposed and rank == 0 and certificates[-1] is not None:
            # A thread brings the records of the engine.
            deadline = time.monotonic() + 30
            while len(warnings_of_noise(listener)) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
        (bucket, *_) = gflow.state_dict(models=[model])["models"][0]["buckets"]
        return {
            "delivered": delivered,
            "certificates": certificates,
            "layout": layout_of(model)[0],
            "shard": bucket["shard"],
            "warnings": warnings_of_noise(listener),
        }


def expected(found: dict[str, Any], certificate: dict[str, Any], world: int) -> dict[str, float]:
    """What a certificate should say of the only bucket, from its own steps on."""
    first = certificate["step"] + found["ahead"]
    start, end = found["shard"]

    def shard_of(parameters: list[torch.Tensor]) -> torch.Tensor:
        whole = torch.cat([parameters[index].double() for index in found["layout"]])
        return whole[start:end]

    steps = range(first, first + certificate["steps"])
    came = torch.stack([shard_of(found["delivered"][step]) for step in steps])
    exact = torch.stack([shard_of(sum_of_step(world, step)) for step in steps])

    def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
        return ((one * other).sum() / (one.norm() * other.norm())).item()

    error = ((came - exact).norm() / exact.norm()).item()
    window_error = ((came - exact).sum(0).norm() / exact.sum(0).norm()).item()
    return {
        "cosine": cosine(came, exact),
        "relative_error": error,
        "noise": error**2,
        "window_cosine": cosine(came.sum(0), exact.sum(0)),
        "window_relative_error": window_error,
    }


def check(found: dict[str, Any], method: str, world: int, ahead: int) -> None:
    """Both audits of the only bucket. The job is `ahead` of it by so many steps."""
    found = found | {"ahead": ahead}
    certificates = found["certificates"]
    # Nothing is audited while it is exact, and nothing is said before the audit has ended.
    assert all(one is None for one in certificates[: 7 + ahead])
    told = [one for one in certificates if one is not None]
    first, last = told[0], told[-1]
    assert [(one["step"], one["steps"]) for one in (first, last)] == [(2, 6), (10, 8)]
    for certificate in (first, last):
        assert certificate["method"] == method
        numbers = expected(found, certificate, world)
        told_numbers = {name: certificate[name] for name in numbers}
        assert told_numbers == pytest.approx(numbers, rel=1e-3, abs=1e-6)
        assert 0 < certificate["noise"] < 3
        assert certificate["cosine"] <= 1
        # What was missing in one step has come in a later one.
        assert certificate["window_relative_error"] < certificate["relative_error"]
        assert certificate["window_cosine"] > certificate["cosine"]
    # With few levels, gradients as uneven as these may be worth a warning.
    if method in ("fp16", "int8"):
        assert found["warnings"] == []


@pytest.mark.parametrize("where", ["ab", "aabb"])
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_a_certificate_says_what_is_true(
    compressing: Callable[..., Team], family: str, where: str
) -> None:
    options = options_of(family)
    team = compressing(where, audit_steps=AUDIT_STEPS, **options)
    for found in team.run(train, STEPS, {}, "", 0.0):
        check(found, options["method"], len(where), ahead=1)


@pytest.mark.parametrize("chosen", ["fp16", "int8", "int3"])
def test_a_certificate_says_what_auto_stands_for(
    compressing: Callable[..., Team], chosen: str
) -> None:
    team = compressing("ab", audit_steps=AUDIT_STEPS, method="auto")
    for found in team.run(train, STEPS, {}, chosen, 0.0):
        # Loading a state has laid out the buckets before the first step.
        check(found, chosen, 2, ahead=0)


@pytest.mark.parametrize(
    "options",
    [
        {"method": "exact"},
        {"method": "fp32"},
        {"method": "int3", "audit_steps": 0},
        {"method": "int3", "warmup_steps": STEPS},
        {"method": "int3", "compress": "off"},
        # It measures for 20 steps before it chooses.
        {"method": "auto"},
    ],
    ids=str,
)
def test_nothing_is_certified_while_gradients_are_exact_or_audits_are_off(
    compressing: Callable[..., Team], options: dict[str, Any]
) -> None:
    team = compressing(2, **({"audit_steps": AUDIT_STEPS} | options))
    for found in team.run(train, STEPS, {}, "", 1e4):
        assert found["certificates"] == [None] * STEPS
        assert found["warnings"] == []


def test_a_rank_that_carries_nothing_has_nothing_to_certify(
    compressing: Callable[..., Team],
) -> None:
    team = compressing("aab", audit_steps=AUDIT_STEPS, method="int3")
    carriers = [found["certificates"][-1] for found in team.run(train, STEPS, {}, "", 0.0)]
    assert [one is not None for one in carriers] == [True, False, True]


def test_buckets_take_turns(compressing: Callable[..., Team]) -> None:
    team = compressing(2, audit_steps=AUDIT_STEPS, method="int3")
    small = {"bucket_cap_mb": SMALL_BUCKETS}
    for found in team.run(train, 4 * AUDIT_STEPS, small, "", 0.0):
        buckets = [one["bucket"] for one in found["certificates"] if one is not None]
        in_turn = list(dict.fromkeys(buckets))
        assert len(in_turn) == 3
        assert buckets[-1] == in_turn[0]


@pytest.mark.parametrize("family", ["fp16", "int8", "int4", "int3", "quinary", "ternary-adam"])
def test_rank_0_warns_of_noise_that_is_not_expected_of_the_method(
    compressing: Callable[..., Team], family: str
) -> None:
    options = options_of(family)
    team = compressing(2, audit_steps=AUDIT_STEPS, **options)
    first, *others = team.run(train, STEPS, {}, "", 1e4)
    assert first["certificates"][-1]["noise"] > 1
    for text in first["warnings"]:
        for words in ("more noise", f"sent as {options['method']}", "GFLOW_METHOD=fp16"):
            assert words in text, text
    # One for each audit.
    assert len(first["warnings"]) == 2
    assert all(other["warnings"] == [] for other in others)
