"""Tests that one rank's mistake or exit reaches the others at once, and that nothing waits
needlessly. Each case here once hung, gave a wrong result or killed a process.
"""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.collectives.attempt import still_works
from tests.ranks import Died, Returned, Team
from tests.ranks.membership import rendezvous

pytestmark = pytest.mark.gflow_only("Gloo promises none of this")


def message_of(call: Callable[[], Any]) -> str:
    """The error message of a call that must fail."""
    try:
        call()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def barrier_behind_collectives(rank: int, world: int) -> bool:
    for step in range(30):
        # The ranks reach the barrier with different amounts of work behind them.
        works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(3 + rank)][:3]
        for _ in range(world - 1 - rank):
            works.append(dist.all_reduce(torch.ones(1000), async_op=True))
        dist.monitored_barrier(timeout=timedelta(seconds=20))
        for work in works:
            work.wait()
        if step % 10 == rank:
            time.sleep(0.01)
    return still_works()


def test_a_monitored_barrier_stands_behind_the_collectives_before_it(
    ranks: Callable[..., Team],
) -> None:
    assert ranks(2).run(barrier_behind_collectives) == [True, True]


# The others see nothing wrong in these calls: only rank 1 itself can notice its mistake.
WRONG_ON_RANK_ONE: dict[str, Callable[[], Any]] = {
    "output too small": lambda: dist.all_gather_into_tensor(torch.empty(3), torch.ones(2)),
    "output of another type": lambda: dist.distributed_c10d._get_default_group()._allgather_base(
        torch.empty(4, dtype=torch.float64), torch.ones(2)
    ),
    "rows that cannot be shared": lambda: dist.all_to_all_single(torch.empty(3), torch.ones(3)),
    "splits that do not add up": lambda: dist.all_to_all_single(
        torch.empty(4), torch.ones(5), [2, 2], [2, 2]
    ),
    "output too large": lambda: dist.reduce_scatter_tensor(torch.empty(3), torch.ones(4)),
}
RIGHT: dict[str, Callable[[], Any]] = {
    "output too small": lambda: dist.all_gather_into_tensor(torch.empty(4), torch.ones(2)),
    "output of another type": lambda: dist.distributed_c10d._get_default_group()._allgather_base(
        torch.empty(4), torch.ones(2)
    ),
    "rows that cannot be shared": lambda: dist.all_to_all_single(torch.empty(2), torch.ones(2)),
    "splits that do not add up": lambda: dist.all_to_all_single(
        torch.empty(4), torch.ones(4), [2, 2], [2, 2]
    ),
    "output too large": lambda: dist.reduce_scatter_tensor(torch.empty(2), torch.ones(4)),
}


def wrong_on_rank_one(rank: int, world: int, case: str) -> tuple[str, bool]:
    def call() -> None:
        work = (WRONG_ON_RANK_ONE if rank == 1 else RIGHT)[case]()
        if work is not None:
            work.wait()

    return message_of(call), still_works()


@pytest.mark.parametrize("case", WRONG_ON_RANK_ONE)
def test_wrong_arguments_on_one_rank_are_an_error_on_all_and_the_group_goes_on(
    ranks: Callable[..., Team], case: str
) -> None:
    for message, works in ranks(2).run(wrong_on_rank_one, case, deadline_s=20.0):
        assert message.startswith("DistBackendError: gflow: the ranks do not agree"), message
        assert works


def killed_inside_a_collective(rank: int, world: int) -> str:
    big = torch.ones(30_000_000)
    if rank == world - 1:
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(big, async_op=True)
        # Long enough for data to be in flight, too short for all of it to arrive.
        time.sleep(0.3)
        os._exit(9)
    dist.all_reduce(torch.ones(1))
    message = message_of(lambda: dist.all_reduce(big))
    if message == "no error":
        # It completed before the last rank ended, so the next one fails.
        message = message_of(lambda: dist.all_reduce(big))
    return message


def test_a_rank_that_ends_inside_a_collective_is_named_by_all_long_before_the_timeout(
    ranks: Callable[..., Team],
) -> None:
    outcomes = ranks(4, timeout_s=600.0).outcomes(killed_inside_a_collective, deadline_s=50.0)
    assert isinstance(outcomes[-1], Died)
    for outcome in outcomes[:-1]:
        assert isinstance(outcome, Returned), outcome.story()
        assert "lost rank" in outcome.value
        assert "#2" in outcome.value or "#3" in outcome.value


def receive_after_the_timeout(rank: int, world: int) -> tuple[float, bool]:
    tensor = torch.zeros(1)
    if rank == 0:
        receiving = dist.irecv(tensor, 1)
        time.sleep(3)
        receiving.wait()
    else:
        time.sleep(3)
        dist.send(torch.ones(1), 0)
    return tensor.item(), still_works()


def test_a_receive_that_nobody_waits_for_does_not_time_out(ranks: Callable[..., Team]) -> None:
    assert ranks(2, timeout_s=2.0).run(receive_after_the_timeout) == [(1.0, True), (0.0, True)]


def destroy_with_a_receive_pending(rank: int, world: int) -> str:
    dist.init_process_group("gflow", store=rendezvous(), rank=rank, world_size=world)
    receiving = dist.irecv(torch.zeros(1), 1 - rank)
    dist.destroy_process_group()
    return message_of(receiving.wait)


def test_a_pending_receive_fails_when_its_group_is_destroyed(ranks: Callable[..., Team]) -> None:
    for message in ranks(2, group=None).run(destroy_with_a_receive_pending):
        assert "was destroyed while this operation was pending" in message, message


def message_from_a_fork(rank: int, world: int) -> tuple[int, float]:
    tensor = torch.zeros(1)
    receiving = dist.irecv(tensor, 1 - rank)
    child = os.fork()
    if child == 0:
        refused = "fork" in message_of(lambda: dist.send(torch.full((1,), 66.0), 1 - rank))
        os._exit(0 if refused else 1)
    _, status = os.waitpid(child, 0)
    dist.barrier()
    dist.send(torch.ones(1), 1 - rank)
    receiving.wait()
    return os.waitstatus_to_exitcode(status), tensor.item()


def test_a_forked_child_cannot_send_in_its_parents_group(ranks: Callable[..., Team]) -> None:
    assert ranks(2).run(message_from_a_fork) == [(0, 1.0), (0, 1.0)]


def after_a_failure(rank: int, world: int) -> list[str]:
    if rank == 1:
        time.sleep(1.5)
        return []
    messages = [message_of(lambda: dist.all_reduce(torch.ones(1))) for _ in range(2)]
    messages.append(message_of(lambda: dist.recv(torch.ones(1), 1)))
    return messages


def test_after_a_failure_every_later_call_says_the_same(ranks: Callable[..., Team]) -> None:
    messages, _ = ranks(2, timeout_s=1.0).run(after_a_failure)
    assert len(set(messages)) == 1, messages
    assert messages[0].startswith("DistBackendError: gflow: Timed out after 1.0 s"), messages[0]
    assert "rank 1" in messages[0]
