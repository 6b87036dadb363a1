"""Tests how ranks find each other: missing ranks are named, and ranks with other options are
refused, all before training starts.
"""

import dataclasses
import json
import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gflow
from gflow import network, rendezvous
from gflow.options import resolve
from gflow.rendezvous import wait_until_connected
from tests.ranks import Team
from tests.ranks.membership import rendezvous as store_of_case

pytestmark = pytest.mark.gflow_only("how gflow finds its ranks")


def join(rank: int, world: int, timeout_s: float = 20.0, **options: Any) -> None:
    dist.init_process_group(
        "gflow",
        store=store_of_case(),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
        pg_options=gflow.Options(**options) if options else None,
    )


def message_of(rank: int, world: int, **arguments: Any) -> str:
    """Joins, expecting to fail, and returns the error message."""
    try:
        join(rank, world, **arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        # torch numbers groups by attempt, and only forgets the number of a group it made.
        dist.distributed_c10d._world.group_count = 0
        if dist.is_initialized():
            dist.destroy_process_group()
    return "joined"


def join_unless_last(rank: int, world: int) -> str | None:
    return None if rank == world - 1 else message_of(rank, world, timeout_s=3.0)


def test_a_rank_that_never_comes_is_named_on_every_other(ranks: Callable[..., Team]) -> None:
    *waiting, absent = ranks(3, group=None).run(join_unless_last)
    assert absent is None
    for message in waiting:
        assert "for rank 2 of group" in message, message
        assert "(3 ranks expected)" in message


def join_with_own_density(rank: int, world: int) -> str:
    return message_of(rank, world, density=0.1 if rank == 0 else 0.2)


def test_ranks_with_different_options_are_refused_on_every_rank(ranks: Callable[..., Team]) -> None:
    for message in ranks(2, group=None).run(join_with_own_density):
        assert "density is 0.1 on rank 0" in message, message
        assert "0.2 on rank 1" in message
        assert "GFLOW_DENSITY" in message


def join_with_wrong_variable(rank: int, world: int) -> str:
    os.environ["GFLOW_WIRE"] = "fp8"
    try:
        return message_of(rank, world)
    finally:
        del os.environ["GFLOW_WIRE"]


def test_a_wrong_variable_is_refused_at_init(ranks: Callable[..., Team]) -> None:
    for message in ranks(2, group=None).run(join_with_wrong_variable):
        assert message.startswith("ValueError: gflow: GFLOW_WIRE is 'fp8'"), message


def join_through_unknown_interface(rank: int, world: int) -> str:
    return message_of(rank, world, ifname="nosuch0")


def test_an_interface_that_does_not_exist_is_named_with_those_that_do(
    ranks: Callable[..., Team],
) -> None:
    (message,) = ranks(1, group=None).run(join_through_unknown_interface)
    assert "'nosuch0'" in message, message
    assert "It has: lo" in message


def sum_over_loopback_interface(rank: int, world: int) -> float:
    join(rank, world, ifname="lo")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.item()


def test_an_interface_can_be_chosen(ranks: Callable[..., Team]) -> None:
    assert ranks(2, group=None).run(sum_over_loopback_interface) == [2.0, 2.0]


def join_with_own_secret(rank: int, world: int) -> str:
    return message_of(rank, world, timeout_s=3.0, secret="left" if rank == 0 else "right")


def test_ranks_with_different_secrets_do_not_connect(ranks: Callable[..., Team]) -> None:
    for message in ranks(2, group=None).run(join_with_own_secret):
        assert "could not connect with" in message, message


def join_with_secret_on_one(rank: int, world: int, holder: int) -> str:
    return message_of(rank, world, **({"secret": "hush"} if rank == holder else {}))


@pytest.mark.parametrize("holder", [0, 1])
def test_a_secret_on_some_ranks_only_is_refused_at_once(
    ranks: Callable[..., Team], holder: int
) -> None:
    for message in ranks(2, group=None).run(join_with_secret_on_one, holder):
        assert "secret is" in message, message
        assert "GFLOW_SECRET" in message
        assert "hush" not in message


def remake_with_other_members(rank: int, world: int) -> list[float]:
    sums = []
    for members in ([0, 1], [0, 1, 2], [0, 2], [0, 1, 2]):
        # torch numbers groups from 0 again, so all of these have the same name in the same store.
        join(rank, world)
        part = dist.new_group(members)
        if rank in members:
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=part)
            sums.append(tensor.item())
        dist.destroy_process_group()
    return sums


