"""Starts and ends the processes of a test.

Importing torch costs each spawned rank seconds, and the suite starts hundreds of them. On a machine
without an accelerator a rank can be forked from a process that has imported torch but has used
nothing of it: no threads, no tensors, no groups.

Must never let a forked rank end more gently than a spawned one: the interpreter is finalized, so
that a backend which hangs or crashes on the way out fails its test.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing.context
import os
import signal


class ForkedRank(multiprocessing.context.ForkProcess):
    """A rank forked from the test's process that starts and exits like a spawned one."""

    def start(self) -> None:
        refuse_threads()
        super().start()

    def _bootstrap(self, parent_sentinel: int | None = None) -> int:
        disown_directories()
        code = super()._bootstrap(parent_sentinel)  # type: ignore[misc]
        # A forked process would now leave by os._exit, without finalization.
        ctypes.pythonapi.Py_Exit(ctypes.c_int(code))
        return code


def show_stacks_when_asked() -> None:
    """Lets `ask_for_stacks` print what this process is doing, even while it ends."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def ask_for_stacks(pid: int) -> None:
    os.kill(pid, signal.SIGUSR1)


def refuse_threads() -> None:
    """Raises if a fork would lose a thread, and with it perhaps a lock."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"{threads} threads run here: forking is not safe, use --start spawn")


def disown_directories() -> None:
    """Leaves the removal of the test's temporary directory to the process that made it."""
    from torch.testing._internal import common_distributed

    if common_distributed.tmp_dir is not None:
        common_distributed.tmp_dir._finalizer.detach()  # type: ignore[attr-defined]
