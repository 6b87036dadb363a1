"""Ranks that run while the test looks on: it reads what they say, stops one, pulls a cable, and
then sees how each of them ends.

It must never wait without a deadline, and never leave a process behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.hosts.network import Host
from tests.ranks import ScriptRank, ScriptRun, leash
from tests.ranks.script import ScriptProcess, free_port, script_environment

ROOT = Path(__file__).resolve().parents[2]


def say(**fields: Any) -> None:
    """Called by a rank: one line for the test, whole even when other threads write too."""
    os.write(sys.stdout.fileno(), (json.dumps(fields) + "\n").encode())


class Ranks:
    """The ranks of a program, one per place: a host, or None for this machine as it is.

    `env` may hold a variable for all, or a list of one value per rank (None: not set). The program
    is a module; it is killed when the block ends."""

    def __init__(
        self,
        module: str,
        places: Sequence[Host | None],
        env: Mapping[str, str | Sequence[str | None]] | None = None,
        arguments: Sequence[str] = (),
        master: str | None = None,
    ) -> None:
        self._tag = leash.new_tag()
        self._open = True
        self.processes: list[ScriptProcess] = []
        first = places[0]
        rendezvous = {
            "WORLD_SIZE": str(len(places)),
            "MASTER_ADDR": master or (first.ipv4() if first else "127.0.0.1"),
            "MASTER_PORT": str(free_port()),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(
                ":"
            ),
        }
        command = [sys.executable, "-m", module, *arguments]
        try:
            for rank, host in enumerate(places):
                own = {
                    name: value if isinstance(value, str) else value[rank]
                    for name, value in (env or {}).items()
                }
                environment = script_environment(self._tag, rendezvous) | {
                    "RANK": str(rank),
                    **{name: value for name, value in own.items() if value is not None},
                }
                self.processes.append(
                    ScriptProcess(rank, host.command(command) if host else command, environment)
                )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def wait_until_all_say(self, word: str, timeout_s: float = 60.0) -> None:
        """Waits until each rank has said a line with this field."""
        __tracebackhide__ = True
        end = time.monotonic() + timeout_s
        waiting = list(self.processes)
        while waiting := [
            process
            for process in waiting
            if not any(word in line for line in lines_of(process.output_so_far()))
        ]:
            gone = [process for process in waiting if process.has_ended()]
            if gone or time.monotonic() > end:
                why = "ended before" if gone else "had not come to it at the deadline"
                names = [process.rank for process in gone or waiting]
                raise AssertionError(f"rank {names} {why}: {word}\n{self._end(end).story()}")
            time.sleep(0.02)

    def signal(self, rank: int, number: signal.Signals) -> float:
        """Sends a signal to one rank; gives the time at which it was sent."""
        now = time.monotonic()
        os.kill(self.processes[rank].pid, number)
        return now

    def ended(self, timeout_s: float = 60.0, but: Sequence[int] = ()) -> ScriptRun:
        """How the ranks end, each by the deadline. Those in `but` are not waited for: they are
        killed when the others have ended."""
        return self._end(time.monotonic() + timeout_s, but)

    def close(self) -> None:
        """Kills whatever still runs."""
        if self._open:
            self._open = False
            for process in self.processes:
                process.kill()
            leash.kill_strays(self._tag, grace_s=0.0)

    def _end(self, end: float, but: Sequence[int] = ()) -> ScriptRun:
        ranks: dict[int, ScriptRank] = {}
        for process in self.processes:
            if process.rank not in but:
                ranks[process.rank] = process.ended(end)
        for rank in but:
            self.processes[rank].kill()
            ranks[rank] = self.processes[rank].ended(end)
        left = leash.kill_strays(self._tag)
        return ScriptRun([ranks[process.rank] for process in self.processes], left)


def lines_of(output: str) -> list[dict[str, Any]]:
    """What a rank has said by `say`, in order; other output is passed over."""
    lines = []
    for line in output.splitlines():
        if line.startswith("{"):
            with contextlib.suppress(json.JSONDecodeError):
                lines.append(json.loads(line))
    return lines


def line_with(rank: ScriptRank, word: str) -> dict[str, Any]:
    """The first line of a rank that has this field; fails with all its output without one."""
    __tracebackhide__ = True
    for line in lines_of(rank.output):
        if word in line:
            return line
    raise AssertionError(f"rank {rank.rank} never said {word!r}\n{rank.story()}")


def eventually(holds: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    """Whether something holds before the deadline; it is asked again and again."""
    end = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