def test_groups_of_other_members_may_follow_each_other_in_the_same_store(
    ranks: Callable[..., Team],
) -> None:
    sums = ranks(3, group=None).run(remake_with_other_members)
    assert sums == [[2.0, 3.0, 2.0, 3.0], [2.0, 3.0, 3.0], [3.0, 2.0, 3.0]]


def sum_with_secret(rank: int, world: int) -> float:
    join(rank, world, secret="shared")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.item()


def test_ranks_with_the_same_secret_connect(ranks: Callable[..., Team]) -> None:
    assert ranks(2, group=None).run(sum_with_secret) == [2.0, 2.0]


def meet_again_and_again(rank: int, world: int) -> list[float]:
    sums = []
    for round_ in range(3):
        # The same store and prefix each time, as torchrun's agent gives.
        join(rank, world)
        tensor = torch.full((1,), float(round_))
        dist.all_reduce(tensor)
        sums.append(tensor.item())
        dist.destroy_process_group()
    return sums


def test_a_group_can_be_made_again_in_the_same_store(ranks: Callable[..., Team]) -> None:
    assert ranks(2, group=None).run(meet_again_and_again) == [[0.0, 2.0, 4.0]] * 2


def test_a_long_wait_is_reported_while_it_lasts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous, "REPORT_SECONDS", 0.2)
    own = rendezvous.RankInfo.of_this_process(0, "127.0.0.1:1", "", resolve(None, {}))
    store = dist.HashStore()
    spec = rendezvous.GroupSpec("g", 3, [])
    with pytest.raises(RuntimeError, match="for ranks 1, 2 of group 'g'"):
        rendezvous.gather_ranks(store, own, spec, None, timedelta(seconds=1))
    reports = [record.getMessage() for record in caplog.records]
    assert len(reports) >= 2
    assert all("waiting" in report and "ranks 1, 2" in report for report in reports)
    # Ranks that gave up must not count in the next attempt.
    assert store.add(f"{spec.prefix}/arrivals", 0) == 0
    for rank in (1, 2):
        late = rendezvous.RankInfo.of_this_process(rank, "127.0.0.1:1", "", resolve(None, {}))
        store.set(f"{spec.prefix}/0/rank/{rank}", json.dumps(dataclasses.asdict(late)))
    with pytest.raises(RuntimeError, match="rank 0 of group 'g' had waited for rank 2"):
        rendezvous.gather_ranks(store, late, spec, None, timedelta(seconds=1))


def test_a_version_that_differs_is_refused() -> None:
    settings = resolve(None, {})
    ours = rendezvous.RankInfo.of_this_process(0, "127.0.0.1:1", "", settings)
    # From another version, so the fields differ.
    theirs = {"rank": 1, "host": "other", "version": "9.9", "colour": "blue"}
    with pytest.raises(RuntimeError, match=r"rank 1 \(other\) runs gflow 9\.9"):
        rendezvous._refuse_other_versions([dataclasses.asdict(ours), theirs])


class TestOwnAddress:
    """Which address a rank gives to the others."""

    def test_a_loopback_master_means_loopback(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(network, "_master_host", lambda store: "localhost")
        assert network.own_address(dist.HashStore(), None) == "127.0.0.1"

    def test_a_master_name_that_leads_to_loopback_gives_an_address_others_reach(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(network, "_master_host", lambda store: "this-host")
        monkeypatch.setattr(network, "_address_towards", lambda host: "127.0.1.1")
        monkeypatch.setattr(network, "_addresses_that_others_reach", lambda: iter(["198.51.100.7"]))
        assert network.own_address(dist.HashStore(), None) == "198.51.100.7"

    def test_the_master_is_found_behind_prefixes(self) -> None:
        tcp = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
        wrapped = dist.PrefixStore("a", dist.PrefixStore("b", tcp))
        assert network._master_host(wrapped) == "127.0.0.1"

    def test_an_interface_gives_its_own_address(self) -> None:
        assert network.own_address(dist.HashStore(), "lo") in ("127.0.0.1", "::1")

    def test_every_interface_with_an_address_can_be_asked(self) -> None:
        for _, name in socket.if_nameindex():
            for address in network._addresses_of(name):
                assert socket.getaddrinfo(address, None, flags=socket.AI_NUMERICHOST)


def test_no_rank_goes_on_before_all_are_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    early = threading.Thread(target=wait_until_connected, args=(store, 0, 2))
    early.start()
    early.join(0.2)
    assert early.is_alive()
    wait_until_connected(store, 1, 2)
    early.join(10)
    assert not early.is_alive()
    # But it does not wait for ever for one that has died.
    monkeypatch.setattr(rendezvous, "COURTESY_SECONDS", 0.05)
    wait_until_connected(dist.HashStore(), 0, 2)
