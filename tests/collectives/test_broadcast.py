"""Tests broadcast: every rank gets the source's data, whatever its type, and the source's tensor
stays as it is.
"""

import pytest
import torch
import torch.distributed as dist

from tests.plain import COMPLEX, DTYPES, assert_same, fill, name_of
from tests.ranks import Team


def from_every_source(rank: int, world: int, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    results = []
    for source in range(world):
        tensor = fill(rank, dtype, count)
        dist.broadcast(tensor, source)
        results.append(tensor)
    return results


@pytest.mark.parametrize("dtype", [*DTYPES, *COMPLEX], ids=name_of)
def test_every_rank_gets_what_the_source_has(team: Team, dtype: torch.dtype) -> None:
    for results in team.run(from_every_source, dtype, 7):
        for source, came in enumerate(results):
            assert_same(came, fill(source, dtype))


@pytest.mark.parametrize("count", [0, 1, 1025, 32769, 700001])
def test_any_number_of_elements_is_sent(team: Team, count: int) -> None:
    for results in team.run(from_every_source, torch.int32, count):
        for source, came in enumerate(results):
            assert_same(came, fill(source, torch.int32, count))


def bits_of_nan(rank: int, world: int) -> int:
    # A NaN with a payload: a copy keeps it, arithmetic would not.
    bits = 0x7FC12345 if rank == 0 else 0
    tensor = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    dist.broadcast(tensor, 0)
    return tensor.view(torch.int32).item()


def test_the_bits_arrive_unchanged(team: Team) -> None:
    assert team.run(bits_of_nan) == [0x7FC12345] * team.world


def by_rank_in_the_group(rank: int, world: int) -> list[float]:
    group = dist.new_group([1, 0])
    tensor = torch.tensor([float(rank)])
    dist.broadcast(tensor, group=group, group_src=dist.get_group_rank(group, 1))
    return tensor.tolist()


def test_the_source_can_be_named_by_its_rank_in_the_group(pair: Team) -> None:
    assert pair.run(by_rank_in_the_group) == [[1.0], [1.0]]
