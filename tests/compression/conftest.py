"""The team whose group compresses its gradients, on one machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.compression.jobs import RANK_VARIABLE, Chosen
from tests.ranks import Group, Pool, Team


@pytest.fixture
def compressing(rank_pool: Pool, backend: str) -> Callable[..., Team]:
    """`compressing(2)`: two ranks, each its own host; `compressing("aab")`: three ranks, two
    of them on host a. Further arguments are gflow's options; `group` has fields of Group."""
    if backend != "gflow":
        pytest.skip("only gflow compresses")

    def team(where: int | str, group: dict[str, Any] | None = None, **options: Any) -> Team:
        layout = where if isinstance(where, str) else None
        world = len(where) if isinstance(where, str) else where
        fields = dict(group or {})
        env = ((RANK_VARIABLE, "{rank}"), *fields.pop("env", ()))
        chosen = Chosen(layout, tuple(sorted(options.items())))
        return rank_pool.team(world, Group("gflow", env=env, options=chosen, **fields))

    return team
