"""Tests that collectives are correct to the bit on every rank, wherever the ranks are: on one, two
or three hosts, unevenly, interleaved.

The ranks of a layout are started once and run every check of checks.py; each check is reported on
its own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from gflow.launch.namespaces import Network, why_not
from tests.backends import BACKENDS
from tests.hosts.checks import CHECKS, FEW, ROUGH
from tests.hosts.running import Ranks, line_with, lines_of
from tests.ranks import ScriptRun

# All checks of a layout together, on a busy machine.
DEADLINE_S = 300.0


@dataclass(frozen=True)
class Layout:
    """Where the ranks are, and what they check."""

    # The host of each rank; None: all on this machine, without namespaces.
    hosts: tuple[int, ...] | None
    world: int
    checks: list[str]
    host_ids: tuple[str, ...] | None = None
    # These checks are repeated by a second set of ranks, and must give the same bits.
    again: list[str] = field(default_factory=list)
    # Repeats checks of other layouts; only `make thorough` runs it.
    repeats: bool = False

    def names(self) -> list[str]:
        """The checks that make sense with this many ranks."""
        absent = {f"broadcast from rank {root}" for root in range(self.world, 4)}
        return [name for name in self.checks if name not in absent]


ALL = list(CHECKS)
LAYOUTS: dict[str, Layout] = {
    "1+1": Layout((0, 1), 2, ALL),
    "2+1": Layout((0, 0, 1), 3, ALL, again=ROUGH),
    "1+1+1": Layout((0, 1, 2), 3, ALL, repeats=True),
    "2+2_in_turns": Layout((0, 1, 0, 1), 4, ALL, again=ROUGH, repeats=True),
    "1+2": Layout((0, 1, 1), 3, FEW, repeats=True),
    "2+2": Layout((0, 0, 1, 1), 4, FEW, repeats=True),
    "2+1_in_turns": Layout((0, 1, 0), 3, FEW, repeats=True),
    "1+2+1": Layout((0, 1, 1, 2), 4, FEW, repeats=True),
    "one_host": Layout(None, 3, ALL, again=ROUGH, repeats=True),
    "one_machine_as_2+1": Layout(None, 3, ALL, host_ids=("left", "left", "right"), repeats=True),
    "one_machine_as_1+1+1": Layout(
        None, 3, FEW, host_ids=("left", "middle", "right"), repeats=True
    ),
}


@dataclass(frozen=True)
class Outcome:
    """What the ranks of a layout reported."""

    layout: Layout
    run: ScriptRun
    # None unless the layout has checks to repeat.
    second: ScriptRun | None

    def reports(self, check: str, run: ScriptRun | None = None) -> list[dict[str, Any]]:
        """What each rank reported about a check."""
        __tracebackhide__ = True
        reports = []
        for rank in (run or self.run).ranks:
            found = [line for line in lines_of(rank.output) if line.get("check") == check]
            assert found, f"rank {rank.rank} never came to it\n{rank.output[-3000:]}"
            reports.append(found[0])
        return reports


def run_checks(
    backend: str,
    layout: Layout,
    network: Network | None,
    names: list[str],
    env: dict[str, Any] | None = None,
    master: str | None = None,
) -> ScriptRun:
    """Runs the checks on the ranks of a layout."""
    variables: dict[str, Any] = {"BACKEND": backend, **(env or {})}
    if layout.host_ids:
        variables["GFLOW_HOST_ID"] = layout.host_ids
    if network and backend == "gloo":
        variables["GLOO_SOCKET_IFNAME"] = "eth0"  # its hosts' names do not resolve
    if network:
        places = [network.hosts[number] for number in layout.hosts]
    else:
        places = [None] * layout.world
    with Ranks("tests.hosts.checks", places, variables, names, master) as ranks:
        return ranks.ended(DEADLINE_S)


@functools.cache
def outcome_of(backend: str, name: str) -> Outcome:
    """What the ranks of a layout reported; the first test to ask runs them."""
    layout = LAYOUTS[name]
    with contextlib.ExitStack() as stack:
        network = None
        if layout.hosts is not None:
            network = stack.enter_context(Network(max(layout.hosts) + 1))
        run = run_checks(backend, layout, network, [*layout.names(), "traffic"])
        second = run_checks(backend, layout, network, layout.again) if layout.again else None
        return Outcome(layout, run, second)


@pytest.fixture
def outcome(request: pytest.FixtureRequest) -> Outcome:
    # Not a module fixture: pytest would set it up and tear it down in its own order.
    backend, name = request.param
    if LAYOUTS[name].hosts is not None and why_not():
        pytest.skip(why_not())
    return outcome_of(backend, name)


def _marks(layout: Layout) -> list[pytest.MarkDecorator]:
    return [pytest.mark.thorough] if layout.repeats else []


def _cases(chosen: Callable[[Layout], list[str]]) -> list[Any]:
    return [
        pytest.param(
            (backend, name),
            check,
            id="-".join([backend, name, check.replace(" ", "_")]),
            marks=_marks(layout),
        )
        for backend in BACKENDS
        for name, layout in LAYOUTS.items()
        for check in chosen(layout)
    ]


def _layouts(*names: str) -> list[Any]:
    return [
        pytest.param((backend, name), id=f"{backend}-{name}", marks=_marks(LAYOUTS[name]))
        for backend in BACKENDS
        for name in names
    ]


@pytest.mark.parametrize(("outcome", "check"), _cases(Layout.names), indirect=["outcome"])
def test_every_rank_gets_what_a_plain_computation_gives_and_all_get_the_same_bits(
    outcome: Outcome, check: str
) -> None:
    reports = outcome.reports(check)
    problems = [f"rank {rank}: {text}" for rank, r in enumerate(reports) for text in r["problems"]]
    assert not problems, "\n".join(problems)
    assert len({report["digest"] for report in reports}) == 1, reports


@pytest.mark.parametrize(
    ("outcome", "check"),
    _cases(lambda layout: layout.again),
    indirect=["outcome"],
)
def test_a_second_start_of_the_same_ranks_gives_the_same_bits(outcome: Outcome, check: str) -> None:
    first, second = outcome.reports(check), outcome.reports(check, outcome.second)
    assert [r["digest"] for r in first] == [r["digest"] for r in second]


@pytest.mark.parametrize("outcome", _layouts(*LAYOUTS), indirect=True)
def test_every_rank_ends_well(outcome: Outcome) -> None:
    outcome.run.assert_exit_codes(*[0] * outcome.layout.world)
    if outcome.second:
        outcome.second.assert_exit_codes(*[0] * outcome.layout.world)


@pytest.mark.gflow_only("hosts first")
@pytest.mark.parametrize(
    "outcome",
    _layouts("1+1", "2+1", "1+1+1", "2+2_in_turns", "2+2", "1+2+1"),
    indirect=True,
)
def test_a_host_sends_a_tensor_no_more_often_than_a_ring_of_hosts_needs(outcome: Outcome) -> None:
    count = len(set(outcome.layout.hosts))
    for rank in outcome.run.ranks:
        line = line_with(rank, "sent")
        # Room for headers and acknowledgements.
        assert line["sent"]["eth0"] < 1.15 * line["tensor"] * 2 * (count - 1) / count, line


@pytest.mark.gflow_only("shared memory")
@pytest.mark.parametrize("outcome", _layouts("2+1", "2+2"), indirect=True)
def test_ranks_of_one_host_send_each_other_no_data_through_its_loopback(outcome: Outcome) -> None:
    for rank in outcome.run.ranks:
        line = line_with(rank, "sent")
        assert line["sent"]["lo"] < 0.1 * line["tensor"], line


UNEVEN = Layout((0, 0, 1), 3, FEW)


def assert_all_right(run: ScriptRun, names: list[str]) -> None:
    run.assert_exit_codes(*[0] * len(run.ranks))
    outcome = Outcome(UNEVEN, run, None)
    for name in names:
        reports = outcome.reports(name)
        assert not any(report["problems"] for report in reports), reports
        assert len({report["digest"] for report in reports}) == 1, reports


@pytest.mark.parametrize(
    "ipv4",
    [
        pytest.param(True, id="both_families", marks=pytest.mark.thorough),
        pytest.param(False, id="ipv6_alone"),
    ],
)
def test_the_master_may_have_an_ipv6_address(
    hosts: Callable[..., Network], backend: str, ipv4: bool
) -> None:
    network = hosts(2, ipv4=ipv4)
    master = network.hosts[0].ipv6()
    assert_all_right(run_checks(backend, UNEVEN, network, FEW, master=master), FEW)


@pytest.mark.thorough
@pytest.mark.gflow_only("an option of gflow")
def test_data_takes_the_interface_that_is_chosen(
    hosts: Callable[..., Network], backend: str
) -> None:
    network = hosts(2, planes=2)
    # torch's store stays on the first interface, which has its address.
    run = run_checks(backend, UNEVEN, network, [*FEW, "traffic"], {"GFLOW_IFNAME": "eth1"})
    assert_all_right(run, FEW)
    for rank in run.ranks:
        line = line_with(rank, "sent")
        assert line["sent"]["eth1"] > 0.9 * line["tensor"], line
        assert line["sent"]["eth0"] < 0.01 * line["tensor"], line


@pytest.mark.thorough
@pytest.mark.gflow_only("an option of gflow")
def test_an_interface_can_be_chosen_by_each_rank_for_itself(
    hosts: Callable[..., Network], backend: str
) -> None:
    # Each plane has its own switch, so eth0 of one host cannot reach eth1 of another; but every
    # host is on both. What matters is that each rank listens where it was told to.
    network = hosts(2, planes=2)
    env = {"GFLOW_IFNAME": ("eth1", "eth1", "eth0")}
    assert_all_right(run_checks(backend, UNEVEN, network, FEW, env), FEW)


@pytest.fixture(scope="module")
def alike() -> Iterator[ScriptRun]:
    """Two hosts that claim to be one: the ranks expect to share memory, but can't."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    layout = Layout((0, 0, 1), 3, FEW, host_ids=("same", "same", "same"))
    with Network(2) as network:
        yield run_checks("gflow", layout, network, [*FEW, "parts of the world"])


@pytest.mark.thorough
@pytest.mark.gflow_only("an option of gflow")
def test_hosts_that_claim_to_be_one_still_get_right_results(alike: ScriptRun) -> None:
    assert_all_right(alike, [*FEW, "parts of the world"])


@pytest.mark.thorough
@pytest.mark.gflow_only("an option of gflow")
def test_hosts_that_claim_to_be_one_are_told_once_that_they_cannot_share_memory(
    alike: ScriptRun,
) -> None:
    counts = [rank.output.count("cannot share memory") for rank in alike.ranks]
    assert max(counts) == 1, alike.story()


@pytest.mark.gflow_only("an option of gflow")
@pytest.mark.parametrize(
    "outcome", _layouts("1+1", "2+1", "one_host", "one_machine_as_2+1"), indirect=True
)
def test_hosts_that_share_memory_as_they_should_say_nothing_of_it(outcome: Outcome) -> None:
    assert "cannot share memory" not in outcome.run.story()
