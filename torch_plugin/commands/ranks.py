"""Starts ranks on this host, each a process of its own, and brings back what they found out.

It must never wait without a deadline, and never leave a process behind: not when a rank fails, not
when this process is interrupted, not when it is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

from gflow.commands.rank import STACKS_SIGNAL

#: When a rank has failed, the others have this long to notice and to say so.
GRACE_SECONDS = 3.0

_HOST = "127.0.0.1"
_LAST_WORDS = 6000
# The ranks see the same modules as this process: without this, a folder that happens to be called
# like a package could stand in its way, depending on where the command is run.
_BOOT = "import sys; sys.path[:] = sys.argv[1:]; from gflow.commands.rank import main; main()"


class RanksFailed(RuntimeError):
    """At least one rank did not bring a result; the text says which, and how it ended."""


def run(
    work: Callable[..., Any],
    world: int,
    arguments: Mapping[str, Any] | None = None,
    *,
    deadline: float,
    on_news: Callable[[Any], None] | None = None,
    unset: tuple[str, ...] = (),
) -> list[Any]:
    """Call ``work(rank, **arguments)`` on ``world`` ranks and return their results by rank.

    A rank can call ``init_process_group`` without an address: the environment has it all.

    Args:
        work: a function at the top level of a module; it gets a :class:`gflow.commands.rank.Rank`.
        world: how many ranks.
        arguments: what JSON can hold. So must be the results.
        deadline: seconds until ranks that are not done are ended, and RanksFailed is raised.
        on_news: called with what ranks ``tell``, while they work.
        unset: environment variables that the ranks must not see.
    """
    until = time.monotonic() + deadline
    ranks: list[_Process] = []
    with _reserved_port() as port, selectors.DefaultSelector() as selector:
        try:
            for number in range(world):
                environ = _environ(number, world, port, unset)
                ranks.append(_Process(number, world, work, dict(arguments or {}), environ))
                selector.register(ranks[-1].way_back, selectors.EVENT_READ, ranks[-1])
            failures = _follow(selector, until, deadline, on_news)
        finally:
            for rank in ranks:
                rank.end()
    if failures:
        raise RanksFailed("\n".join(failures))
    return [rank.result for rank in ranks]


def _follow(
    selector: selectors.BaseSelector,
    until: float,
    deadline: float,
    on_news: Callable[[Any], None] | None,
) -> list[str]:
    """Listen to the ranks until all have ended; return what went wrong, the first failure first."""
    failures: list[str] = []
    while selector.get_map():
        left = until - time.monotonic()
        if left <= 0:
            if not failures:
                failures = _name_the_late(selector, deadline)
            break
        for key, _ in selector.select(left):
            rank: _Process = key.data
            for news in rank.listen():
                if on_news is not None:
                    on_news(news)
            if rank.is_silent:
                selector.unregister(rank.way_back)
                failure = rank.failure(until)
                if failure is not None and not failures:
                    until = min(until, time.monotonic() + GRACE_SECONDS)
                failures += [failure] if failure is not None else []
    return failures


def _name_the_late(selector: selectors.BaseSelector, deadline: float) -> list[str]:
    late: list[_Process] = [key.data for key in selector.get_map().values()]
    for rank in late:
        rank.signal(STACKS_SIGNAL)
    time.sleep(0.5)  # for writing the stacks
    return [
        f"rank {rank.number} was not done after {deadline:g} s. Where it was:\n{rank.last_words()}"
        for rank in late
    ]


class _Process:
    """One rank, from the outside."""

    def __init__(
        self,
        number: int,
        world: int,
        work: Callable[..., Any],
        arguments: dict[str, Any],
        environ: dict[str, str],
    ) -> None:
        self.number = number
        self.result: Any = None
        self.is_silent = False
        self._has_result = False
        self._raised: str | None = None
        self._unread = b""
        self._output: IO[bytes] = tempfile.TemporaryFile()
        self.way_back, childs_end = os.pipe()
        order = {
            "rank": number,
            "world": world,
            "work": f"{work.__module__}:{work.__name__}",
            "arguments": arguments,
            "way_back": childs_end,
            "starter": os.getpid(),
        }
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, *sys.path],
                stdin=subprocess.PIPE,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=[childs_end],
                env=environ,
                # A process group of its own can be ended as a whole.
                start_new_session=True,
            )
        except BaseException:
            os.close(self.way_back)
            self._output.close()
            raise
        finally:
            os.close(childs_end)
        assert self._process.stdin is not None
        # A rank that is gone already is noticed when its way back is found closed.
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(json.dumps(order).encode())

    def listen(self) -> Iterator[Any]:
        """Read what has arrived; results and errors are kept, news are returned."""
        data = os.read(self.way_back, 1 << 16)
        self.is_silent = not data
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            kind, content = json.loads(line)
            if kind == "news":
                yield content
            elif kind == "result":
                self.result, self._has_result = content, True
            else:
                self._raised = content

    def failure(self, until: float) -> str | None:
        """How a silent rank has failed, or None if it did not."""
        if self._raised is not None:
            return f"rank {self.number} raised an exception:\n{_indented(self._raised)}"
        try:
            code = self._process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            how = "had done its work, but its process did not end"
        else:
            if code == 0 and self._has_result:
                return None
            how = f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"
        when = "after its work was done" if self._has_result else "before its work was done"
        return f"rank {self.number} {how} ({when}). Its last words:\n{self.last_words()}"

    def last_words(self) -> str:
        """The end of what the rank has printed."""
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - _LAST_WORDS))
        text = self._output.read().decode(errors="replace").strip()
        return _indented(text or "(nothing)")

    def signal(self, number: int) -> None:
        """Send a signal to the rank, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def end(self) -> None:
        """Leave nothing of the rank behind."""
        # The rank has not been waited for yet, or had nothing left in its group that matters:
        # the number of a group is not given away while it has members.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self.way_back)
        self._output.close()


def _environ(rank: int, world: int, port: int, unset: tuple[str, ...]) -> dict[str, str]:
    environ = {
        name: value
        for name, value in os.environ.items()
        # What an outer launcher says is meant for its own ranks.
        if name not in unset and not name.startswith("TORCHELASTIC_")
    }
    return environ | {
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        # More threads than cores would only take turns.
        "OMP_NUM_THREADS": "1",
    }


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A port that rank 0 can listen on and that nobody else is given meanwhile.

    Linux lets two sockets have the same port if both ask to reuse addresses and only one listens.
    """
    with socket.socket() as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind(("", 0))
        yield reservation.getsockname()[1]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in text.rstrip().splitlines())
