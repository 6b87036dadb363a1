"""Tests timeouts: a rank whose peer never calls raises in time and says what happened.

The peer stays alive and connected throughout; lost peers are tested elsewhere.
"""

import re
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.collectives.attempt import Attempt, attempt
from tests.ranks import Team
from tests.ranks.membership import rendezvous

TIMED_OUT = r"(?i)tim(ed?|e) ?-?out"
# How much later than its timeout an error may come on a busy machine.
SLACK_S = 10.0


def alone(rank: int, world: int, call: Callable[[int, int], object]) -> Attempt | None:
    """Rank 0 calls; the others never do, but stay until it has failed."""
    store = rendezvous()
    if rank == 0:
        outcome = attempt(lambda: call(rank, world))
        store.set("over", "")
        return outcome
    store.wait(["over"], timedelta(seconds=30))
    return None


def wait_one_second(rank: int, world: int) -> None:
    dist.all_reduce(torch.ones(3), async_op=True).wait(timedelta(seconds=1))


@pytest.mark.parametrize("size", [2, 3])
def test_waiting_with_a_timeout_ends_by_it(ranks: Callable[..., Team], size: int) -> None:
    outcome = ranks(size).run(alone, wait_one_second)[0]
    assert "RuntimeError" in outcome.kinds
    assert re.search(TIMED_OUT, outcome.message), outcome.message
    assert 0.9 <= outcome.seconds < 1 + SLACK_S


def all_reduce(rank: int, world: int) -> None:
    dist.all_reduce(torch.ones(3))


def reduce(rank: int, world: int) -> None:
    dist.reduce(torch.ones(3), rank)


def broadcast(rank: int, world: int) -> None:
    dist.broadcast(torch.ones(3), 1)


def all_gather(rank: int, world: int) -> None:
    dist.all_gather([torch.ones(3) for _ in range(world)], torch.ones(3))


def all_gather_into_tensor(rank: int, world: int) -> None:
    dist.all_gather_into_tensor(torch.ones(3 * world), torch.ones(3))


def gather(rank: int, world: int) -> None:
    dist.gather(torch.ones(3), [torch.ones(3) for _ in range(world)], rank)


def scatter(rank: int, world: int) -> None:
    dist.scatter(torch.ones(3), None, 1)


def reduce_scatter_tensor(rank: int, world: int) -> None:
    dist.reduce_scatter_tensor(torch.ones(3), torch.ones(3 * world))


def all_to_all_single(rank: int, world: int) -> None:
    dist.all_to_all_single(torch.ones(world), torch.ones(world))


def barrier(rank: int, world: int) -> None:
    dist.barrier()


def receive(rank: int, world: int) -> None:
    dist.recv(torch.ones(3), 1)


KINDS = [
    all_reduce,
    reduce,
    broadcast,
    all_gather,
    all_gather_into_tensor,
    gather,
    scatter,
    reduce_scatter_tensor,
    all_to_all_single,
    barrier,
]


def with_a_short_timeout(
    rank: int, world: int, call: Callable[[int, int], object]
) -> Attempt | None:
    # Set once the group exists, so that a slow start does not count.
    dist.all_reduce(torch.ones(1))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
    return alone(rank, world, call)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_collective_ends_by_the_timeout_of_its_group(
    ranks: Callable[..., Team], kind: Callable[[int, int], object]
) -> None:
    outcome = ranks(2).run(with_a_short_timeout, kind)[0]
    assert "RuntimeError" in outcome.kinds
    assert re.search(TIMED_OUT, outcome.message), outcome.message
    assert 0.9 <= outcome.seconds < 1 + SLACK_S


# Receiving is tested here because Gloo keeps the timeout that its connections were made with.
@pytest.mark.parametrize("kind", [all_reduce, receive], ids=lambda kind: kind.__name__)
def test_the_timeout_given_at_init_holds(
    ranks: Callable[..., Team], kind: Callable[[int, int], object]
) -> None:
    outcome = ranks(2, timeout_s=3.0).run(alone, kind)[0]
    assert "RuntimeError" in outcome.kinds
    assert re.search(TIMED_OUT, outcome.message), outcome.message
    assert 2.9 <= outcome.seconds < 3 + SLACK_S


def new_group_alone(rank: int, world: int) -> Attempt | None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=3))
    return alone(rank, world, _InGroup(group))


class _InGroup:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, rank: int, world: int) -> None:
        dist.all_reduce(torch.ones(3), group=self._group)


def test_a_new_group_has_its_own_timeout(ranks: Callable[..., Team]) -> None:
    outcome = ranks(2, timeout_s=60.0).run(new_group_alone)[0]
    assert outcome.failed
    assert re.search(TIMED_OUT, outcome.message), outcome.message
    assert 2.9 <= outcome.seconds < 3 + SLACK_S


@pytest.mark.gflow_only("Gloo does not say which rank was missing")
def test_the_error_names_the_operation_and_the_rank_that_was_missing(
    ranks: Callable[..., Team],
) -> None:
    outcome = ranks(2).run(with_a_short_timeout, all_reduce)[0]
    assert "all_reduce" in outcome.message
    assert "rank 1" in outcome.message


def twice(rank: int, world: int) -> None:
    first = attempt(lambda: all_reduce(rank, world))
    assert first.failed
    second = attempt(lambda: all_reduce(rank, world))
    assert second.failed
    assert second.seconds < 2, "the group was over, but the second call waited again"
    raise RuntimeError(second.message)


@pytest.mark.gflow_only("Gloo waits again, or finds its connections closed")
def test_after_a_timeout_every_later_call_fails_at_once_with_the_same_error(
    ranks: Callable[..., Team],
) -> None:
    outcome = ranks(2, timeout_s=4.0).run(alone, twice)[0]
    assert re.search(TIMED_OUT, outcome.message), outcome.message
    assert "rank 1" in outcome.message
