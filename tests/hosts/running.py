"""Ranks under observation: the test reads their reports, stops one or pulls a cable, and then
checks how each of them ends.

Every wait has a deadline, and no process is left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from gflow.launch import ranks
from gflow.launch.namespaces import Host
from gflow.launch.process import THIS_MACHINE
from tests.ranks import ScriptRank, ScriptRun
from tests.ranks.script import script_run, script_variables
from tests.ranks.strays import kill_strays, new_tag

ROOT = Path(__file__).resolve().parents[2]


def say(**fields: Any) -> None:
    """Called by a rank: reports one line to the test, in one piece even if other threads write."""
    os.write(sys.stdout.fileno(), (json.dumps(fields) + "\n").encode())


class Ranks:
    """The ranks of a program, one per place: a host, or None for this machine itself.

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
        self._tag = new_tag()
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self._ranks = ranks.Ranks(
            [sys.executable, "-m", module, *arguments],
            # The test itself sets its ranks' variables.
            [replace(host.location, variables={}) if host else THIS_MACHINE for host in places],
            variables=script_variables(self._tag) | {"PYTHONPATH": path} | dict(env or {}),
            master=master,
        )
        self.processes = self._ranks.processes

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
        """Waits until each rank has reported a line with this field."""
        __tracebackhide__ = True
        end = time.monotonic() + timeout_s
        waiting = dict(enumerate(self.processes))
        while waiting := {
            rank: process
            for rank, process in waiting.items()
            if not any(word in line for line in lines_of(process.output()))
        }:
            gone = [rank for rank, process in waiting.items() if process.exit_code() is not None]
            if gone or time.monotonic() > end:
                why = "ended before" if gone else "had not come to it at the deadline"
                names = gone or list(waiting)
                story = script_run(self.processes, self._tag, end).story()
                raise AssertionError(f"rank {names} {why}: {word}\n{story}")
            time.sleep(0.02)

    def signal(self, rank: int, number: signal.Signals) -> float:
        """Sends a signal to one rank; returns the time at which it was sent."""
        now = time.monotonic()
        self.processes[rank].signal(number)
        return now

    def ended(self, timeout_s: float = 60.0, but: Sequence[int] = ()) -> ScriptRun:
        """Waits until the ranks end, each by the deadline. Those in `but` are not waited for: they
        are killed once the others have ended."""
        return script_run(self.processes, self._tag, time.monotonic() + timeout_s, but)

    def close(self) -> None:
        """Kills whatever still runs."""
        self._ranks.close()
        kill_strays(self._tag, grace_s=0.0)


def lines_of(output: str) -> list[dict[str, Any]]:
    """The lines that a rank has reported with `say`, in order; other output is skipped."""
    lines = []
    for line in output.splitlines():
        if line.startswith("{"):
            with contextlib.suppress(json.JSONDecodeError):
                lines.append(json.loads(line))
    return lines


def line_with(rank: ScriptRank, word: str) -> dict[str, Any]:
    """The first line of a rank that has this field; without one, fails and shows its output."""
    __tracebackhide__ = True
    for line in lines_of(rank.output):
        if word in line:
            return line
    raise AssertionError(f"rank {rank.rank} never said {word!r}\n{rank.story()}")


def eventually(holds: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    """Polls until `holds` is true or the deadline passes; whether it became true."""
    end = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
