"""Starts ranks, each a process of its own, and collects their results.

They run on this machine as it is, or on the hosts that ``namespaces`` makes on it. Nothing here
waits without a deadline, and no process is left behind: not when a rank fails, not when this
process is interrupted, not when it is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gflow.launch.process import THIS_MACHINE, Location, Process, signal_name
from gflow.launch.rank import STACKS_SIGNAL

#: When a rank has failed, the others have this long to notice and to say so.
GRACE_SECONDS = 3.0

#: A variable for all ranks, or one value per rank, None where it is not set.
Variables = Mapping[str, str | Sequence[str | None]]

_LAST_OUTPUT = 6000
# The ranks see the same modules as this process: otherwise a folder named like a package could
# shadow it, depending on where the command is run.
_BOOT = (
    "import sys; sys.path[:] = sys.argv[1:-1]; from gflow.launch.rank import main; "
    "main(int(sys.argv[-1]))"
)


class RanksFailed(RuntimeError):
    """At least one rank returned no result; the text says which, and how it ended."""


class Ranks:
    """The processes of one job, one per rank. A rank can call ``init_process_group`` without an
    address: RANK, WORLD_SIZE, MASTER_ADDR and so on are set.

    Usable as a context manager; :meth:`close` kills what still runs.
    """

    def __init__(
        self,
        command: Sequence[str],
        locations: Sequence[Location],
        *,
        variables: Variables | None = None,
        unset: Sequence[str] = (),
        master: str | None = None,
        has_channel: bool = False,
    ) -> None:
        """Start all ranks.

        Args:
            command: what each of them runs.
            locations: where each of them runs.
            variables: for their environment, beside this process's own.
            unset: variables of this process that they must not see.
            master: the address of rank 0; by default that of its location.
            has_channel: give each a socket, see :class:`~gflow.launch.process.Process`.
        """
        self.processes: list[Process] = []
        self._open = contextlib.ExitStack()
        with contextlib.ExitStack() as opened:
            port = opened.enter_context(_reserved_port())
            inherited = {
                name: value
                for name, value in os.environ.items()
                # An outer launcher's variables are meant for its own ranks.
                if name not in unset and not name.startswith("TORCHELASTIC_")
            }
            for number, location in enumerate(locations):
                environ = {
                    **inherited,
                    **_rendezvous(number, locations),
                    "MASTER_ADDR": master or locations[0].address,
                    "MASTER_PORT": str(port),
                    # With more threads than cores they would only wait for each other.
                    "OMP_NUM_THREADS": "1",
                    **location.variables,
                    **_of_rank(number, variables or {}),
                }
                process = Process(command, environ, location, has_channel=has_channel)
                opened.callback(process.kill)
                self.processes.append(process)
            self._open = opened.pop_all()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill whatever still runs."""
        self._open.close()


