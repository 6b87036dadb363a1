"""NCCL's collectives: bit-exact results, with threads and processes as ranks."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import reduce

import numpy as np

from tests.gpu.calls import (
    REDUCTIONS,
    TYPES,
    Communicator,
    Memory,
    Stream,
    UniqueId,
    call,
    nccl,
    on_threads,
    races,
    unique_id,
    use_device,
)

NUMPY = {
    "i32": np.int32,
    "i64": np.int64,
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    "bf16": np.uint16,
    "u8": np.uint8,
}
SIXTEEN = ("f16", "bf16")
# Pieces of the ring start at multiples of this many bytes.
ALIGNMENT = 64


def widen(stored: np.ndarray, kind: str) -> np.ndarray:
    """Converts to the type that sums are computed in."""
    if kind == "bf16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32) if kind == "f16" else stored


def narrow(numbers: np.ndarray, kind: str) -> np.ndarray:
    """Rounds to the stored type: to nearest, ties to even."""
    if kind == "bf16":
        bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return numbers.astype(NUMPY[kind])


def samples(kind: str, count: int, rank: int) -> np.ndarray:
    """Values of very different magnitude, so that the order of a sum shows in its bits."""
    random = np.random.default_rng(1000 * count + rank)
    if kind in ("i32", "i64", "u8"):
        return random.integers(0, 100, count).astype(NUMPY[kind])
    sizes = 10.0 ** random.integers(-2, 3, count)
    return narrow((random.standard_normal(count) * sizes).astype(np.float32), kind)


def join(reduction: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    joins = {"prod": np.multiply, "max": np.maximum, "min": np.minimum}
    return joins.get(reduction, np.add)


def finished(numbers: np.ndarray, reduction: str, ranks: int) -> np.ndarray:
    if reduction != "avg":
        return numbers
    is_integer = np.issubdtype(numbers.dtype, np.integer)
    return numbers // ranks if is_integer else numbers / numbers.dtype.type(ranks)


def folded(parts: list[np.ndarray], kind: str, reduction: str) -> np.ndarray:
    """The reduction in rank order, rounded once."""
    numbers = reduce(join(reduction), [widen(part, kind) for part in parts])
    return narrow(finished(numbers, reduction, len(parts)), kind)


def round_the_ring(parts: list[np.ndarray], kind: str, reduction: str) -> np.ndarray:
    """The reduction of a ring: each piece in its own order, rounded at every hop."""
    ranks, result = len(parts), parts[0].copy()
    each = ALIGNMENT // parts[0].itemsize
    units = -(-len(parts[0]) // each)

    def start(piece: int) -> int:
        return min((units // ranks * piece + min(units % ranks, piece)) * each, len(parts[0]))

    for piece in range(ranks):
        cut = slice(start(piece), start(piece + 1))
        stored = parts[piece][cut]
        for hop in range(1, ranks):
            own = widen(parts[(piece + hop) % ranks][cut], kind)
            numbers = join(reduction)(widen(stored, kind), own)
            is_last = hop == ranks - 1
            stored = narrow(finished(numbers, reduction, ranks) if is_last else numbers, kind)
        result[cut] = stored
    return result


def bytes_of(memory: Memory, stream: Stream, kind: str) -> np.ndarray:
    return np.frombuffer(stream.get(memory), NUMPY[kind])


def as_ranks(count: int, function: Callable[[Communicator, Stream], object]) -> list:
    """Calls `function` on `count` threads, each a rank with its own device."""
    name = unique_id()

    def rank(index: int) -> object:
        communicator = Communicator(name, index, count)
        result = function(communicator, Stream())
        communicator.destroy()
        return result

    return on_threads(count, rank)


def reduce_all(ranks: int, kind: str, reduction: str, count: int) -> None:
    parts = [samples(kind, count, rank) for rank in range(ranks)]

    def one(communicator: Communicator, stream: Stream) -> np.ndarray:
        memory = Memory(max(1, parts[0].nbytes))
        stream.put(memory, parts[communicator.rank].tobytes())
        communicator.all_reduce(memory, count, kind, reduction, stream)
        return bytes_of(memory, stream, kind)[:count]

    is_small = kind not in SIXTEEN and parts[0].nbytes <= 64 * 1024
    expected = (folded if is_small else round_the_ring)(parts, kind, reduction)
    for result in as_ranks(ranks, one):
        assert np.array_equal(result, expected), (ranks, kind, reduction, count)


def every_type_and_reduction_is_right() -> None:
    for kind in TYPES:
        for reduction in REDUCTIONS:
            reduce_all(3, kind, reduction, 1001)


def large_sums_go_round_the_ring() -> None:
    for ranks, kind, count in (
        (2, "f32", 50_001),
        (3, "f32", 100_000),
        (4, "f16", 70_003),
        (4, "bf16", 5),
        (3, "f64", 9_001),
        (4, "i64", 20_000),
    ):
        reduce_all(ranks, kind, "sum", count)
    reduce_all(3, "bf16", "avg", 40_000)


def one_rank_alone_and_nothing_to_send() -> None:
    reduce_all(1, "f32", "avg", 10)
    reduce_all(1, "f16", "sum", 100_000)


def what_counts_as_small_can_be_set() -> None:
    parts = [samples("f32", 3000, rank) for rank in range(3)]
    by_rank, by_ring = (order(parts, "f32", "sum") for order in (folded, round_the_ring))
    assert not np.array_equal(by_rank, by_ring)

    def one(communicator: Communicator, stream: Stream) -> np.ndarray:
        memory = Memory(parts[0].nbytes)
        stream.put(memory, parts[communicator.rank].tobytes())
        communicator.all_reduce(memory, 3000, "f32", "sum", stream)
        return bytes_of(memory, stream, "f32")

    assert np.array_equal(as_ranks(3, one)[0], by_rank)
    nccl.standin_nccl_set_small(100)
    assert np.array_equal(as_ranks(3, one)[0], by_ring)


def halves_are_rounded_as_numpy_does() -> None:
    # Every f16 there is, plus others: subnormal, overflowing and tied results are among them.
    bits = np.arange(0x10000, dtype=np.uint32).astype(np.uint16)
    numbers = bits.view(np.float16)
    parts = [numbers, np.roll(numbers, 12345)]

    def one(communicator: Communicator, stream: Stream) -> np.ndarray:
        memory = Memory(parts[0].nbytes)
        stream.put(memory, parts[communicator.rank].tobytes())
        communicator.all_reduce(memory, len(numbers), "f16", "sum", stream)
        return bytes_of(memory, stream, "f16")

    with np.errstate(all="ignore"):
        expected = (parts[0].astype(np.float32) + parts[1].astype(np.float32)).astype(np.float16)
    for result in as_ranks(2, one):
        assert np.array_equal(result, expected, equal_nan=True)


def a_zero_keeps_its_sign() -> None:
    parts = [np.array([-0.0, 0.0, -0.0], np.float32), np.array([-0.0, -0.0, 0.0], np.float32)]

    def one(communicator: Communicator, stream: Stream) -> list[bool]:
        memory = Memory(12)
        stream.put(memory, parts[communicator.rank].tobytes())
        communicator.all_reduce(memory, 3, "f32", "sum", stream)
        return np.signbit(bytes_of(memory, stream, "f32")).tolist()

    assert as_ranks(2, one) == [[True, False, False]] * 2


def blocks_are_scattered_and_gathered() -> None:
    ranks, count = 3, 700
    for kind in ("f32", "bf16"):
        parts = [samples(kind, ranks * count, rank) for rank in range(ranks)]
        width = parts[0].itemsize

        def one(comm: Communicator, stream: Stream, kind=kind, parts=parts, width=width) -> tuple:
            found = []
            for is_in_place in (True, False):
                whole, block = Memory(parts[0].nbytes), Memory(count * width)
                stream.put(whole, parts[comm.rank].tobytes())
                own = whole.address + comm.rank * count * width
                target = own if is_in_place else block.address
                given = (TYPES[kind], REDUCTIONS["sum"], comm.handle, stream.handle)
                call("ncclReduceScatter", whole.address, target, count, *given)
                call("ncclAllGather", target, whole.address, count, given[0], *given[2:])
                found.append(bytes_of(whole, stream, kind))
            return tuple(found)

        expected = folded(parts, kind, "sum")
        for in_place, apart in as_ranks(ranks, one):
            assert np.array_equal(in_place, expected)
            assert np.array_equal(apart, expected)


def shards_of_unequal_size_are_reduced_and_handed_out_in_one_group() -> None:
    ranks, starts = 3, [0, 500, 900, 1001]
    parts = [samples("f16", 1001, rank) for rank in range(ranks)]

    def one(comm: Communicator, stream: Stream) -> np.ndarray:
        memory = Memory(parts[0].nbytes)
        stream.put(memory, parts[comm.rank].tobytes())
        for name in ("ncclReduce", "ncclBroadcast"):
            more = (REDUCTIONS["sum"],) if name == "ncclReduce" else ()
            stream.synchronize()
            call("ncclGroupStart")
            for root in range(ranks):
                at = memory.address + 2 * starts[root]
                size = starts[root + 1] - starts[root]
                tail = (TYPES["f16"], *more, root, comm.handle, stream.handle)
                call(name, at, at, size, *tail)
            # Nothing is queued before the end of the group.
            assert stream.is_done()
            call("ncclGroupEnd")
        return bytes_of(memory, stream, "f16")

    expected = folded(parts, "f16", "sum")
    assert all(np.array_equal(result, expected) for result in as_ranks(ranks, one))


def messages_of_a_group_pass_each_other() -> None:
    ranks, count = 3, 300_000

    def one(comm: Communicator, stream: Stream) -> list[int]:
        mine, theirs = Memory(4 * count), [Memory(4 * count) for _ in range(ranks)]
        stream.put(mine, np.full(count, comm.rank, np.int32).tobytes())
        call("ncclGroupStart")
        for peer in range(ranks):
            tail = (TYPES["i32"], peer, comm.handle, stream.handle)
            call("ncclSend", mine.address, count, *tail)
            call("ncclRecv", theirs[peer].address, count, *tail)
        call("ncclGroupEnd")
        values = [set(bytes_of(memory, stream, "i32").tolist()) for memory in theirs]
        return [value for found in values for value in found]

    assert as_ranks(ranks, one) == [[0, 1, 2]] * ranks


def a_communicator_splits() -> None:
    from ctypes import byref, c_int, c_void_p

    def one(comm: Communicator, stream: Stream) -> tuple:
        child, rank, count = c_void_p(), c_int(-1), c_int(-1)
        # Rank 3 stays out; of the others, those of equal parity together, in reverse order.
        color = c_int(-1 if comm.rank == 3 else comm.rank % 2)
        call("ncclCommSplit", comm.handle, color, c_int(-comm.rank), byref(child), None)
        if comm.rank == 3:
            assert not child
            return ()
        call("ncclCommUserRank", child, byref(rank))
        call("ncclCommCount", child, byref(count))
        memory = Memory(4)
        stream.put(memory, np.int32(10 + comm.rank).tobytes())
        given = (TYPES["i32"], REDUCTIONS["sum"], child, stream.handle)
        call("ncclAllReduce", memory.address, memory.address, 1, *given)
        total = bytes_of(memory, stream, "i32")[0]
        call("ncclCommDestroy", child)
        return rank.value, count.value, int(total)

    assert as_ranks(4, one) == [(1, 2, 22), (0, 1, 11), (0, 2, 22), ()]


def a_group_of_communicators_is_made_by_one_thread() -> None:
    from ctypes import byref, c_int, c_void_p

    use_device(0)
    handles = (c_void_p * 3)()
    call("ncclCommInitAll", handles, c_int(3), None)
    memories, streams = [], []
    for device, handle in enumerate(handles):
        use_device(device)
        memories.append(Memory(4))
        streams.append(Stream())
        streams[-1].put(memories[-1], np.float32(device + 1).tobytes())
        rank = c_int(-1)
        call("ncclCommUserRank", c_void_p(handle), byref(rank))
        assert rank.value == device
    call("ncclGroupStart")
    for handle, memory, stream in zip(handles, memories, streams, strict=True):
        given = (TYPES["f32"], REDUCTIONS["sum"], c_void_p(handle), stream.handle)
        call("ncclAllReduce", memory.address, memory.address, 1, *given)
    call("ncclGroupEnd")
    for device, (memory, stream) in enumerate(zip(memories, streams, strict=True)):
        use_device(device)
        assert bytes_of(memory, stream, "f32")[0] == 6


def operations_on_two_streams_keep_their_order() -> None:
    def one(comm: Communicator, stream: Stream) -> tuple:
        other, first, second = Stream(), Memory(400), Memory(400)
        stream.fill(first, 0)
        other.fill(second, 0)
        # Delays the first operation on one rank.
        if comm.rank == 0:
            stream.run(lambda: __import__("time").sleep(0.05))
        comm.all_reduce(first, 100, "f32", "sum", stream)
        comm.all_reduce(second, 100, "i32", "max", other)
        other.synchronize()
        stream.synchronize()
        return comm.async_error()

    assert as_ranks(3, one) == [0, 0, 0]


def a_collective_races_as_a_kernel_does() -> None:
    def one(comm: Communicator, stream: Stream) -> None:
        caller, memory = Stream(), Memory(400)
        caller.fill(memory, 0)
        stream.wait_for(caller)
        comm.all_reduce(memory, 100, "f32", "sum", stream)
        caller.wait_for(stream)
        caller.fill(memory, 1)
        stream.synchronize()

    as_ranks(2, one)
    assert races() == 0

    def careless(comm: Communicator, stream: Stream) -> None:
        caller, memory = Stream(), Memory(400)
        caller.fill(memory, 0)
        comm.all_reduce(memory, 100, "f32", "sum", stream)
        stream.synchronize()

    as_ranks(2, careless)
    assert races() == 2


def processes_are_ranks_too() -> None:
    _as_processes({})


def processes_meet_at_the_address_that_is_given() -> None:
    _as_processes({"STANDIN_ADDRESS": "127.0.0.2"})
    _as_processes({"NCCL_SOCKET_IFNAME": "=lo"})


def _as_processes(environment: dict[str, str]) -> None:
    ranks = 3
    command = [sys.executable, "-m", "tests.gpu.cases", "collectives._process", str(ranks)]
    children = [
        subprocess.Popen(
            [*command, str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
        )
        for rank in range(ranks)
    ]
    name = bytes.fromhex(children[0].stdout.readline().decode().strip())
    for child in children[1:]:
        child.stdin.write(name.hex().encode() + b"\n")
        child.stdin.flush()
    for child in children:
        output, _ = child.communicate(timeout=20)
        assert child.returncode == 0, output
        assert b"right" in output


def _process(ranks: str, rank: str) -> None:
    use_device(0)
    if rank == "0":
        name = unique_id()
        print(bytes(name).hex(), flush=True)
    else:
        name = UniqueId.from_buffer_copy(bytes.fromhex(sys.stdin.readline().strip()))
    communicator = Communicator(name, int(rank), int(ranks))
    for kind, count in (("f32", 100), ("f32", 100_000), ("bf16", 30_000)):
        parts = [samples(kind, count, index) for index in range(int(ranks))]
        stream, memory = Stream(), Memory(parts[0].nbytes)
        stream.put(memory, parts[int(rank)].tobytes())
        communicator.all_reduce(memory, count, kind, "sum", stream)
        order = folded if count == 100 else round_the_ring
        assert np.array_equal(bytes_of(memory, stream, kind), order(parts, kind, "sum"))
    communicator.destroy()
    print("right", flush=True)
