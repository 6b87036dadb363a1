"""Runs test functions on several ranks, each in its own process.

No process is left behind, and every wait has a deadline.

    def add_ones(rank: int, world: int) -> float:
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return tensor.item()

    def test_the_sum_of_ones_is_the_world_size(ranks):
        assert ranks(2).run(add_ones) == [2.0, 2.0]
"""

from tests.ranks.case import Case, Group
from tests.ranks.outcome import Died, Outcome, Raised, RanksFailed, Returned, Silent
from tests.ranks.pool import Pool, Team
from tests.ranks.script import ScriptRank, ScriptRun, run_script

__all__ = [
    "Case",
    "Died",
    "Group",
    "Outcome",
    "Pool",
    "Raised",
    "RanksFailed",
    "Returned",
    "ScriptRank",
    "ScriptRun",
    "Silent",
    "Team",
    "run_script",
]
