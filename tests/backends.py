"""Which backends the tests run on: gflow, unless TEST_BACKEND names others (`gloo`, `gflow,gloo`).

TEST_HOST_PER_RANK=1 makes gflow take every rank for a host of its own, so that what the ranks of
one host do over shared memory is done over the network. Gloo is there to try a test on a backend
that is known to work: no expected value may ever be taken from it.
"""

import os

BACKENDS: list[str] = [
    name.strip() for name in os.environ.get("TEST_BACKEND", "gflow").split(",") if name.strip()
]

# Environment variables of every group under test.
GROUP_ENV: tuple[tuple[str, str], ...] = (
    (("GFLOW_HOST_ID", "host{rank}"),) if os.environ.get("TEST_HOST_PER_RANK") == "1" else ()
)
