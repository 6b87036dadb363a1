"""Tests reduce: the destination gets the reduction.

torch does not define what the other ranks' tensors hold afterwards, so that isn't checked.
"""

import pytest
import torch
import torch.distributed as dist

from tests.plain import COMPLEX, DTYPES, assert_same, fill, name_of, ops_of, reduce
from tests.ranks import Team

OPS_AND_DTYPES = [(op, dtype) for dtype in DTYPES for op in ops_of(dtype)]


def to_every_destination(
    rank: int, world: int, op: str, dtype: torch.dtype, count: int
) -> list[torch.Tensor]:
    results = []
    for destination in range(world):
        tensor = fill(rank, dtype, count)
        dist.reduce(tensor, destination, getattr(dist.ReduceOp, op))
        results.append(tensor)
    return results


@pytest.mark.parametrize(
    ("op", "dtype"), OPS_AND_DTYPES, ids=[f"{op}-{name_of(dtype)}" for op, dtype in OPS_AND_DTYPES]
)
def test_the_destination_gets_the_reduction(team: Team, op: str, dtype: torch.dtype) -> None:
    expected = reduce(op, [fill(rank, dtype) for rank in range(team.world)])
    for rank, results in enumerate(team.run(to_every_destination, op, dtype, 7)):
        assert_same(results[rank], expected, rounded=op == "AVG")


@pytest.mark.parametrize("dtype", COMPLEX, ids=name_of)
def test_complex_numbers_are_summed(team: Team, dtype: torch.dtype) -> None:
    expected = reduce("SUM", [fill(rank, dtype) for rank in range(team.world)])
    for rank, results in enumerate(team.run(to_every_destination, "SUM", dtype, 7)):
        assert_same(results[rank], expected)


@pytest.mark.parametrize("count", [0, 1, 1025, 100003])
def test_any_number_of_elements_is_reduced(team: Team, count: int) -> None:
    expected = sum(fill(rank, torch.int32, count) for rank in range(team.world))
    for rank, results in enumerate(team.run(to_every_destination, "SUM", torch.int32, count)):
        assert_same(results[rank], expected)
