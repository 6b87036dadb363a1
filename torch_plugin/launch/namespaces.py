"""Several hosts on this machine: network namespaces with names and addresses of their own, joined
by a switch that can cut one off or slow it down.

    with Network(2) as network:
        one, other = network.hosts
        subprocess.run(one.command(["ping", "-c1", other.ipv4()]))

The networks of the machine itself are never touched, and nothing is left behind: no namespace has a
name in /run/netns; each lives as long as a process that the kernel kills together with this one,
whatever ends it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from typing import NoReturn

from gflow.launch.child import command_of_child, command_of_holder
from gflow.launch.process import Location

#: The name of the first network card on each host.
INTERFACE = "eth0"
_MAX_HOSTS = 64
_COMMAND_SECONDS = 30.0
#: A link must let pass at once what the kernel sends at once, and what comes between two ticks.
_MIN_BURST = 128 << 10
_BURST_SECONDS = 0.001
#: How long a packet may wait in a full link before it is dropped.
_QUEUE = "25ms"


class NoHosts(RuntimeError):
    """Hosts cannot be made here; the text says what is needed."""


class Host:
    """One host: ``eth0`` leads to the others, and so do ``eth1`` and further ones if asked for.

    Attributes:
        number: from 0.
        name: what ``gethostname()`` returns on it.
    """

    def __init__(self, network: Network, number: int) -> None:
        self.number = number
        self.name = f"host{number}"
        self._network = network
        self._namespace = _Namespace(self.name)

    def ipv4(self, plane: int = 0) -> str:
        """The address of ``eth{plane}``."""
        return f"10.231.{plane}.{self.number + 1}"

    def ipv6(self, plane: int = 0) -> str:
        """The address of ``eth{plane}``."""
        return f"fd00:231:{plane}::{self.number + 1:x}"

    @property
    def location(self) -> Location:
        """This host, for processes to be started on it."""
        variables = {
            # Gloo would look up the name of the host, which leads nowhere.
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "GFLOW_IFNAME": INTERFACE,
            # A user's own value is meant for this machine as a whole.
            "GFLOW_HOST_ID": self.name,
        }
        return Location(self.name, self.ipv4(), variables, self._namespace.pid)

    def command(self, command: Sequence[str]) -> list[str]:
        """The command that runs ``command`` on this host, for as long as this process lives."""
        return command_of_child(command, self._namespace.pid)

    def cut_off(self) -> None:
        """Pull its cables: from now on nothing reaches it, without any notice."""
        self._network._set_ports(self, "down")

    def reconnect(self) -> None:
        """Plug its cables in again."""
        self._network._set_ports(self, "up")

    def limit(self, rate: int) -> None:
        """Limit each interface to ``rate`` bits per second in each direction."""
        for plane in range(self._network.planes):
            self._namespace.run("tc", *_token_bucket(f"eth{plane}", rate))
            self._network._switch.run("tc", *_token_bucket(_port(self, plane), rate))

    def close(self) -> None:
        """Let the kernel remove it."""
        self._namespace.close()


class Network:
    """Hosts joined by a switch, or by one switch per plane. Usable as a context manager.

    What runs on them should have ended before: a namespace lives on while a process is in it.
    """

    def __init__(self, hosts: int, planes: int = 1, ipv4: bool = True) -> None:
        self.planes = planes
        self.hosts: list[Host] = []
        self._open = contextlib.ExitStack()
        with contextlib.ExitStack() as opened:
            self._switch = _Namespace("switch")
            opened.callback(self._switch.close)
            for number in range(hosts):
                host = Host(self, number)
                opened.callback(host.close)
                self.hosts.append(host)
            self._connect(ipv4)
            self._open = opened.pop_all()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the kernel remove all of it."""
        self._open.close()

    def _connect(self, ipv4: bool) -> None:
        lines = []
        for plane in range(self.planes):
            lines += [f"link add br{plane} type bridge", f"link set br{plane} up"]
            for host in self.hosts:
                port, holder = _port(host, plane), host._namespace.pid
                lines += [
                    f"link add {port} type veth peer name eth{plane} netns {holder}",
                    f"link set {port} master br{plane}",
                    f"link set {port} up",
                ]
        self._switch.ip(lines)
        for host in self.hosts:
            lines = ["link set lo up"]
            for plane in range(self.planes):
                # Without nodad an IPv6 address cannot be used for its first second or two.
                lines.append(f"addr add {host.ipv6(plane)}/64 dev eth{plane} nodad")
                if ipv4:
                    lines.append(f"addr add {host.ipv4(plane)}/24 dev eth{plane}")
                lines.append(f"link set eth{plane} up")
            host._namespace.ip(lines)

    def _set_ports(self, host: Host, state: str) -> None:
        self._switch.ip([f"link set {_port(host, plane)} {state}" for plane in range(self.planes)])


