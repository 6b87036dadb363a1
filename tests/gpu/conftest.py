"""Teams of ranks that use the stand-in as a torch device.

These are separate from the ranks of other tests: once a process has the device, torch uses it as
its accelerator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.gpu import jobs
from tests.ranks import Group, Pool, Team


@pytest.fixture(scope="package")
def device_pool() -> Iterator[Pool]:
    """The ranks of the tests in this folder."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def device_files() -> tuple[str, str, str]:
    """The files of the device, built if needed: the extension, the driver and NCCL."""
    from tests.gpu.device.build import build

    try:
        extension, paths = build()
    except FileNotFoundError as missing:
        pytest.skip(f"this torch comes without CUDA: {missing}")
    return str(extension), str(paths.cuda), str(paths.nccl)


@pytest.fixture
def on_device(device_pool: Pool, device_files: tuple[str, str, str]) -> Callable[..., Team]:
    """`on_device(2)`: two ranks, each its own host; `on_device("aab")`: three ranks, two of
    them on host a. Further arguments are gflow's options; `group` has fields of Group."""

    def team(where: int | str, group: dict[str, Any] | None = None, **options: Any) -> Team:
        layout = where if isinstance(where, str) else None
        world = len(where) if isinstance(where, str) else where
        chosen = jobs.Chosen(device_files, layout, tuple(sorted(options.items())))
        env = ((jobs.RANK_VARIABLE, "{rank}"),)
        return device_pool.team(world, Group("gflow", options=chosen, env=env, **(group or {})))

    return team
