"""Tests all_gather in all its forms: into a list, into one tensor, coalesced.

Outputs are filled to the last element, so a gap would show.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from tests.collectives.attempt import Attempt, attempt, still_works
from tests.plain import COMPLEX, DTYPES, assert_same, fill, name_of
from tests.ranks import Team

EVERY_DTYPE = pytest.mark.parametrize("dtype", [*DTYPES, *COMPLEX], ids=name_of)
COUNTS = pytest.mark.parametrize("count", [0, 1, 1025, 200003])


def into_a_list(rank: int, world: int, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    outputs = [torch.zeros(count, dtype=dtype) for _ in range(world)]
    dist.all_gather(outputs, fill(rank, dtype, count))
    return outputs


@EVERY_DTYPE
def test_every_rank_gets_everyones_tensor(team: Team, dtype: torch.dtype) -> None:
    for outputs in team.run(into_a_list, dtype, 7):
        for rank, came in enumerate(outputs):
            assert_same(came, fill(rank, dtype))


@COUNTS
def test_any_number_of_elements_is_gathered(team: Team, count: int) -> None:
    for outputs in team.run(into_a_list, torch.int32, count):
        for rank, came in enumerate(outputs):
            assert_same(came, fill(rank, torch.int32, count))


def into_one_tensor(rank: int, world: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    output = torch.zeros(world * count, dtype=dtype)
    dist.all_gather_into_tensor(output, fill(rank, dtype, count))
    return output


@EVERY_DTYPE
def test_everyones_tensor_lands_in_one_tensor(team: Team, dtype: torch.dtype) -> None:
    expected = torch.cat([fill(rank, dtype) for rank in range(team.world)])
    for came in team.run(into_one_tensor, dtype, 7):
        assert_same(came, expected)


def stacked(rank: int, world: int) -> tuple[Attempt, bool]:
    output = torch.zeros(world, 7)

    def call() -> torch.Tensor:
        dist.all_gather_into_tensor(output, fill(rank))
        return output

    return attempt(call), still_works()


# torch documents this form for all backends; Gloo refuses it.
def test_a_stacked_output_is_filled_rightly_or_refused_on_every_rank(team: Team) -> None:
    for outcome, works in team.run(stacked):
        assert works
        if not outcome.failed:
            assert_same(outcome.value, torch.stack([fill(rank) for rank in range(team.world)]))


@COUNTS
def test_any_number_of_elements_lands_in_one_tensor(team: Team, count: int) -> None:
    expected = torch.cat([fill(rank, torch.int32, count) for rank in range(team.world)])
    for came in team.run(into_one_tensor, torch.int32, count):
        assert_same(came, expected)


def by_the_old_name(rank: int, world: int) -> torch.Tensor:
    output = torch.zeros(world * 7)
    dist._all_gather_base(output, fill(rank))
    return output


def test_the_old_name_of_the_one_tensor_form_works(team: Team) -> None:
    for came in team.run(by_the_old_name):
        assert_same(came, torch.cat([fill(rank) for rank in range(team.world)]))


def matrices(rank: int, world: int) -> torch.Tensor:
    output = torch.zeros(2 * world, 3)
    dist.all_gather_into_tensor(output, torch.full((2, 3), float(rank)))
    return output


def test_matrices_are_joined_along_their_rows(team: Team) -> None:
    expected = torch.cat([torch.full((2, 3), float(rank)) for rank in range(team.world)])
    for came in team.run(matrices):
        assert_same(came, expected)


def lists_coalesced(rank: int, world: int, in_background: bool) -> list[list[torch.Tensor]]:
    outputs = [[torch.zeros(3), torch.zeros(5)] for _ in range(world)]
    future = dist.all_gather_coalesced(
        outputs, [fill(rank, count=3), fill(rank + 1, count=5)], async_op=in_background
    )
    if in_background:
        future.wait()
    return outputs


@pytest.mark.parametrize("in_background", [False, True], ids=["sync", "async"])
def test_several_tensors_are_gathered_as_one(team: Team, in_background: bool) -> None:
    for outputs in team.run(lists_coalesced, in_background):
        for rank, (short, long) in enumerate(outputs):
            assert_same(short, fill(rank, count=3))
            assert_same(long, fill(rank + 1, count=5))


def inside_the_coalescing_manager(rank: int, world: int, in_background: bool) -> list[torch.Tensor]:
    outputs = [torch.zeros(3 * world), torch.zeros(5 * world)]
    inputs = [fill(rank, count=3), fill(rank + 1, count=5)]
    with _coalescing_manager(async_ops=in_background) as manager:
        for output, source in zip(outputs, inputs, strict=True):
            dist.all_gather_into_tensor(output, source)
    if in_background:
        manager.wait()
    return outputs


@pytest.mark.parametrize("in_background", [False, True], ids=["sync", "async"])
def test_the_coalescing_manager_gathers_all_its_tensors(team: Team, in_background: bool) -> None:
    ranks = range(team.world)
    for short, long in team.run(inside_the_coalescing_manager, in_background):
        assert_same(short, torch.cat([fill(rank, count=3) for rank in ranks]))
        assert_same(long, torch.cat([fill(rank + 1, count=5) for rank in ranks]))
