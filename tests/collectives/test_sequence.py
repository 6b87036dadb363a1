"""Tests the group's sequence number: it counts collectives, the same on every rank.

Tools that look for the rank that fell behind rely on it.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from tests.ranks import Team


def number() -> int:
    return dist.group.WORLD._get_sequence_number_for_group()


def counted(rank: int, world: int) -> list[tuple[str, int]]:
    steps: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(1)),
        "broadcast": lambda: dist.broadcast(torch.ones(1), 0),
        "reduce": lambda: dist.reduce(torch.ones(1), 0),
        "barrier": lambda: dist.barrier(),
        "all_gather": lambda: dist.all_gather([torch.ones(1)] * world, torch.ones(1)),
        "all_to_all": lambda: dist.all_to_all_single(torch.ones(world), torch.ones(world)),
        "all_reduce again": lambda: dist.all_reduce(torch.ones(1)),
    }
    seen = [("start", number())]
    for name, step in steps.items():
        step()
        seen.append((name, number()))
    return seen


def test_every_collective_counts_one_alike_on_every_rank(
    ranks: Callable[..., Team], world: int
) -> None:
    results = ranks(world).run(counted)
    assert results == [results[0]] * world
    numbers = [value for _, value in results[0]]
    start = numbers[0]
    assert numbers == list(range(start, start + len(numbers)))


def numbers_of_works(rank: int, world: int) -> list[int]:
    works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(5)]
    for work in works:
        work.wait()
    return [work._get_sequence_number() for work in works]


def test_works_carry_the_numbers_of_their_collectives(
    ranks: Callable[..., Team], world: int
) -> None:
    results = ranks(world).run(numbers_of_works)
    first = results[0][0]
    assert results == [list(range(first, first + 5))] * world


def two_groups(rank: int, world: int) -> tuple[int, int]:
    one, other = dist.new_group([0, 1]), dist.new_group([0, 1])
    before = [group._get_sequence_number_for_group() for group in (one, other)]
    for _ in range(3):
        dist.all_reduce(torch.ones(1), group=one)
    after = [group._get_sequence_number_for_group() for group in (one, other)]
    return after[0] - before[0], after[1] - before[1]


def test_every_group_counts_for_itself(ranks: Callable[..., Team]) -> None:
    assert ranks(2).run(two_groups) == [(3, 0)] * 2
