"""Where the demo's two ranks run: on two hosts with a link of some rate, or both on this machine.

The choice and its reason are always shown to the user.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from gflow.bench.machine import LOOPBACK
from gflow.bench.units import show_rate
from gflow.launch.namespaces import INTERFACE, NoHosts, hosts
from gflow.launch.process import Location

RANKS = 2


@dataclass(frozen=True)
class Testbed:
    """Where the ranks run.

    Attributes:
        hosts: one for each rank.
        interface: the network interface whose sent bytes are counted.
        senders: how many ranks send through that interface.
        settings: environment variables that gflow needs there.
        title: a few words for the plot.
        note: what the user should know about it.
    """

    hosts: list[Location]
    interface: str
    senders: int
    settings: dict[str, str]
    title: str
    note: str


@contextlib.contextmanager
def two_hosts(rate: int) -> Iterator[Testbed]:
    """Two hosts on a link of ``rate`` bits per second; loopback where they cannot be made."""
    with contextlib.ExitStack() as cleanup:
        try:
            made = cleanup.enter_context(hosts(RANKS, rate))
        except NoHosts as reason:
            yield loopback(str(reason))
            return
        link = show_rate(rate)
        note = f"Two hosts (network namespaces on this machine), one rank each, on a {link} link."
        yield Testbed(
            [host.location for host in made], INTERFACE, 1, {}, f"Two hosts, {link}", note
        )


def loopback(reason: str) -> Testbed:
    """This machine as it is, with each rank as a host of its own to gflow."""
    # Ranks of one host would share memory, and bytes that they exchange there are not counted.
    made = [
        Location(f"rank {number}", "127.0.0.1", {"GFLOW_HOST_ID": f"demo-{number}"})
        for number in range(RANKS)
    ]
    note = (
        f"NOT ON TWO HOSTS: {reason}.\n"
        "Both ranks run on this machine, each as a host of its own to gflow (GFLOW_COMPRESS=on), "
        "and exchange\nover loopback, which is far faster than a network: look at bytes and "
        "losses, not at times."
    )
    return Testbed(made, LOOPBACK, RANKS, {"GFLOW_COMPRESS": "on"}, "Two ranks on loopback", note)
