"""The order of the tests, and how they are spread over the workers of pytest-xdist.

Tests that are quick and break often come first, so that a mistake shows within seconds. A worker
takes one unit of tests at a time. Usually that is a file, whose tests share ranks that are already
running. Where every test starts processes of its own, each test is a unit: while the processes of
one import torch or wait for a timeout, another computes.
"""

from __future__ import annotations

import os
import re
from typing import Any

# Top-level files that are not listed are plain unit tests and run before all of these.
ORDER = (
    "tests/collectives/",
    "tests/ddp/",
    "tests/compression/",
    "tests/test_rendezvous.py",
    "tests/test_robustness.py",
    "tests/gpu/",
    "tests/test_harness.py",
    "tests/test_fork.py",
    "tests/test_shutdown.py",
    "tests/hosts/",
    "tests/test_commands.py",
    "tests/test_examples.py",
)

ONE_BY_ONE = (
    "tests/gpu/test_commands_on_device.py",
    "tests/gpu/test_engine.py",
    "tests/hosts/test_costs.py",
    "tests/hosts/test_network.py",
    "tests/test_commands.py",
    "tests/test_examples.py",
    "tests/test_shutdown.py",
)

# In these files the tests with the same match look at the same run of the same ranks.
SHARED_RUNS = {
    "tests/hosts/test_hosts.py": re.compile(r"\[\w+-(?:one_host|[\w+]*\d\+\d[\w+]*)(?=[-\]])"),
    "tests/hosts/test_loss.py": re.compile(r"\[.*\]"),
}

# The ranks with a device are needed in one worker only.
ON_DEVICE = re.compile(r"tests/gpu/test_(ddp|failures|groups|state|waiting)\.py")

# A process that has imported torch takes this much memory.
RANK_BYTES = 400 << 20
# The processes of a worker: itself and four ranks, or the two sets of ranks that some tests start.
WORKER_BYTES = 7 * RANK_BYTES
MOST_WORKERS = 8


def position(nodeid: str) -> int:
    """Where a test belongs in the order; tests of one folder are equal."""
    return next((i for i, prefix in enumerate(ORDER, 1) if nodeid.startswith(prefix)), 0)


def unit(nodeid: str) -> str:
    """The name of the tests that have to run on the same worker as this one."""
    path = _path(nodeid)
    if ON_DEVICE.match(path):
        return ON_DEVICE.pattern
    if path in ONE_BY_ONE:
        return nodeid
    if path in SHARED_RUNS:
        shared = SHARED_RUNS[path].search(nodeid)
        return path + shared[0] if shared else nodeid
    return path


def starts_its_own_ranks(nodeid: str) -> bool:
    """Whether a test has no use for ranks that are already running."""
    path = _path(nodeid)
    return path in ONE_BY_ONE or path in SHARED_RUNS


def number_of_workers() -> int:
    """Two per core, because most tests wait for timeouts or for processes that import torch; fewer
    if memory is short."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(2 * len(os.sched_getaffinity(0)), memory // WORKER_BYTES, MOST_WORKERS))


def scheduler(config: Any, log: Any) -> Any:
    """The scheduler that gives workers whole units, in the order of collection."""
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid)

    # Otherwise the files with the most tests would come first.
    config.option.loadscopereorder = False
    return Units(config, log)


def _path(nodeid: str) -> str:
    return nodeid.partition("::")[0]