@contextlib.contextmanager
def hosts(count: int, rate: int | None = None) -> Iterator[list[Host]]:
    """Make hosts that reach each other, and remove them at the end; NoHosts says why it cannot.

    Args:
        count: how many, from 1 to 64.
        rate: bits per second of each host's link, in each direction; None does not limit it.
    """
    if not 1 <= count <= _MAX_HOSTS:
        raise ValueError(f"{count} hosts: it must be 1 to {_MAX_HOSTS}")
    reason = obstacle(rate=rate is not None)
    if reason is not None:
        raise NoHosts(reason)
    with Network(count) as network:
        for host in network.hosts:
            if rate is not None:
                host.limit(rate)
        yield network.hosts


def obstacle(*, rate: bool = False) -> str | None:
    """Why hosts can't be made, or None; not every obstacle can be foreseen."""
    if os.geteuid() != 0:
        return "several hosts are network namespaces, and making them needs root: run it with sudo"
    for command in ("ip", "tc") if rate else ("ip",):
        if shutil.which(command) is None:
            return f"several hosts need the command `{command}`: install iproute2"
    return None


@functools.cache
def why_not() -> str | None:
    """Try to make hosts; return why this machine can't, or None if it can."""
    try:
        with hosts(1, rate=10**9):
            return None
    except NoHosts as reason:
        return str(reason)


class _Namespace:
    """A network namespace with a host name of its own, and the process that holds it."""

    def __init__(self, name: str) -> None:
        self._holder = subprocess.Popen(
            command_of_holder(name),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self._holder.pid
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        try:
            # It says so, or ends: neither takes long.
            if not self._holder.stdout.readline():
                _refuse("a network namespace", self._holder.stderr.read())
        except BaseException:
            self.close()
            raise

    def run(self, *command: str, given: str | None = None) -> None:
        """Run a command in it, with ``given`` as standard input."""
        ended = subprocess.run(
            command_of_child(command, self.pid),
            input=given,
            capture_output=True,
            text=True,
            timeout=_COMMAND_SECONDS,
            check=False,
        )
        if ended.returncode:
            _refuse(" ".join(command), ended.stderr, given)

    def ip(self, lines: Sequence[str]) -> None:
        """Run several commands of ``ip`` in it."""
        self.run("ip", "-batch", "-", given="".join(f"{line}\n" for line in lines))

    def close(self) -> None:
        """Let the kernel remove it, with all interfaces in it."""
        self._holder.kill()
        self._holder.communicate()


def _refuse(command: str, said: str, given: str | None = None) -> NoReturn:
    raise NoHosts(
        f"hosts cannot be made here: `{command}` failed: {said.strip()}. "
        "In a container it needs the capabilities NET_ADMIN and SYS_ADMIN."
        + (f"\n{given}" if given else "")
    )


def _port(host: Host, plane: int) -> str:
    return f"port{host.number}-{plane}"


def _token_bucket(interface: str, rate: int) -> list[str]:
    burst = max(_MIN_BURST, round(rate / 8 * _BURST_SECONDS))
    limits = ["rate", f"{rate}bit", "burst", str(burst), "latency", _QUEUE]
    return ["qdisc", "replace", "dev", interface, "root", "tbf", *limits]
