"""One program that runs beside this one: started, watched, and ended with all its children.

It never outlives this process, whatever ends it: see ``child``. Its output goes to a temporary
file, so a program that prints a lot is never held up.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gflow.launch.child import command_of_child

_POLL_SECONDS = 0.005


@dataclass(frozen=True)
class Location:
    """Where a process runs.

    Attributes:
        name: of the host.
        address: where other hosts reach it.
        variables: what its processes need in their environment.
        namespace: the process whose network namespace they share; None for this one's.
    """

    name: str
    address: str
    variables: Mapping[str, str] = field(default_factory=dict, hash=False)
    namespace: int | None = None


THIS_MACHINE = Location("this machine", "127.0.0.1")


class Process:
    """A running program and everything it starts.

    Attributes:
        pid: its number; it stays taken until :meth:`kill`.
        channel: this side of a socket to it, if there is one.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        location: Location = THIS_MACHINE,
        *,
        has_channel: bool = False,
        folder: Path | None = None,
    ) -> None:
        """Start ``command``.

        Args:
            command: the program and its arguments.
            environ: its whole environment.
            location: where it runs.
            has_channel: connect a socket to it, and add the number of its end to the arguments.
            folder: its working folder; by default this process's own.
        """
        self.channel: socket.socket | None = None
        ends: list[socket.socket] = []
        if has_channel:
            self.channel, other_end = socket.socketpair()
            ends = [other_end]
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        descriptors = [end.fileno() for end in ends]
        try:
            self._process = subprocess.Popen(
                command_of_child([*command, *map(str, descriptors)], location.namespace),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=descriptors,
                env=dict(environ),
                cwd=folder,
                # A process group of its own can be killed as a whole.
                start_new_session=True,
            )
        except BaseException:
            self._close_files()
            raise
        finally:
            for end in ends:
                end.close()
        self.pid = self._process.pid

    @property
    def is_killed(self) -> bool:
        """Whether :meth:`kill` was called."""
        return self._process.returncode is not None

    def exit_code(self) -> int | None:
        """How it ended, as ``subprocess`` has it; None while it runs."""
        if self._process.returncode is not None:
            return self._process.returncode
        # It stays a zombie: until `kill`, its process id can't be reused.
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def wait(self, until: float) -> int | None:
        """Its exit code, or None if it still runs at ``until`` on the monotonic clock."""
        while (code := self.exit_code()) is None and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        return code

    def signal(self, number: int) -> None:
        """Send it a signal; harmless once it has ended."""
        if not self.is_killed:
            os.kill(self.pid, number)

    def output(self, start: int = 0) -> str:
        """Its output so far, from byte ``start`` on."""
        # Read at a position: the process writes where the file stands.
        data = os.pread(self._output.fileno(), max(0, self.output_size() - start), start)
        return data.decode(errors="replace")

    def output_size(self) -> int:
        """How many bytes it has printed so far."""
        return os.fstat(self._output.fileno()).st_size

    def kill(self) -> int:
        """End it and its process group, if they still run; return its exit code."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            if self.channel is not None:
                self.channel.close()
        return self._process.returncode

    def _close_files(self) -> None:
        self._output.close()
        if self.channel is not None:
            self.channel.close()


def signal_name(exit_code: int) -> str | None:
    """The name of the signal behind a negative exit code; None if no signal ended the process.

    Example:
        >>> signal_name(-9), signal_name(1)
        ('SIGKILL', None)
    """
    if exit_code >= 0:
        return None
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"
