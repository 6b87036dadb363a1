"""The limit of a link: plain TCP streams that carry what an allreduce must move between hosts.

Each host sends 2 * (hosts - 1) / hosts of the tensor to the next host and receives as much from
the one before, at once. It adds nothing up, so it must never be shown as a competitor.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from typing import Any

from gflow.commands.left_out import LeftOut
from gflow.commands.rank import Rank

_CHUNK = 1 << 20
_SECONDS = 60.0


def build(addresses: list[str]) -> dict[str, Any]:
    """Return what :class:`LinkLimit` needs, or raise LeftOut."""
    if len(addresses) < 2:
        raise LeftOut("there is no link with one host; --hosts 2 makes one")
    return {"addresses": addresses}


class LinkLimit:
    """The contender, on a rank. The first rank of each host sends and receives; others wait."""

    def __init__(self, rank: Rank, addresses: list[str]) -> None:
        import torch.distributed as dist

        self.about: dict[str, Any] = {}
        self._hosts = len(addresses)
        self._at_the_end = contextlib.ExitStack()
        self._bytes = 0
        ranks_per_host = rank.world // self._hosts
        host, local = divmod(rank.number, ranks_per_host)
        self._works = local == 0
        ports: list[int] = [0] * rank.world
        listener = self._at_the_end.enter_context(socket.socket())
        if self._works:
            listener.bind((addresses[host], 0))
            listener.listen()
        dist.all_gather_object(ports, listener.getsockname()[1] if self._works else 0)
        if self._works:
            following = (host + 1) % self._hosts
            there = (addresses[following], ports[following * ranks_per_host])
            listener.settimeout(_SECONDS)
            self._to_next = socket.create_connection(there, timeout=_SECONDS)
            self._at_the_end.enter_context(self._to_next)
            self._from_previous, _ = listener.accept()
            self._at_the_end.enter_context(self._from_previous)
            self._to_next.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for connection in (self._to_next, self._from_previous):
                connection.setblocking(False)
        self._out, self._in = memoryview(bytes(_CHUNK)), memoryview(bytearray(_CHUNK))

    def take_size(self, size: int) -> None:
        """Make ready for tensors of that many bytes; there is no sum to check."""
        self._bytes = 2 * (self._hosts - 1) * size // self._hosts
        self.turn(1, 0)

    def turn(self, skipped: int, counted: int) -> list[float]:
        """Seconds of each exchange; on the ranks that only wait, 0."""
        if not self._works:
            return [0.0] * counted
        for _ in range(skipped):
            self._exchange()
        seconds = []
        for _ in range(counted):
            start = time.perf_counter()
            self._exchange()
            seconds.append(time.perf_counter() - start)
        return seconds

    def close(self) -> None:
        """Close the streams."""
        self._at_the_end.close()

    def _exchange(self) -> None:
        to_send = to_receive = self._bytes
        while to_send or to_receive:
            readable, writable, _ = select.select(
                [self._from_previous] if to_receive else [],
                [self._to_next] if to_send else [],
                [],
                _SECONDS,
            )
            if not readable and not writable:
                raise RuntimeError(f"link limit: nothing came through for {_SECONDS:g} s")
            if writable:
                to_send -= self._to_next.send(self._out[:to_send])
            if readable:
                received = self._from_previous.recv_into(self._in[:to_receive])
                if received == 0:
                    raise RuntimeError("link limit: the host before this one has hung up")
                to_receive -= received
