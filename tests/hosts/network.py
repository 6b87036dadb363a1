"""Several hosts on one machine: network namespaces with names and addresses of their own, joined by
a switch that can cut one off or slow it down.

    with Network(2) as network:
        subprocess.run(network.hosts[0].command(["ping", "-c1", network.hosts[1].ipv4()]))

It must never leave anything behind. So no namespace has a name and none is in /run/netns: each
lives as long as a process that the kernel kills together with this one, whatever ends it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from types import TracebackType

from tests.ranks import leash

_READY_S = 10.0
_COMMAND_S = 10.0


class Host:
    """One host: `eth0` leads to the others, and so does `eth1` and so on if it was asked for."""

    def __init__(self, network: Network, number: int) -> None:
        self.number = number
        # What gethostname() says on it.
        self.name = f"host{number}"
        self._network = network
        self._space = _Namespace(self.name)

    def ipv4(self, plane: int = 0) -> str:
        """The address of `eth{plane}`."""
        return f"10.231.{plane}.{self.number + 1}"

    def ipv6(self, plane: int = 0) -> str:
        """The address of `eth{plane}`."""
        return f"fd00:231:{plane}::{self.number + 1}"

    def command(self, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on this host."""
        return self._space.command(command)

    def cut_off(self) -> None:
        """Pulls its cables: from now on nothing reaches it, and nobody is told."""
        self._network._set_ports(self, "down")

    def reconnect(self) -> None:
        """Plugs its cables in again."""
        self._network._set_ports(self, "up")

    def limit(self, rate: str) -> None:
        """Lets no more than `rate` (as tc has it: `1gbit`) out of each interface, or into it."""
        for plane in range(self._network.planes):
            self._space.run("tc", *_tbf(f"eth{plane}", rate))
            self._network._switch.run("tc", *_tbf(_port(self, plane), rate))

    def close(self) -> None:
        """Lets the kernel remove it."""
        self._space.close()


class Network:
    """Hosts joined by a switch, or by one switch per plane. Usable as a context manager."""

    def __init__(self, hosts: int, planes: int = 1, ipv4: bool = True) -> None:
        self.planes = planes
        self.hosts: list[Host] = []
        self._open = contextlib.ExitStack()
        with contextlib.ExitStack() as made:
            self._switch = _Namespace("switch")
            made.callback(self._switch.close)
            for number in range(hosts):
                host = Host(self, number)
                made.callback(host.close)
                self.hosts.append(host)
            self._wire(ipv4)
            self._open = made.pop_all()

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Lets the kernel remove all of it."""
        self._open.close()

    def _wire(self, ipv4: bool) -> None:
        lines = []
        for plane in range(self.planes):
            lines += [f"link add br{plane} type bridge", f"link set br{plane} up"]
            for host in self.hosts:
                port = _port(host, plane)
                lines += [
                    f"link add {port} type veth peer name eth{plane} netns {host._space.pid}",
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
            host._space.ip(lines)

    def _set_ports(self, host: Host, state: str) -> None:
        self._switch.ip([f"link set {_port(host, plane)} {state}" for plane in range(self.planes)])


class _Namespace:
    """A network namespace with a host name of its own, and the process that keeps it."""

    def __init__(self, name: str) -> None:
        self._keeper = subprocess.Popen(
            leash.leashed([_tool("unshare"), "--net", "--uts", _tool("sleep"), "infinity"]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self._wait()
            self.run("hostname", name)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._keeper.pid

    def command(self, command: Sequence[str]) -> list[str]:
        return [_tool("nsenter"), f"--target={self.pid}", "--net", "--uts", "--", *command]

    def run(self, *command: str, given: str | None = None) -> None:
        ended = subprocess.run(
            self.command([_tool(command[0]), *command[1:]]),
            input=given,
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            check=False,
        )
        if ended.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {ended.stderr.strip()}\n{given or ''}")

    def ip(self, lines: Sequence[str]) -> None:
        self.run("ip", "-batch", "-", given="".join(f"{line}\n" for line in lines))

    def close(self) -> None:
        if self._keeper.returncode is None:
            leash.kill_process_group(self._keeper.pid)
            self._keeper.wait()
        self._keeper.stderr.close()

    def _wait(self) -> None:
        """Until the keeper is in namespaces of its own."""
        end = time.monotonic() + _READY_S
        while not all(
            _namespace(self.pid, kind) not in (None, _namespace(os.getpid(), kind))
            for kind in ("net", "uts")
        ):
            if self._keeper.poll() is not None:
                said = self._keeper.stderr.read().decode(errors="replace").strip()
                raise PermissionError(f"no network namespace can be made here: {said}")
            if time.monotonic() > end:
                raise TimeoutError("a network namespace was not ready in time")
            time.sleep(0.005)


@functools.cache
def why_not() -> str | None:
    """Why this machine cannot play several hosts, or None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc", "nsenter", "unshare") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    try:
        Network(1).close()
    except (OSError, RuntimeError) as error:
        return str(error)
    return None


def _namespace(pid: int, kind: str) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return None


def _port(host: Host, plane: int) -> str:
    return f"port{host.number}-{plane}"


def _tbf(interface: str, rate: str) -> list[str]:
    # The burst must hold what the kernel passes on in one piece, which is 64 KiB and its headers.
    limits = ["rate", rate, "burst", "256kb", "latency", "50ms"]
    return ["qdisc", "replace", "dev", interface, "root", "tbf", *limits]


def _tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise FileNotFoundError(f"{name} is not installed")
    return path
