"""Streams and events: what orders work, and what does not."""

import threading
import time
from ctypes import byref, c_float, c_int, c_size_t, c_uint64

from tests.gpu.calls import (
    Event,
    Gate,
    Memory,
    Stream,
    call,
    code_of,
    cuda,
    on_threads,
    use_device,
)

INVALID_CONTEXT = 201
INVALID_HANDLE = 400
NOT_PERMITTED = 800
CAPTURE_UNSUPPORTED = 900


def nothing_runs_on_the_calling_thread() -> None:
    use_device(0)
    stream, threads = Stream(), []
    stream.run(lambda: threads.append(threading.get_native_id()))
    stream.synchronize()
    assert threads != [threading.get_native_id()]


def a_call_returns_before_its_work_has_begun() -> None:
    use_device(0)
    stream, memory = Stream(), Memory(64)
    stream.freeze()
    stream.fill(memory, 7)
    assert not stream.is_done()
    time.sleep(0.02)
    assert not stream.is_done()
    stream.freeze(False)
    assert stream.get(memory) == bytes([7]) * 64


def a_stream_works_in_order() -> None:
    use_device(0)
    cuda.standin_delay_streams(200)
    stream, done = Stream(), []
    for number in range(50):
        stream.run(lambda number=number: done.append(number))
    stream.synchronize()
    assert done == list(range(50))


def streams_do_not_wait_for_each_other() -> None:
    use_device(0)
    held, free = Stream(), Stream()
    gate = Gate(held)
    free.run(lambda: None)
    free.synchronize()
    Stream(handle=None).synchronize()
    assert not held.is_done()
    gate.open()
    held.synchronize()


def a_wait_holds_a_stream_until_the_event() -> None:
    use_device(0)
    first, second, done = Stream(), Stream(), []
    gate = Gate(first)
    first.run(lambda: done.append("first"))
    second.wait_for(first)
    second.run(lambda: done.append("second"))
    time.sleep(0.02)
    assert not second.is_done()
    gate.open()
    second.synchronize()
    assert done == ["first", "second"]


def an_event_means_what_was_queued_when_it_was_recorded() -> None:
    use_device(0)
    stream = Stream()
    event = stream.record()
    gate = Gate(stream)
    event.synchronize()
    assert event.is_done()
    assert not stream.is_done()
    gate.open()


def recording_again_does_not_change_earlier_waits() -> None:
    use_device(0)
    first, second, waiting = Stream(), Stream(), Stream()
    event = first.record()
    waiting.wait(event)
    second.freeze()
    second.record_again(event)
    waiting.synchronize()
    assert not event.is_done()
    late = Stream()
    late.wait(event)
    time.sleep(0.02)
    assert not late.is_done()
    second.freeze(False)
    late.synchronize()


def an_event_that_was_never_recorded_holds_nobody() -> None:
    use_device(0)
    stream, event = Stream(), Event()
    stream.wait(event)
    stream.synchronize()
    event.synchronize()
    assert event.is_done()


def an_event_may_be_destroyed_while_it_is_waited_for() -> None:
    use_device(0)
    first, second = Stream(), Stream()
    gate = Gate(first)
    event = first.record()
    second.wait(event)
    call("cuEventDestroy_v2", event.handle)
    assert code_of("cuEventQuery", event.handle) == INVALID_HANDLE
    assert not second.is_done()
    gate.open()
    second.synchronize()


def a_destroyed_stream_still_does_its_work() -> None:
    use_device(0)
    stream, other = Stream(), Stream()
    gate = Gate(stream)
    other.wait_for(stream)
    call("cuStreamDestroy_v2", stream.handle)
    assert code_of("cuStreamQuery", stream.handle) == INVALID_HANDLE
    gate.open()
    other.synchronize()


def a_frozen_stream_holds_all_who_wait_for_it() -> None:
    use_device(0)
    frozen, waiting = Stream(), Stream()
    frozen.freeze()
    event = frozen.record()
    waiting.wait(event)
    time.sleep(0.05)
    assert not any(held.is_done() for held in (frozen, waiting, event))
    frozen.freeze(False)
    waiting.synchronize()


def events_reach_across_devices() -> None:
    use_device(0)
    first = Stream()
    gate = Gate(first)
    event = first.record()
    use_device(1)
    second = Stream()
    second.wait(event)
    # But an event can be recorded only on streams of its own device.
    assert code_of("cuEventRecord", event.handle, second.handle) == INVALID_HANDLE
    assert not second.is_done()
    gate.open()
    second.synchronize()


