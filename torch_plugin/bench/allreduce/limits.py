"""The limits that contenders are compared with: of shared memory, and of the links between hosts.

They do less than an allreduce of arbitrary tensors, so they are never shown as competitors.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import select
import shutil
import socket
import time
from pathlib import Path
from typing import Any

from gflow.bench.allreduce.compiler import CannotCompile, compile_c
from gflow.bench.turns import Unavailable
from gflow.launch.rank import Rank

_SOURCE = "memory_limit.c"
_CACHE_LINE = 64
_PAGE = 4096
#: Tensors at the same offset in their pages would compete for the same cache lines.
_STAGGER = 17 * _CACHE_LINE
#: Bytes per system call, and seconds of silence on a link.
_CHUNK = 1 << 20
_TIMEOUT = 60.0


def prepare_memory_limit(folder: Path) -> dict[str, Any]:
    """Compile the program; return what :class:`MemoryLimit` needs, or raise Unavailable."""
    if shutil.which("cc") is None:
        raise Unavailable("there is no C compiler, cc")
    options = ["-march=native", "-shared", "-fPIC"]
    try:
        return {"library": str(compile_c(["cc", *options], _SOURCE, folder / "memory_limit.so"))}
    except CannotCompile as error:
        raise Unavailable(str(error)) from error


class MemoryLimit:
    """The limit of one host: an allreduce in memory that all ranks share, and nothing else.

    No backend can be much faster with tensors in memory. It only works on tensors that it has made.
    """

    def __init__(self, rank: Rank, library: str) -> None:
        self.info: dict[str, Any] = {}
        self._rank = rank
        self._take_turn = ctypes.CDLL(library).take_turn
        self._take_turn.restype = None
        self._memory: Any = None

    def set_size(self, size: int) -> None:
        """Share memory for tensors of that many bytes, and check a sum."""
        import torch
        import torch.distributed as dist

        number, world = self._rank.number, self._rank.world
        flags = _rounded_up(world * _CACHE_LINE, _PAGE)
        self._stride = _rounded_up(size, _CACHE_LINE) + _STAGGER
        self._count = size // 4
        self._memory = torch.frombuffer(
            _shared_memory(number, flags + world * self._stride), dtype=torch.uint8
        )
        self._flags = self._memory.data_ptr()
        self._tensors = self._flags + flags
        start = flags + number * self._stride
        tensor = self._memory[start : start + size].view(torch.float32)
        tensor.fill_(number + 1)
        dist.barrier()
        self.turn(1, 0)
        if not bool((tensor == world * (world + 1) // 2).all()):
            raise RuntimeError(f"memory limit: a wrong sum for a tensor of {size} bytes")
        dist.barrier()
        # A sum of zeros can be repeated without overflowing.
        tensor.zero_()

    def turn(self, skipped: int, counted: int) -> list[float]:
        """Seconds of each call."""
        seconds = (ctypes.c_double * counted)()
        self._take_turn(
            ctypes.c_void_p(self._flags),
            ctypes.c_void_p(self._tensors),
            ctypes.c_size_t(self._stride // 4),
            self._rank.number,
            self._rank.world,
            ctypes.c_size_t(self._count),
            skipped,
            counted,
            seconds,
        )
        return list(seconds)

    def close(self) -> None:
        """Give the memory back."""
        self._memory = None


def _shared_memory(rank: int, size: int) -> mmap.mmap:
    """Memory that all ranks see; without a name, so that nothing can be left behind."""
    import torch.distributed as dist

    file = -1
    path = [""]
    if rank == 0:
        file = os.memfd_create("gflow-memory-limit")
        os.ftruncate(file, size)
        path = [f"/proc/{os.getpid()}/fd/{file}"]
    dist.broadcast_object_list(path, src=0)
    with open(path[0], "r+b") as shared:
        memory = mmap.mmap(shared.fileno(), size)
    # Not every kernel has large pages for shared memory.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    dist.barrier()
    if rank == 0:
        os.close(file)
    return memory


def _rounded_up(number: int, to: int) -> int:
    return (number + to - 1) // to * to


# --- links


def prepare_link_limit(addresses: list[str]) -> dict[str, Any]:
    """Return what :class:`LinkLimit` needs, or raise Unavailable."""
    if len(addresses) < 2:
        raise Unavailable("there is no link with one host; --hosts 2 makes one")
    return {"addresses": addresses}


class LinkLimit:
    """The limit of a link: TCP streams that carry what an allreduce must move between hosts.

    The first rank of each host sends 2 * (hosts - 1) / hosts of the tensor to the next host and
    receives as much from the one before, at once; the other ranks wait.
    """

    def __init__(self, rank: Rank, addresses: list[str]) -> None:
        import torch.distributed as dist

        self.info: dict[str, Any] = {}
        self._hosts = len(addresses)
        self._cleanup = contextlib.ExitStack()
        self._bytes = 0
        ranks_per_host = rank.world // self._hosts
        host, local = divmod(rank.number, ranks_per_host)
        self._is_active = local == 0
        ports: list[int] = [0] * rank.world
        listener = self._cleanup.enter_context(socket.socket())
        if self._is_active:
            listener.bind((addresses[host], 0))
            listener.listen()
        dist.all_gather_object(ports, listener.getsockname()[1] if self._is_active else 0)
        if self._is_active:
            next_host = (host + 1) % self._hosts
            address = (addresses[next_host], ports[next_host * ranks_per_host])
            listener.settimeout(_TIMEOUT)
            self._to_next = socket.create_connection(address, timeout=_TIMEOUT)
            self._cleanup.enter_context(self._to_next)
            self._from_previous, _ = listener.accept()
            self._cleanup.enter_context(self._from_previous)
            self._to_next.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for connection in (self._to_next, self._from_previous):
                connection.setblocking(False)
        self._out, self._in = memoryview(bytes(_CHUNK)), memoryview(bytearray(_CHUNK))

    def set_size(self, size: int) -> None:
        """Prepare for tensors of that many bytes; there is no sum to check."""
        self._bytes = 2 * (self._hosts - 1) * size // self._hosts
        self.turn(1, 0)

    def turn(self, skipped: int, counted: int) -> list[float]:
        """Seconds of each exchange; 0 on ranks that only wait."""
        if not self._is_active:
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
        self._cleanup.close()

    def _exchange(self) -> None:
        to_send = to_receive = self._bytes
        while to_send or to_receive:
            readable, writable, _ = select.select(
                [self._from_previous] if to_receive else [],
                [self._to_next] if to_send else [],
                [],
                _TIMEOUT,
            )
            if not readable and not writable:
                raise RuntimeError(f"link limit: nothing came through for {_TIMEOUT:g} s")
            if writable:
                to_send -= self._to_next.send(self._out[:to_send])
            if readable:
                received = self._from_previous.recv_into(self._in[:to_receive])
                if received == 0:
                    raise RuntimeError("link limit: the host before this one has hung up")
                to_receive -= received
