"""Tests that training through gflow gives the same losses as training through Gloo, bit for bit
with two ranks (a sum of two has only one order), on one host and on two.

Gloo runs beside gflow in the same processes. test_buckets.py compares single steps with a plain
computation.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gflow.launch.namespaces import Network, why_not
from tests.ddp.models import WIDTH, WithUnusedLayer, batch, loss_of, perceptron
from tests.hosts.running import Ranks, line_with, say
from tests.ranks import Team
from tests.ranks.membership import rendezvous

pytestmark = pytest.mark.gflow_only("compares gflow with Gloo")

STEPS = 12


def wide() -> nn.Module:
    """Gradients of 5 MB, more than a socket buffers."""
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(WIDTH, 1000), nn.Tanh(), nn.Linear(1000, 1200), nn.Tanh(), nn.Linear(1200, 3)
    )


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "plain": (perceptron, {}),
    "many_buckets": (perceptron, {"bucket_cap_mb": 0.0002}),
    "bucket_view": (perceptron, {"gradient_as_bucket_view": True}),
    "static_graph": (perceptron, {"static_graph": True}),
    "static_graph_and_bucket_view": (
        perceptron,
        {"static_graph": True, "gradient_as_bucket_view": True},
    ),
    "find_unused_none": (perceptron, {"find_unused_parameters": True}),
    "find_unused_some": (WithUnusedLayer, {"find_unused_parameters": True}),
    "find_unused_some_and_bucket_view": (
        WithUnusedLayer,
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    ),
    "wide": (wide, {"bucket_cap_mb": 1}),
    "wide_and_bucket_view": (wide, {"bucket_cap_mb": 1, "gradient_as_bucket_view": True}),
}


def train(rank: int, case: str) -> list[str]:
    """The losses of this rank, each to the last bit."""
    build, options = CASES[case]
    plain = build()
    model = DistributedDataParallel(plain, **options)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, batch(rank, step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    losses += [value.hex() for value in next(plain.parameters()).flatten()[:20].tolist()]
    return losses


def train_with_both(rank: int, world: int, cases: list[str]) -> dict[str, dict[str, list[str]]]:
    losses = {}
    for backend in ("gflow", "gloo"):
        dist.init_process_group(backend, store=rendezvous(backend), rank=rank, world_size=world)
        try:
            losses[backend] = {case: train(rank, case) for case in cases}
        finally:
            dist.destroy_process_group()
    return losses


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_of_one_host_train_as_with_gloo_to_the_last_bit(
    ranks: Callable[..., Team], case: str
) -> None:
    for losses in ranks(2, group=None).run(train_with_both, [case]):
        assert losses["gflow"] == losses["gloo"]
        assert len(set(losses["gflow"][case][:STEPS])) == STEPS  # it does train


# --- two hosts ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_two_hosts() -> list[dict[str, dict[str, list[str]]]]:
    """The losses of two ranks on separate hosts, in all cases, with both backends."""
    if why_not():
        pytest.skip(why_not())
    with Network(2) as network:
        with Ranks(__name__, network.hosts, arguments=["train"]) as ranks:
            run = ranks.ended(120.0)
        run.assert_exit_codes(0, 0)
    return [line_with(rank, "losses")["losses"] for rank in run.ranks]


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_of_two_hosts_train_as_with_gloo_to_the_last_bit(
    on_two_hosts: list[dict[str, dict[str, list[str]]]], case: str
) -> None:
    for losses in on_two_hosts:
        assert losses["gflow"][case] == losses["gloo"][case]
        assert len(set(losses["gflow"][case][:STEPS])) == STEPS


def main() -> None:
    """The job of a rank on one of two hosts."""
    torch.set_num_threads(1)
    rank, address, port = (os.environ[name] for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    store = dist.TCPStore(address, int(port), is_master=rank == "0")
    losses = {}
    for backend in ("gflow", "gloo"):
        if backend == "gloo":
            os.environ["GLOO_SOCKET_IFNAME"] = "eth0"  # its host's name does not resolve
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(backend, store),
            rank=int(rank),
            world_size=2,
            timeout=timedelta(seconds=60),
        )
        losses[backend] = {case: train(dist.get_rank(), case) for case in CASES}
        dist.destroy_process_group()
    say(losses=losses)
    # Rank 0 keeps the store until rank 1 no longer needs it.
    store.set(f"over {rank}", "")
    store.wait(["over 0", "over 1"], timedelta(seconds=60))


if __name__ == "__main__" and sys.argv[1:] == ["train"] and "RANK" in os.environ:
    main()
