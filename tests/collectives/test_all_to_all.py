"""Tests all_to_all and all_to_all_single, with even and uneven parts.

No case relies on equal parts.
"""

import pytest
import torch
import torch.distributed as dist

from tests.collectives.attempt import Attempt, attempt, still_works
from tests.plain import COMPLEX, DTYPES, assert_same, fill, name_of
from tests.ranks import Team

EVERY_DTYPE = pytest.mark.parametrize("dtype", [*DTYPES, *COMPLEX], ids=name_of)


def letter(sender: int, receiver: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    """The data that one rank sends to another."""
    return fill(sender + 5 * receiver, dtype, count)


def uneven(sender: int, receiver: int) -> int:
    """How much one rank sends to another in the uneven cases; for some pairs, nothing."""
    return (2 * sender + 3 * receiver) % 4


def lists(rank: int, world: int, dtype: torch.dtype) -> list[torch.Tensor]:
    outputs = [torch.zeros(7, dtype=dtype) for _ in range(world)]
    dist.all_to_all(outputs, [letter(rank, other, dtype, 7) for other in range(world)])
    return outputs


@EVERY_DTYPE
def test_every_rank_gets_its_letter_from_every_other(team: Team, dtype: torch.dtype) -> None:
    for rank, outputs in enumerate(team.run(lists, dtype)):
        for sender, came in enumerate(outputs):
            assert_same(came, letter(sender, rank, dtype, 7))


def uneven_lists(rank: int, world: int) -> tuple[Attempt, bool]:
    others = range(world)
    outputs = [torch.zeros(uneven(other, rank)) for other in others]
    inputs = [letter(rank, other, torch.float32, uneven(rank, other)) for other in others]

    def call() -> list[torch.Tensor]:
        dist.all_to_all(outputs, inputs)
        return outputs

    return attempt(call), still_works()


# torch documents uneven lists for all backends; Gloo refuses them.
def test_uneven_lists_are_exchanged_rightly_or_refused_on_every_rank(team: Team) -> None:
    for rank, (outcome, works) in enumerate(team.run(uneven_lists)):
        assert works
        if not outcome.failed:
            for sender, came in enumerate(outcome.value):
                assert_same(came, letter(sender, rank, torch.float32, uneven(sender, rank)))


def single_even(rank: int, world: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    output = torch.zeros(world * count, dtype=dtype)
    dist.all_to_all_single(
        output, torch.cat([letter(rank, other, dtype, count) for other in range(world)])
    )
    return output


@EVERY_DTYPE
def test_one_tensor_is_cut_into_equal_letters(team: Team, dtype: torch.dtype) -> None:
    for rank, came in enumerate(team.run(single_even, dtype, 3)):
        letters = [letter(sender, rank, dtype, 3) for sender in range(team.world)]
        assert_same(came, torch.cat(letters))


@pytest.mark.parametrize("count", [0, 1, 1025, 50003])
def test_any_number_of_elements_is_exchanged(team: Team, count: int) -> None:
    for rank, came in enumerate(team.run(single_even, torch.int32, count)):
        letters = [letter(sender, rank, torch.int32, count) for sender in range(team.world)]
        assert_same(came, torch.cat(letters))


def single_uneven(rank: int, world: int, dtype: torch.dtype) -> torch.Tensor:
    others = range(world)
    give = [uneven(rank, other) for other in others]
    take = [uneven(other, rank) for other in others]
    output = torch.zeros(sum(take), dtype=dtype)
    dist.all_to_all_single(
        output,
        torch.cat([letter(rank, other, dtype, give[other]) for other in others]),
        take,
        give,
    )
    return output


@EVERY_DTYPE
def test_one_tensor_is_cut_into_letters_of_the_given_sizes(team: Team, dtype: torch.dtype) -> None:
    for rank, came in enumerate(team.run(single_uneven, dtype)):
        senders = range(team.world)
        letters = [letter(sender, rank, dtype, uneven(sender, rank)) for sender in senders]
        assert_same(came, torch.cat(letters))


def rows(rank: int, world: int) -> torch.Tensor:
    others = range(world)
    give = [uneven(rank, other) for other in others]
    take = [uneven(other, rank) for other in others]
    output = torch.zeros(sum(take), 3)
    source = torch.cat([torch.full((give[other], 3), float(10 * rank + other)) for other in others])
    dist.all_to_all_single(output, source, take, give)
    return output


def test_the_sizes_count_rows(team: Team) -> None:
    for rank, came in enumerate(team.run(rows)):
        letters = [
            torch.full((uneven(sender, rank), 3), float(10 * sender + rank))
            for sender in range(team.world)
        ]
        assert_same(came, torch.cat(letters))
