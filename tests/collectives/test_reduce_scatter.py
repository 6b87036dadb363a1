"""Tests reduce_scatter in all its forms: from a list, from one tensor, coalesced.

Every rank's part is compared with a plain computation, never with another rank's result.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from tests.plain import COMPLEX, DTYPES, assert_same, fill, name_of, ops_of, reduce
from tests.ranks import Team

OPS_AND_DTYPES = [(op, dtype) for dtype in DTYPES for op in ops_of(dtype)]
EVERY_OP_AND_DTYPE = pytest.mark.parametrize(
    ("op", "dtype"), OPS_AND_DTYPES, ids=[f"{op}-{name_of(dtype)}" for op, dtype in OPS_AND_DTYPES]
)


def part(giver: int, taker: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    """One rank's input for another's part."""
    return fill(giver + 3 * taker, dtype, count)


def expected_for(taker: int, world: int, op: str, dtype: torch.dtype, count: int) -> torch.Tensor:
    return reduce(op, [part(giver, taker, dtype, count) for giver in range(world)])


def from_a_list(rank: int, world: int, op: str, dtype: torch.dtype, count: int) -> torch.Tensor:
    output = torch.zeros(count, dtype=dtype)
    inputs = [part(rank, taker, dtype, count) for taker in range(world)]
    dist.reduce_scatter(output, inputs, getattr(dist.ReduceOp, op))
    return output


def from_one_tensor(rank: int, world: int, op: str, dtype: torch.dtype, count: int) -> torch.Tensor:
    output = torch.zeros(count, dtype=dtype)
    joined = torch.cat([part(rank, taker, dtype, count) for taker in range(world)])
    dist.reduce_scatter_tensor(output, joined, getattr(dist.ReduceOp, op))
    return output


@EVERY_OP_AND_DTYPE
def test_every_rank_gets_its_part_of_the_reduced_list(
    team: Team, op: str, dtype: torch.dtype
) -> None:
    for rank, came in enumerate(team.run(from_a_list, op, dtype, 7)):
        expected = expected_for(rank, team.world, op, dtype, 7)
        assert_same(came, expected, rounded=op == "AVG")


@EVERY_OP_AND_DTYPE
def test_every_rank_gets_its_part_of_the_reduced_tensor(
    team: Team, op: str, dtype: torch.dtype
) -> None:
    for rank, came in enumerate(team.run(from_one_tensor, op, dtype, 7)):
        expected = expected_for(rank, team.world, op, dtype, 7)
        assert_same(came, expected, rounded=op == "AVG")


@pytest.mark.parametrize("function", [from_a_list, from_one_tensor], ids=["list", "tensor"])
@pytest.mark.parametrize("dtype", COMPLEX, ids=name_of)
def test_complex_numbers_are_summed(team: Team, function: object, dtype: torch.dtype) -> None:
    for rank, came in enumerate(team.run(function, "SUM", dtype, 7)):
        assert_same(came, expected_for(rank, team.world, "SUM", dtype, 7))


@pytest.mark.parametrize("function", [from_a_list, from_one_tensor], ids=["list", "tensor"])
@pytest.mark.parametrize("count", [0, 1, 1025, 50003])
def test_any_number_of_elements_is_reduced(team: Team, function: object, count: int) -> None:
    for rank, came in enumerate(team.run(function, "SUM", torch.int32, count)):
        assert_same(came, expected_for(rank, team.world, "SUM", torch.int32, count))


def matrices(rank: int, world: int) -> torch.Tensor:
    output = torch.zeros(2, 3)
    joined = torch.arange(6.0 * world).reshape(2 * world, 3) + rank
    dist.reduce_scatter_tensor(output, joined)
    return output


def test_matrices_are_cut_along_their_rows(team: Team) -> None:
    world = team.world
    whole = world * torch.arange(6.0 * world).reshape(2 * world, 3) + sum(range(world))
    for rank, came in enumerate(team.run(matrices)):
        assert_same(came, whole[2 * rank : 2 * rank + 2])


def by_the_old_name(rank: int, world: int) -> torch.Tensor:
    output = torch.zeros(7)
    joined = torch.cat([part(rank, taker, torch.float32, 7) for taker in range(world)])
    dist._reduce_scatter_base(output, joined)
    return output


def test_the_old_name_of_the_one_tensor_form_works(team: Team) -> None:
    for rank, came in enumerate(team.run(by_the_old_name)):
        assert_same(came, expected_for(rank, team.world, "SUM", torch.float32, 7))


def inside_the_coalescing_manager(rank: int, world: int, in_background: bool) -> list[torch.Tensor]:
    counts = [3, 5]
    outputs = [torch.zeros(count) for count in counts]
    with _coalescing_manager(async_ops=in_background) as manager:
        for output, count in zip(outputs, counts, strict=True):
            joined = [part(rank, taker, torch.float32, count) for taker in range(world)]
            dist.reduce_scatter_tensor(output, torch.cat(joined))
    if in_background:
        manager.wait()
    return outputs


@pytest.mark.parametrize("in_background", [False, True], ids=["sync", "async"])
def test_the_coalescing_manager_reduces_all_its_tensors(team: Team, in_background: bool) -> None:
    for rank, came in enumerate(team.run(inside_the_coalescing_manager, in_background)):
        for one, count in zip(came, [3, 5], strict=True):
            assert_same(one, expected_for(rank, team.world, "SUM", torch.float32, count))


def in_the_background(rank: int, world: int) -> torch.Tensor:
    output = torch.zeros(7)
    joined = torch.cat([part(rank, taker, torch.float32, 7) for taker in range(world)])
    dist.reduce_scatter_tensor(output, joined, async_op=True).wait()
    return output


def test_the_result_is_there_after_waiting(team: Team) -> None:
    for rank, came in enumerate(team.run(in_the_background)):
        assert_same(came, expected_for(rank, team.world, "SUM", torch.float32, 7))
