"""Tests send and recv in all their forms.

Messages are never confused, whatever the order in which they are received.
"""

import pytest
import torch
import torch.distributed as dist

from tests.plain import COMPLEX, DTYPES, assert_same, fill, name_of
from tests.ranks import Team

# int16 and the like are refused by collectives of Gloo, but messages are only bytes.
EVERY_DTYPE = [*DTYPES, *COMPLEX, torch.int16, torch.uint16, torch.uint32, torch.uint64]


def around_the_ring(rank: int, world: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    tensor = fill(rank, dtype, count)
    came = torch.zeros(count, dtype=dtype)
    after, before = (rank + 1) % world, (rank - 1) % world
    # The first rank sends first and the others reply: this works without buffering.
    if rank == 0:
        dist.send(tensor, after)
        dist.recv(came, before)
    else:
        dist.recv(came, before)
        dist.send(tensor, after)
    # As bytes: torch cannot unpickle tensors of unsigned integers.
    return came.view(torch.uint8)


@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=name_of)
def test_a_tensor_goes_from_rank_to_rank(peers: Team, dtype: torch.dtype) -> None:
    size = peers.world
    for rank, came in enumerate(peers.run(around_the_ring, dtype, 7)):
        assert_same(came, fill((rank - 1) % size, dtype).view(torch.uint8))


@pytest.mark.parametrize("count", [0, 1, 1025, 1000003])
def test_any_number_of_elements_is_sent(pair: Team, count: int) -> None:
    for rank, came in enumerate(pair.run(around_the_ring, torch.int32, count)):
        assert_same(came, fill(1 - rank, torch.int32, count).view(torch.uint8))


def tags_out_of_order(rank: int, world: int) -> list[float]:
    tags = [3, 1, 2, 0]
    tensors = {tag: torch.full((5,), float(tag)) if rank == 0 else torch.zeros(5) for tag in tags}
    if rank == 0:
        works = [dist.isend(tensors[tag], 1, tag=tag) for tag in tags]
    else:
        works = [dist.irecv(tensors[tag], 0, tag=tag) for tag in sorted(tags)]
    for work in works:
        work.wait()
    return [tensors[tag][0].item() for tag in sorted(tags)]


def test_tags_keep_messages_apart(pair: Team) -> None:
    assert pair.run(tags_out_of_order)[1] == [0.0, 1.0, 2.0, 3.0]


def same_tag_in_order(rank: int, world: int) -> list[float]:
    tensors = [torch.full((3,), float(index)) * (rank == 0) for index in range(20)]
    move = dist.isend if rank == 0 else dist.irecv
    works = [move(tensor, 1 - rank) for tensor in tensors]
    for work in works:
        work.wait()
    return [tensor[0].item() for tensor in tensors]


def test_messages_of_one_tag_arrive_in_the_order_they_were_sent(pair: Team) -> None:
    assert pair.run(same_tag_in_order)[1] == [float(index) for index in range(20)]


def from_anyone(rank: int, world: int) -> list[tuple[int, float]]:
    if rank != 0:
        dist.send(torch.tensor([100.0 + rank]), 0)
        return []
    came = []
    for _ in range(world - 1):
        tensor = torch.zeros(1)
        source = dist.recv(tensor)
        came.append((source, tensor.item()))
    return sorted(came)


def test_receiving_from_anyone_tells_who_it_was(peers: Team) -> None:
    size = peers.world
    expected = [(rank, 100.0 + rank) for rank in range(1, size)]
    assert peers.run(from_anyone)[0] == expected


def the_source(rank: int, world: int) -> int:
    if rank == 0:
        dist.send(torch.ones(1), 1)
        return -1
    return dist.recv(torch.zeros(1), 0)


def test_receiving_returns_the_source(pair: Team) -> None:
    assert pair.run(the_source)[1] == 0


def both_at_once(rank: int, world: int, count: int) -> torch.Tensor:
    came = torch.zeros(count)
    works = [dist.isend(torch.full((count,), float(rank)), 1 - rank), dist.irecv(came, 1 - rank)]
    for work in works:
        work.wait()
    return came


# Far more than a socket buffers: a backend that sends before it receives would block.
@pytest.mark.parametrize("count", [1, 3_000_000])
def test_two_ranks_send_to_each_other_at_once(pair: Team, count: int) -> None:
    for rank, came in enumerate(pair.run(both_at_once, count)):
        assert_same(came, torch.full((count,), float(1 - rank)))


def batched_ring(rank: int, world: int) -> list[float]:
    came = [torch.zeros(4), torch.zeros(2)]
    after, before = (rank + 1) % world, (rank - 1) % world
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.full((4,), float(rank)), after, tag=1),
            dist.P2POp(dist.irecv, came[0], before, tag=1),
            dist.P2POp(dist.isend, torch.full((2,), 10.0 + rank), before, tag=2),
            dist.P2POp(dist.irecv, came[1], after, tag=2),
        ]
    )
    for work in works:
        work.wait()
    return [tensor.unique().item() for tensor in came]


def test_a_batch_of_messages_arrives(peers: Team) -> None:
    size = peers.world
    expected = [[float((rank - 1) % size), 10.0 + (rank + 1) % size] for rank in range(size)]
    assert peers.run(batched_ring) == expected


def between_collectives(rank: int, world: int) -> list[float]:
    came = []
    for step in range(10):
        total = torch.tensor([float(rank + step)])
        work = dist.all_reduce(total, async_op=True)
        letter = torch.tensor([float(10 * step + rank)])
        received = torch.zeros(1)
        works = [dist.isend(letter, 1 - rank), dist.irecv(received, 1 - rank), work]
        for each in works:
            each.wait()
        came += [total.item(), received.item()]
    return came


def test_messages_and_collectives_do_not_mix(pair: Team) -> None:
    for rank, came in enumerate(pair.run(between_collectives)):
        expected = [[2.0 * step + 1, 10.0 * step + 1 - rank] for step in range(10)]
        assert came == [value for both in expected for value in both]
