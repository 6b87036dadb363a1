"""NCCL when something goes wrong: what hangs, what is reported, and what an abort ends."""

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from ctypes import byref, c_int, c_void_p

from tests.gpu.calls import (
    IN_PROGRESS,
    REMOTE_ERROR,
    Communicator,
    Memory,
    Stream,
    UniqueId,
    code_of,
    code_raised_by,
    cuda,
    faults,
    nccl,
    on_threads,
    unique_id,
    use_device,
)

INVALID_ARGUMENT = 4
INVALID_USAGE = 5


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < deadline, "this does not come"
        time.sleep(0.005)


def a_collective_waits_for_all_and_an_abort_ends_it() -> None:
    name = unique_id()

    def rank(index: int) -> None:
        comm, stream, memory = Communicator(name, index, 2), Stream(), Memory(400)
        stream.fill(memory, 0)
        if index == 1:
            return
        comm.all_reduce(memory, 100, "f32", "sum", stream)
        event = stream.record()
        time.sleep(0.1)
        assert not event.is_done()
        assert comm.async_error() == 0
        comm.abort()
        event.synchronize()
        assert code_of("ncclCommAbort", comm.handle) == INVALID_ARGUMENT

    on_threads(2, rank)


def an_abort_ends_all_that_is_queued() -> None:
    name, reached = unique_id(), threading.Barrier(2)

    def rank(index: int) -> None:
        comm, stream, memory = Communicator(name, index, 2), Stream(), Memory(4 << 20)
        other = Stream()
        stream.fill(memory, 0)
        other.wait_for(stream)
        if index == 0:
            for _ in range(5):
                comm.all_reduce(memory, 1 << 20, "f32", "sum", stream)
            other.wait_for(stream)
            comm.all_reduce(memory, 1 << 20, "f32", "sum", other)
            assert not stream.is_done()
        reached.wait()
        comm.abort()
        stream.synchronize()
        other.synchronize()

    on_threads(2, rank)


def a_dead_peer_is_told_and_the_operation_hangs_until_the_abort() -> None:
    use_device(0)
    name = unique_id()
    command = [sys.executable, "-m", "tests.gpu.cases", "trouble._comes_and_waits"]
    children = [
        subprocess.Popen([*command, bytes(name).hex(), str(rank)], stdout=subprocess.PIPE)
        for rank in (1, 2)
    ]
    comm, stream, memory = Communicator(name, 0, 3), Stream(), Memory(1 << 20)
    stream.fill(memory, 0)
    for child in children:
        assert child.stdout.readline() == b"here\n"
    assert comm.async_error() == 0
    comm.all_reduce(memory, 1 << 18, "f32", "sum", stream)
    time.sleep(0.05)
    assert comm.async_error() == 0
    # This rank receives no data from the killed one.
    children[0].kill()
    until(lambda: comm.async_error() != 0)
    assert comm.async_error() == REMOTE_ERROR
    assert b"rank 1 is gone" in nccl.ncclGetLastError(comm.handle)
    time.sleep(0.05)
    assert not stream.is_done()
    given = (7, 0, comm.handle, stream.handle)
    code = code_of("ncclAllReduce", memory.address, memory.address, 1, *given)
    assert code == REMOTE_ERROR
    comm.abort()
    stream.synchronize()
    children[1].kill()


def _comes_and_waits(name: str, rank: str) -> None:
    use_device(0)
    Communicator(UniqueId.from_buffer_copy(bytes.fromhex(name)), int(rank), 3)
    print("here", flush=True)
    time.sleep(20)


def a_peer_that_leaves_in_order_is_no_error() -> None:
    name = unique_id()

    def rank(index: int) -> int:
        comm, stream, memory = Communicator(name, index, 3), Stream(), Memory(1 << 20)
        stream.fill(memory, 0)
        # The last rank is late, so the first has already left while others are still running.
        if index == 2:
            stream.run(lambda: time.sleep(0.1))
        given = (1 << 18, 7, 0, 1, comm.handle, stream.handle)
        assert code_of("ncclReduce", memory.address, memory.address, *given) == 0
        if index == 0:
            comm.destroy()
            return 0
        stream.synchronize()
        error = comm.async_error()
        comm.destroy()
        return error

    assert on_threads(3, rank) == [0, 0, 0]


def ranks_at_different_collectives_are_told() -> None:
    name = unique_id()

    def rank(index: int) -> int:
        comm, stream, memory = Communicator(name, index, 2), Stream(), Memory(800)
        stream.fill(memory, 0)
        comm.all_reduce(memory, 100 + index, "f32", "sum", stream)
        until(lambda: comm.async_error() != 0)
        error = comm.async_error()
        text = nccl.ncclGetLastError(comm.handle)
        assert b"elements" in text, text
        time.sleep(0.05)
        comm.abort()
        return error

    assert on_threads(2, rank) == [INVALID_USAGE] * 2
    assert faults() == 2


def two_ranks_on_one_device_are_refused() -> None:
    name = unique_id()

    def rank(index: int) -> int:
        use_device(0)
        return code_raised_by(lambda: Communicator(name, index, 2))

    assert on_threads(2, rank) == [INVALID_USAGE] * 2


def a_rank_that_is_there_twice_is_refused() -> None:
    name = unique_id()

    def rank(_: int) -> int:
        return code_raised_by(lambda: Communicator(name, 0, 2))

    assert on_threads(2, rank) == [INVALID_USAGE] * 2


