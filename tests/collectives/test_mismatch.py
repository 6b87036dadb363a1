"""Tests that ranks which call different things all get an error that names both calls.

Never a hang, never garbage, and the group stays usable: ranks agree on a header before they send
any data.
"""

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.collectives.attempt import Attempt, attempt, still_works
from tests.ranks import Team

pytestmark = pytest.mark.gflow_only("Gloo hangs, or gives garbage, when its ranks differ")

# Long enough for a busy machine, short enough that a hanging case does not hold up the others.
TIMEOUT_S = 10.0


@pytest.fixture
def pair(ranks: Callable[..., Team]) -> Team:
    return ranks(2, kept=True, timeout_s=TIMEOUT_S)


SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX


def all_reduce(count: int, dtype: torch.dtype = torch.float32, op: object = SUM) -> None:
    dist.all_reduce(torch.ones(count, dtype=dtype), op)


def broadcast(count: int, source: int = 0, dtype: torch.dtype = torch.float32) -> None:
    dist.broadcast(torch.ones(count, dtype=dtype), source)


def all_gather(count: int, dtype: torch.dtype = torch.float32) -> None:
    world = dist.get_world_size()
    outputs = [torch.zeros(count, dtype=dtype) for _ in range(world)]
    dist.all_gather(outputs, torch.ones(count, dtype=dtype))


def all_gather_into_tensor(count: int, dtype: torch.dtype = torch.float32) -> None:
    output = torch.zeros(count * dist.get_world_size(), dtype=dtype)
    dist.all_gather_into_tensor(output, torch.ones(count, dtype=dtype))


def reduce(count: int, destination: int = 0, op: object = SUM) -> None:
    dist.reduce(torch.ones(count), destination, op)


def reduce_scatter_tensor(count: int, dtype: torch.dtype = torch.float32, op: object = SUM) -> None:
    joined = torch.ones(count * dist.get_world_size(), dtype=dtype)
    dist.reduce_scatter_tensor(torch.zeros(count, dtype=dtype), joined, op)


def reduce_scatter(count: int, op: object = SUM) -> None:
    inputs = [torch.ones(count) for _ in range(dist.get_world_size())]
    dist.reduce_scatter(torch.zeros(count), inputs, op)


def all_to_all_single(take: list[int], give: list[int]) -> None:
    dist.all_to_all_single(torch.zeros(sum(take)), torch.ones(sum(give)), take, give)


def gather(count: int, root: int = 0) -> None:
    world = dist.get_world_size()
    outputs = [torch.zeros(count) for _ in range(world)] if dist.get_rank() == root else None
    dist.gather(torch.ones(count), outputs, root)


def scatter(count: int, root: int = 0) -> None:
    world = dist.get_world_size()
    inputs = [torch.ones(count) for _ in range(world)] if dist.get_rank() == root else None
    dist.scatter(torch.zeros(count), inputs, root)


def all_reduce_coalesced(*counts: int) -> None:
    dist.all_reduce_coalesced([torch.ones(count) for count in counts])


def all_gather_coalesced(*counts: int) -> None:
    outputs = [[torch.zeros(count) for count in counts] for _ in range(dist.get_world_size())]
    dist.all_gather_coalesced(outputs, [torch.ones(count) for count in counts])


def all_to_all(take: list[int], give: list[int]) -> None:
    dist.all_to_all([torch.zeros(size) for size in take], [torch.ones(size) for size in give])


def barrier() -> None:
    dist.barrier()


Call = tuple[Callable[..., None], tuple[object, ...]]


def differing(
    rank: int, world: int, names: list[str], arguments: list[tuple]
) -> tuple[Attempt, bool]:
    outcome = attempt(lambda: globals()[names[rank]](*arguments[rank]))
    return outcome, still_works()


I32, F32, F64 = torch.int32, torch.float32, torch.float64

