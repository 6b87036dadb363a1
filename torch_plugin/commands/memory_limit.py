"""The limit of one host: an allreduce in memory that all ranks share, with nothing around it.

No backend can be much faster with tensors in memory. It must never be shown as a competitor: it
can only be used on tensors that it has made itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shutil
from pathlib import Path
from typing import Any

from gflow.commands.compiler import CannotCompile, compile_c
from gflow.commands.left_out import LeftOut
from gflow.commands.rank import Rank

_SOURCE = "memory_limit.c"
_LINE = 64
_PAGE = 4096
#: Tensors that began at the same place in their pages would compete for the same lines of cache.
_SHIFT = 17 * _LINE


def build(folder: Path) -> dict[str, Any]:
    """Compile the program; return what :class:`MemoryLimit` needs, or raise LeftOut."""
    if shutil.which("cc") is None:
        raise LeftOut("there is no C compiler, cc")
    options = ["-march=native", "-shared", "-fPIC"]
    try:
        return {"library": str(compile_c(["cc", *options], _SOURCE, folder / "memory_limit.so"))}
    except CannotCompile as error:
        raise LeftOut(str(error)) from error


class MemoryLimit:
    """The contender, on a rank."""

    def __init__(self, rank: Rank, library: str) -> None:
        self.about: dict[str, Any] = {}
        self._rank = rank
        self._take_turn = ctypes.CDLL(library).take_turn
        self._take_turn.restype = None
        self._memory: Any = None

    def take_size(self, size: int) -> None:
        """Share memory for tensors of that many bytes, and check a sum."""
        import torch
        import torch.distributed as dist

        number, world = self._rank.number, self._rank.world
        flags = _rounded_up(world * _LINE, _PAGE)
        self._stride = _rounded_up(size, _LINE) + _SHIFT
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
        # A sum of zeros can be repeated for ever without growing.
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
    """Memory that all ranks see; it has no name that could be left behind."""
    import torch.distributed as dist

    file = -1
    place = [""]
    if rank == 0:
        file = os.memfd_create("gflow-memory-limit")
        os.ftruncate(file, size)
        place = [f"/proc/{os.getpid()}/fd/{file}"]
    dist.broadcast_object_list(place, src=0)
    with open(place[0], "r+b") as shared:
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