def run(
    function: Callable[..., Any],
    world: int,
    arguments: Mapping[str, Any] | None = None,
    *,
    deadline: float,
    on_message: Callable[[Any], None] | None = None,
    unset: Sequence[str] = (),
    hosts: Sequence[Location] = (),
) -> list[Any]:
    """Call ``function(rank, **arguments)`` on ``world`` ranks and return their results by rank.

    Args:
        function: at the top level of a module; it gets a :class:`gflow.launch.rank.Rank`.
        world: how many ranks.
        arguments: what JSON can hold. So must be the results.
        deadline: seconds until ranks that are not done are killed, and RanksFailed is raised.
        on_message: called with what ranks ``tell``, while they work.
        unset: environment variables that the ranks must not see.
        hosts: where the ranks run, as many on each; by default on this machine as it is.
    """
    hosts = hosts or [THIS_MACHINE]
    if world % len(hosts) != 0:
        raise ValueError(f"{world} ranks cannot be spread over {len(hosts)} hosts")
    until = time.monotonic() + deadline
    locations = [host for host in hosts for _ in range(world // len(hosts))]
    task = {
        "function": f"{function.__module__}:{function.__name__}",
        "arguments": dict(arguments or {}),
        "world": world,
    }
    command = [sys.executable, "-c", _BOOT, *sys.path]
    with (
        Ranks(command, locations, unset=unset, has_channel=True) as ranks,
        selectors.DefaultSelector() as selector,
    ):
        runs = [_Run(number, process) for number, process in enumerate(ranks.processes)]
        for one in runs:
            one.send(task)
            selector.register(one.channel, selectors.EVENT_READ, one)
        failures = _follow(selector, until, deadline, on_message)
    if failures:
        raise RanksFailed("\n".join(failures))
    return [one.result for one in runs]


def _follow(
    selector: selectors.BaseSelector,
    until: float,
    deadline: float,
    on_message: Callable[[Any], None] | None,
) -> list[str]:
    """Listen to the ranks until all have ended; return what went wrong, the first failure first."""
    failures: list[str] = []
    while selector.get_map():
        left = until - time.monotonic()
        if left <= 0:
            if not failures:
                failures = _describe_late(selector, deadline)
            break
        for key, _ in selector.select(left):
            one: _Run = key.data
            for message in one.receive():
                if on_message is not None:
                    on_message(message)
            if one.has_hung_up:
                selector.unregister(one.channel)
                failure = one.failure(until)
                if failure is not None and not failures:
                    until = min(until, time.monotonic() + GRACE_SECONDS)
                failures += [failure] if failure is not None else []
    return failures


def _describe_late(selector: selectors.BaseSelector, deadline: float) -> list[str]:
    late: list[_Run] = [key.data for key in selector.get_map().values()]
    for one in late:
        one.process.signal(STACKS_SIGNAL)
    time.sleep(0.5)  # for writing the stacks
    return [
        f"rank {one.number} was not done after {deadline:g} s. Where it was:\n{one.last_output()}"
        for one in late
    ]


class _Run:
    """The task of one rank, as this process sees it."""

    def __init__(self, number: int, process: Process) -> None:
        assert process.channel is not None
        self.number = number
        self.process = process
        self.channel = process.channel
        self.result: Any = None
        self.has_hung_up = False
        self._has_result = False
        self._raised: str | None = None
        self._unread = b""

    def send(self, task: dict[str, Any]) -> None:
        """Give the rank its task."""
        # A rank that is gone already is noticed when its channel is found closed.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.channel.sendall((json.dumps(task | {"rank": self.number}) + "\n").encode())

    def receive(self) -> Iterator[Any]:
        """Read what has arrived; keep results and errors, return messages."""
        try:
            data = self.channel.recv(1 << 16)
        except ConnectionResetError:  # it died with something of ours unread
            data = b""
        self.has_hung_up = not data
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            kind, content = json.loads(line)
            if kind == "message":
                yield content
            elif kind == "result":
                self.result, self._has_result = content, True
            else:
                self._raised = content

    def failure(self, until: float) -> str | None:
        """How a rank that has hung up has failed, or None if it has not."""
        if self._raised is not None:
            return f"rank {self.number} raised an exception:\n{_indented(self._raised)}"
        code = self.process.wait(until)
        if code == 0 and self._has_result:
            return None
        when = "after its work was done" if self._has_result else "before its work was done"
        return (
            f"rank {self.number} {_how_it_ended(code)} ({when}). Its last words:\n"
            f"{self.last_output()}"
        )

    def last_output(self) -> str:
        """The end of what the rank has printed."""
        start = max(0, self.process.output_size() - _LAST_OUTPUT)
        return _indented(self.process.output(start).strip() or "(nothing)")


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "closed its channel but is still running"
    name = signal_name(code)
    return f"was killed by {name}" if name else f"exited with code {code}"


def _rendezvous(number: int, locations: Sequence[Location]) -> dict[str, str]:
    """The variables that torch reads in a rank, except the master's address."""
    on_this_host = [rank for rank, one in enumerate(locations) if one == locations[number]]
    return {
        "RANK": str(number),
        "WORLD_SIZE": str(len(locations)),
        "LOCAL_RANK": str(on_this_host.index(number)),
        "LOCAL_WORLD_SIZE": str(len(on_this_host)),
    }


def _of_rank(number: int, variables: Variables) -> dict[str, str]:
    own = {
        name: value if isinstance(value, str) else value[number]
        for name, value in variables.items()
    }
    return {name: value for name, value in own.items() if value is not None}


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A port that rank 0 can listen on and that isn't given to anyone else in the meantime.

    Linux lets two sockets have the same port if both ask to reuse addresses and only one listens.
    """
    with socket.socket() as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind(("", 0))
        yield reservation.getsockname()[1]


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in text.rstrip().splitlines())
