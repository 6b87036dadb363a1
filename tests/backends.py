"""Which backends the tests run on: gflow, unless TEST_BACKEND names others (`gloo`, `gflow,gloo`).

TEST_HOST_PER_RANK=1 makes gflow treat every rank as a separate host, so that ranks use the network
where they would share memory. Gloo is for trying a test on a backend that is known to work;
expected values never come from it.
"""

import os

BACKENDS: list[str] = [
    name.strip() for name in os.environ.get("TEST_BACKEND", "gflow").split(",") if name.strip()
]

# Environment variables of every group under test.
GROUP_ENV: tuple[tuple[str, str], ...] = (
    (("GFLOW_HOST_ID", "host{rank}"),) if os.environ.get("TEST_HOST_PER_RANK") == "1" else ()
)
