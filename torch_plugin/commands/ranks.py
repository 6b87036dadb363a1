"""Starts ranks, each a process of its own, and brings back what they found out.

They run on this machine as it is, or on the hosts that ``hosts`` makes on it.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from gflow.commands.hosts import Host
from gflow.commands.rank import STACKS_SIGNAL

#: When a rank has failed, the others have this long to notice and to say so.
GRACE_SECONDS = 3.0

_THIS_MACHINE = Host("this machine", "127.0.0.1", "::1", [])
_LAST_WORDS = 6000
_WELL = "exited with code 0"
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
    hosts: Sequence[Host] = (),
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
        hosts: where the ranks run, as many on each; by default on this machine as it is.
    """
    if world % max(1, len(hosts)) != 0:
        raise ValueError(f"{world} ranks cannot be spread over {len(hosts)} hosts")
    until = time.monotonic() + deadline
    order = {
        "work": f"{work.__module__}:{work.__name__}",
        "arguments": dict(arguments or {}),
        "world": world,
        "starter": os.getpid(),
    }
    ranks: list[_Process] = []
    with contextlib.ExitStack() as at_the_end:
        port = at_the_end.enter_context(_reserved_port())
        selector = at_the_end.enter_context(selectors.DefaultSelector())
        places = hosts or [_THIS_MACHINE]
        for number in range(world):
            host, local = divmod(number, world // len(places))
            environ = _environ(number, world, places[0].address, port, unset) | {
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(world // len(places)),
                **places[host].variables,
            }
            output = at_the_end.enter_context(tempfile.TemporaryFile())
            rank = _Process(number, order, places[host].prefix, environ, output)
            at_the_end.callback(rank.end)
            selector.register(rank.way_back, selectors.EVENT_READ, rank)
            ranks.append(rank)
        failures = _follow(selector, until, deadline, on_news)
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
        order: dict[str, Any],
        prefix: list[str],
        environ: dict[str, str],
        output: IO[bytes],
    ) -> None:
        self.number = number
        self.result: Any = None
        self.is_silent = False
        self._has_result = False
        self._raised: str | None = None
        self._unread = b""
        self._output = output
        self.way_back, childs_end = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, "-c", _BOOT, *sys.path],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[childs_end],
                env=environ,
                # A process group of its own can be ended as a whole.
                start_new_session=True,
            )
        except BaseException:
            os.close(self.way_back)
            raise
        finally:
            os.close(childs_end)
        assert self._process.stdin is not None
        # A rank that is gone already is noticed when its way back is found closed.
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(json.dumps(order | {"rank": number, "way_back": childs_end}).encode())

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
        how = self._how_it_ended(until)
        if how == _WELL and self._has_result:
            return None
        when = "after its work was done" if self._has_result else "before its work was done"
        return f"rank {self.number} {how} ({when}). Its last words:\n{self.last_words()}"

    def _how_it_ended(self, until: float) -> str:
        while True:
            # The process stays a zombie: until `end` nobody else can be given its number.
            ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if ended is not None:
                if ended.si_code == os.CLD_EXITED:
                    return f"exited with code {ended.si_status}"
                return f"was killed by {_signal_name(ended.si_status)}"
            if time.monotonic() > until:
                return "closed its way back, but did not end"
            time.sleep(0.01)

    def last_words(self) -> str:
        """The end of what the rank has printed."""
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - _LAST_WORDS))
        text = self._output.read().decode(errors="replace").strip()
        return _indented(text or "(nothing)")

    def signal(self, number: int) -> None:
        """Send a signal to the rank."""
        os.kill(self._process.pid, number)

    def end(self) -> None:
        """Leave nothing of the rank behind."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self.way_back)


def _environ(
    rank: int, world: int, master: str, port: int, unset: tuple[str, ...]
) -> dict[str, str]:
    environ = {
        name: value
        for name, value in os.environ.items()
        # What an outer launcher says is meant for its own ranks.
        if name not in unset and not name.startswith("TORCHELASTIC_")
    }
    return environ | {
        "MASTER_ADDR": master,
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
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
