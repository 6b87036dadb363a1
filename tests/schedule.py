"""The order of the tests, and how they are spread over the workers of pytest-xdist.

Tests that are quick and break often come first, so that a mistake shows within seconds. A worker
takes one unit of tests at a time. Usually that is a file, whose tests share ranks that are already
running. Where every test starts processes of its own, each test is a unit: while the processes of
one import torch or wait for a timeout, another computes.
"""

from __future__ import annotations

import re
from typing import Any

# Top-level files that are not listed are plain unit tests and run before all of these.
ORDER = (
    "tests/collectives/",
    "tests/ddp/",
    "tests/compression/",
    "tests/gpu/",
    "tests/test_rendezvous.py",
    "tests/test_robustness.py",
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


def position(nodeid: str) -> int:
    """Where a test belongs in the order; tests of one folder are equal."""
    return next((i for i, prefix in enumerate(ORDER, 1) if nodeid.startswith(prefix)), 0)


def unit(nodeid: str) -> str:
    """The name of the tests that have to run on the same worker as this one."""
    path = nodeid.partition("::")[0]
    if path in ONE_BY_ONE:
        return nodeid
    if path in SHARED_RUNS:
        shared = SHARED_RUNS[path].search(nodeid)
        return path + shared[0] if shared else nodeid
    return path


def scheduler(config: Any, log: Any) -> Any:
    """The scheduler that gives workers whole units, in the order of collection."""
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid)

    # Otherwise the files with the most tests would come first.
    config.option.loadscopereorder = False
    return Units(config, log)
