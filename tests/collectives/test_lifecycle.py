"""Tests how a group ends (destroyed, shut down, aborted) and is made again in the same process.

Whatever is pending then ends with an error: no rank is left waiting.
"""

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

from tests.collectives.attempt import Attempt, attempt, still_works
from tests.ranks import Team
from tests.ranks.membership import rendezvous

CPU = torch.device("cpu")


def make_group(backend: str, rank: int, world: int, name: str) -> None:
    dist.init_process_group(
        backend,
        store=rendezvous(name),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=20),
    )


def made_again(rank: int, world: int, backend: str) -> list[bool]:
    works = []
    for index in range(5):
        make_group(backend, rank, world, f"round {index}")
        works.append(still_works())
        dist.destroy_process_group()
    return works


def test_a_group_can_be_destroyed_and_made_again(
    ranks: Callable[..., Team], backend: str, world: int
) -> None:
    assert ranks(world, group=None).run(made_again, backend) == [[True] * 5] * world


def open_things() -> tuple[int, int]:
    # Threads and sockets may take a moment to disappear.
    time.sleep(0.3)
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def what_ten_groups_leave(rank: int, world: int, backend: str) -> tuple[int, int]:
    before = (0, 0)
    for index in range(12):
        make_group(backend, rank, world, f"round {index}")
        still_works()
        dist.destroy_process_group()
        if index == 1:  # once-per-process state exists by now
            before = open_things()
    after = open_things()
    return after[0] - before[0], after[1] - before[1]


def test_groups_leave_no_descriptors_and_no_threads(
    ranks: Callable[..., Team], backend: str
) -> None:
    for descriptors, threads in ranks(2, group=None).run(what_ten_groups_leave, backend):
        # Less than one each per group.
        assert descriptors < 10
        assert threads < 10


def shared_memory_left(rank: int, world: int, backend: str) -> list[str]:
    before = set(os.listdir("/dev/shm"))
    make_group(backend, rank, world, "one")
    tensor = torch.ones(1_000_000)
    dist.all_reduce(tensor)
    dist.barrier()
    dist.destroy_process_group()
    return sorted(set(os.listdir("/dev/shm")) - before)


def test_a_group_leaves_nothing_in_shared_memory(ranks: Callable[..., Team], backend: str) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("this system has no /dev/shm")
    assert ranks(2, group=None).run(shared_memory_left, backend) == [[], []]


def after_destroy(rank: int, world: int) -> tuple[Attempt, Attempt]:
    group = dist.group.WORLD
    still_works()
    dist.destroy_process_group()
    by_name = attempt(lambda: dist.all_reduce(torch.ones(1)))
    by_hand = attempt(lambda: group.allreduce(torch.ones(1)).wait(timedelta(seconds=5)))
    return by_name, by_hand


def test_the_world_is_unknown_after_destroy(ranks: Callable[..., Team]) -> None:
    for by_name, _ in ranks(2).run(after_destroy):
        assert "ValueError" in by_name.kinds


@pytest.mark.gflow_only("Gloo's groups go on working after they were destroyed")
def test_a_destroyed_group_refuses_to_work(ranks: Callable[..., Team]) -> None:
    for _, by_hand in ranks(2).run(after_destroy):
        assert "RuntimeError" in by_hand.kinds
        assert by_hand.message


def after_shutdown(rank: int, world: int) -> tuple[Attempt, Attempt]:
    group = dist.group.WORLD
    still_works()
    group.shutdown()
    group.shutdown()
    return attempt(lambda: group.allreduce(torch.ones(1)).wait(timedelta(seconds=5))), attempt(
        dist.destroy_process_group
    )


@pytest.mark.gflow_only("Gloo's shutdown does nothing")
def test_a_group_that_was_shut_down_refuses_to_work_and_can_be_destroyed(
    ranks: Callable[..., Team],
) -> None:
    for work, destroy in ranks(2).run(after_shutdown):
        assert "RuntimeError" in work.kinds
        assert not destroy.failed


