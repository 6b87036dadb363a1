"""Tests that replicas stay bit-identical, and that a training can be repeated to the bit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gflow
from tests.compression.jobs import FAMILIES, FEEDBACK, options_of, same_bits
from tests.ddp.models import WIDTH, batch, loss_of
from tests.ranks import Team

STEPS = 24


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(WIDTH, 60), nn.Tanh(), nn.Linear(60, 50), nn.Tanh(), nn.Linear(50, 3)
    )


def train(rank: int, world: int, optimizer: str) -> dict[str, Any]:
    plain = network()
    model = DistributedDataParallel(plain, bucket_cap_mb=0.004)
    kinds = {
        "SGD": lambda: torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.5),
        "Adam": lambda: torch.optim.Adam(plain.parameters(), lr=0.01),
    }
    steps = kinds[optimizer]()
    losses = []
    for step in range(STEPS):
        steps.zero_grad()
        loss = loss_of(model, batch(rank, step % 4))
        loss.backward()
        steps.step()
        losses.append(loss.item())
    return {
        "weights": dict(plain.state_dict()),
        "losses": losses,
        "sent as": gflow.metrics().method,
    }


ONE_BY_ONE, FUSED = 0, 1 << 24


def cases() -> list[Any]:
    """Chunks on all layouts of hosts, the others on one; in the thorough tests all on all."""
    found = []
    for family in FEEDBACK:
        for where, fusion_bytes in product(["ab", "abc", "aab"], [ONE_BY_ONE, FUSED]):
            is_usual = where == "aab" and fusion_bytes == FUSED and family in FAMILIES
            marks = () if family == "chunks" or is_usual else pytest.mark.thorough
            size = "fused" if fusion_bytes else "one_by_one"
            name = f"{family}-{where}-{size}"
            found.append(pytest.param(family, where, fusion_bytes, id=name, marks=marks))
    return found


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize(("family", "where", "fusion_bytes"), cases())
def test_replicas_are_the_same_and_runs_repeat(
    compressing: Callable[..., Team], family: str, where: str, fusion_bytes: int, optimizer: str
) -> None:
    team = compressing(where, fusion_bytes=fusion_bytes, **options_of(family))
    first, second = team.run(train, optimizer), team.run(train, optimizer)
    assert first[0]["sent as"] == options_of(family)["method"]
    for rank in first:
        assert same_bits(rank["weights"], first[0]["weights"])
        assert rank["losses"][-1] < rank["losses"][0]
    assert same_bits(first, second)
