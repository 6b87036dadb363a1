"""Kernels: images must be valid, launches must be possible, and the work runs on the stream."""

import struct
from ctypes import byref, c_uint, c_uint64, c_void_p
from functools import partial

from tests.gpu.calls import (
    Function,
    Memory,
    Stream,
    call,
    code_of,
    code_raised_by,
    compiled,
    cuda,
    faults,
    races,
    use_device,
)

INVALID_VALUE = 1
INVALID_IMAGE = 200
OTHER_ARCHITECTURE = 209
INVALID_HANDLE = 400
NOT_FOUND = 500
ILLEGAL_ADDRESS = 700

# Dummies: only their names and arguments matter, since the host runs the real source.
RESCALE = """
extern "C" __global__ void gflow_rescale(float* values, unsigned long long count, float factor) {
  values[threadIdx.x] *= factor;
}
"""
SELECT = """
extern "C" __global__ void gflow_select(const float* sums, unsigned chunks, unsigned count,
                                        unsigned* selected, unsigned* slot_of_chunk) {
  selected[0] = sums[0] > 0;
}
"""


def floats(*numbers: float) -> bytes:
    return struct.pack(f"{len(numbers)}f", *numbers)


def rescale(architecture: str = "sm_90") -> Function:
    return Function(compiled(RESCALE, architecture), "gflow_rescale")


def a_kernel_runs_on_its_stream() -> None:
    use_device(0)
    function, stream, memory = rescale(), Stream(), Memory(12)
    stream.put(memory, floats(1, 2, 3))
    stream.freeze()
    function.launch(stream, [memory, c_uint64(3), 2.0])
    assert not stream.is_done()
    stream.freeze(False)
    assert stream.get(memory) == floats(2, 4, 6)


def kernels_run_from_their_source() -> None:
    use_device(0)
    function = Function(compiled(SELECT), "gflow_select")
    stream, sums, selected, slots = Stream(), Memory(20), Memory(8), Memory(20)
    stream.put(sums, floats(1, 7, 3, 9, 5))
    function.launch(stream, [sums, c_uint(5), c_uint(2), selected, slots], block=1024)
    assert struct.unpack("2I", stream.get(selected)) == (1, 3)
    none = 0xFFFFFFFF
    assert struct.unpack("5I", stream.get(slots)) == (none, 0, none, 1, none)


def kernels_of_two_streams_race() -> None:
    use_device(0)
    function, first, second, memory = rescale(), Stream(), Stream(), Memory(12)
    function.launch(first, [memory, c_uint64(3), 2.0])
    second.wait_for(first)
    function.launch(second, [memory, c_uint64(3), 2.0])
    assert races() == 0
    function.launch(first, [memory, c_uint64(3), 2.0])
    assert races() == 1
    assert b"gflow_rescale" in cuda.standin_last_race()


def a_kernel_that_reaches_too_far_is_not_run() -> None:
    use_device(0)
    function, stream, memory = rescale(), Stream(), Memory(12)
    function.launch(stream, [memory, c_uint64(4), 2.0])
    assert code_of("cuStreamSynchronize", stream.handle) == ILLEGAL_ADDRESS
    assert b"gflow_rescale" in cuda.standin_last_fault()
    cuda.standin_clear()
    function.launch(stream, [None, c_uint64(4), 2.0])
    assert code_of("cuStreamSynchronize", stream.handle) == ILLEGAL_ADDRESS


def text_for_the_driver_is_taken_too() -> None:
    use_device(0)
    function, stream, memory = rescale("compute_90"), Stream(), Memory(8)
    stream.put(memory, floats(1, 2))
    function.launch(stream, [memory, c_uint64(2), 3.0])
    assert stream.get(memory) == floats(3, 6)


def an_image_of_another_architecture_is_refused() -> None:
    use_device(0)
    for architecture in ("sm_80", "sm_100", "sm_120"):
        image = compiled(RESCALE, architecture)
        assert code_of("cuModuleLoadData", byref(c_void_p()), image) == OTHER_ARCHITECTURE


def what_is_no_image_is_refused() -> None:
    use_device(0)
    for image in (b"not an image", b"\x7fELF" + bytes(200)):
        assert code_of("cuModuleLoadData", byref(c_void_p()), image) == INVALID_IMAGE


def a_kernel_must_be_in_the_image_and_among_the_known_ones() -> None:
    use_device(0)
    module = c_void_p()
    other = RESCALE.replace("gflow_rescale", "unknown")
    call("cuModuleLoadData", byref(module), compiled(RESCALE + other))
    found = byref(c_void_p())
    assert code_of("cuModuleGetFunction", found, module, b"gflow_rescale") == 0
    assert code_of("cuModuleGetFunction", found, module, b"gflow_select") == NOT_FOUND
    assert faults() == 0
    assert code_of("cuModuleGetFunction", found, module, b"unknown") == NOT_FOUND
    assert faults() == 1


def a_kernel_with_other_arguments_is_refused() -> None:
    use_device(0)
    changed = RESCALE.replace("float factor", "double factor")
    image = compiled(changed)
    assert code_raised_by(lambda: Function(image, "gflow_rescale")) == NOT_FOUND
    assert b"other arguments" in cuda.standin_last_fault()


def an_impossible_launch_is_refused() -> None:
    use_device(0)
    bounded = RESCALE.replace("void gflow", "void __launch_bounds__(256) gflow")
    function, stream, memory = Function(compiled(bounded), "gflow_rescale"), Stream(), Memory(8)
    arguments = [memory, c_uint64(2), 2.0]
    function.launch(stream, arguments, block=256)
    for shape in ({"block": 257}, {"block": 128}, {"block": 0}, {"grid": 0}, {"grid": 1 << 31}):
        launch = partial(function.launch, stream, arguments, **shape)
        assert code_raised_by(launch) == INVALID_VALUE, shape


def a_module_belongs_to_its_device() -> None:
    use_device(0)
    function = rescale()
    use_device(1)
    stream, memory = Stream(), Memory(8)
    launch = partial(function.launch, stream, [memory, c_uint64(2), 2.0])
    assert code_raised_by(launch) == INVALID_HANDLE
