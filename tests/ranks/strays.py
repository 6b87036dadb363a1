"""Finds processes that a test has started and that outlive it.

Every process of a test, and whatever it starts in turn, carries a variable in its environment: a
child that has left the process group (torchrun's workers do) is still found by it.
"""

import contextlib
import os
import signal
import time
import uuid
from pathlib import Path

TAG_VARIABLE = "TEST_RANKS_TAG"


def new_tag() -> str:
    """A value for TAG_VARIABLE that no other run uses."""
    return uuid.uuid4().hex


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
    """Kills what still carries `tag` after `grace_s`, and returns which processes that were. The
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
