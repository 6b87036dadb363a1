"""The test class: PyTorch's backend tests, on the backend that the environment names.

Imported by the runner and again by every spawned rank. Must never skip a test on its own account,
nor relax what PyTorch checks. It adds one check, see `_check_return_codes`.
"""

from __future__ import annotations

import os
import time
from typing import Any, ClassVar

import torch
from torch.testing._internal import common_distributed

from gflow.launch.child import die_with_parent

from . import gates, ranks

module = gates.load(os.environ["BACKEND"])


class BackendSuite(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[name-defined]
    """What PyTorch's test_distributed_spawn.py runs."""

    start_method: ClassVar[str] = "spawn"

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()
        torch.backends.cudnn.flags(enabled=True, allow_tf32=False).__enter__()

    def _spawn_processes(self) -> None:
        if self.start_method == "fork":
            self._start_processes(ranks.ForkedRank)
        else:
            super()._spawn_processes()

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, pipe: Any, **kwargs: Any) -> None:
        die_with_parent()
        ranks.show_stacks_when_asked()
        # A spawned rank imports the module anew and so reads this test's own rendezvous file; a
        # forked one must look again, or it would meet the ranks of an earlier test.
        module.INIT_METHOD = os.environ["INIT_METHOD"]
        super()._run(rank, test_name, file_name, pipe, **kwargs)

    def _get_timedout_process_traceback(self) -> None:
        # PyTorch asks a thread of the rank for its stack, but that thread lives only while the test
        # itself runs: not while the group is made, nor while the interpreter ends.
        for process in self.processes:
            if process.exitcode is None:
                ranks.ask_for_stacks(process.pid)
        # They are killed as soon as this returns.
        time.sleep(1)
        super()._get_timedout_process_traceback()

    def _check_return_codes(self, fn: Any, *args: Any, **kwargs: Any) -> None:
        super()._check_return_codes(fn, *args, **kwargs)
        if fn in self.skip_return_code_checks:
            return
        # PyTorch checks only the first rank: a crash of another one would go unnoticed.
        expected = self.special_return_code_checks.get(fn, 0)
        for rank, process in enumerate(self.processes):
            if process.exitcode != expected:
                code = process.exitcode
                raise self.failureException(f"rank {rank} ended with {code}, not {expected}")


def names() -> list[str]:
    """The tests' names, in the order of unittest."""
    return sorted(name for name in dir(BackendSuite) if name.startswith("test"))


def deadline(name: str) -> float:
    """The seconds after which PyTorch itself gives up on a test."""
    return float(common_distributed.get_timeout(name))
