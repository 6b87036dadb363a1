"""Open MPI and MPICH as contenders: an MPI program with as many ranks, which takes turns.

The program is compiled with what is installed, started once by its own ``mpiexec`` with its own
defaults, and told over Unix sockets when it is its turn. Otherwise its ranks sleep: busy waiting
would slow down the other contenders.
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

from gflow.bench.allreduce.compiler import CannotCompile, compile_c
from gflow.bench.turns import Unavailable
from gflow.launch.rank import Rank

_SOURCE = "mpi_allreduce.c"
_START_SECONDS = 30.0
_POLL_SECONDS = 0.1
_END_SECONDS = 5.0
_ANSWER_SECONDS = 600.0
_MAX_MESSAGE = 300


@dataclass(frozen=True)
class Flavour:
    """One implementation of MPI.

    Attributes:
        label: its name, which its compiler prints too.
        suffix: of its commands where several implementations are installed.
        question: the option that makes its compiler print its label.
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
        # Otherwise it refuses more ranks than cores; its bindings stay the default.
        options=("--oversubscribe",),
        variables=(("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")),
    ),
    "mpich": Flavour("MPICH", ".mpich", "-v"),
}


# --- before the ranks are started


def prepare(name: str, folder: Path) -> dict[str, Any]:
    """Compile the program; return what :class:`MpiRanks` needs, or raise Unavailable."""
    flavour = FLAVOURS[name]
    compiler = next(_compilers(flavour), None)
    if compiler is None:
        raise Unavailable(f"not installed: no mpicc{flavour.suffix}, no mpicc of {flavour.label}")
    mpiexec = compiler.with_name(compiler.name.replace("mpicc", "mpiexec"))
    if not os.access(mpiexec, os.X_OK):
        raise Unavailable(f"{compiler} is there, but {mpiexec} is not")
    try:
        program = compile_c([str(compiler)], _SOURCE, folder / name)
    except CannotCompile as error:
        raise Unavailable(str(error)) from error
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
    """The contender. Rank 0 starts the MPI program and sends it commands; the others wait."""

    def __init__(self, rank: Rank, flavour: str, mpiexec: str, program: str) -> None:
        self.info: dict[str, Any] = {}
        self._connections: list[IO[str]] = []
        self._cleanup = contextlib.ExitStack()
        if rank.number == 0:
            self._start(FLAVOURS[flavour], mpiexec, program, rank.world)

    def _start(self, flavour: Flavour, mpiexec: str, program: str, world: int) -> None:
        with contextlib.ExitStack() as cleanup:
            output = cleanup.enter_context(tempfile.TemporaryFile())
            listener = cleanup.enter_context(socket.socket(socket.AF_UNIX))
            # In the folder of the program, which is removed even if this rank is killed.
            address = Path(program).with_suffix(".orders")
            try:
                listener.bind(str(address))
            except OSError as error:
                raise Unavailable(f"its ranks cannot be reached at {address}: {error}") from error
            cleanup.callback(address.unlink)
            listener.listen(world)
            listener.settimeout(_POLL_SECONDS)
            process = subprocess.Popen(
                [mpiexec, *flavour.options, "-n", str(world), program, str(address)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | dict(flavour.variables),
            )
            cleanup.callback(_end, process)
            cleanup.callback(self._hang_up)
            until = time.monotonic() + _START_SECONDS
            while len(self._connections) < world:
                with contextlib.suppress(TimeoutError):
                    self._connections.append(_file(listener.accept()[0]))
                if process.poll() is not None or time.monotonic() > until:
                    output.seek(0)
                    said = " ".join(output.read().decode(errors="replace").split())
                    raise Unavailable(f"{mpiexec} did not start its ranks: {said[:_MAX_MESSAGE]}")
            self.info = _read_ready(
                [_read(connection) for connection in self._connections], flavour
            )
            self._cleanup = cleanup.pop_all()

    def set_size(self, size: int) -> None:
        """Prepare for tensors of that many bytes, and check a sum."""
        answers = self._send(f"size {size}")
        wrong = [answer for answer in answers if answer != "ok"]
        if wrong:
            raise RuntimeError(f"MPI: {wrong[0]} (tensor of {size} bytes)")

    def turn(self, skipped: int, counted: int) -> list[float]:
        """Seconds of each call; 0 on ranks that only wait."""
        by_rank = [_nanoseconds(answer) for answer in self._send(f"turn {skipped} {counted}")]
        if not by_rank:
            return [0.0] * counted
        return [max(calls) / 1e9 for calls in zip(*by_rank, strict=True)]

    def close(self) -> None:
        """End the MPI program."""
        self._cleanup.close()

    def _send(self, command: str) -> list[str]:
        for connection in self._connections:
            connection.write(command + "\n")
            connection.flush()
        return [_read(connection) for connection in self._connections]

    def _hang_up(self) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.close()


def _file(connection: socket.socket) -> IO[str]:
    with connection:  # the file keeps the connection open
        connection.settimeout(_ANSWER_SECONDS)
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
    """Wait for it: its ranks end once their connections are closed."""
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
