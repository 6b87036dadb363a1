"""Ranks that stay alive between test cases, and teams of them that run one case together.

A team never gets a rank that has died or has not answered its last case, and no process outlives
the pool.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from multiprocessing.connection import wait
from typing import Any

import torch.distributed as dist

from tests.ranks.case import DEADLINE_S, Case, Group, pack
from tests.ranks.outcome import Outcome, RanksFailed, Returned
from tests.ranks.rank import Rank
from tests.ranks.strays import kill_strays, new_tag

# Once one rank has failed, the others get this long to answer before they are asked for their
# stacks: usually they are waiting for the one that failed.
_PATIENCE_S = 10.0


class Pool:
    """Ranks that are started when first needed and replaced when lost."""

    def __init__(self) -> None:
        self.tag = new_tag()
        self._ranks: list[Rank] = []
        self._names = count()
        self._store: dist.TCPStore | None = None
        # The kept group that the ranks are in, and its world size.
        self._kept: tuple[Group, int] | None = None
        self._kept_name = ""

    def team(self, world: int, group: Group | None) -> "Team":
        """The first `world` ranks, in `group`."""
        return Team(self, world, group)

    def pids(self) -> list[int]:
        """The processes of the current ranks."""
        return [rank.pid for rank in self._ranks]

    def close(self) -> None:
        """Ends every rank; the next case starts new ones. A rank that does not end with exit code 0
        is an error: a process that crashes on its way out would otherwise go unseen."""
        ends = [(index, rank.dismiss()) for index, rank in enumerate(self._ranks)]
        for rank in self._ranks:
            rank.end()
        self._ranks = []
        self._kept = None
        left = kill_strays(self.tag)
        problems = [f"rank {index}: {problem}" for index, problem in ends if problem]
        if left:
            problems.append(f"processes that had to be killed: {left}")
        if problems:
            raise RuntimeError("the ranks did not end well:\n" + "\n".join(problems))

    def outcomes(
        self,
        world: int,
        group: Group | None,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        deadline_s: float,
        patience_s: float,
    ) -> list[Outcome]:
        """Runs the function on the first `world` ranks; the outcome of each, in order."""
        payload = pack(function, arguments)
        ranks = self._take(world)
        name = self._group_name(world, group)
        for index, rank in enumerate(ranks):
            rank.send(Case(index, world, payload, group, name, self._store_port(), tuple(sys.path)))
        try:
            outcomes = self._collect(ranks, deadline_s, patience_s)
        except BaseException:
            # Interrupted: these ranks are in an unknown state.
            for rank in ranks:
                rank.end()
            raise
        if not all(isinstance(outcome, Returned) for outcome in outcomes):
            self._kept = None
        self._replace_lost()
        return outcomes

    def _take(self, world: int) -> list[Rank]:
        self._replace_lost()
        while len(self._ranks) < world:
            self._ranks.append(Rank(self.tag))
        ranks = self._ranks[:world]
        for rank in ranks:
            rank.be_ready()
        return ranks

    def _replace_lost(self) -> None:
        # The new process imports torch while the next case runs on the others.
        for index, rank in enumerate(self._ranks):
            if rank.ended or not rank.is_alive():
                rank.end()
                self._ranks[index] = Rank(self.tag)
                self._kept = None

    def _group_name(self, world: int, group: Group | None) -> str:
        if group is not None and group.kept and self._kept == (group, world):
            return self._kept_name
        self._kept = (group, world) if group is not None and group.kept else None
        self._kept_name = str(next(self._names))
        return self._kept_name

    def _store_port(self) -> int:
        if self._store is None:
            # Port 0: the system picks a free one. The store lives here so that it survives every
            # rank.
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self._store.port

    def _collect(self, ranks: list[Rank], deadline_s: float, patience_s: float) -> list[Outcome]:
        start = time.monotonic()
        end = start + deadline_s
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < len(ranks) and (left_s := end - time.monotonic()) > 0:
            waiting = {}
            for index, rank in enumerate(ranks):
                if index not in outcomes:
                    waiting[rank.conversation] = index
                    waiting[rank.death] = index
            for index in {waiting[item] for item in wait(list(waiting), timeout=left_s)}:
                outcomes[index] = ranks[index].answer(index)
                if not isinstance(outcomes[index], Returned):
                    end = min(end, time.monotonic() + patience_s)
        after_s = time.monotonic() - start
        for index, rank in enumerate(ranks):
            if index not in outcomes:
                outcomes[index] = rank.silence(index, after_s)
        return [outcomes[index] for index in range(len(ranks))]


class Team:
    """Some ranks and the group they work in."""

    def __init__(self, pool: Pool, world: int, group: Group | None) -> None:
        self._pool = pool
        self.world = world
        self.group = group

    def run(
        self, function: Callable[..., Any], *arguments: Any, deadline_s: float = DEADLINE_S
    ) -> list[Any]:
        """Runs `function(rank, world, *arguments)` on every rank; the values, in rank order.
        Raises RanksFailed unless every rank returns one."""
        __tracebackhide__ = True
        outcomes = self._pool.outcomes(
            self.world, self.group, function, arguments, deadline_s, _PATIENCE_S
        )
        if all(isinstance(outcome, Returned) for outcome in outcomes):
            return [outcome.value for outcome in outcomes]
        raise RanksFailed(function, outcomes)

    def outcomes(
        self, function: Callable[..., Any], *arguments: Any, deadline_s: float = DEADLINE_S
    ) -> list[Outcome]:
        """Like `run`, for cases in which ranks are meant to fail: the outcome of each rank. Every
        rank gets the whole deadline."""
        return self._pool.outcomes(
            self.world, self.group, function, arguments, deadline_s, deadline_s
        )

    def with_group(self, **changes: Any) -> "Team":
        """The same ranks in a group that differs in these fields."""
        if self.group is None:
            raise ValueError("this team has no group to change")
        return Team(self._pool, self.world, replace(self.group, **changes))
