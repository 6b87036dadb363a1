"""Tests the Work that async_op=True returns: waiting, polling, futures and their callbacks.

No case depends on speed: a collective stays pending because a peer holds it up.
"""

import gc
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.collectives.attempt import Attempt, attempt, still_works
from tests.ranks import Team
from tests.ranks.membership import rendezvous


def reduce_ones(count: int = 3) -> dist.Work:
    return dist.all_reduce(torch.ones(count), async_op=True)


def waited(rank: int, world: int) -> tuple[Any, bool, bool, list[list[float]]]:
    work = reduce_ones()
    came = work.wait()
    return came, work.is_completed(), work.is_success(), [t.tolist() for t in work.result()]


def test_a_work_that_was_waited_for_is_complete_and_has_its_result(team: Team) -> None:
    whole = [[float(team.world)] * 3]
    assert team.run(waited) == [(True, True, True, whole)] * team.world


def waited_twice(rank: int, world: int) -> list[Any]:
    work = reduce_ones()
    return [work.wait(), work.wait(), work.wait(timedelta(seconds=5)), work.is_completed()]


def test_a_work_can_be_waited_for_again(team: Team) -> None:
    assert team.run(waited_twice) == [[True] * 4] * team.world


def pending_until_the_peer_calls(rank: int, world: int) -> tuple[bool, bool, bool] | None:
    store = rendezvous()
    if rank == 1:
        store.wait(["looked"], timedelta(seconds=20))
        reduce_ones().wait()
        return None
    work = reduce_ones()
    future = work.get_future()
    before, future_before = work.is_completed(), future.done()
    store.set("looked", "")
    work.wait()
    return before, future_before, work.is_completed()


def test_a_work_is_not_complete_before_the_peer_has_called(ranks: Callable[..., Team]) -> None:
    assert ranks(2).run(pending_until_the_peer_calls)[0] == (False, False, True)


def futures(rank: int, world: int) -> dict[str, list[list[float]]]:
    def outputs() -> list[torch.Tensor]:
        return [torch.zeros(2) for _ in range(world)]

    mine = torch.full((2,), float(rank))
    works = {
        "all_reduce": lambda: dist.all_reduce(mine.clone(), async_op=True),
        "broadcast": lambda: dist.broadcast(mine.clone(), world - 1, async_op=True),
        "all_gather": lambda: dist.all_gather(outputs(), mine, async_op=True),
        "all_to_all": lambda: dist.all_to_all(outputs(), [mine] * world, async_op=True),
        "barrier": lambda: dist.barrier(async_op=True),
    }
    values = {}
    for name, start in works.items():
        value = start().get_future().wait()
        values[name] = [tensor.tolist() for tensor in value]
    return values


def test_the_future_holds_the_output_tensors(team: Team) -> None:
    world = team.world
    total, everyone = float(sum(range(world))), [[float(rank)] * 2 for rank in range(world)]
    expected = {
        "all_reduce": [[total] * 2],
        "broadcast": [[float(world - 1)] * 2],
        "all_gather": everyone,
        "all_to_all": everyone,
        "barrier": [],
    }
    assert team.run(futures) == [expected] * world


def one_tensor_as_future(rank: int, world: int) -> tuple[bool, list[float]]:
    tensor = torch.ones(2)
    value = dist.all_reduce(tensor, async_op=True).get_future().wait()
    return value[0].data_ptr() == tensor.data_ptr(), tensor.tolist()


def test_the_future_of_all_reduce_holds_the_very_tensor(team: Team) -> None:
    assert team.run(one_tensor_as_future) == [(True, [float(team.world)] * 2)] * team.world


def chained(rank: int, world: int) -> float:
    future = reduce_ones().get_future()
    halved = future.then(lambda done: done.value()[0] / 2)
    return halved.then(lambda done: done.value() + 1).wait()[0].item()


def test_callbacks_can_be_chained(team: Team) -> None:
    assert team.run(chained) == [team.world / 2 + 1] * team.world


def late_callback(rank: int, world: int) -> tuple[float, float]:
    work = reduce_ones()
    work.wait()
    future = work.get_future()
    seen: list[float] = []
    future.add_done_callback(lambda done: seen.append(done.value()[0][0].item()))
    return future.then(lambda done: done.value()[0][0].item()).wait(), seen[0]


def test_a_callback_added_after_completion_runs_at_once(team: Team) -> None:
    assert team.run(late_callback) == [(float(team.world), float(team.world))] * team.world