def abort_while_pending(rank: int, world: int) -> tuple[Attempt, Attempt] | None:
    store = rendezvous()
    group = dist.group.WORLD
    still_works()
    if rank == 1:
        store.wait(["over"], timedelta(seconds=30))
        return None
    work = dist.all_reduce(torch.ones(3), async_op=True)
    # From another thread, as a watchdog would do it, while the main thread waits.
    threading.Timer(0.5, group.abort).start()
    waiting = attempt(work.wait)
    later = attempt(lambda: group.allreduce(torch.ones(1)).wait())
    store.set("over", "")
    return waiting, later


@pytest.mark.gflow_only("Gloo's abort does nothing")
def test_abort_wakes_whoever_waits_and_ends_the_group(ranks: Callable[..., Team]) -> None:
    waiting, later = ranks(2, timeout_s=30.0).run(abort_while_pending)[0]
    assert "RuntimeError" in waiting.kinds
    assert waiting.seconds < 10
    assert "RuntimeError" in later.kinds
    assert later.seconds < 10


def peer_of_an_abort(rank: int, world: int) -> Attempt | None:
    still_works()
    if rank == 1:
        time.sleep(0.3)
        dist.group.WORLD.abort()
        return None
    return attempt(lambda: dist.all_reduce(torch.ones(3)))


@pytest.mark.gflow_only("Gloo's abort does nothing")
def test_the_peer_of_a_rank_that_aborts_gets_an_error_at_once(ranks: Callable[..., Team]) -> None:
    outcome = ranks(2, timeout_s=30.0).run(peer_of_an_abort)[0]
    assert "RuntimeError" in outcome.kinds
    assert "rank 1" in outcome.message
    assert outcome.seconds < 10


def abort_everything(rank: int, world: int, backend: str) -> tuple[bool, Attempt, bool]:
    store = rendezvous()
    still_works()
    # A rank that aborts leaves everything, including what the others are still doing.
    store.set(f"{rank} is done", "")
    store.wait([f"{other} is done" for other in range(world)])
    work = dist.all_reduce(torch.ones(3), async_op=True) if rank == 0 else None
    _abort_process_group()
    gone = not dist.is_initialized()
    waiting = attempt(work.wait if work else lambda: None)
    make_group(backend, rank, world, "again")
    return gone, waiting, still_works()


def test_aborting_all_groups_lets_new_ones_be_made(
    ranks: Callable[..., Team], backend: str
) -> None:
    results = ranks(2).run(abort_everything, backend)
    assert [(gone, works) for gone, _, works in results] == [(True, True)] * 2
    assert results[0][1].failed
    assert results[0][1].seconds < 25


def destroy_while_pending(rank: int, world: int, backend: str) -> tuple[Attempt, bool]:
    store = rendezvous()
    still_works()
    work = None
    if rank == 0:
        work = dist.all_reduce(torch.ones(3), async_op=True)
    dist.destroy_process_group()
    store.set(f"destroyed {rank}", "")
    store.wait([f"destroyed {1 - rank}"], timedelta(seconds=30))
    waiting = attempt(work.wait if work else lambda: None)
    make_group(backend, rank, world, "again")
    return waiting, still_works()


def test_destroying_a_group_with_a_pending_collective_fails_the_collective(
    ranks: Callable[..., Team], backend: str
) -> None:
    (waiting, works), (_, others_work) = ranks(2, timeout_s=10.0).run(
        destroy_while_pending, backend
    )
    assert "RuntimeError" in waiting.kinds
    assert works
    assert others_work


def under_torchs_own_checks(rank: int, world: int, backend: str) -> tuple[str, bool, Attempt, bool]:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        make_group(backend, rank, world, "checked")
        name = type(dist.group.WORLD._get_backend(CPU)).__name__
        works = still_works()
        outcome = attempt(lambda: dist.all_reduce(torch.ones(3 + rank)))
        return name, works, outcome, still_works()
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def test_torchs_own_checks_can_be_put_around_the_group(
    ranks: Callable[..., Team], backend: str
) -> None:
    for _, works, outcome, later in ranks(2, group=None).run(under_torchs_own_checks, backend):
        assert works
        assert outcome.failed
        assert later
