"""Tests what a rank refuses on its own: wrong shapes, lists, roots, devices, a missing peer.

A refusal doesn't disturb the group, since nothing has been sent.
"""

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.collectives.attempt import Attempt, attempt, still_works
from tests.ranks import Team
from tests.ranks.membership import rendezvous

BAD_CALLS: dict[str, Callable[[int], object]] = {
    "all_gather with too few outputs": lambda world: dist.all_gather(
        [torch.zeros(2)] * (world - 1), torch.ones(2)
    ),
    "all_gather with an output of another size": lambda world: dist.all_gather(
        [torch.zeros(3)] * world, torch.ones(2)
    ),
    "all_gather with an output of another dtype": lambda world: dist.all_gather(
        [torch.zeros(2, dtype=torch.int32)] * world, torch.ones(2)
    ),
    "all_gather_into_tensor with too small an output": lambda world: dist.all_gather_into_tensor(
        torch.zeros(2 * world - 1), torch.ones(2)
    ),
    "reduce_scatter_tensor with an input that does not divide": (
        lambda world: dist.reduce_scatter_tensor(torch.zeros(3), torch.ones(3 * world + 1))
    ),
    "broadcast from a rank that does not exist": lambda world: dist.broadcast(
        torch.zeros(3), world + 5
    ),
    "reduce to a rank that does not exist": lambda world: dist.reduce(torch.zeros(3), world + 5),
    "all_to_all_single with sizes that do not add up": lambda world: dist.all_to_all_single(
        torch.zeros(2 * world), torch.ones(2 * world), [1] * world, [2] * world
    ),
    "all_to_all_single with a length that does not divide": lambda world: dist.all_to_all_single(
        torch.zeros(2 * world + 1), torch.ones(2 * world + 1)
    ),
    "send to oneself": lambda world: dist.send(torch.zeros(3), dist.get_rank()),
    "a list in the place of a tensor": lambda world: dist.all_reduce([1.0, 2.0]),
    "an unknown reduce operation": lambda world: dist.all_reduce(
        torch.ones(2), dist._make_nccl_premul_sum(2.0)
    ),
}


def bad_call(rank: int, world: int, name: str) -> tuple[Attempt, bool]:
    return attempt(lambda: BAD_CALLS[name](world)), still_works()


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_bad_call_is_refused_at_once_and_the_group_goes_on(pair: Team, name: str) -> None:
    for outcome, works in pair.run(bad_call, name):
        assert outcome.failed
        assert outcome.message
        assert outcome.seconds < 10
        assert works


# Wrong calls of rank 0 while the others call correctly: what it sends fits, but its outputs don't,
# so only rank 0 can notice.
ONE_SIDED: dict[str, Callable[[int, int], object]] = {
    "all_gather into outputs of another size": lambda rank, world: dist.all_gather(
        [torch.zeros(3 if rank == 0 else 2) for _ in range(world)], torch.ones(2)
    ),
    "all_gather into too few outputs": lambda rank, world: dist.all_gather(
        [torch.zeros(2) for _ in range(world - (rank == 0))], torch.ones(2)
    ),
    "all_gather_into_tensor of another size": lambda rank, world: dist.all_gather_into_tensor(
        torch.zeros(2 * world + (rank == 0)), torch.ones(2)
    ),
    "gather into outputs of another size": lambda rank, world: dist.gather(
        torch.ones(2), [torch.zeros(3) for _ in range(world)] if rank == 0 else None, 0
    ),
    "scatter of parts of another size": lambda rank, world: dist.scatter(
        torch.zeros(2), [torch.zeros(3) for _ in range(world)] if rank == 0 else None, 0
    ),
    "reduce_scatter into an output of another size": lambda rank, world: dist.reduce_scatter(
        torch.zeros(3 if rank == 0 else 2), [torch.ones(2) for _ in range(world)]
    ),
    "all_to_all into outputs of another size": lambda rank, world: dist.all_to_all(
        [torch.zeros(3 if rank == 0 else 2) for _ in range(world)],
        [torch.ones(2) for _ in range(world)],
    ),
}


def one_sided(rank: int, world: int, name: str) -> tuple[Attempt, Attempt]:
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3))
    outcome = attempt(lambda: ONE_SIDED[name](rank, world))
    return outcome, attempt(still_works)


@pytest.mark.gflow_only("Gloo's ranks check each for itself")
@pytest.mark.parametrize("name", ONE_SIDED)
def test_a_bad_call_of_one_rank_is_an_error_for_all_by_the_timeout(
    ranks: Callable[..., Team], name: str
) -> None:
    for outcome, later in ranks(2).run(one_sided, name):
        assert outcome.failed
        assert outcome.message
        assert outcome.seconds < 13
        # The group may be broken, but it must not give a wrong result.
        assert later.failed or later.value is True


def straight_to_the_backend(rank: int, world: int) -> tuple[Attempt, bool]:
    # torch answers meta tensors itself in dist.all_reduce; only this way reaches the backend.
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    outcome = attempt(lambda: backend.allreduce([torch.ones(2, device="meta")]).wait())
    return outcome, still_works()


def test_a_tensor_on_a_device_that_is_not_served_is_refused(pair: Team) -> None:
    for outcome, works in pair.run(straight_to_the_backend):
        assert outcome.failed
        assert works


@pytest.mark.gflow_only("Gloo's words are its own")
def test_the_refusal_names_the_device(pair: Team) -> None:
    for outcome, _ in pair.run(straight_to_the_backend):
        assert "meta" in outcome.message
        assert "cpu" in outcome.message


def alone_at_the_rendezvous(rank: int, world: int, backend: str) -> Attempt:
    return attempt(
        lambda: dist.init_process_group(
            backend,
            store=rendezvous(),
            rank=0,
            world_size=2,
            timeout=timedelta(seconds=5),
        )
    )


def test_a_peer_that_never_starts_is_an_error_by_the_timeout_that_names_it(
    ranks: Callable[..., Team], backend: str
) -> None:
    outcome = ranks(1, group=None).run(alone_at_the_rendezvous, backend)[0]
    assert "RuntimeError" in outcome.kinds
    assert outcome.seconds < 10
    if backend == "gflow":  # Gloo shows a key of its store
        assert "rank 1" in outcome.message


def two_missing(rank: int, world: int, backend: str) -> Attempt:
    return attempt(
        lambda: dist.init_process_group(
            backend,
            store=rendezvous(),
            rank=2 * rank,
            world_size=4,
            timeout=timedelta(seconds=5),
        )
    )


@pytest.mark.gflow_only("Gloo shows a key of its store")
def test_the_error_names_a_missing_peer_on_every_rank_that_came(
    ranks: Callable[..., Team], backend: str
) -> None:
    for outcome in ranks(2, group=None).run(two_missing, backend):
        assert "RuntimeError" in outcome.kinds
        assert "1" in outcome.message or "3" in outcome.message
        assert outcome.seconds < 12
