"""Tests that ranks on several hosts always agree on what `method="auto"` stands for, over links
that are slow, and that become faster or slower in mid-run; with a slow rank, and with one that has
run out of data."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gflow.launch.namespaces import Network
from tests.hosts.choosing import SETTLED
from tests.hosts.running import Ranks, lines_of
from tests.ranks import ScriptRun

pytestmark = pytest.mark.gflow_only("only gflow chooses how gradients are sent")

#: Exact gradients take 0.6 s, 70 ms and 7 ms; all else in a step takes some milliseconds.
SLOW, MIDDLING, FAST = 100_000_000, 800_000_000, 10_000_000_000
#: The first choice is made by step SETTLED, the next 60 steps after a change, else after 300.
STEPS = 120
#: From exact to the fewest bytes, as docs/codecs.md has them.
LADDER = ["exact", "fp16", "int8", "int4", "int3", "quinary"]


@pytest.mark.parametrize(
    ("first", "then", "steps"),
    [(SLOW, FAST, STEPS), pytest.param(FAST, MIDDLING, 420, marks=pytest.mark.thorough)],
    ids=["slow-then-fast", "fast-then-slow"],
)
def test_all_hosts_change_the_method_together_when_the_link_changes(
    hosts: Callable[..., Network], first: int, then: int, steps: int
) -> None:
    network = hosts(3)
    for host in network.hosts:
        host.limit(first)
    with Ranks("tests.hosts.choosing", network.hosts, {}, [str(steps)]) as ranks:
        ranks.wait_until_all_say("settled", timeout_s=120.0)
        for host in network.hosts:
            host.limit(then)
        run = ranks.ended(timeout_s=240.0)
    methods = methods_of(run, [steps] * 3)
    assert methods[:3] == ["exact"] * 3
    before, after = (LADDER.index(methods[step]) for step in (SETTLED - 1, steps - 1))
    if first == SLOW:
        assert before >= LADDER.index("int8")
        assert after < before
    else:
        assert after > before


@pytest.mark.thorough
def test_a_rank_that_is_slow_is_not_taken_for_a_slow_link(hosts: Callable[..., Network]) -> None:
    network = hosts(3)
    with Ranks("tests.hosts.choosing", network.hosts, {}, [str(STEPS), "slow_rank"]) as ranks:
        run = ranks.ended(timeout_s=240.0)
    # The others wait for it for 0.1 s in every step, which no method makes shorter.
    assert set(methods_of(run, [STEPS] * 3)) <= {"exact", "fp16", "int8"}


def methods_of(run: ScriptRun, steps: list[int]) -> list[str]:
    """What gradients were sent as in each step, by all ranks as long as they had data."""
    told = [[line for line in lines_of(rank.output) if "step" in line] for rank in run.ranks]
    for rank, lines in enumerate(told):
        assert len(lines) == steps[rank], run.ranks[rank].story()
        assert lines == told[0][: len(lines)], f"rank {rank} and rank 0 differ"
    return [line["method"] for line in told[0]]


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["slow_rank", "uneven"])
def test_all_hosts_use_the_same_method_with_a_rank_that_is_slow_or_has_run_out_of_data(
    hosts: Callable[..., Network], how: str
) -> None:
    network = hosts(3)
    for host in network.hosts:
        host.limit(SLOW)
    with Ranks("tests.hosts.choosing", network.hosts, {}, [str(STEPS), how]) as ranks:
        run = ranks.ended(timeout_s=240.0)
    methods = methods_of(run, [STEPS, SETTLED + 10 if how == "uneven" else STEPS, STEPS])
    # It is the link that is slow, not only the rank.
    assert "exact" not in methods[30:40]
