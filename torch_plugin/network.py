"""Which address of this machine the other ranks should connect to. Finding out sends no packets."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

from torch.distributed import PrefixStore, Store, TCPStore

_SIOCGIFADDR = 0x8915
_LOOPBACK = "127.0.0.1"


class Choice(NamedTuple):
    """An address to listen on, and why it was chosen."""

    address: str
    reason: str


def own_address(store: Store, ifname: str | None) -> str:
    """Return the address to listen on: of ``ifname``, or of the route to the master."""
    return choose_address(store, ifname).address


def choose_address(store: Store, ifname: str | None) -> Choice:
    """Choose the address to listen on, as :func:`own_address` does, and say why."""
    if ifname is not None:
        return Choice(_address_of_interface(ifname), f"it is on the chosen interface {ifname}")
    master = _master_host(store)
    if master is None:
        return Choice(_address_of_hostname(), "this host's name resolves to it; no master is known")
    address = _address_towards(master)
    if address is None:
        reason = f"there is no route to the master {master}"
    elif _is_loopback(address) and not _is_loopback_name(master):
        # The master's own name often resolves to 127.0.1.1 on the master itself, where no other
        # host could reach it.
        reason = f"the master's name {master} resolves to loopback here"
    else:
        return Choice(address, f"it is on the route to the master {master}")
    reachable = next(_addresses_that_others_reach(), _LOOPBACK)
    return Choice(reachable, f"{reason}; this is the first address that is not loopback")


def _master_host(store: Store) -> str | None:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, TCPStore) else os.environ.get("MASTER_ADDR")


def _address_towards(host: str) -> str | None:
    """The local address that packets to ``host`` carry. Connecting a UDP socket sends none."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _address_of_hostname() -> str:
    try:
        address = socket.gethostbyname(socket.gethostname())
        with socket.socket() as probe:
            probe.bind((address, 0))
        return address
    except OSError:
        return _LOOPBACK


def _address_of_interface(name: str) -> str:
    address = next(_addresses_of(name), None)
    if address is None:
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise ValueError(
            f"gflow: GFLOW_IFNAME (or Options.ifname) is {name!r}, but this host has no interface "
            f"of that name with an address. It has: {names}."
        )
    return address


def _addresses_that_others_reach() -> Iterator[str]:
    for _, name in socket.if_nameindex():
        yield from (address for address in _addresses_of(name) if not _is_loopback(address))


def _addresses_of(interface: str) -> Iterator[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            yield socket.inet_ntoa(answer[20:24])
        except OSError:
            pass  # no such interface, or no IPv4 address on it
    try:
        with open("/proc/net/if_inet6") as table:
            for line in table:
                digits, *_, name = line.split()
                address = ipaddress.IPv6Address(bytes.fromhex(digits))
                # A link-local address is useless without the name of its interface.
                if name == interface and not address.is_link_local:
                    yield str(address)
    except OSError:
        pass  # a kernel without IPv6


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def _is_loopback_name(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return _is_loopback(host)
    except ValueError:
        return False
