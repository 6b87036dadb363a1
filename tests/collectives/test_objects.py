"""Tests the collectives of Python objects, which torch builds from those of tensors."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import Team


def object_of(rank: int) -> Any:
    """Objects of very different sizes: nothing, a word, a megabyte."""
    return [None, "word", {"list": [1, (2.5, b"bytes")]}, "m" * 1_000_000][rank % 4]


def everyones(rank: int, world: int) -> list[Any]:
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, object_of(rank))
    return objects


def test_everyone_gets_everyones_object(team: Team) -> None:
    assert team.run(everyones) == [[object_of(rank) for rank in range(team.world)]] * team.world


def gathered(rank: int, world: int) -> list[Any] | None:
    objects: list[Any] | None = [None] * world if rank == world - 1 else None
    dist.gather_object(object_of(rank), objects, world - 1)
    return objects


def test_the_root_gathers_everyones_object(team: Team) -> None:
    assert team.run(gathered)[-1] == [object_of(rank) for rank in range(team.world)]


def broadcast(rank: int, world: int) -> list[Any]:
    source = world - 1
    objects = [object_of(index) if rank == source else None for index in range(4)]
    dist.broadcast_object_list(objects, source)
    return objects


def test_everyone_gets_the_objects_of_the_source(team: Team) -> None:
    assert team.run(broadcast) == [[object_of(index) for index in range(4)]] * team.world


def scattered(rank: int, world: int) -> Any:
    came: list[Any] = [None]
    objects = [object_of(index) for index in range(world)] if rank == 0 else None
    dist.scatter_object_list(came, objects, 0)
    return came[0]


def test_everyone_gets_its_object_from_the_root(team: Team) -> None:
    assert team.run(scattered) == [object_of(rank) for rank in range(team.world)]


def sent(rank: int, world: int) -> list[Any]:
    objects = [object_of(index) if rank == 0 else None for index in range(4)]
    if rank == 0:
        dist.send_object_list(objects, 1)
    elif rank == 1:
        dist.recv_object_list(objects, 0)
    return objects


def test_objects_go_from_rank_to_rank(pair: Team) -> None:
    assert pair.run(sent)[1] == [object_of(index) for index in range(4)]


def tensors_inside(rank: int, world: int) -> list[Any]:
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"tensor": torch.full((2,), float(rank))})
    return [value["tensor"].tolist() for value in objects]


@pytest.mark.filterwarnings("ignore")
def test_an_object_may_hold_a_tensor(pair: Team) -> None:
    assert pair.run(tensors_inside) == [[[0.0, 0.0], [1.0, 1.0]]] * 2
