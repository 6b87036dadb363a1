"""Fixtures that all tests share: the pool of ranks, and teams of ranks in a group.

Processes are started on first use only: a test that needs no ranks pays for none.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests import schedule
from tests.backends import BACKENDS, GROUP_ENV
from tests.ranks import Group, Pool, Team

_POOL: pytest.StashKey[Pool] = pytest.StashKey()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "thorough: slow, or repeats a case; only `make thorough` runs it"
    )
    config.addinivalue_line(
        "markers", "gflow_only(reason): what gflow promises and Gloo does not; other backends skip"
    )


# Last, because pytest itself first sorts the cases by the parameters of session-wide fixtures.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    files: dict[str, int] = {}
    for item in items:
        files.setdefault(str(item.path), len(files))
    items.sort(key=lambda item: (schedule.position(item.nodeid), files[str(item.path)]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return schedule.scheduler(config, log) if config.getoption("dist") == "load" else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    return schedule.number_of_workers()


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gflow_only")
    callspec = getattr(item, "callspec", None)
    name = callspec.params.get("backend") if callspec else None
    if marker and name not in (None, "gflow"):
        pytest.skip(marker.args[0] if marker.args else "only gflow promises this")
    # Frees the memory of the idle ranks; they are started again if a later test needs them.
    pool = item.config.stash.get(_POOL, None)
    if pool is not None and pool.pids() and schedule.starts_its_own_ranks(item.nodeid):
        pool.close()


@pytest.fixture(scope="session")
def rank_pool(pytestconfig: pytest.Config) -> Iterator[Pool]:
    """The ranks of this run of pytest."""
    pool = pytestconfig.stash[_POOL] = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """The name of the backend under test."""
    return request.param


@pytest.fixture
def ranks(rank_pool: Pool, backend: str) -> Callable[..., Team]:
    """`ranks(2)`: a team of two in a fresh group of the backend under test; keyword arguments are
    fields of Group (`kept=True`, `timeout_s=5.0`). `ranks(2, group=None)`: no group is made."""

    def team(world: int, **fields: Any) -> Team:
        if fields.get("group", "unset") is None:
            return rank_pool.team(world, None)
        env = (*GROUP_ENV, *fields.pop("env", ()))
        return rank_pool.team(world, Group(backend, env=env, **fields))

    return team