def events_measure_time() -> None:
    use_device(0)
    stream, start, end = Stream(), Event(flags=0), Event(flags=0)
    stream.record_again(start)
    stream.run(lambda: time.sleep(0.02))
    stream.record_again(end)
    stream.synchronize()
    elapsed = c_float()
    for name in ("cuEventElapsedTime", "cuEventElapsedTime_v2"):
        call(name, byref(elapsed), start.handle, end.handle)
        assert 15 < elapsed.value < 5000
    silent = stream.record()
    assert code_of("cuEventElapsedTime", byref(elapsed), start.handle, silent.handle) != 0


def a_thread_without_a_context_is_refused() -> None:
    use_device(0)
    stream, codes = Stream(), []
    thread = threading.Thread(
        target=lambda: codes.append(code_of("cuStreamSynchronize", stream.handle))
    )
    thread.start()
    thread.join()
    assert codes == [INVALID_CONTEXT]


def a_function_on_a_stream_may_not_call_cuda() -> None:
    use_device(0)
    stream, codes = Stream(), []
    stream.run(lambda: codes.append(code_of("cuCtxGetDevice", byref(c_int()))))
    stream.synchronize()
    assert codes == [NOT_PERMITTED]


def every_device_has_its_own_default_stream() -> None:
    use_device(0)
    memory = Memory(8)
    Stream(handle=None).fill(memory, 1)

    def of_device(_: int) -> int:
        Stream(handle=None).synchronize()
        return int(Stream(handle=None).is_done())

    assert on_threads(4, of_device) == [1] * 4
    assert Stream(handle=None).get(memory) == bytes([1]) * 8


def a_captured_stream_says_so_and_takes_no_work() -> None:
    use_device(0)
    for stream in (Stream(), Stream(handle=None)):
        status = c_int(-1)
        call("cuStreamIsCapturing", stream.handle, byref(status))
        assert status.value == 0
        memory = Memory(8)
        cuda.standin_capture_stream(stream.handle, 1)
        call("cuStreamIsCapturing", stream.handle, byref(status))
        assert status.value == 1
        code = code_of("cuMemsetD8Async", memory.address, 0, 8, stream.handle)
        assert code == CAPTURE_UNSUPPORTED
        assert code_of("cuEventRecord", Event().handle, stream.handle) == CAPTURE_UNSUPPORTED
        cuda.standin_capture_stream(stream.handle, 0)


def while_a_stream_is_captured_only_threads_that_say_so_ask_events_and_take_memory() -> None:
    use_device(0)
    captured, event, address = Stream(), Event(), c_uint64()

    def outcomes() -> list[int]:
        taken = code_of("cuMemAlloc_v2", byref(address), c_size_t(8))
        return [code_of("cuEventQuery", event.handle), taken]

    cuda.standin_capture_stream(captured.handle, 1)
    for mode, before, expected in ((1, 0, 0), (2, 1, 0), (0, 2, CAPTURE_UNSUPPORTED)):
        exchanged = c_int(mode)
        call("cuThreadExchangeStreamCaptureMode", byref(exchanged))
        assert exchanged.value == before
        assert outcomes() == [expected] * 2
    cuda.standin_capture_stream(captured.handle, 0)
    assert outcomes() == [0, 0]


def a_failure_can_be_ordered_once() -> None:
    use_device(0)
    stream = Stream()
    cuda.standin_fail_next(b"cuEventRecord", 719)
    cuda.standin_fail_next(b"cuMemAlloc_v2", 2)
    event = Event()
    assert code_of("cuEventRecord", event.handle, stream.handle) == 719
    assert code_of("cuEventRecord", event.handle, stream.handle) == 0
    assert code_of("cuMemAlloc_v2", byref(c_float()), 8) == 2


def waits_of_the_host_are_counted() -> None:
    use_device(0)
    stream, memory = Stream(), Memory(8)
    stream.fill(memory, 1)
    stream.wait_for(stream)
    before = cuda.standin_host_waits()
    stream.is_done()
    assert cuda.standin_host_waits() == before
    stream.synchronize()
    assert cuda.standin_host_waits() == before + 1


def a_forked_child_is_refused() -> None:
    import os

    use_device(0)
    child = os.fork()
    if child == 0:
        os._exit(code_of("cuCtxGetDevice", byref(c_int())))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
