"""Tests what happens to tensors that are not contiguous.

The memory between a tensor's elements must not be written.
"""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.collectives.attempt import Attempt, attempt, still_works
from tests.plain import assert_same
from tests.ranks import Team


def turned(value: float) -> torch.Tensor:
    """Dense in memory, but transposed: three rows of two, stored column by column."""
    return (torch.arange(6.0).reshape(2, 3) + value).t()


def with_gaps(value: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Every second element of some memory, and the memory."""
    memory = torch.full((8,), -1.0)
    memory[::2] = torch.arange(4.0) + value
    return memory[::2], memory


def turned_all_reduced(rank: int, world: int) -> torch.Tensor:
    tensor = turned(10.0 * rank)
    dist.all_reduce(tensor)
    return tensor


def test_all_reduce_takes_a_turned_tensor(team: Team) -> None:
    expected = sum(turned(10.0 * rank) for rank in range(team.world))
    for came in team.run(turned_all_reduced):
        assert_same(came, expected)


def turned_broadcast(rank: int, world: int) -> torch.Tensor:
    tensor = turned(10.0 * rank)
    dist.broadcast(tensor, world - 1)
    return tensor


def test_broadcast_takes_a_turned_tensor(team: Team) -> None:
    for came in team.run(turned_broadcast):
        assert_same(came, turned(10.0 * (team.world - 1)))


def turned_reduced(rank: int, world: int) -> torch.Tensor:
    tensor = turned(10.0 * rank)
    dist.reduce(tensor, 0)
    return tensor


def test_reduce_takes_a_turned_tensor(team: Team) -> None:
    expected = sum(turned(10.0 * rank) for rank in range(team.world))
    assert_same(team.run(turned_reduced)[0], expected)


def coalesced_with_gaps(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    tensor, memory = with_gaps(10.0 * rank)
    other = turned(10.0 * rank)
    dist.all_reduce_coalesced([tensor, other])
    return memory, other


def test_all_reduce_coalesced_takes_any_layout(team: Team) -> None:
    ranks = range(team.world)
    for memory, other in team.run(coalesced_with_gaps):
        assert_same(memory[::2], sum(torch.arange(4.0) + 10.0 * rank for rank in ranks))
        assert_same(memory[1::2], torch.full((4,), -1.0))
        assert_same(other, sum(turned(10.0 * rank) for rank in ranks))


def gathered_from_gaps(rank: int, world: int) -> list[torch.Tensor]:
    tensor, _ = with_gaps(10.0 * rank)
    outputs = [with_gaps(0.0)[0] for _ in range(world)]
    dist.all_gather(outputs, tensor)
    joined = torch.zeros(4 * world)
    dist.all_gather_into_tensor(joined, tensor)
    return [*outputs, joined]


def test_all_gather_takes_any_layout(team: Team) -> None:
    inputs = [torch.arange(4.0) + 10.0 * rank for rank in range(team.world)]
    for *outputs, joined in team.run(gathered_from_gaps):
        for came, expected in zip(outputs, inputs, strict=True):
            assert_same(came, expected)
        assert_same(joined, torch.cat(inputs))


def gap_call(name: str, rank: int, world: int) -> Attempt:
    """Calls a collective on tensors with gaps; the value is the written memory."""
    tensor, memory = with_gaps(10.0 * rank)
    parts = [with_gaps(10.0 * rank + other)[0] for other in range(world)]
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "broadcast": lambda: dist.broadcast(tensor, 0),
        "reduce": lambda: dist.reduce(tensor, 0),
        "scatter": lambda: dist.scatter(tensor, parts if rank == 0 else None, 0),
        "reduce_scatter": lambda: dist.reduce_scatter(tensor, parts),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(tensor, torch.cat(parts)),
        "all_to_all": lambda: dist.all_to_all([tensor, torch.zeros(4)], parts),
        "all_to_all_single": lambda: dist.all_to_all_single(
            tensor, torch.arange(4.0) + 10.0 * rank
        ),
        "recv": lambda: dist.send(torch.arange(4.0), 1) if rank == 0 else dist.recv(tensor, 0),
    }

    def call() -> torch.Tensor:
        calls[name]()
        return memory

    return attempt(call)


def gaps(rank: int, world: int, name: str) -> tuple[Attempt, bool]:
    outcome = gap_call(name, rank, world)
    if name == "recv" and rank == 1 and outcome.failed:
        dist.recv(torch.zeros(4), 0)  # the message is still on its way
    return outcome, still_works()


def expected_of_gaps(name: str, rank: int) -> torch.Tensor | None:
    start = torch.arange(4.0)
    if name == "all_reduce":
        return 2 * start + 10
    if name == "reduce":
        return 2 * start + 10 if rank == 0 else None
    if name == "broadcast":
        return start
    if name == "scatter":
        return start + rank
    if name in ("reduce_scatter", "reduce_scatter_tensor"):
        return 2 * start + 10 + 2 * rank
    if name == "all_to_all":
        return start + rank
    if name == "all_to_all_single":
        return torch.tensor([0.0, 1.0, 10.0, 11.0]) + 2 * rank
    return start if rank == 1 else None


@pytest.mark.gflow_only("Gloo takes tensors with gaps for dense ones and writes into the gaps")
@pytest.mark.parametrize(
    "name",
    [
        "all_reduce",
        "broadcast",
        "reduce",
        "scatter",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "all_to_all",
        "all_to_all_single",
        "recv",
    ],
)
def test_a_tensor_with_gaps_is_filled_rightly_or_refused_and_the_gaps_stay(
    pair: Team, name: str
) -> None:
    for rank, (outcome, works) in enumerate(pair.run(gaps, name)):
        assert works
        if outcome.failed:
            assert "contiguous" in outcome.message or "dense" in outcome.message
            continue
        memory = outcome.value
        assert_same(memory[1::2], torch.full((4,), -1.0), note="the gaps")
        expected = expected_of_gaps(name, rank)
        if expected is not None:
            assert_same(memory[::2], expected)


def one_rank_turned(rank: int, world: int, name: str) -> tuple[Attempt, bool]:
    # The same shape, stored in another order on one rank.
    tensor = turned(0.0) if rank == 0 else turned(0.0).contiguous()

    def call() -> torch.Tensor:
        if name == "all_reduce":
            dist.all_reduce(tensor)
        else:
            dist.broadcast(tensor, 0)
        return tensor

    return attempt(call), still_works()


@pytest.mark.gflow_only("Gloo adds up memory, whatever the elements' order in it")
@pytest.mark.parametrize("name", ["all_reduce", "broadcast"])
def test_ranks_with_different_layouts_get_the_right_elements_or_an_error(
    pair: Team, name: str
) -> None:
    for outcome, works in pair.run(one_rank_turned, name):
        assert works
        if not outcome.failed:
            expected = turned(0.0) * 2 if name == "all_reduce" else turned(0.0)
            assert_same(outcome.value, expected)


def sent_turned(rank: int, world: int) -> Attempt:
    outcome = attempt(lambda: dist.send(turned(0.0), 1) if rank == 0 else None)
    if rank == 0 and outcome.failed:
        dist.send(turned(0.0).contiguous(), 1)
    if rank == 1:
        tensor = torch.zeros(3, 2)
        dist.recv(tensor, 0)
        return attempt(lambda: tensor)
    return outcome


def test_send_sends_a_turned_tensor_rightly_or_refuses_it(pair: Team) -> None:
    sender, receiver = pair.run(sent_turned)
    assert_same(receiver.value, turned(0.0).contiguous())
    if sender.failed:
        assert "contiguous" in sender.message
