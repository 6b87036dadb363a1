"""Tests what happens when a rank or a host is lost in the middle of a stream of all_reduces: every
survivor soon raises an error that names the lost rank and the operation, and ends by itself.

The seconds here are deadlines against hangs, far above the usual times, which are shown at the end
of the run. Nothing depends on the speed of the machine.
"""

from __future__ import annotations

import contextlib
import functools
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from gflow.launch.namespaces import Host, Network, why_not
from tests.hosts.running import Ranks, line_with, lines_of
from tests.ranks import ScriptRun

pytestmark = pytest.mark.gflow_only("Gloo does not name who is lost, and may not end")

Note = Callable[[str], None]


def repeat(*values: object) -> Any:
    """A case that repeats what another one shows; only `make thorough` runs it."""
    return pytest.param(*values, marks=pytest.mark.thorough)


# A lost process is noticed without a timeout, so the timeout of its group is long.
LONG_S = 120.0
NOTICED_S = 5.0
TIMEOUT_S = 3.0
HOSTS_TIMEOUT_S = 4.0
# The call that times out may have begun this long before the loss.
EARLY_S = 2.5
# How much later than its timeout an error may come on a busy machine.
SLACK_S = 6.0
# From the error to the end of the process: at most three seconds to close, and the interpreter.
ENDED_S = 20.0


def stream(kind: str, timeout_s: float, places: Sequence[Host | None], keep: bool = False) -> Ranks:
    """Ranks that call all_reduce continuously; all of them have started when this returns."""
    arguments = [kind, str(timeout_s), *(["--keep"] if keep else [])]
    ranks = Ranks("tests.hosts.stream", places, {"BACKEND": "gflow"}, arguments)
    try:
        ranks.wait_until_all_say("streaming")
        time.sleep(0.2)
    except BaseException:
        ranks.close()
        raise
    return ranks


@dataclass(frozen=True)
class Loss:
    """How the ranks ended after one was lost."""

    run: ScriptRun
    # When it was lost, on the monotonic clock.
    since: float
    # For each survivor, a pattern that its error must match.
    named: dict[int, str]

    def check_time(self, limit_s: float, note: Note, least_s: float = 0.0) -> None:
        """Every survivor has raised in time, named the operation, and ended by itself."""
        lines = {rank: line_with(self.run.ranks[rank], "raised") for rank in self.named}
        seconds = {rank: line["raised"] - self.since for rank, line in lines.items()}
        note("raised after " + ", ".join(f"{took:.2f}" for took in seconds.values()) + " s")
        for rank, line in lines.items():
            survivor, took = self.run.ranks[rank], seconds[rank]
            assert line["kind"] == "DistBackendError", survivor.story()
            assert "all_reduce" in line["message"], survivor.story()
            assert least_s <= took < limit_s, survivor.story()
            assert self.run.exit_codes()[rank] == 0, survivor.story()
        assert not self.run.left_running

    def check_names(self) -> None:
        """Every survivor has named the lost rank."""
        for rank, pattern in self.named.items():
            message = line_with(self.run.ranks[rank], "raised")["message"]
            assert re.search(pattern, message), f"rank {rank} said: {message}"


def label(rank: int, host: str, pid: int) -> str:
    """How an error names a rank."""
    return rf"rank {rank} \(host {re.escape(host)}, pid {pid}\)"


def lose(ranks: Ranks, victim: int, number: signal.Signals, hosts: Sequence[str]) -> Loss:
    """Kills or stops a rank and waits for the others to end."""
    pid = ranks.processes[victim].pid
    since = ranks.signal(victim, number)
    run = ranks.ended(NOTICED_S + SLACK_S + ENDED_S, but=[victim])
    survivors = [rank for rank in range(len(run.ranks)) if rank != victim]
    return Loss(run, since, dict.fromkeys(survivors, label(victim, hosts[victim], pid)))


# --- on one host ----------------------------------------------------------------------------------

ONE_HOST = [
    repeat(2, "ordinary"),
    repeat(2, "bucket"),
    (2, "small"),
    repeat(4, "ordinary"),
    (4, "bucket"),
    repeat(4, "small"),
]


def lose_on_one_host(
    kind: str, world: int, number: signal.Signals, timeout_s: float = LONG_S, keep: bool = False
) -> Loss:
    """Loses the last rank of a host whose ranks share memory."""
    with stream(kind, timeout_s, [None] * world, keep) as ranks:
        return lose(ranks, world - 1, number, [socket.gethostname()] * world)


@pytest.mark.parametrize(("world", "kind"), ONE_HOST)
def test_a_killed_rank_is_named_by_every_other_of_its_host(
    world: int, kind: str, measured: Note
) -> None:
    loss = lose_on_one_host(kind, world, signal.SIGKILL)
    loss.check_time(NOTICED_S, measured)
    loss.check_names()


@functools.cache
def stopped_on_one_host(world: int, kind: str) -> Loss:
    return lose_on_one_host(kind, world, signal.SIGSTOP, TIMEOUT_S)


@pytest.mark.parametrize(("world", "kind"), ONE_HOST)
def test_when_a_rank_of_the_host_is_stopped_the_timeout_holds(
    world: int, kind: str, measured: Note
) -> None:
    stopped_on_one_host(world, kind).check_time(TIMEOUT_S + SLACK_S, measured, TIMEOUT_S - EARLY_S)


@pytest.mark.parametrize(("world", "kind"), ONE_HOST)
def test_a_stopped_rank_is_named_by_every_other_of_its_host(world: int, kind: str) -> None:
    stopped_on_one_host(world, kind).check_names()


