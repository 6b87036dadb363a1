"""Tests that the simulated hosts are separate hosts, and that they leave nothing behind.

The engine isn't involved: this checks what its tests rely on.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gflow.launch.namespaces import Host, Network, why_not
from tests.hosts.running import ROOT, eventually
from tests.ranks.strays import TAG_VARIABLE, new_tag, strays


def reaches(host: Host, address: str) -> bool:
    """Whether a packet to a closed port of `address` is answered."""
    program = f"import socket; socket.create_connection(({address!r}, 9), timeout=1)"
    ended = subprocess.run(
        host.command([sys.executable, "-c", program]),
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    return "ConnectionRefusedError" in ended.stderr


def namespaces() -> set[str]:
    """The network namespaces that some process of this machine is in."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(os.readlink(link))
        except OSError:
            continue  # gone meanwhile
    return found


def test_hosts_reach_each_other_on_every_interface_and_in_both_families(
    hosts: Callable[..., Network],
) -> None:
    first, *others = hosts(3, planes=2).hosts
    for other in others:
        for plane in (0, 1):
            assert reaches(first, other.ipv4(plane))
            assert reaches(first, other.ipv6(plane))


def test_a_host_that_is_cut_off_is_reached_by_nobody_until_it_is_reconnected(
    hosts: Callable[..., Network],
) -> None:
    first, second = hosts(2).hosts
    second.cut_off()
    assert not reaches(first, second.ipv4())
    assert not reaches(second, first.ipv4())
    second.reconnect()
    assert eventually(lambda: reaches(first, second.ipv4()))


def test_every_host_has_a_name_of_its_own(hosts: Callable[..., Network]) -> None:
    network = hosts(2)
    names = [
        subprocess.run(
            host.command([sys.executable, "-c", "import socket; print(socket.gethostname())"]),
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout.strip()
        for host in network.hosts
    ]
    assert names == ["host0", "host1"]


def test_the_machine_itself_keeps_its_interfaces(hosts: Callable[..., Network]) -> None:
    def interfaces() -> str:
        return (
            Path("/proc/self/net/dev").read_text().translate({ord(c): None for c in "0123456789"})
        )

    before = interfaces()
    network = hosts(2)
    assert interfaces() == before
    network.close()
    assert interfaces() == before


@pytest.mark.parametrize(
    "end", ["raise SystemExit", "os.kill(os.getpid(), 9)"], ids=["exit", "kill"]
)
def test_nothing_of_a_network_stays_whatever_ends_its_maker(end: str) -> None:
    if why_not():
        pytest.skip(why_not())
    tag = new_tag()
    program = f"""
import os
from gflow.launch.namespaces import Network
network = Network(2)
print(*[os.readlink(f"/proc/{{host._namespace.pid}}/ns/net") for host in network.hosts], flush=True)
{end}
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, TAG_VARIABLE: tag},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    made = set(ended.stdout.split())
    assert len(made) == 2, ended.stderr
    assert eventually(lambda: not strays(tag))
    assert not made & namespaces()
