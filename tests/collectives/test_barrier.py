"""Tests barrier and monitored_barrier: no rank leaves before all have arrived. Nothing is timed."""

import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from tests.collectives.attempt import Attempt, attempt
from tests.ranks import Team
from tests.ranks.membership import rendezvous


def arrivals_seen(rank: int, world: int, monitored: bool) -> list[int]:
    store = rendezvous()
    seen = []
    for step in range(5):
        # Each rank is late once.
        if step % world == rank:
            time.sleep(0.05)
        store.add(f"arrivals {step}", 1)
        if monitored:
            dist.monitored_barrier(timeout=timedelta(seconds=20))
        else:
            dist.barrier()
        seen.append(store.add(f"arrivals {step}", 0))
    return seen


def test_nobody_leaves_a_barrier_before_everybody_has_come(
    ranks: Callable[..., Team], world: int
) -> None:
    assert ranks(world).run(arrivals_seen, False) == [[world] * 5] * world


def test_nobody_leaves_a_monitored_barrier_before_everybody_has_come(
    ranks: Callable[..., Team], world: int
) -> None:
    assert ranks(world).run(arrivals_seen, True) == [[world] * 5] * world


def barrier_in_the_background(rank: int, world: int) -> bool:
    work = dist.barrier(async_op=True)
    work.wait()
    return work.is_completed()


def test_a_barrier_can_run_in_the_background(team: Team) -> None:
    assert team.run(barrier_in_the_background) == [True] * team.world


def barrier_without(rank: int, world: int, missing: list[int], all_ranks: bool) -> Attempt | None:
    store = rendezvous()
    if rank == 0:
        outcome = attempt(
            lambda: dist.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=all_ranks)
        )
        store.set("over", "")
        return outcome
    if rank not in missing:
        outcome = attempt(lambda: dist.monitored_barrier(timeout=timedelta(seconds=1)))
        store.wait(["over"], timedelta(seconds=20))
        return outcome
    store.wait(["over"], timedelta(seconds=20))
    return None


def test_a_monitored_barrier_names_the_rank_that_did_not_come(ranks: Callable[..., Team]) -> None:
    outcome = ranks(3).run(barrier_without, [1], False)[0]
    assert outcome.failed
    assert "ank 1" in outcome.message


def test_a_monitored_barrier_names_all_ranks_that_did_not_come(
    ranks: Callable[..., Team],
) -> None:
    outcome = ranks(3).run(barrier_without, [1, 2], True)[0]
    assert outcome.failed
    assert "1, 2" in outcome.message
