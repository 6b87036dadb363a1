"""Tests that groups are independent: parts of the world, meshes, several groups at once.

What happens in one group never shows in another.
"""

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.collectives.attempt import still_works
from tests.ranks import Team


def summed(value: float, group: dist.ProcessGroup | None = None) -> float:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def in_parts(rank: int, world: int) -> tuple[int, int, float, float]:
    # torch requires every rank to create every group.
    even, odd = dist.new_group([0, 2]), dist.new_group([1, 3])
    mine = even if rank % 2 == 0 else odd
    inner = summed(10.0**rank, mine)
    whole = summed(10.0**rank)
    return dist.get_rank(mine), dist.get_world_size(mine), inner, whole


def test_a_part_of_the_world_reduces_among_itself(ranks: Callable[..., Team]) -> None:
    assert ranks(4).run(in_parts) == [
        (0, 2, 101.0, 1111.0),
        (0, 2, 1010.0, 1111.0),
        (1, 2, 101.0, 1111.0),
        (1, 2, 1010.0, 1111.0),
    ]


def outside(rank: int, world: int) -> tuple[bool, float | None]:
    group = dist.new_group([0, 2])
    member = group is not dist.GroupMember.NON_GROUP_MEMBER
    inner = summed(10.0**rank, group) if member else None
    return still_works(), inner


def test_a_rank_outside_a_group_goes_on_in_the_world(ranks: Callable[..., Team]) -> None:
    assert ranks(3).run(outside) == [(True, 101.0), (True, None), (True, 101.0)]


def every_kind_in_a_part(rank: int, world: int) -> list[list[float]] | None:
    group = dist.new_group([1, 2])
    if rank not in (1, 2):
        return None
    me = float(rank)
    results = []
    tensor = torch.tensor([me])
    dist.broadcast(tensor, 2, group=group)
    results.append(tensor.tolist())
    outputs = [torch.zeros(1), torch.zeros(1)]
    dist.all_gather(outputs, torch.tensor([me]), group=group)
    results.append(torch.cat(outputs).tolist())
    tensor = torch.tensor([me])
    dist.reduce(tensor, 1, group=group)
    results.append(tensor.tolist() if rank == 1 else [])
    tensor = torch.zeros(1)
    dist.scatter(
        tensor, [torch.tensor([7.0]), torch.tensor([8.0])] if rank == 2 else None, 2, group=group
    )
    results.append(tensor.tolist())
    tensor = torch.zeros(2)
    dist.all_to_all_single(tensor, torch.tensor([10 * me, 10 * me + 1]), group=group)
    results.append(tensor.tolist())
    tensor = torch.zeros(1)
    if rank == 1:
        dist.send(torch.tensor([5.0]), 2, group=group)
    else:
        dist.recv(tensor, 1, group=group)
    results.append(tensor.tolist())
    return results


def test_a_group_names_its_ranks_by_their_rank_in_the_world(ranks: Callable[..., Team]) -> None:
    nobody, first, second = ranks(3).run(every_kind_in_a_part)
    assert nobody is None
    assert first == [[2.0], [1.0, 2.0], [3.0], [7.0], [10.0, 20.0], [0.0]]
    assert second == [[2.0], [1.0, 2.0], [], [8.0], [11.0, 21.0], [5.0]]


def on_a_mesh(rank: int, world: int) -> tuple[float, float, float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    value = 10.0**rank
    return (
        summed(value, mesh["rows"].get_group()),
        summed(value, mesh["columns"].get_group()),
        summed(value),
    )


def test_a_mesh_of_two_by_two_reduces_along_each_side(ranks: Callable[..., Team]) -> None:
    assert ranks(4).run(on_a_mesh) == [
        (101.0, 11.0, 1111.0),
        (1010.0, 11.0, 1111.0),
        (101.0, 1100.0, 1111.0),
        (1010.0, 1100.0, 1111.0),
    ]


def interleaved(rank: int, world: int) -> list[float]:
    groups = [dist.new_group(list(range(world))) for _ in range(3)]
    tensors = [torch.full((1000,), float(rank + index)) for index in range(30)]
    works = [
        dist.all_reduce(tensor, group=groups[index % 3], async_op=True)
        for index, tensor in enumerate(tensors)
    ]
    for work in works:
        work.wait()
    return [value for tensor in tensors for value in tensor.unique().tolist()]


def test_several_groups_work_at_once(ranks: Callable[..., Team], world: int) -> None:
    expected = [float(sum(rank + index for rank in range(world))) for index in range(30)]
    assert ranks(world).run(interleaved) == [expected] * world


def in_another_order_on_every_rank(rank: int, world: int) -> list[float]:
    groups = [dist.new_group(list(range(world))) for _ in range(world)]
    tensors = [torch.full((100_000,), float(rank + index)) for index in range(world)]
    works = {}
    for step in range(world):
        index = (rank + step) % world
        works[index] = dist.all_reduce(tensors[index], group=groups[index], async_op=True)
    for work in works.values():
        work.wait()
    return [value for tensor in tensors for value in tensor.unique().tolist()]


def test_the_order_between_groups_may_differ_from_rank_to_rank(
    ranks: Callable[..., Team], world: int
) -> None:
    expected = [float(sum(rank + index for rank in range(world))) for index in range(world)]
    assert ranks(world).run(in_another_order_on_every_rank) == [expected] * world


def one_destroyed(rank: int, world: int) -> tuple[float, float, bool]:
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    before = summed(1.0, first)
    dist.destroy_process_group(first)
    return before, summed(2.0, second), still_works()


def test_destroying_one_group_leaves_the_others_alone(ranks: Callable[..., Team]) -> None:
    assert ranks(2).run(one_destroyed) == [(2.0, 4.0, True)] * 2


def made_by_its_members_alone(rank: int, world: int) -> float:
    mine = [0, 2] if rank % 2 == 0 else [1, 3]
    group = dist.new_group(mine, use_local_synchronization=True)
    return summed(10.0**rank, group)


def test_a_group_can_be_made_by_its_members_alone(ranks: Callable[..., Team]) -> None:
    assert ranks(4).run(made_by_its_members_alone) == [101.0, 1010.0, 101.0, 1010.0]


def single(rank: int, world: int) -> list[float]:
    groups = [dist.new_group([member]) for member in range(world)]
    return [summed(float(rank + 1), groups[rank]), summed(1.0)]


def test_a_group_of_one_is_a_group(ranks: Callable[..., Team]) -> None:
    assert ranks(3).run(single) == [[1.0, 3.0], [2.0, 3.0], [3.0, 3.0]]


def one_thread_per_group(rank: int, world: int) -> list[float]:
    groups = [dist.new_group(list(range(world))) for _ in range(4)]
    results = [0.0] * len(groups)

    def work(index: int) -> None:
        for step in range(20):
            results[index] += summed(float(rank + index + step), groups[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    return results


def test_threads_may_use_groups_of_their_own_at_once(
    ranks: Callable[..., Team], world: int
) -> None:
    expected = [
        float(sum(rank + index + step for rank in range(world) for step in range(20)))
        for index in range(4)
    ]
    assert ranks(world).run(one_thread_per_group) == [expected] * world


def split(rank: int, world: int) -> tuple[str, bool]:
    try:
        dist.split_group(split_ranks=[[0], [1]])
    except RuntimeError as error:
        return str(error), still_works()
    return "split", still_works()


@pytest.mark.gflow_only("Gloo can be split; gflow has new_group")
def test_splitting_a_group_is_refused_and_the_group_goes_on(ranks: Callable[..., Team]) -> None:
    for message, works in ranks(2).run(split):
        assert "does not support splitting" in message
        assert works
