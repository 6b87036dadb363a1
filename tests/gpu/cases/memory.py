"""Device memory: which accesses work, and which are reported."""

import ctypes
import os
import signal
import time
from ctypes import byref, c_size_t, c_uint64

from tests.gpu.calls import Memory, Range, Stream, call, code_of, cuda, faults, races, use_device

ILLEGAL_ADDRESS = 700
OUT_OF_MEMORY = 2


def the_host_cannot_touch_it() -> None:
    use_device(0)
    memory = Memory(4096)
    for touch in (
        lambda: ctypes.string_at(memory.address, 1),
        lambda: ctypes.memset(memory.address, 0, 1),
    ):
        child = os.fork()
        if child == 0:
            # The fault is intended, so no traceback is wanted.
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            touch()
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        assert os.waitstatus_to_exitcode(status) == -signal.SIGSEGV


def new_memory_is_nan() -> None:
    use_device(0)
    assert Stream().get(Memory(1000)) == b"\xff" * 1000


def copies_bring_what_they_should() -> None:
    use_device(0)
    stream, first, second = Stream(), Memory(100_000), Memory(100_000)
    data = bytes(range(256)) * 390 + bytes(160)
    stream.put(first, data)
    stream.copy(second, first)
    stream.fill(second, 9, 10, 20)
    assert stream.get(second) == data[:10] + bytes([9]) * 10 + data[20:]
    back = ctypes.create_string_buffer(100_000)
    call("cuMemcpyDtoH_v2", back, first.address, 100_000)
    assert back.raw == data


def a_copy_reads_the_host_when_the_stream_comes_to_it() -> None:
    use_device(0)
    stream, memory = Stream(), Memory(4)
    host = ctypes.create_string_buffer(b"old.", 4)
    stream.freeze()
    call("cuMemcpyHtoDAsync_v2", memory.address, host, 4, stream.handle)
    host.raw = b"new."
    stream.freeze(False)
    assert stream.get(memory) == b"new."


def memory_is_aligned_and_never_given_out_twice() -> None:
    use_device(0)
    seen = set()
    for size in (1, 3, 511, 513, 4096, 5000, 100_000):
        memory = Memory(size)
        assert memory.address % 512 == 0
        assert memory.address not in seen
        seen.add(memory.address)
        memory.free()


def touching_freed_memory_is_reported_and_ends_the_device() -> None:
    use_device(0)
    stream, memory, other = Stream(), Memory(64), Memory(64)
    memory.free()
    stream.fill(memory, 1)
    assert code_of("cuStreamSynchronize", stream.handle) == ILLEGAL_ADDRESS
    assert faults() == 1
    assert b"freed" in cuda.standin_last_fault()
    # As on a real device, nothing works after a fault.
    assert code_of("cuMemsetD8Async", other.address, 0, 64, stream.handle) == ILLEGAL_ADDRESS
    cuda.standin_clear()
    stream.fill(other, 1)
    assert stream.get(other) == bytes([1]) * 64


def running_past_the_end_is_reported() -> None:
    use_device(0)
    stream, memory = Stream(), Memory(64)
    call("cuMemsetD8Async", memory.address + 60, 0, 5, stream.handle)
    assert code_of("cuStreamSynchronize", stream.handle) == ILLEGAL_ADDRESS
    assert b"past the end" in cuda.standin_last_fault()


def memory_of_the_host_is_not_device_memory() -> None:
    use_device(0)
    stream = Stream()
    host = ctypes.create_string_buffer(64)
    call("cuMemsetD8Async", ctypes.addressof(host), 1, 64, stream.handle)
    assert code_of("cuStreamSynchronize", stream.handle) == ILLEGAL_ADDRESS
    assert b"not device memory" in cuda.standin_last_fault()
    assert host.raw == bytes(64)


def memory_of_another_device_can_be_copied_but_not_worked_on() -> None:
    use_device(1)
    far = Memory(64)
    use_device(0)
    stream, near = Stream(), Memory(64)
    stream.fill(near, 3)
    stream.copy(far, near)
    stream.synchronize()
    stream.fill(far, 1)
    assert code_of("cuStreamSynchronize", stream.handle) == ILLEGAL_ADDRESS
    assert b"device 1" in cuda.standin_last_fault()


def a_function_on_a_stream_sees_it_at_its_alias() -> None:
    use_device(0)
    stream, memory = Stream(), Memory(16)
    alias = cuda.standin_alias(memory.address)
    stream.run(lambda: ctypes.memset(alias, 5, 16), [Range(memory.address, 16, 1)])
    assert stream.get(memory) == bytes([5]) * 16


def a_free_waits_for_the_device() -> None:
    use_device(0)
    stream, memory = Stream(), Memory(64)
    stream.run(lambda: time.sleep(0.05))
    stream.fill(memory, 1)
    memory.free()
    assert stream.is_done()
    assert faults() == 0


def a_free_on_a_stream_waits_for_nobody() -> None:
    use_device(0)
    stream = Stream()
    address = c_uint64()
    call("cuMemAllocAsync", byref(address), 64, stream.handle)
    stream.freeze()
    call("cuMemsetD8Async", address.value, 1, 64, stream.handle)
    call("cuMemFreeAsync", address.value, stream.handle)
    stream.freeze(False)
    stream.synchronize()
    assert faults() == 0
    call("cuMemsetD8Async", address.value, 1, 64, stream.handle)
    assert code_of("cuStreamSynchronize", stream.handle) == ILLEGAL_ADDRESS


def a_free_on_another_stream_needs_an_event() -> None:
    use_device(0)
    using, freeing = Stream(), Stream()
    for is_ordered in (True, False):
        address = c_uint64()
        call("cuMemAllocAsync", byref(address), 64, using.handle)
        call("cuMemsetD8Async", address.value, 1, 64, using.handle)
        using.synchronize() if not is_ordered else freeing.wait_for(using)
        if not is_ordered:
            using.freeze()
            call("cuMemsetD8Async", address.value, 1, 64, using.handle)
        call("cuMemFreeAsync", address.value, freeing.handle)
        assert races() == (0 if is_ordered else 1), cuda.standin_last_race()


def there_is_so_much_and_no_more() -> None:
    use_device(0)
    free, total = c_size_t(), c_size_t()
    call("cuMemGetInfo_v2", byref(free), byref(total))
    assert free.value == total.value > 0
    memory = Memory(1 << 20)
    call("cuMemGetInfo_v2", byref(free), byref(total))
    assert free.value == total.value - (1 << 20)
    assert code_of("cuMemAlloc_v2", byref(c_uint64()), total.value) == OUT_OF_MEMORY
    memory.free()
    call("cuMemGetInfo_v2", byref(free), byref(total))
    assert free.value == total.value
