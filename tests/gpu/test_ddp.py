"""Tests that DDP on the device delivers the same bits as on the CPU in all of its modes, without a
race on the device.

With 16 bits on the wire the bits can differ: on the CPU the engine keeps what a hop rounds off, and
NCCL does not report it. Those cases are compared with the method.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import gflow
from tests.compression.jobs import SMALL_BUCKETS
from tests.compression.test_delivery import check_against_method
from tests.gpu import jobs
from tests.gpu.jobs import CPU, NAME, delivered_by, given_on, model_on, same_bits
from tests.ranks import Team

STEPS = 8
LARGE = 1 << 24


def check_same(team: Team, job: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Runs a job on the CPU and on the device; returns the result of the device."""
    expected = team.run(job, CPU, *arguments)
    came = team.run(job, NAME, *arguments)
    assert same_bits(came, expected)
    return came


@jobs.clean
def train(rank: int, world: int, device: str, options: dict[str, Any]) -> tuple[Any, ...]:
    record = jobs.train.__wrapped__(rank, world, device, STEPS, options)
    return record.delivered, record.layout, record.state


@pytest.mark.parametrize("fusion_bytes", [0, LARGE], ids=["one_by_one", "fused"])
def test_gradients_are_those_of_the_cpu_to_the_bit(
    on_device: Callable[..., Team], fusion_bytes: int
) -> None:
    team = on_device(2, wire="fp32", fusion_bytes=fusion_bytes)
    for delivered, layout, _ in check_same(team, train, {}):
        assert len(layout) == 3
        sent = sum(int(part.count_nonzero()) for part in delivered[-1])
        assert 0 < sent <= 64 * 10


def test_gradients_are_those_of_the_cpu_where_hosts_have_several_ranks(
    on_device: Callable[..., Team],
) -> None:
    check_same(on_device("aab", wire="fp32"), train, {})


@pytest.mark.parametrize("method", ["int8", "int4", "int3", "quinary", "ternary"])
def test_quantised_gradients_are_those_of_the_cpu_to_the_bit(
    on_device: Callable[..., Team], method: str
) -> None:
    """Three levels need to know the optimizer, which this job does not have."""
    team = on_device(2, method=method, optimizer="adam")
    for delivered, _, state in check_same(team, train, {}):
        assert all(bool(part.any()) for part in delivered[-1])
        kept = state["models"][0]["buckets"]
        assert all(bool(bucket["residual"].any()) for bucket in kept)


def test_quantised_gradients_are_those_of_the_cpu_where_hosts_have_several_ranks(
    on_device: Callable[..., Team],
) -> None:
    check_same(on_device("aab", method="int3"), train, {})


MODES: dict[str, dict[str, Any]] = {
    "find_unused": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "bucket_view": {"gradient_as_bucket_view": True},
    "static_graph_and_bucket_view": {"static_graph": True, "gradient_as_bucket_view": True},
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_of_ddp_delivers_what_it_does_on_the_cpu(
    on_device: Callable[..., Team], mode: str
) -> None:
    check_same(on_device(2, wire="fp32"), train, MODES[mode])


@pytest.mark.parametrize(("world", "wire"), [(2, "fp16"), (2, "bf16"), (3, "fp16")])
def test_16_bits_on_the_wire_deliver_what_the_method_says(
    on_device: Callable[..., Team], world: int, wire: str
) -> None:
    records = on_device(world, wire=wire).run(jobs.train, NAME, 10)
    for record in records:
        assert same_bits(record.delivered, records[0].delivered)
    sent = check_against_method(world, records[0].delivered, records[0].layout, wire)
    # A tenth of the 24, 11 and 48 chunks of three buckets.
    assert sent[-1] == 3 + 2 + 5


@jobs.clean
def accumulate(rank: int, world: int, device: str) -> Any:
    """Two backward passes per step; the last is exchanged."""
    model = model_on(device)
    delivered = []
    for step in range(STEPS):
        with model.no_sync():
            model(given_on(device, rank, 2 * step)).backward()
        model(given_on(device, rank, 2 * step + 1)).backward()
        delivered.append(delivered_by(model))
    return delivered, gflow.state_dict()


def test_accumulated_gradients_are_exchanged_together(on_device: Callable[..., Team]) -> None:
    check_same(on_device(2, wire="fp32"), accumulate)


@jobs.clean
def uneven(rank: int, world: int, device: str, counts: list[int]) -> Any:
    model = model_on(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with Join([model]):
        for step in range(counts[rank]):
            optimizer.zero_grad()
            model(given_on(device, rank, step)).backward()
            optimizer.step()
    return jobs.to_host(list(model.parameters())), gflow.state_dict()


@pytest.mark.parametrize("counts", [[4, 8], [8, 5]])
def test_ranks_that_run_out_of_data_join_as_on_the_cpu(
    on_device: Callable[..., Team], counts: list[int]
) -> None:
    check_same(on_device(2, wire="fp32"), uneven, counts)


class Small(nn.Module):
    """A network of the usual layers, with a buffer that DDP broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(96, 32),
            nn.ReLU(),
            nn.Linear(32, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


@jobs.clean
def learn(rank: int, world: int, device: str, momentum: float) -> Any:
    torch.manual_seed(0)
    model = DistributedDataParallel(Small().to(device), bucket_cap_mb=SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    if momentum:
        assert gflow.take_momentum(optimizer)
    losses = []
    torch.manual_seed(1 + rank)
    for _ in range(STEPS):
        images, labels = torch.randn(4, 2, 8, 8), torch.randint(10, (4,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = jobs.to_host(dict(model.module.state_dict()))
    return losses, state, gflow.metrics().wire_bytes > 0


@pytest.mark.parametrize("momentum", [0.0, 0.9], ids=["plain", "momentum"])
def test_a_network_learns_as_on_the_cpu(on_device: Callable[..., Team], momentum: float) -> None:
    for losses, _, has_sent in check_same(on_device(2, wire="fp32"), learn, momentum):
        assert len(set(losses)) == STEPS
        assert has_sent