# The call of rank 0, the call of rank 1, and patterns for what the error must say about each.
CASES: dict[str, tuple[Call, Call, list[str]]] = {
    "all_reduce of different sizes": (
        (all_reduce, (4,)),
        (all_reduce, (5,)),
        [r"all_reduce", r"\b4\b", r"\b5\b"],
    ),
    "all_reduce of nothing and something": (
        (all_reduce, (0,)),
        (all_reduce, (5,)),
        [r"all_reduce", r"\b0\b", r"\b5\b"],
    ),
    "all_reduce of very different sizes": (
        (all_reduce, (3,)),
        (all_reduce, (1_000_000,)),
        [r"all_reduce", r"\b3\b", r"\b1000000\b"],
    ),
    "all_reduce of different dtypes of one width": (
        (all_reduce, (4, F32)),
        (all_reduce, (4, I32)),
        [r"float32", r"int32"],
    ),
    "all_reduce of different dtypes of one size in bytes": (
        (all_reduce, (4, F32)),
        (all_reduce, (2, F64)),
        [r"float32", r"float64"],
    ),
    "all_reduce with different operations": (
        (all_reduce, (4, F32, SUM)),
        (all_reduce, (4, F32, MAX)),
        [r"(?i)\bsum\b", r"(?i)\bmax\b"],
    ),
    "all_reduce and broadcast": (
        (all_reduce, (4,)),
        (broadcast, (4,)),
        [r"all_reduce", r"broadcast"],
    ),
    "all_reduce and barrier": (
        (all_reduce, (4,)),
        (barrier, ()),
        [r"all_reduce", r"barrier"],
    ),
    "all_gather and all_reduce": (
        (all_gather, (4,)),
        (all_reduce, (4,)),
        [r"all_gather", r"all_reduce"],
    ),
    "broadcast of different sizes": (
        (broadcast, (4,)),
        (broadcast, (6,)),
        [r"broadcast", r"\b4\b", r"\b6\b"],
    ),
    "broadcast of different dtypes": (
        (broadcast, (4, 0, F32)),
        (broadcast, (4, 0, I32)),
        [r"broadcast", r"float32", r"int32"],
    ),
    "broadcast from different sources": (
        (broadcast, (4, 0)),
        (broadcast, (4, 1)),
        [
            r"broadcast",
            r"(?i)(root|source|src|from)\D{0,12}0",
            r"(?i)(root|source|src|from)\D{0,12}1",
        ],
    ),
    "all_gather of different sizes": (
        (all_gather, (4,)),
        (all_gather, (6,)),
        [r"all_gather", r"\b4\b", r"\b6\b"],
    ),
    "all_gather of different dtypes": (
        (all_gather, (4, F32)),
        (all_gather, (4, I32)),
        [r"all_gather", r"float32", r"int32"],
    ),
    "all_gather_into_tensor of different sizes": (
        (all_gather_into_tensor, (4,)),
        (all_gather_into_tensor, (6,)),
        [r"all_?gather", r"\b4\b", r"\b6\b"],
    ),
    "reduce of different sizes": (
        (reduce, (4,)),
        (reduce, (6,)),
        [r"reduce", r"\b4\b", r"\b6\b"],
    ),
    "reduce to different destinations": (
        (reduce, (4, 0)),
        (reduce, (4, 1)),
        [
            r"reduce",
            r"(?i)(root|destination|dst|to)\D{0,12}0",
            r"(?i)(root|destination|dst|to)\D{0,12}1",
        ],
    ),
    "reduce_scatter_tensor of different sizes": (
        (reduce_scatter_tensor, (4,)),
        (reduce_scatter_tensor, (6,)),
        [r"reduce_scatter", r"\b(4|8)\b", r"\b(6|12)\b"],
    ),
    "reduce_scatter_tensor of different dtypes": (
        (reduce_scatter_tensor, (4, F32)),
        (reduce_scatter_tensor, (4, I32)),
        [r"reduce_scatter", r"float32", r"int32"],
    ),
    "reduce_scatter of different sizes": (
        (reduce_scatter, (4,)),
        (reduce_scatter, (6,)),
        [r"reduce_scatter", r"\b(4|8)\b", r"\b(6|12)\b"],
    ),
    "all_to_all_single with sizes that do not fit each other": (
        (all_to_all_single, ([1, 2], [1, 2])),
        (all_to_all_single, ([3, 1], [2, 1])),
        [r"all_to_all"],
    ),
    "all_to_all with sizes that do not fit each other": (
        (all_to_all, ([2, 2], [2, 2])),
        (all_to_all, ([3, 3], [3, 3])),
        [r"all_to_all", r"\b(2|4)\b", r"\b(3|6)\b"],
    ),
    "all_reduce_coalesced of one total in other parts": (
        (all_reduce_coalesced, (2, 3)),
        (all_reduce_coalesced, (3, 2)),
        [r"all_reduce_coalesced"],
    ),
    "all_reduce_coalesced of different numbers of tensors": (
        (all_reduce_coalesced, (2, 2)),
        (all_reduce_coalesced, (4,)),
        [r"all_reduce_coalesced"],
    ),
    "all_reduce and all_reduce_coalesced": (
        (all_reduce, (4,)),
        (all_reduce_coalesced, (4,)),
        [r"all_reduce\b", r"all_reduce_coalesced"],
    ),
    "all_gather_coalesced of one total in other parts": (
        (all_gather_coalesced, (2, 3)),
        (all_gather_coalesced, (3, 2)),
        [r"all_gather_coalesced"],
    ),
    "all_gather and all_gather_into_tensor": (
        (all_gather, (4,)),
        (all_gather_into_tensor, (4,)),
        [r"all_gather\b", r"all_gather_into_tensor"],
    ),
    "reduce_scatter and reduce_scatter_tensor": (
        (reduce_scatter, (4,)),
        (reduce_scatter_tensor, (4,)),
        [r"reduce_scatter\b", r"reduce_scatter_tensor"],
    ),
    "reduce and all_reduce": (
        (reduce, (4,)),
        (all_reduce, (4,)),
        [r"\breduce\b", r"all_reduce"],
    ),
    "all_reduce of truth values and of bytes": (
        (all_reduce, (4, torch.bool, MAX)),
        (all_reduce, (4, torch.uint8, MAX)),
        [r"bool", r"uint8"],
    ),
    "all_reduce of float16 and of bfloat16": (
        (all_reduce, (4, torch.float16)),
        (all_reduce, (4, torch.bfloat16)),
        [r"\bfloat16", r"bfloat16"],
    ),
    "all_reduce with a sum and with an average": (
        (all_reduce, (4, F32, SUM)),
        (all_reduce, (4, F32, dist.ReduceOp.AVG)),
        [r"(?i)\bsum\b", r"(?i)\b(avg|average)\b"],
    ),
    "reduce with different operations": (
        (reduce, (4, 0, SUM)),
        (reduce, (4, 0, MAX)),
        [r"(?i)\bsum\b", r"(?i)\bmax\b"],
    ),
    "gather to different roots": (
        (gather, (4, 0)),
        (gather, (4, 1)),
        [
            r"gather",
            r"(?i)(root|destination|dst|to)\D{0,12}0",
            r"(?i)(root|destination|dst|to)\D{0,12}1",
        ],
    ),
    "scatter from different roots": (
        (scatter, (4, 0)),
        (scatter, (4, 1)),
        [
            r"scatter",
            r"(?i)(root|source|src|from)\D{0,12}0",
            r"(?i)(root|source|src|from)\D{0,12}1",
        ],
    ),
    "gather of different sizes": (
        (gather, (4,)),
        (gather, (6,)),
        [r"gather", r"\b4\b", r"\b6\b"],
    ),
    "scatter of different sizes": (
        (scatter, (4,)),
        (scatter, (6,)),
        [r"scatter", r"\b4\b", r"\b6\b"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_differ_both_get_an_error_with_both_views_and_the_group_goes_on(
    pair: Team, name: str
) -> None:
    first, second, facts = CASES[name]
    results = pair.run(
        differing,
        [first[0].__name__, second[0].__name__],
        [first[1], second[1]],
        deadline_s=45.0,
    )
    for outcome, works in results:
        assert "RuntimeError" in outcome.kinds
        for fact in [r"rank 0\b", r"rank 1\b", *facts]:
            assert re.search(fact, outcome.message), f"{fact} is not in: {outcome.message}"
        assert works


@pytest.mark.parametrize("size", [3, 4])
def test_one_rank_that_differs_is_told_to_all_and_named(
    ranks: Callable[..., Team], size: int
) -> None:
    results = ranks(size).run(
        differing, ["all_reduce"] * size, [(7,)] * (size - 1) + [(9,)], deadline_s=45.0
    )
    for outcome, works in results:
        assert "RuntimeError" in outcome.kinds
        for fact in [rf"rank {size - 1}\b", r"\b7\b", r"\b9\b"]:
            assert re.search(fact, outcome.message), f"{fact} is not in: {outcome.message}"
        assert works


def differing_in_the_background(rank: int, world: int) -> tuple[list[bool], list[list[float]]]:
    """Three collectives in flight, the second of which differs."""
    tensors = [torch.ones(4), torch.ones(4 + rank), torch.ones(4)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    failed = [attempt(work.wait).failed for work in works]
    return failed, [tensors[index].tolist() for index in (0, 2)]


def test_only_the_collective_that_differs_fails(ranks: Callable[..., Team]) -> None:
    expected = ([False, True, False], [[2.0] * 4] * 2)
    assert ranks(2).run(differing_in_the_background) == [expected] * 2


def untouched(rank: int, world: int) -> list[float]:
    tensor = torch.full((4 + rank,), 5.0)
    attempt(lambda: dist.all_reduce(tensor))
    return tensor.unique().tolist()


def test_a_tensor_whose_collective_was_refused_is_unchanged(pair: Team) -> None:
    assert pair.run(untouched) == [[5.0], [5.0]]


def many_times(rank: int, world: int) -> bool:
    outcomes = [attempt(lambda: all_reduce(4 + rank)) for _ in range(50)]
    return all(outcome.failed for outcome in outcomes) and still_works()


def test_fifty_mismatches_later_the_group_still_works(ranks: Callable[..., Team]) -> None:
    assert ranks(2).run(many_times) == [True, True]


def message_that_does_not_fit(
    rank: int, world: int, sizes: list[int], dtypes: list[torch.dtype]
) -> tuple[Attempt, bool]:
    tensor = torch.ones(sizes[rank], dtype=dtypes[rank])
    move = dist.send if rank == 0 else dist.recv
    return attempt(lambda: move(tensor, 1 - rank)), still_works()


@pytest.mark.parametrize(
    ("sizes", "dtypes", "facts"),
    [
        ([4, 6], [F32, F32], [r"\b4\b", r"\b6\b"]),
        ([6, 4], [F32, F32], [r"\b6\b", r"\b4\b"]),
        ([0, 4], [F32, F32], [r"\b0\b", r"\b4\b"]),
        ([4, 4], [F32, I32], [r"float32", r"int32"]),
    ],
    ids=["too short", "too long", "empty", "another dtype"],
)
def test_a_message_that_does_not_fit_is_an_error_for_both_and_the_group_goes_on(
    pair: Team, sizes: list[int], dtypes: list[torch.dtype], facts: list[str]
) -> None:
    for outcome, works in pair.run(message_that_does_not_fit, sizes, dtypes):
        assert "RuntimeError" in outcome.kinds
        for fact in facts:
            assert re.search(fact, outcome.message), f"{fact} is not in: {outcome.message}"
        assert works


def sparse_and_dense(rank: int, world: int) -> tuple[Attempt, bool]:
    tensor = torch.ones(4) if rank == 0 else torch.ones(4).to_sparse()
    return attempt(lambda: dist.all_reduce(tensor)), still_works()


def test_a_sparse_and_a_dense_tensor_do_not_fit(pair: Team) -> None:
    for outcome, works in pair.run(sparse_and_dense):
        assert "RuntimeError" in outcome.kinds
        assert "sparse" in outcome.message
        assert works


def in_one_group_only(rank: int, world: int) -> tuple[Attempt, bool, bool]:
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    outcome = attempt(lambda: dist.all_reduce(torch.ones(4 + rank), group=first))
    return outcome, still_works(second), still_works(first)


def test_a_mismatch_in_one_group_does_not_touch_another(ranks: Callable[..., Team]) -> None:
    for outcome, second_works, first_works in ranks(2).run(in_one_group_only):
        assert outcome.failed
        assert second_works
        assert first_works
