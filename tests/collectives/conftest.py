"""Teams for the tests of the collectives: small worlds whose groups are kept from case to case.

A test that breaks its group, or needs a fresh one, uses `ranks` instead.
"""

from collections.abc import Callable

import pytest

from tests.ranks import Team


# Session scope makes pytest sort the cases by world size, so that many of them share a group.
@pytest.fixture(scope="session", params=[1, 2, 3, 4], ids=lambda size: f"world{size}")
def world(request: pytest.FixtureRequest) -> int:
    """The number of ranks."""
    return request.param


@pytest.fixture
def team(ranks: Callable[..., Team], world: int) -> Team:
    """A team of every world size in turn."""
    return ranks(world, kept=True)


@pytest.fixture(scope="session", params=[2, 3, 4], ids=lambda size: f"world{size}")
def several(request: pytest.FixtureRequest) -> int:
    """The number of ranks, for cases that need at least two."""
    return request.param


@pytest.fixture
def peers(ranks: Callable[..., Team], several: int) -> Team:
    """A team of every world size from two up."""
    return ranks(several, kept=True)


@pytest.fixture
def pair(ranks: Callable[..., Team]) -> Team:
    """Two ranks."""
    return ranks(2, kept=True)
