"""Several hosts on this machine: network namespaces, joined by a switch, with links of some rate.

Each host has one interface with an IPv4 and an IPv6 address, and its own loopback. All of it is in
namespaces of its own, the switch too, so it must never touch a network of this machine, and never
leave a namespace behind: not on failure, not on Ctrl-C. (After SIGKILL, `ip netns list` has what is
left, with names that begin with ``gflow-`` and the number of the process.)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count as counting
from types import FrameType

#: What a network card is called on each host.
INTERFACE = "eth0"
_MOST_HOSTS = 64
_COMMAND_SECONDS = 30.0
#: A link must let pass at once what the kernel sends at once, and what comes between two ticks.
_LEAST_BURST = 128 << 10
_BURST_SECONDS = 0.001
#: How long a packet may wait in a full link before it is dropped.
_QUEUE = "25ms"
_runs = counting()


class NoHosts(RuntimeError):
    """Hosts cannot be made here; the text says what is needed."""


@dataclass(frozen=True)
class Host:
    """One host.

    Attributes:
        name: of its network namespace.
        address: where the other hosts reach it, IPv4.
        address6: the same, IPv6.
        prefix: what to put before a command so that it runs there.
        variables: what ranks on this host need in their environment.
    """

    name: str
    address: str
    address6: str
    prefix: list[str]
    variables: dict[str, str] = field(default_factory=dict)


def obstacle(*, rate: bool = False) -> str | None:
    """What stands in the way of making hosts, or None; not every obstacle can be foreseen."""
    if os.geteuid() != 0:
        return "several hosts are network namespaces, and making them needs root: run it with sudo"
    for command in ("ip", "tc") if rate else ("ip",):
        if shutil.which(command) is None:
            return f"several hosts need the command `{command}`: install iproute2"
    return None


@contextlib.contextmanager
def hosts(count: int, rate: int | None = None) -> Iterator[list[Host]]:
    """Make hosts that reach each other, and remove them at the end.

    What runs on them must have ended before: a namespace lives on while there is a process in it.

    Args:
        count: how many, from 1 to 64.
        rate: bits per second of each host's link, in each direction; None does not limit it.

    Example:
        >>> with hosts(2, rate=10**9) as (one, other):  # doctest: +SKIP
        ...     subprocess.run([*one.prefix, "ping", "-c1", other.address])
    """
    if not 1 <= count <= _MOST_HOSTS:
        raise ValueError(f"{count} hosts: it must be 1 to {_MOST_HOSTS}")
    in_the_way = obstacle(rate=rate is not None)
    if in_the_way is not None:
        raise NoHosts(in_the_way)
    run = f"gflow-{os.getpid()}-{next(_runs)}"
    switch = f"{run}-switch"
    with contextlib.ExitStack() as at_the_end:
        at_the_end.enter_context(_ended_in_order())
        _add_namespace(switch, at_the_end)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        made = []
        for number in range(count):
            host = _host(f"{run}-host{number}", number)
            _add_namespace(host.name, at_the_end)
            _plug_in(host, switch, f"port{number}", rate)
            made.append(host)
        yield made


def _host(name: str, number: int) -> Host:
    return Host(
        name,
        f"10.77.0.{number + 1}",
        f"fd77::{number + 1:x}",
        ["ip", "netns", "exec", name],
        {
            # By its name, this machine would be looked for outside of the namespace.
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "GFLOW_IFNAME": INTERFACE,
            # All namespaces are on one machine, whose memory hosts would not share.
            "GFLOW_HOST_ID": name,
        },
    )


def _add_namespace(name: str, at_the_end: contextlib.ExitStack) -> None:
    # First, so that an interruption between the two lines leaves nothing behind.
    at_the_end.callback(_remove_namespace, name)
    _ip("netns", "add", name)


def _remove_namespace(name: str) -> None:
    """Remove it with all interfaces in it, if it is there."""
    command = ["ip", "netns", "del", name]
    subprocess.run(command, capture_output=True, timeout=_COMMAND_SECONDS, check=False)


def _plug_in(host: Host, switch: str, port: str, rate: int | None) -> None:
    inside, outside = ("-n", host.name), ("-n", switch)
    _ip(*outside, "link", "add", port, "type", "veth", "peer", INTERFACE, "netns", host.name)
    _ip(*outside, "link", "set", port, "master", "switch", "up")
    _ip(*inside, "link", "set", "lo", "up")
    _ip(*inside, "link", "set", INTERFACE, "up")
    _ip(*inside, "address", "add", f"{host.address}/24", "dev", INTERFACE)
    # Nobody else is there to have the same address: it can be used at once.
    _ip(*inside, "address", "add", f"{host.address6}/64", "dev", INTERFACE, "nodad")
    if rate is not None:
        _limit(host.name, INTERFACE, rate)
        _limit(switch, port, rate)


def _limit(namespace: str, interface: str, rate: int) -> None:
    burst = max(_LEAST_BURST, round(rate / 8 * _BURST_SECONDS))
    shape = ["rate", f"{rate}bit", "burst", str(burst), "latency", _QUEUE]
    _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", *shape)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False
    )
    if done.returncode != 0:
        raise NoHosts(
            f"hosts cannot be made here: `{' '.join(command)}` failed: {done.stderr.strip()}. "
            "In a container it needs the capabilities NET_ADMIN and SYS_ADMIN."
        )


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """Let SIGTERM end the program as Ctrl-C does, with all that is to be done at the end."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    # Only the main thread may set handlers, and somebody else's are not replaced.
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return
    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