def callback_with_a_collective(rank: int, world: int) -> list[float]:
    def again(done: torch.futures.Future) -> torch.Tensor:
        tensor = done.value()[0]
        dist.all_reduce(tensor)
        return tensor

    # Attached while the first is still pending: rank 0 calls last, after all have attached.
    store = rendezvous()
    if rank == 0:
        store.wait([f"attached {other}" for other in range(1, world)], timedelta(seconds=20))
    future = reduce_ones().get_future().then(again)
    store.set(f"attached {rank}", "")
    return future.wait().tolist()


def test_a_callback_may_call_a_collective_and_wait_for_it(
    ranks: Callable[..., Team], world: int
) -> None:
    whole = float(world * world)
    assert ranks(world).run(callback_with_a_collective) == [[whole] * 3] * world


def callbacks_in_a_row(rank: int, world: int) -> float:
    def again(done: torch.futures.Future) -> list[torch.Tensor]:
        tensor = done.value()[0]
        dist.all_reduce(tensor, async_op=True).wait()
        return [tensor]

    future = reduce_ones().get_future()
    for _ in range(4):
        future = future.then(again)
    return future.wait()[0][0].item()


def test_callbacks_in_a_row_may_each_call_a_collective(
    ranks: Callable[..., Team], world: int
) -> None:
    assert ranks(world).run(callbacks_in_a_row) == [float(world**5)] * world


def callback_that_raises(rank: int, world: int) -> tuple[Attempt, Attempt, bool]:
    def fail(done: torch.futures.Future) -> None:
        raise ValueError("the callback's own words")

    work = reduce_ones()
    outcome = attempt(work.get_future().then(fail).wait)
    return outcome, attempt(work.wait), still_works()


def test_an_error_in_a_callback_reaches_whoever_waits_and_nobody_else(team: Team) -> None:
    for outcome, work, works in team.run(callback_that_raises):
        assert outcome.failed
        assert "the callback's own words" in outcome.message
        assert work.value is True
        assert works


def callback_on_a_pending_work(rank: int, world: int) -> tuple[int, int, float]:
    store = rendezvous()
    if rank == 1:
        store.wait(["attached"], timedelta(seconds=20))
        reduce_ones().wait()
        return 0, 0, 0.0
    ran_in: list[int] = []

    def note(done: torch.futures.Future) -> float:
        ran_in.append(threading.get_native_id())
        return done.value()[0][0].item()

    future = reduce_ones().get_future().then(note)
    early = len(ran_in)
    store.set("attached", "")
    value = future.wait()
    return early, len(ran_in), value


def test_a_callback_runs_once_and_not_before_completion(ranks: Callable[..., Team]) -> None:
    assert ranks(2).run(callback_on_a_pending_work)[0] == (0, 1, 2.0)


def dropped(rank: int, world: int) -> list[float]:
    tensors = [torch.full((10_000,), float(index)) for index in range(20)]
    for tensor in tensors:
        dist.all_reduce(tensor, async_op=True)
    gc.collect()
    dist.barrier()
    # Called after them, so it completes after them.
    return [value for tensor in tensors for value in tensor.unique().tolist()]


def test_a_collective_is_done_even_if_its_work_is_dropped(team: Team) -> None:
    expected = [float(index * team.world) for index in range(20)]
    assert team.run(dropped) == [expected] * team.world


def temporaries(rank: int, world: int) -> list[float]:
    # Only the Work still holds these tensors.
    works = [dist.all_reduce(torch.full((50_000,), float(i)), async_op=True) for i in range(20)]
    gc.collect()
    noise = [torch.rand(50_000) for _ in range(20)]
    values = [work.get_future().wait()[0].unique().tolist() for work in works]
    assert len(noise) == 20
    return [value for each in values for value in each]


def test_a_work_keeps_its_tensors_alive(team: Team) -> None:
    assert team.run(temporaries) == [[float(i * team.world) for i in range(20)]] * team.world


def other_thread_waits(rank: int, world: int) -> list[float]:
    work = reduce_ones()
    came: list[float] = []

    def wait() -> None:
        work.wait()
        came.append(work.result()[0][0].item())

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return came


def test_several_threads_may_wait_for_one_work(team: Team) -> None:
    assert team.run(other_thread_waits) == [[float(team.world)] * 3] * team.world


def python_runs_while_waiting(rank: int, world: int) -> bool:
    store = rendezvous()
    if rank == 1:
        store.wait(["thread has run"], timedelta(seconds=20))
        reduce_ones().wait()
        return True
    # This thread, which needs the GIL, releases the peer while the main thread waits.
    timer = threading.Timer(0.2, lambda: store.set("thread has run", ""))
    timer.start()
    reduce_ones().wait()
    timer.join()
    return True


def test_waiting_lets_other_python_threads_run(ranks: Callable[..., Team]) -> None:
    assert ranks(2).run(python_runs_while_waiting) == [True, True]
