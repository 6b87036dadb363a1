"""Open MPI and MPICH as contenders: an MPI program of as many ranks, which takes its turns.

The program is compiled with what is installed, started once by its own ``mpiexec`` with its own
defaults, and told over Unix sockets when it is its turn. Its ranks must never run, not even wait
actively, when it is not.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from gflow.commands.compiler import CannotCompile, compile_c
from gflow.commands.left_out import LeftOut
from gflow.commands.rank import Rank

_SOURCE = "mpi_allreduce.c"
_START_SECONDS = 30.0
_LOOK_SECONDS = 0.1
_END_SECONDS = 5.0
_ORDER_SECONDS = 600.0
_SAID_AT_MOST = 300


@dataclass(frozen=True)
class Flavour:
    """One implementation of MPI.

    Attributes:
        label: how it is called, in text and by itself.
        suffix: what its commands end in where several implementations are installed.
        question: the option to which its compiler answers with its label.
        options: for ``mpiexec``.
        variables: for the environment of ``mpiexec``.
    """

    label: str
    suffix: str
    question: str
    options: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


FLAVOURS = {
    "openmpi": Flavour(
        "Open MPI",
        ".openmpi",
        "--showme:version",
        # Without this it refuses more ranks than it counts cores; its bindings stay as they are.
        options=("--oversubscribe",),
        variables=(("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")),
    ),
    "mpich": Flavour("MPICH", ".mpich", "-v"),
}


# --- before the ranks are started


def build(name: str, folder: Path) -> dict[str, Any]:
    """Compile the program; return what :class:`MpiRanks` needs, or raise LeftOut."""
    flavour = FLAVOURS[name]
    compiler = next(_compilers(flavour), None)
    if compiler is None:
        raise LeftOut(f"not installed: no mpicc{flavour.suffix}, no mpicc of {flavour.label}")
    mpiexec = compiler.with_name(compiler.name.replace("mpicc", "mpiexec"))
    if not os.access(mpiexec, os.X_OK):
        raise LeftOut(f"{compiler} is there, but {mpiexec} is not")
    try:
        program = compile_c([str(compiler)], _SOURCE, folder / name)
    except CannotCompile as error:
        raise LeftOut(str(error)) from error
    return {"flavour": name, "mpiexec": str(mpiexec), "program": str(program)}


def _compilers(flavour: Flavour) -> Iterator[Path]:
    for command in (f"mpicc{flavour.suffix}", "mpicc"):
        path = shutil.which(command)
        if path is not None and flavour.label in _answer([path, flavour.question]):
            yield Path(path)


def _answer(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


# --- on the ranks


class MpiRanks:
    """The contender. Rank 0 starts the MPI program and tells it what to do; the others wait."""

    def __init__(self, rank: Rank, flavour: str, mpiexec: str, program: str) -> None:
        self.about: dict[str, Any] = {}
        self._orders: list[IO[str]] = []
        self._at_the_end = contextlib.ExitStack()
        if rank.number == 0:
            self._start(FLAVOURS[flavour], mpiexec, program, rank.world)

    def _start(self, flavour: Flavour, mpiexec: str, program: str, world: int) -> None:
        with contextlib.ExitStack() as at_the_end:
            output = at_the_end.enter_context(tempfile.TemporaryFile())
            listener = at_the_end.enter_context(socket.socket(socket.AF_UNIX))
            # In the folder of the program, which somebody removes even if this rank is killed.
            orders = Path(program).with_suffix(".orders")
            try:
                listener.bind(str(orders))
            except OSError as error:
                raise LeftOut(f"its ranks cannot be reached at {orders}: {error}") from error
            at_the_end.callback(orders.unlink)
            listener.listen(world)
            listener.settimeout(_LOOK_SECONDS)
            process = subprocess.Popen(
                [mpiexec, *flavour.options, "-n", str(world), program, str(orders)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | dict(flavour.variables),
            )
            at_the_end.callback(_end, process)
            at_the_end.callback(self._hang_up)
            until = time.monotonic() + _START_SECONDS
            while len(self._orders) < world:
                with contextlib.suppress(TimeoutError):
                    self._orders.append(_file(listener.accept()[0]))
                if process.poll() is not None or time.monotonic() > until:
                    output.seek(0)
                    said = " ".join(output.read().decode(errors="replace").split())
                    raise LeftOut(f"{mpiexec} did not start its ranks: {said[:_SAID_AT_MOST]}")
            self.about = _read_ready([_read(order) for order in self._orders], flavour)
            self._at_the_end = at_the_end.pop_all()

    def take_size(self, size: int) -> None:
        """Make ready for tensors of that many bytes, and check a sum."""
        answers = self._ask(f"size {size}")
        wrong = [answer for answer in answers if answer != "ok"]
        if wrong:
            raise RuntimeError(f"MPI: {wrong[0]} (tensor of {size} bytes)")

    def turn(self, skipped: int, counted: int) -> list[float]:
        """Seconds of each call; on the ranks that only wait, 0."""
        by_rank = [_nanoseconds(answer) for answer in self._ask(f"turn {skipped} {counted}")]
        if not by_rank:
            return [0.0] * counted
        return [max(calls) / 1e9 for calls in zip(*by_rank, strict=True)]

    def close(self) -> None:
        """End the MPI program."""
        self._at_the_end.close()

    def _ask(self, order: str) -> list[str]:
        for connection in self._orders:
            connection.write(order + "\n")
            connection.flush()
        return [_read(connection) for connection in self._orders]

    def _hang_up(self) -> None:
        for connection in self._orders:
            with contextlib.suppress(OSError):
                connection.close()


def _file(connection: socket.socket) -> IO[str]:
    with connection:  # the file goes on when the socket is closed
        connection.settimeout(_ORDER_SECONDS)
        return connection.makefile("rw")


def _read(connection: IO[str]) -> str:
    line = connection.readline()
    if not line:
        raise RuntimeError("MPI: a rank has ended too early")
    return line.strip()


def _nanoseconds(answer: str) -> list[int]:
    try:
        return [int(word) for word in answer.split()]
    except ValueError:
        raise RuntimeError(f"MPI: {answer}") from None


def _read_ready(answers: list[str], flavour: Flavour) -> dict[str, Any]:
    """Version and binding, from lines such as ``ready 1 Open MPI v4.1.4``."""
    _, cores, version = answers[0].split(" ", 2)
    return {
        "version": version.split()[-1].lstrip("v"),
        "bound_to_cores": int(cores) < len(os.sched_getaffinity(0)),
        "options": list(flavour.options),
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """Its ranks end by themselves when nobody gives orders any more."""
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
