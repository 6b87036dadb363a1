"""One test, run in its own process group with a deadline.

Must never return while a process of the test is alive, and must never report a test as passed
unless the test's own process said so.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
import traceback
import unittest
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from gflow.launch.child import die_with_parent

from . import ranks


@dataclass(frozen=True)
class Outcome:
    """The outcome of a test."""

    name: str
    result: str  # passed, failed or skipped; limited, see limits.txt
    seconds: float
    reason: str  # why it was skipped, or the tracebacks of the ranks
    output: str  # what its processes printed


def run(suite: type[unittest.TestCase], name: str, folder: Path, deadline: float) -> Outcome:
    """Runs one test of `suite`; whatever happens, its processes are gone afterwards."""
    verdict, log = folder / "verdict", folder / "log"
    verdict.unlink(missing_ok=True)
    begun = time.monotonic()
    ranks.refuse_threads()
    pid = os.fork()
    if pid == 0:
        become_case(suite, name, verdict, log)
    try:
        ended = wait(pid, deadline)
    finally:
        end_group(pid)
    seconds = time.monotonic() - begun
    output = log.read_text(errors="replace") if log.exists() else ""
    if verdict.exists():
        result, reason = json.loads(verdict.read_text())
    elif ended:
        result, reason = "failed", "the test's process died without a verdict"
    else:
        result, reason = "failed", f"not finished after {deadline:.0f} s; its processes were killed"
    return Outcome(name, result, seconds, reason, output)


def wait(pid: int, deadline: float) -> bool:
    """True if the process ends within `deadline` seconds."""
    handle = os.pidfd_open(pid)
    try:
        return bool(select.select([handle], [], [], deadline)[0])
    finally:
        os.close(handle)


def end_group(pid: int) -> None:
    # The child creates its group first thing; before that it is the only process.
    for end in (os.killpg, os.kill):
        try:
            end(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    os.waitpid(pid, 0)


def become_case(suite: type[unittest.TestCase], name: str, verdict: Path, log: Path) -> NoReturn:
    """Runs in the test's process: starts the ranks, joins them and writes the verdict."""
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        die_with_parent()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        result = unittest.TestResult()
        unittest.TestSuite([suite(name)]).run(result)
        write(verdict, judge(result))
    except BaseException:
        write(verdict, ("failed", traceback.format_exc()))
    finally:
        # Not sys.exit: this is a copy of the runner, whose frames must not unwind here.
        os._exit(0)


def write(verdict: Path, content: Any) -> None:
    # Renamed into place, so that a process killed while writing leaves no half verdict.
    draft = verdict.with_suffix(".draft")
    draft.write_text(json.dumps(content))
    draft.rename(verdict)


def judge(result: unittest.TestResult) -> tuple[str, str]:
    broken = result.errors + result.failures
    if broken:
        return "failed", "\n".join(text for _, text in broken)
    if result.unexpectedSuccesses:
        return "failed", "passed, but PyTorch marks it as failing"
    if result.skipped:
        return "skipped", result.skipped[0][1]
    if result.testsRun != 1:
        return "failed", f"{result.testsRun} tests ran where one was asked for"
    return "passed", ""
