"""Ties a process to the one that started it: it dies when its starter dies, and can be found.

Run as a program (`leash.py STARTER_PID PROGRAM ARGUMENT...`) it becomes PROGRAM, which then is
killed by the kernel as soon as the starter is gone. It must never import torch: it runs before
every rank, and its only cost may be the start of a bare interpreter.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
import uuid
from pathlib import Path

# Every process under a leash, and whatever it starts in turn, carries this variable: a child that
# has left the process group (torchrun's workers do) is still found by it.
TAG_VARIABLE = "TEST_RANKS_TAG"

# What a rank is sent at a deadline; it then writes its stacks to its output.
STACKS_SIGNAL = signal.SIGUSR1

_PR_SET_PDEATHSIG = 1


def new_tag() -> str:
    """A value for TAG_VARIABLE that no other run uses."""
    return uuid.uuid4().hex


def leashed(command: list[str]) -> list[str]:
    """The command that runs `command` under a leash held by this process."""
    return [sys.executable, "-S", "-E", __file__, str(os.getpid()), *command]


def strays(tag: str) -> list[int]:
    """The processes that still carry `tag`, zombies excepted."""
    needle = f"{TAG_VARIABLE}={tag}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # A zombie's environment reads as empty.
            if needle in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue  # gone meanwhile, or another user's
    return found


def kill_strays(tag: str, grace_s: float = 1.0, patience_s: float = 5.0) -> list[int]:
    """Kills what still carries `tag` after `grace_s`, and says which processes that were. The
    grace is for processes that are on their way out, as multiprocessing's tracker is."""
    killed: set[int] = set()
    end = time.monotonic() + grace_s
    while strays(tag) and time.monotonic() < end:
        time.sleep(0.02)
    end = time.monotonic() + patience_s
    while left := strays(tag):
        for pid in left:
            killed.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > end:
            break
        time.sleep(0.02)
    return sorted(killed)


def kill_process_group(pid: int) -> None:
    """Kills the process group led by `pid`. The leader must not have been reaped yet: until then
    its number cannot belong to anybody else."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _main() -> None:
    starter = int(sys.argv[1])
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != starter:  # it died before the line above took hold
        sys.exit(1)
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    _main()
