"""Tests all_reduce in all its forms: plain, coalesced, sparse, complex, and what it refuses.

No case depends on the order in which ranks arrive.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from tests.collectives.attempt import Attempt, attempt, still_works
from tests.plain import (
    COMPLEX,
    DTYPES,
    FLOATS,
    INTEGERS,
    assert_same,
    fill,
    name_of,
    ops_of,
    reduce,
    same_bits,
)
from tests.ranks import Team

OPS_AND_DTYPES = [(op, dtype) for dtype in DTYPES for op in ops_of(dtype)]


def all_reduced(rank: int, world: int, op: str, dtype: torch.dtype, count: int) -> torch.Tensor:
    tensor = fill(rank, dtype, count)
    dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
    return tensor


@pytest.mark.parametrize(
    ("op", "dtype"), OPS_AND_DTYPES, ids=[f"{op}-{name_of(dtype)}" for op, dtype in OPS_AND_DTYPES]
)
def test_every_rank_gets_the_reduction(team: Team, op: str, dtype: torch.dtype) -> None:
    expected = reduce(op, [fill(rank, dtype) for rank in range(team.world)])
    for came in team.run(all_reduced, op, dtype, 7):
        assert_same(came, expected, rounded=op == "AVG")


@pytest.mark.gflow_only("Gloo has no average of integers")
@pytest.mark.parametrize("dtype", INTEGERS, ids=name_of)
@pytest.mark.parametrize("count", [7, 100_003])
def test_an_average_of_integers_is_cut_off_towards_zero(
    team: Team, dtype: torch.dtype, count: int
) -> None:
    sums = sum(fill(rank, torch.int64, count) for rank in range(team.world))
    expected = torch.div(sums, team.world, rounding_mode="trunc").to(dtype)
    for came in team.run(all_reduced, "AVG", dtype, count):
        assert_same(came, expected)


@pytest.mark.parametrize("op", ["SUM", "AVG"])
@pytest.mark.parametrize("dtype", COMPLEX, ids=name_of)
def test_complex_numbers_are_reduced(team: Team, op: str, dtype: torch.dtype) -> None:
    expected = reduce(op, [fill(rank, dtype) for rank in range(team.world)])
    for came in team.run(all_reduced, op, dtype, 7):
        assert_same(came, expected, rounded=op == "AVG")


# One element less or more than an even split; sizes around pages and chunks; a few megabytes.
@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 1023, 1024, 1025, 4097, 32769, 262147, 2000003])
def test_any_number_of_elements_is_reduced(team: Team, count: int) -> None:
    expected = sum(fill(rank, torch.int32, min(count, 60)) for rank in range(team.world))
    # The pattern of `fill` repeats every three elements, and 60 is a multiple of three.
    expected = expected.repeat(count // 60 + 1)[:count] if count else expected
    for came in team.run(all_reduced_pattern, count):
        assert_same(came, expected.to(torch.int32))


def all_reduced_pattern(rank: int, world: int, count: int) -> torch.Tensor:
    tensor = fill(rank, torch.int32, min(count, 60))
    if count:
        tensor = tensor.repeat(count // 60 + 1)[:count].clone()
    dist.all_reduce(tensor)
    return tensor


def noise(rank: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randn(count, dtype=torch.float64, generator=generator).to(dtype)


def noise_summed_three_times(
    rank: int, world: int, dtype: torch.dtype, count: int
) -> list[torch.Tensor]:
    sums = []
    for _ in range(3):
        tensor = noise(rank, dtype, count)
        dist.all_reduce(tensor)
        sums.append(tensor)
    return sums


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("count", [1001, 100003])
def test_the_sum_of_any_numbers_is_right_and_the_same_bits_on_every_rank(
    team: Team, dtype: torch.dtype, count: int
) -> None:
    inputs = [noise(rank, dtype, count) for rank in range(team.world)]
    expected = sum(tensor.double() for tensor in inputs)
    # At worst each of the world - 1 additions rounds by half a unit of the largest partial sum.
    largest = sum(tensor.double().abs() for tensor in inputs)
    allowed = largest * torch.finfo(dtype).eps * max(team.world - 1, 0)
    results = team.run(noise_summed_three_times, dtype, count)
    for came in results[0]:
        assert bool(((came.double() - expected).abs() <= allowed).all())
    assert all(same_bits(came, results[0][0]) for sums in results for came in sums)


def shaped(rank: int, world: int, shape: tuple[int, ...]) -> torch.Tensor:
    tensor = torch.full(shape, float(rank + 1))
    dist.all_reduce(tensor)
    return tensor


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (2, 1, 4), (3, 0, 2), (0,)])
def test_the_shape_stays(team: Team, shape: tuple[int, ...]) -> None:
    expected = torch.full(shape, float(sum(range(1, team.world + 1))))
    for came in team.run(shaped, shape):
        assert_same(came, expected)


def not_finite(rank: int, world: int, dtype: torch.dtype, value: float) -> list[float]:
    tensor = torch.ones(4099, dtype=dtype)
    if rank == world - 1:
        tensor[17] = value
        tensor[4098] = value
    dist.all_reduce(tensor)
    return [tensor[index].item() for index in (0, 17, 4097, 4098)]


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_infinity_and_nan_reach_every_rank_and_no_other_element(
    team: Team, dtype: torch.dtype, value: str
) -> None:
    whole = float(team.world)
    for came in team.run(not_finite, dtype, float(value)):
        assert str(came) == str([whole, float(value), whole, float(value)])


def many_in_flight(rank: int, world: int) -> list[float]:
    tensors = [torch.full((index + 1,), float(rank + index)) for index in range(100)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    return [value for tensor in tensors for value in set(tensor.tolist())]


def test_a_hundred_reductions_in_flight_do_not_mix(team: Team) -> None:
    expected = [float(sum(rank + index for rank in range(team.world))) for index in range(100)]
    assert team.run(many_in_flight) == [expected] * team.world


def coalesced(rank: int, world: int, op: str, in_background: bool) -> list[torch.Tensor]:
    tensors = [fill(rank, count=3), fill(rank + 1, count=5), fill(rank, count=0)]
    future = dist.all_reduce_coalesced(tensors, getattr(dist.ReduceOp, op), async_op=in_background)
    if in_background:
        future.wait()
    return tensors


@pytest.mark.parametrize("in_background", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("op", ["SUM", "MAX"])
@pytest.mark.filterwarnings("ignore")
def test_several_tensors_are_reduced_as_one(team: Team, op: str, in_background: bool) -> None:
    expected = [
        reduce(op, [fill(rank, count=3) for rank in range(team.world)]),
        reduce(op, [fill(rank + 1, count=5) for rank in range(team.world)]),
        torch.empty(0),
    ]
    for came in team.run(coalesced, op, in_background):
        for one, other in zip(came, expected, strict=True):
            assert_same(one, other)


def inside_the_coalescing_manager(rank: int, world: int, in_background: bool) -> list[torch.Tensor]:
    tensors = [fill(rank, count=3), fill(rank + 1, count=5)]
    with _coalescing_manager(async_ops=in_background) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    if in_background:
        manager.wait()
    return tensors


@pytest.mark.parametrize("in_background", [False, True], ids=["sync", "async"])
def test_the_coalescing_manager_reduces_all_its_tensors(team: Team, in_background: bool) -> None:
    expected = [
        reduce("SUM", [fill(rank, count=3) for rank in range(team.world)]),
        reduce("SUM", [fill(rank + 1, count=5) for rank in range(team.world)]),
    ]
    for came in team.run(inside_the_coalescing_manager, in_background):
        for one, other in zip(came, expected, strict=True):
            assert_same(one, other)


def sparse_tensor(rank: int, columns: int) -> torch.Tensor:
    # Rank 0 has one index twice, and every rank has row 1: both must be summed.
    rows = torch.tensor([[rank + 1, 1, 1]])
    values = torch.arange(3.0 * columns).reshape(3, columns) + rank
    return torch.sparse_coo_tensor(rows, values, (6, columns), check_invariants=True)


def sparse_all_reduced(rank: int, world: int, columns: int) -> torch.Tensor:
    tensor = sparse_tensor(rank, columns)
    dist.all_reduce(tensor)
    return tensor.to_dense()


@pytest.mark.parametrize("columns", [1, 3])
def test_sparse_tensors_are_summed(team: Team, columns: int) -> None:
    expected = sum(sparse_tensor(rank, columns).to_dense() for rank in range(team.world))
    for came in team.run(sparse_all_reduced, columns):
        assert_same(came, expected)


def sparse_with_nothing_on_some_ranks(rank: int, world: int) -> torch.Tensor:
    tensor = sparse_tensor(rank, 2) if rank == 0 else torch.zeros(6, 2).to_sparse(1)
    dist.all_reduce(tensor)
    return tensor.to_dense()


def test_a_rank_may_bring_an_empty_sparse_tensor(team: Team) -> None:
    for came in team.run(sparse_with_nothing_on_some_ranks):
        assert_same(came, sparse_tensor(0, 2).to_dense())


def refused(
    rank: int, world: int, op: str, dtype: torch.dtype, sparse: bool
) -> tuple[Attempt, bool]:
    tensor = sparse_tensor(rank, 2) if sparse else fill(rank, dtype)
    outcome = attempt(lambda: dist.all_reduce(tensor, getattr(dist.ReduceOp, op)))
    return outcome, still_works()


REFUSED = [
    ("AVG", torch.bool, False),
    *[(op, dtype, False) for dtype in FLOATS for op in ("BAND", "BOR", "BXOR")],
    *[(op, torch.complex64, False) for op in ("PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")],
    ("MAX", torch.float32, True),
]


@pytest.mark.parametrize(
    ("op", "dtype", "sparse"),
    REFUSED,
    ids=[f"{op}-{name_of(dtype)}{'-sparse' * sparse}" for op, dtype, sparse in REFUSED],
)
def test_a_reduction_without_meaning_is_refused_on_every_rank_and_the_group_goes_on(
    pair: Team, op: str, dtype: torch.dtype, sparse: bool
) -> None:
    for outcome, works in pair.run(refused, op, dtype, sparse):
        assert outcome.failed
        assert outcome.message
        assert works


@pytest.mark.parametrize(
    "dtype", [torch.int16, torch.uint16, torch.uint32, torch.float8_e4m3fn], ids=name_of
)
def test_a_dtype_beyond_the_usual_is_summed_rightly_or_refused_on_every_rank(
    pair: Team, dtype: torch.dtype
) -> None:
    for outcome, works in pair.run(attempt_any_dtype, dtype):
        assert works
        if not outcome.failed:
            assert outcome.value == [2.0, 4.0]


def attempt_any_dtype(rank: int, world: int, dtype: torch.dtype) -> tuple[Attempt, bool]:
    tensor = torch.tensor([1.0, 2.0]).to(dtype)

    def call() -> list[float]:
        dist.all_reduce(tensor)
        return tensor.to(torch.float32).tolist()

    return attempt(call), still_works()
