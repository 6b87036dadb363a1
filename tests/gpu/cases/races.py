"""The happens-before check: what it reports, and what it must not mistake for a race."""

import ctypes
import threading
import time
from collections.abc import Callable

from tests.gpu.calls import Event, Memory, Stream, call, cuda, races, use_device


def two_writes_without_an_event_are_a_race() -> None:
    use_device(0)
    first, second, memory = Stream(), Stream(), Memory(100)
    first.fill(memory, 1)
    # The first fill is done by now, but nothing guarantees that, so it is still a race.
    time.sleep(0.02)
    second.fill(memory, 2)
    assert races() == 1
    assert b"fill on stream" in cuda.standin_last_race()


def a_write_and_a_read_without_an_event_are_a_race() -> None:
    use_device(0)
    for is_write_first in (True, False):
        cuda.standin_clear()
        first, second, memory, other = Stream(), Stream(), Memory(100), Memory(100)
        if is_write_first:
            first.fill(memory, 1)
            second.copy(other, memory)
        else:
            first.copy(other, memory)
            second.fill(memory, 1)
        assert races() == 1


def two_reads_are_no_race() -> None:
    use_device(0)
    first, second, memory = Stream(), Stream(), Memory(100)
    first.copy(Memory(100), memory)
    second.copy(Memory(100), memory)
    assert races() == 0


def different_bytes_are_no_race_and_one_common_byte_is() -> None:
    use_device(0)
    first, second, memory = Stream(), Stream(), Memory(100)
    first.fill(memory, 1, 0, 50)
    second.fill(memory, 2, 50, 100)
    assert races() == 0
    first.fill(memory, 1, 0, 51)
    assert races() == 1
    assert b"bytes 50 to 51 of 100" in cuda.standin_last_race()


def a_part_of_what_another_has_written_is_enough_for_a_race() -> None:
    use_device(0)
    first, second, memory = Stream(), Stream(), Memory(100)
    first.fill(memory, 1)
    second.fill(memory, 2, 40, 60)
    assert races() == 1
    # The parts on both sides of the overwritten range still belong to the first stream.
    first.fill(memory, 3, 0, 40)
    first.fill(memory, 3, 60, 100)
    assert races() == 1
    Stream().fill(memory, 4, 20, 30)
    assert races() == 2


def one_stream_does_not_race_with_itself() -> None:
    use_device(0)
    stream, memory = Stream(), Memory(100)
    for value in range(10):
        stream.fill(memory, value)
    assert races() == 0


def an_event_between_them_orders_them() -> None:
    use_device(0)
    first, second, third, memory = Stream(), Stream(), Stream(), Memory(100)
    first.fill(memory, 1)
    second.wait_for(first)
    second.fill(memory, 2)
    # Ordering is transitive across streams.
    third.wait_for(second)
    third.fill(memory, 3)
    first.wait_for(third)
    first.fill(memory, 4)
    assert races() == 0


def an_event_of_before_is_not_enough() -> None:
    use_device(0)
    first, second, memory = Stream(), Stream(), Memory(100)
    event = first.record()
    first.fill(memory, 1)
    second.wait(event)
    second.fill(memory, 2)
    assert races() == 1


def an_event_that_was_never_recorded_is_not_enough() -> None:
    use_device(0)
    first, second, memory = Stream(), Stream(), Memory(100)
    first.fill(memory, 1)
    second.wait(Event())
    second.fill(memory, 2)
    assert races() == 1


def a_wait_on_the_wrong_stream_is_not_enough() -> None:
    use_device(0)
    first, second, third, memory = Stream(), Stream(), Stream(), Memory(100)
    first.fill(memory, 1)
    third.wait_for(first)
    second.fill(memory, 2)
    assert races() == 1


def the_default_stream_is_a_stream_like_others() -> None:
    use_device(0)
    default, other, memory = Stream(handle=None), Stream(), Memory(100)
    default.fill(memory, 1)
    other.fill(memory, 2)
    assert races() == 1


def what_the_host_waited_for_orders_all_that_comes_later() -> None:
    use_device(0)
    for wait in (Stream.synchronize, wait_with_an_event, wait_with_a_function):
        first, second, memory = Stream(), Stream(), Memory(100)
        first.fill(memory, 1)
        thread = threading.Thread(target=on_a_thread, args=(wait, first))
        thread.start()
        thread.join()
        second.fill(memory, 2)
        assert races() == 0, cuda.standin_last_race()


def on_a_thread(function: Callable[[Stream], None], stream: Stream) -> None:
    use_device(0)
    function(stream)


def wait_with_an_event(stream: Stream) -> None:
    stream.record().synchronize()


def wait_with_a_function(stream: Stream) -> None:
    done = threading.Event()
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: done.set())
    call("cuLaunchHostFunc", stream.handle, function, None)
    assert done.wait(10)


def what_one_thread_was_told_does_not_count_for_another() -> None:
    use_device(0)
    first, second, memory = Stream(), Stream(), Memory(100)
    first.fill(memory, 1)
    event = first.record()

    def poll() -> None:
        use_device(0)
        while not event.is_done():
            time.sleep(0.001)
        # On the thread that polled, the result counts.
        Stream().fill(memory, 2, 0, 50)

    thread = threading.Thread(target=poll)
    thread.start()
    thread.join()
    assert races() == 0
    second.fill(memory, 2, 50, 100)
    assert races() == 1


def freed_memory_leaves_no_history() -> None:
    use_device(0)
    first, second = Stream(), Stream()
    memory = Memory(100)
    first.fill(memory, 1)
    memory.free()
    second.fill(Memory(100), 2)
    assert races() == 0


# An exchange as the engine runs it: the caller writes a gradient, the engine's stream works on it
# and on a private buffer, and the caller continues with the result. Leaving out either wait is a
# race; with both there is none, however slow the streams are.
WAITS = ("for the gradient", "for the end")


def exchange(missing: str | None) -> None:
    use_device(0)
    cuda.standin_delay_streams(300)
    caller, engine, gradient, wire = Stream(), Stream(), Memory(256), Memory(256)
    for step in range(10):
        caller.fill(gradient, step)
        if missing != WAITS[0]:
            engine.wait_for(caller)
        engine.copy(wire, gradient)
        engine.fill(gradient, 0)
        engine.copy(gradient, wire)
        if missing != WAITS[1]:
            caller.wait_for(engine)
        caller.copy(wire, gradient)
        caller.copy(gradient, wire)
        if missing is None:
            assert caller.get(gradient) == bytes([step]) * 256


def an_exchange_with_all_its_waits_has_no_race() -> None:
    exchange(None)
    assert races() == 0, cuda.standin_last_race()


def an_exchange_that_does_not_wait_for_the_gradient_is_caught() -> None:
    exchange(WAITS[0])
    assert races() > 0


def an_exchange_whose_end_is_not_waited_for_is_caught() -> None:
    exchange(WAITS[1])
    assert races() > 0


def delays_make_a_missing_wait_show() -> None:
    use_device(0)
    cuda.standin_delay_streams(2000)
    caller, engine, memory, copied = Stream(), Stream(), Memory(1), Memory(1)
    wrong = 0
    for step in range(40):
        caller.fill(memory, step)
        engine.copy(copied, memory)
        wrong += engine.get(copied) != bytes([step])
        caller.synchronize()
    assert wrong > 0
