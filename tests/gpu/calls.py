"""CUDA and NCCL calls from Python, on the stand-in.

Loads the stand-in, so it belongs in a process of its own: whatever looks for libcuda.so.1 later in
the same process finds the stand-in too.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Sequence
from ctypes import byref, c_char, c_char_p, c_float, c_int, c_size_t, c_uint64, c_void_p
from pathlib import Path

from tests.gpu.standin.build import build

NOT_READY = 600
NON_BLOCKING = 1
TYPES = {"i32": 2, "i64": 4, "f16": 6, "f32": 7, "f64": 8, "bf16": 9, "u8": 1}
REDUCTIONS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}
REMOTE_ERROR = 6
IN_PROGRESS = 7

paths = build()
cuda = ctypes.CDLL(str(paths.cuda))
nccl = ctypes.CDLL(str(paths.nccl))
cuda.standin_last_race.restype = c_char_p
cuda.standin_last_fault.restype = c_char_p
cuda.standin_alias.restype = c_void_p
cuda.standin_alias.argtypes = [c_uint64]
cuda.standin_freeze_stream.argtypes = [c_void_p, c_int]
cuda.standin_capture_stream.argtypes = [c_void_p, c_int]
cuda.standin_host_waits.restype = c_uint64
cuda.standin_queued.restype = c_uint64
nccl.ncclGetErrorString.restype = c_char_p
nccl.ncclGetLastError.restype = c_char_p
nccl.ncclGetLastError.argtypes = [c_void_p]


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", c_char * 128),)


class Range(ctypes.Structure):
    _fields_ = (("address", c_uint64), ("bytes", c_size_t), ("writes", c_int))


nccl.ncclCommInitRank.argtypes = [c_void_p, c_int, UniqueId, c_int]
nccl.ncclCommInitRankConfig.argtypes = [c_void_p, c_int, UniqueId, c_int, c_void_p]


class CallFailed(Exception):
    """A call that did not return success."""

    def __init__(self, name: str, code: int):
        super().__init__(f"{name} returned {code}")
        self.code = code


def call(name: str, *arguments: object) -> None:
    """Calls a function of CUDA ("cu…") or NCCL ("nccl…"). Integers are passed as 64 bits."""
    library = cuda if name.startswith("cu") else nccl
    given = [c_uint64(a & (2**64 - 1)) if isinstance(a, int) else a for a in arguments]
    code = getattr(library, name)(*given)
    if code != 0:
        raise CallFailed(name, code)


def code_of(name: str, *arguments: object) -> int:
    """The code that a call returns."""
    return code_raised_by(lambda: call(name, *arguments))


def code_raised_by(action: Callable[[], object]) -> int:
    """The code of the call that failed in `action`; 0 if none did."""
    try:
        action()
    except CallFailed as failure:
        return failure.code
    return 0


def use_device(index: int) -> None:
    call("cuInit", 0)
    context = c_void_p()
    call("cuDevicePrimaryCtxRetain", byref(context), index)
    call("cuCtxSetCurrent", context)


def races() -> int:
    return cuda.standin_races()


def faults() -> int:
    return cuda.standin_faults()


class Memory:
    """An allocation of device memory."""

    def __init__(self, size: int):
        address = c_uint64()
        call("cuMemAlloc_v2", byref(address), size)
        self.address = address.value
        self.size = size

    def free(self) -> None:
        call("cuMemFree_v2", self.address)


class Event:
    """An event, not recorded yet."""

    def __init__(self, flags: int = 2):
        self.handle = c_void_p()
        call("cuEventCreate", byref(self.handle), flags)

    def is_done(self) -> bool:
        code = code_of("cuEventQuery", self.handle)
        assert code in (0, NOT_READY), code
        return code == 0

    def synchronize(self) -> None:
        call("cuEventSynchronize", self.handle)


class Stream:
    """A stream and its operations. `Stream(handle=None)` is the default stream."""

    def __init__(self, **given: None):
        self.handle = c_void_p()
        self._alive: list[object] = []
        if not given:
            call("cuStreamCreateWithPriority", byref(self.handle), NON_BLOCKING, 0)

    def fill(self, memory: Memory, value: int, start: int = 0, end: int | None = None) -> None:
        size = (memory.size if end is None else end) - start
        call("cuMemsetD8Async", memory.address + start, value, size, self.handle)

    def copy(self, to: Memory, source: Memory, size: int | None = None) -> None:
        size = to.size if size is None else size
        call("cuMemcpyDtoDAsync_v2", to.address, source.address, size, self.handle)

    def put(self, memory: Memory, data: bytes) -> None:
        kept = ctypes.create_string_buffer(data, len(data))
        self._alive.append(kept)
        call("cuMemcpyHtoDAsync_v2", memory.address, kept, len(data), self.handle)

    def get(self, memory: Memory, start: int = 0, end: int | None = None) -> bytes:
        """The contents of the memory once all queued work is done."""
        size = (memory.size if end is None else end) - start
        found = ctypes.create_string_buffer(size)
        call("cuMemcpyDtoHAsync_v2", found, memory.address + start, size, self.handle)
        self.synchronize()
        return found.raw

    def record(self) -> Event:
        event = Event()
        self.record_again(event)
        return event

    def record_again(self, event: Event) -> None:
        call("cuEventRecord", event.handle, self.handle)

    def wait(self, event: Event) -> None:
        call("cuStreamWaitEvent", self.handle, event.handle, 0)

    def wait_for(self, other: Stream) -> None:
        self.wait(other.record())

    def run(self, function: Callable[[], object], ranges: Iterable[Range] = ()) -> None:
        kept = ctypes.CFUNCTYPE(None, c_void_p)(lambda _: function() and None)
        list_of = list(ranges)
        array = (Range * len(list_of))(*list_of)
        self._alive += [kept, array]
        code = cuda.standin_run(self.handle, b"a function", kept, None, array, len(list_of))
        assert code == 0, code

    def is_done(self) -> bool:
        code = code_of("cuStreamQuery", self.handle)
        assert code in (0, NOT_READY), code
        return code == 0

    def synchronize(self) -> None:
        call("cuStreamSynchronize", self.handle)

    def freeze(self, frozen: bool = True) -> None:
        cuda.standin_freeze_stream(self.handle, int(frozen))


class Gate:
    """Holds a stream until it is opened."""

    def __init__(self, stream: Stream):
        self._open = threading.Event()
        stream.run(lambda: self._open.wait(20))

    def open(self) -> None:
        self._open.set()


def unique_id() -> UniqueId:
    made = UniqueId()
    call("ncclGetUniqueId", byref(made))
    return made


class Communicator:
    """One rank of a communicator, on the current device."""

    def __init__(self, name: UniqueId, rank: int, ranks: int):
        self.handle = c_void_p()
        code = nccl.ncclCommInitRank(byref(self.handle), ranks, name, rank)
        if code != 0:
            raise CallFailed("ncclCommInitRank", code)
        self.rank, self.ranks = rank, ranks

    def async_error(self) -> int:
        error = c_int(-1)
        call("ncclCommGetAsyncError", self.handle, byref(error))
        return error.value

    def all_reduce(
        self, to: Memory, count: int, kind: str, reduction: str, stream: Stream, *, source=None
    ) -> None:
        source = source or to
        given = (TYPES[kind], REDUCTIONS[reduction], self.handle, stream.handle)
        call("ncclAllReduce", source.address, to.address, count, *given)

    def destroy(self) -> None:
        call("ncclCommDestroy", self.handle)

    def abort(self) -> None:
        call("ncclCommAbort", self.handle)


def on_threads(count: int, function: Callable[[int], object]) -> list:
    """Calls `function` on `count` threads, each with the device of its index current."""
    results: list = [None] * count
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            use_device(index)
            results[index] = function(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a thread does not end"
    return results


def compiled(source: str, architecture: str = "sm_90") -> bytes:
    """The CUBIN of this source (PTX for "compute_…"), by the NVRTC that comes with torch."""
    root = next(d for d in map(Path, __import__("nvidia").__path__) if list(d.glob("cu*/lib")))
    nvrtc = ctypes.CDLL(str(next(root.glob("cu*/lib/libnvrtc.so.*"))))
    program, size = c_void_p(), c_size_t()
    text = source.encode()
    assert nvrtc.nvrtcCreateProgram(byref(program), text, b"test.cu", 0, None, None) == 0
    options = (c_char_p * 1)(f"--gpu-architecture={architecture}".encode())
    assert nvrtc.nvrtcCompileProgram(program, 1, options) == 0
    what = "CUBIN" if architecture.startswith("sm_") else "PTX"
    assert getattr(nvrtc, f"nvrtcGet{what}Size")(program, byref(size)) == 0
    image = ctypes.create_string_buffer(size.value)
    assert getattr(nvrtc, f"nvrtcGet{what}")(program, image) == 0
    return image.raw


class Function:
    """A kernel of a module."""

    def __init__(self, image: bytes, name: str):
        module, self.handle = c_void_p(), c_void_p()
        call("cuModuleLoadData", byref(module), image)
        call("cuModuleGetFunction", byref(self.handle), module, name.encode())

    def launch(
        self, stream: Stream, arguments: Sequence[object], grid: int = 1, block: int = 256
    ) -> None:
        """Arguments are Memory (or None), float, or a ctypes number."""
        values = [_argument(argument) for argument in arguments]
        pointers = (c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        shape = (grid, 1, 1, block, 1, 1, 0)
        call("cuLaunchKernel", self.handle, *shape, stream.handle, pointers, None)


def _argument(argument: object) -> object:
    match argument:
        case Memory():
            return c_uint64(argument.address)
        case None:
            return c_uint64(0)
        case float():
            return c_float(argument)
    return argument
