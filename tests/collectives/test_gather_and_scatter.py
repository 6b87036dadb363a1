"""Tests gather and scatter, which undo each other, for every root."""

import pytest
import torch
import torch.distributed as dist

from tests.plain import COMPLEX, DTYPES, assert_same, fill, name_of
from tests.ranks import Team


def gathered(
    rank: int, world: int, dtype: torch.dtype, count: int
) -> list[list[torch.Tensor] | None]:
    results = []
    for root in range(world):
        outputs = [torch.zeros(count, dtype=dtype) for _ in range(world)] if rank == root else None
        dist.gather(fill(rank, dtype, count), outputs, root)
        results.append(outputs)
    return results


def scattered(rank: int, world: int, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    results = []
    for root in range(world):
        output = torch.zeros(count, dtype=dtype)
        # The data depends on the root too, so mixing up two rounds would show.
        inputs = [fill(10 * root + other, dtype, count) for other in range(world)]
        dist.scatter(output, inputs if rank == root else None, root)
        results.append(output)
    return results


# torch passes complex tensors to `gather` unchanged, and Gloo rejects them.
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_the_root_gathers_everyones_tensor(team: Team, dtype: torch.dtype) -> None:
    for root, results in enumerate(team.run(gathered, dtype, 7)):
        for rank, came in enumerate(results[root]):
            assert_same(came, fill(rank, dtype))


@pytest.mark.parametrize("count", [0, 1, 1025, 200003])
def test_any_number_of_elements_is_gathered(team: Team, count: int) -> None:
    for root, results in enumerate(team.run(gathered, torch.int32, count)):
        for rank, came in enumerate(results[root]):
            assert_same(came, fill(rank, torch.int32, count))


@pytest.mark.parametrize("dtype", [*DTYPES, *COMPLEX], ids=name_of)
def test_every_rank_gets_its_part_of_what_the_root_scatters(team: Team, dtype: torch.dtype) -> None:
    for rank, results in enumerate(team.run(scattered, dtype, 7)):
        for root, came in enumerate(results):
            assert_same(came, fill(10 * root + rank, dtype))


@pytest.mark.parametrize("count", [0, 1, 1025, 200003])
def test_any_number_of_elements_is_scattered(team: Team, count: int) -> None:
    for rank, results in enumerate(team.run(scattered, torch.int32, count)):
        for root, came in enumerate(results):
            assert_same(came, fill(10 * root + rank, torch.int32, count))
