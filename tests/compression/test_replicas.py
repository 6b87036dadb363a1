"""Tests that replicas stay bit-identical, and that a training can be repeated to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.compression.jobs import same_bits
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
    return {"weights": dict(plain.state_dict()), "losses": losses}


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("fusion_bytes", [0, 1 << 24], ids=["one_by_one", "fused"])
@pytest.mark.parametrize("where", ["ab", "abc", "aab"])
def test_replicas_are_the_same_and_runs_repeat(
    compressing: Callable[..., Team], where: str, fusion_bytes: int, optimizer: str
) -> None:
    team = compressing(where, fusion_bytes=fusion_bytes)
    first, second = team.run(train, optimizer), team.run(train, optimizer)
    for rank in first:
        assert same_bits(rank["weights"], first[0]["weights"])
        assert rank["losses"][-1] < rank["losses"][0]
    assert same_bits(first, second)