def a_stream_of_another_device_is_refused() -> None:
    use_device(1)
    foreign = Stream()
    use_device(0)
    comm, memory = Communicator(unique_id(), 0, 1), Memory(8)
    given = (7, 0, comm.handle, foreign.handle)
    assert code_of("ncclAllReduce", memory.address, memory.address, 2, *given) == INVALID_USAGE


def memory_of_the_host_is_reported() -> None:
    use_device(0)
    comm, stream = Communicator(unique_id(), 0, 1), Stream()
    host = ctypes.create_string_buffer(8)
    given = (7, 0, comm.handle, stream.handle)
    assert code_of("ncclAllReduce", host, host, 2, *given) == 0
    assert code_of("cuStreamSynchronize", stream.handle) == 700
    assert b"not device memory" in cuda.standin_last_fault()


class Config(ctypes.Structure):
    """The beginning of ncclConfig_t, and room for the rest."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", c_int),
        ("rest", ctypes.c_char * 200),
    )


def patient() -> Config:
    return Config(size=128, magic=0xCAFEBEEF, version=23007, blocking=0)


def start(name: UniqueId, rank: int, ranks: int) -> Communicator:
    comm = Communicator.__new__(Communicator)
    comm.handle, comm.rank, comm.ranks = c_void_p(), rank, ranks
    config = patient()
    code = nccl.ncclCommInitRankConfig(byref(comm.handle), ranks, name, rank, byref(config))
    assert code == IN_PROGRESS, code
    return comm


def a_communicator_can_be_made_without_waiting() -> None:
    name = unique_id()

    def rank(index: int) -> bytes:
        if index == 1:
            time.sleep(0.1)
        comm, stream, memory = start(name, index, 2), Stream(), Memory(4)
        if index == 0:
            assert comm.async_error() == IN_PROGRESS
        stream.fill(memory, 1)
        until(lambda: comm.async_error() == 0)
        given = (memory.address, memory.address, 4, 1, 0, comm.handle, stream.handle)
        assert code_of("ncclAllReduce", *given) == IN_PROGRESS
        until(lambda: comm.async_error() == 0)
        return stream.get(memory)

    assert on_threads(2, rank) == [bytes([2]) * 4] * 2


def calls_that_do_not_wait_are_done_later_and_one_after_the_other() -> None:
    name = unique_id()
    nccl.standin_nccl_delay_calls(50_000)

    def rank(index: int) -> bytes:
        comm, stream, memory = start(name, index, 2), Stream(), Memory(4)
        stream.fill(memory, 1)
        until(lambda: comm.async_error() == 0)
        given = (memory.address, memory.address, 4, 1, 0, comm.handle, stream.handle)
        assert code_of("ncclAllReduce", *given) == IN_PROGRESS
        # The call hasn't queued anything yet, so this doesn't wait for it.
        stream.synchronize()
        assert code_of("ncclAllReduce", *given) == INVALID_ARGUMENT
        assert comm.async_error() == IN_PROGRESS
        until(lambda: comm.async_error() == 0)
        assert code_of("ncclCommFinalize", comm.handle) == IN_PROGRESS
        until(lambda: comm.async_error() == 0)
        assert code_of("ncclAllReduce", *given) == INVALID_USAGE
        comm.destroy()
        return stream.get(memory)

    assert on_threads(2, rank) == [bytes([2]) * 4] * 2
    assert nccl.standin_nccl_aborted() == 0


def an_abort_ends_the_making_of_a_communicator() -> None:
    use_device(0)
    name = unique_id()
    before = len(os.listdir("/proc/self/task"))
    comm = start(name, 0, 2)
    time.sleep(0.05)
    assert comm.async_error() == IN_PROGRESS
    comm.abort()
    # The thread that waited for the others has ended.
    until(lambda: len(os.listdir("/proc/self/task")) == before)


def a_configuration_that_was_not_initialised_is_refused() -> None:
    use_device(0)
    config = Config()
    handle = c_void_p()
    code = nccl.ncclCommInitRankConfig(byref(handle), 1, unique_id(), 0, byref(config))
    assert code == INVALID_ARGUMENT


def errors_can_be_ordered() -> None:
    use_device(0)
    comm, stream, memory = Communicator(unique_id(), 0, 1), Stream(), Memory(8)
    given = (7, 0, comm.handle, stream.handle)
    cuda.standin_fail_next(b"ncclAllReduce", 3)
    assert code_of("ncclAllReduce", memory.address, memory.address, 2, *given) == 3
    assert code_of("ncclAllReduce", memory.address, memory.address, 2, *given) == 0
    nccl.standin_nccl_set_async_error(comm.handle, REMOTE_ERROR)
    assert comm.async_error() == REMOTE_ERROR


def a_frozen_stream_holds_the_other_ranks() -> None:
    name = unique_id()

    def rank(index: int) -> None:
        comm, stream, memory = Communicator(name, index, 2), Stream(), Memory(400)
        stream.fill(memory, 0)
        if index == 1:
            stream.freeze()
        comm.all_reduce(memory, 100, "f32", "sum", stream)
        time.sleep(0.1)
        assert not stream.is_done()
        assert comm.async_error() == 0
        if index == 1:
            stream.freeze(False)
        stream.synchronize()
        comm.destroy()

    on_threads(2, rank)


def it_says_which_version_it_is() -> None:
    version, driver = c_int(), c_int()
    assert code_of("ncclGetVersion", byref(version)) == 0
    assert code_of("cuDriverGetVersion", byref(driver)) == 0
    assert (version.value, driver.value) == (23007, 13020)
    assert nccl.ncclGetErrorString(REMOTE_ERROR)
