"""Plain scripts in throw-away processes, for what only a whole process life can show: how an
interpreter ends, what a crash leaves behind.

It must never share a process with another case, and never leave one running.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.ranks import leash
from tests.ranks.outcome import exit_text, signal_name

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
    tag = leash.new_tag()
    with tempfile.TemporaryDirectory() as folder:
        path = script if isinstance(script, Path) else _written(script, Path(folder))
        environment = script_environment(tag, env)
        if torchrun:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc-per-node={world_size}", str(path), *arguments]
            processes = [ScriptProcess(0, command, environment)]
        else:
            rendezvous = {
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free_port()),
            }
            processes = [
                ScriptProcess(
                    rank,
                    [sys.executable, str(path), *arguments],
                    {**environment, **rendezvous, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                )
                for rank in range(world_size)
            ]
        try:
            end = time.monotonic() + timeout_s
            ranks = [process.ended(end) for process in processes]
        finally:
            for process in processes:
                process.kill()
            left = leash.kill_strays(tag)
    return ScriptRun(ranks, left)


class ScriptProcess:
    """One rank of a script, while it runs."""

    def __init__(self, rank: int, command: list[str], environment: dict[str, str]) -> None:
        self.rank = rank
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        self._process = subprocess.Popen(
            leash.leashed(command),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
            env=environment,
        )

    def ended(self, end: float) -> ScriptRank:
        """Waits for the process, until `end` on the monotonic clock."""
        timed_out = False
        try:
            self._process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            timed_out = True
            # PYTHONFAULTHANDLER makes Python show all its stacks on this signal.
            self._process.send_signal(signal.SIGABRT)
            try:
                self._process.wait(_STACKS_S)
            except subprocess.TimeoutExpired:
                self.kill()
        self._output.seek(0)
        output = self._output.read().decode(errors="replace")
        return ScriptRank(self.rank, self._process.returncode, output, timed_out)

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_ended(self) -> bool:
        # Not reaped: until it is, its number cannot belong to anybody else.
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def output_so_far(self) -> str:
        file = self._output.fileno()
        # Read at a place, because the process writes where the file stands.
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")

    def kill(self) -> None:
        if self._process.returncode is None:
            leash.kill_process_group(self._process.pid)
            self._process.wait()


def _written(source: str, folder: Path) -> Path:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(source))
    return path


def script_environment(tag: str, extra: Mapping[str, str] | None) -> dict[str, str]:
    environment = dict(os.environ)
    environment[leash.TAG_VARIABLE] = tag
    environment["OMP_NUM_THREADS"] = "1"
    environment["PYTHONFAULTHANDLER"] = "1"
    environment["PYTHONUNBUFFERED"] = "1"
    environment.update(extra or {})
    return environment


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
