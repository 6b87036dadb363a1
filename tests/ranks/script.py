"""Plain scripts in processes of their own, for what only a whole process can show: how an
interpreter exits, what a crash leaves behind.
"""

import os
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gflow.launch.process import THIS_MACHINE, Process, signal_name
from gflow.launch.ranks import Ranks
from tests.ranks.outcome import exit_text
from tests.ranks.strays import TAG_VARIABLE, kill_strays, new_tag

_STACKS_S = 3.0


@dataclass(frozen=True)
class ScriptRank:
    """How one process of a script ended."""

    rank: int
    exit_code: int
    output: str
    # It was still running at the deadline and was killed; its stacks are in the output.
    timed_out: bool

    @property
    def signal_name(self) -> str | None:
        return None if self.timed_out else signal_name(self.exit_code)

    def story(self) -> str:
        end = "still running at the deadline" if self.timed_out else exit_text(self.exit_code)
        return f"---- rank {self.rank}: {end} ----\n{self.output.rstrip()}"


@dataclass(frozen=True)
class ScriptRun:
    """How all processes of a script ended, in rank order."""

    ranks: list[ScriptRank]
    # Processes that the script had started and that outlived it; they have been killed.
    left_running: list[int]

    def exit_codes(self) -> list[int | None]:
        """One code per rank, None where the deadline ended it."""
        return [None if rank.timed_out else rank.exit_code for rank in self.ranks]

    def story(self) -> str:
        lines = [rank.story() for rank in self.ranks]
        if self.left_running:
            lines.append(f"left running: {self.left_running}")
        return "\n".join(lines)

    def assert_exit_codes(self, *expected: int) -> None:
        """Fails with everything the ranks have said unless they ended with these codes, in time,
        and left nothing running."""
        __tracebackhide__ = True
        if self.exit_codes() != list(expected) or self.left_running:
            raise AssertionError(f"expected exit codes {list(expected)}, came\n{self.story()}")


def run_script(
    script: str | Path,
    world_size: int = 1,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
    torchrun: bool = False,
    arguments: Sequence[str] = (),
) -> ScriptRun:
    """Runs a script (a path, or its source) once per rank, with RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT set, or all ranks under one torchrun (then there is one exit code)."""
    tag = new_tag()
    variables = script_variables(tag, env)
    with tempfile.TemporaryDirectory() as folder:
        path = script if isinstance(script, Path) else _written(script, Path(folder))
        if torchrun:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc-per-node={world_size}", str(path), *arguments]
            process = Process(command, os.environ | {"OMP_NUM_THREADS": "1"} | variables)
            try:
                return script_run([process], tag, time.monotonic() + timeout_s)
            finally:
                process.kill()
        command = [sys.executable, str(path), *arguments]
        with Ranks(command, [THIS_MACHINE] * world_size, variables=variables) as ranks:
            return script_run(ranks.processes, tag, time.monotonic() + timeout_s)


def script_run(
    processes: Sequence[Process], tag: str, end: float, but: Sequence[int] = ()
) -> ScriptRun:
    """Waits for the ranks, each until `end` on the monotonic clock. Those in `but` are not waited
    for: they are killed when the others have ended."""
    ranks: dict[int, ScriptRank] = {}
    for rank, process in enumerate(processes):
        if rank not in but:
            ranks[rank] = _ended(rank, process, end)
    for rank in but:
        processes[rank].kill()
        ranks[rank] = _ended(rank, processes[rank], end)
    return ScriptRun([ranks[rank] for rank in range(len(processes))], kill_strays(tag))


def _ended(rank: int, process: Process, end: float) -> ScriptRank:
    code = process.wait(end)
    timed_out = code is None
    if code is None:
        # PYTHONFAULTHANDLER makes Python show all its stacks on this signal.
        process.signal(signal.SIGABRT)
        code = process.wait(time.monotonic() + _STACKS_S)
    return ScriptRank(rank, process.kill() if code is None else code, process.output(), timed_out)


def script_variables(tag: str, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment variables of every script, and those of the test."""
    own = {TAG_VARIABLE: tag, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    return own | dict(extra or {})


def _written(source: str, folder: Path) -> Path:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(source))
    return path