def test_the_first_rank_may_be_the_one_that_is_killed(measured: Note) -> None:
    # It also hosts torch's store.
    with stream("ordinary", LONG_S, [None] * 3) as ranks:
        loss = lose(ranks, 0, signal.SIGKILL, [socket.gethostname()] * 3)
    loss.check_time(NOTICED_S, measured)
    loss.check_names()


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize("kind", ["ordinary", repeat("bucket"), "small"])
def test_after_a_loss_a_process_ends_without_destroying_its_group(
    kind: str, number: signal.Signals, measured: Note
) -> None:
    loss = lose_on_one_host(kind, 2, number, TIMEOUT_S, keep=True)
    loss.check_time(TIMEOUT_S + SLACK_S, measured)


# --- on several hosts -----------------------------------------------------------------------------

LAYOUTS = {"1+1": (0, 1), "2+1": (0, 0, 1), "1+2": (0, 1, 1), "1+1+1": (0, 1, 2)}
# At this rate 25 MiB take about a second: the rank is lost in the middle of the data.
SLOW = 300 * 10**6
TIMED = [
    repeat("1+1", "ordinary", SLOW),
    ("2+1", "ordinary", SLOW),
    repeat("1+2", "bucket", None),
    ("1+1+1", "small", None),
]


@contextlib.contextmanager
def stream_on_hosts(
    layout: str, kind: str, rate: int | None, timeout_s: float
) -> Iterator[tuple[Ranks, list[Host]]]:
    """Ranks that call all_reduce continuously, and the host of each."""
    if why_not():
        pytest.skip(why_not())
    numbers = LAYOUTS[layout]
    with Network(max(numbers) + 1) as network:
        for host in network.hosts if rate else ():
            host.limit(rate)
        places = [network.hosts[number] for number in numbers]
        with stream(kind, timeout_s, places) as ranks:
            yield ranks, places


def lose_on_hosts(
    layout: str, kind: str, rate: int | None, number: signal.Signals, timeout_s: float
) -> Loss:
    """Loses the last rank of the last host."""
    with stream_on_hosts(layout, kind, rate, timeout_s) as (ranks, places):
        return lose(ranks, len(places) - 1, number, [host.name for host in places])


@pytest.mark.parametrize(
    ("layout", "kind", "rate"),
    [
        repeat("1+1", "ordinary", None),
        repeat("1+1", "ordinary", SLOW),
        ("2+1", "ordinary", SLOW),
        repeat("2+1", "small", None),
        repeat("1+2", "bucket", SLOW),
        repeat("1+1+1", "ordinary", SLOW),
        ("1+1+1", "small", None),
    ],
)
def test_a_killed_rank_is_named_on_every_host(
    layout: str, kind: str, rate: int | None, measured: Note
) -> None:
    loss = lose_on_hosts(layout, kind, rate, signal.SIGKILL, LONG_S)
    loss.check_time(NOTICED_S, measured)
    loss.check_names()


@functools.cache
def stopped_on_hosts(layout: str, kind: str, rate: int | None) -> Loss:
    return lose_on_hosts(layout, kind, rate, signal.SIGSTOP, HOSTS_TIMEOUT_S)


@pytest.mark.parametrize(("layout", "kind", "rate"), TIMED)
def test_when_a_rank_of_another_host_is_stopped_the_timeout_holds(
    layout: str, kind: str, rate: int | None, measured: Note
) -> None:
    loss = stopped_on_hosts(layout, kind, rate)
    loss.check_time(HOSTS_TIMEOUT_S + SLACK_S, measured, HOSTS_TIMEOUT_S - EARLY_S)


@pytest.mark.parametrize(("layout", "kind", "rate"), TIMED)
def test_a_stopped_rank_is_named_on_every_host(layout: str, kind: str, rate: int | None) -> None:
    stopped_on_hosts(layout, kind, rate).check_names()


@functools.cache
def cut_off(layout: str, kind: str, rate: int | None) -> Loss:
    """Pulls the cable of the last host."""
    with stream_on_hosts(layout, kind, rate, HOSTS_TIMEOUT_S) as (ranks, places):
        lost = places[-1]
        labels = [
            label(rank, host.name, ranks.processes[rank].pid) for rank, host in enumerate(places)
        ]
        since = time.monotonic()
        lost.cut_off()
        run = ranks.ended(HOSTS_TIMEOUT_S + SLACK_S + ENDED_S)
    # Each side must name a rank of the other.
    across = {
        rank: [name for peer, name in enumerate(labels) if (places[peer] is lost) != (host is lost)]
        for rank, host in enumerate(places)
    }
    return Loss(run, since, {rank: "|".join(names) for rank, names in across.items()})


@pytest.mark.parametrize(("layout", "kind", "rate"), TIMED)
def test_when_a_host_is_cut_off_the_timeout_holds_on_both_sides(
    layout: str, kind: str, rate: int | None, measured: Note
) -> None:
    loss = cut_off(layout, kind, rate)
    loss.check_time(HOSTS_TIMEOUT_S + SLACK_S, measured, HOSTS_TIMEOUT_S - EARLY_S)


@pytest.mark.parametrize(("layout", "kind", "rate"), TIMED)
def test_when_a_host_is_cut_off_either_side_names_somebody_of_the_other(
    layout: str, kind: str, rate: int | None
) -> None:
    cut_off(layout, kind, rate).check_names()


@pytest.mark.thorough
def test_a_cable_that_is_out_for_a_second_is_no_loss() -> None:
    with stream_on_hosts("1+1", "ordinary", None, LONG_S) as (ranks, places):
        places[1].cut_off()
        time.sleep(1.0)
        places[1].reconnect()
        time.sleep(3.0)
        assert not any(process.exit_code() is not None for process in ranks.processes)
        assert not any("raised" in line for p in ranks.processes for line in lines_of(p.output()))
