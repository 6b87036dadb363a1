"""Registers the stand-in as a torch device in this process, and enables gflow for it."""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib.machinery
import importlib.util
import os
import types
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore

from gflow import accelerator

NAME = "standin"


class Standin:
    """The stand-in's hooks for tests."""

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)
        self._library.standin_last_race.restype = ctypes.c_char_p
        self._library.standin_last_fault.restype = ctypes.c_char_p
        self._library.standin_host_waits.restype = ctypes.c_ulonglong

    def races(self) -> str:
        """Describes the last race; empty if there was none."""
        text = self._library.standin_last_race().decode()
        return text if self._library.standin_races() else ""

    def faults(self) -> str:
        """Describes the last invalid access; empty if there was none."""
        text = self._library.standin_last_fault().decode()
        return text if self._library.standin_faults() else ""

    def clear(self) -> None:
        """Forgets all races and faults."""
        self._library.standin_clear()

    def fail_next(self, function: str, code: int) -> None:
        """The next call of this function of the driver does nothing and returns `code`."""
        self._library.standin_fail_next(function.encode(), code)

    def delay(self, microseconds: int) -> None:
        """Streams sleep for a random time of up to this long before each piece of work."""
        self._library.standin_delay_streams(microseconds)

    def freeze(self, stream: torch.Stream, frozen: bool = True) -> None:
        """The stream makes no progress, as if its work never ended."""
        self._library.standin_freeze_stream(ctypes.c_void_p(stream.native_handle), int(frozen))

    def capture(self, stream: torch.Stream, capturing: bool = True) -> None:
        """The stream reports that it is being captured into a graph."""
        self._library.standin_capture_stream(ctypes.c_void_p(stream.native_handle), int(capturing))

    def host_waits(self) -> int:
        """How often a host thread has waited for a device."""
        return self._library.standin_host_waits()


@functools.cache
def load(extension: str, cuda: str, nccl: str) -> Standin:
    """Load the device, once per process. The arguments are the files that `build` made."""
    # Under its real name, so that any later lookup of a driver finds this one. Torch has already
    # loaded an NCCL, so the engine is told where this one is.
    ctypes.CDLL(cuda, mode=ctypes.RTLD_GLOBAL)
    os.environ["GFLOW_NCCL"] = nccl
    native = _import(Path(extension))
    atexit.register(native.stop_kernels)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module(native))

    def make_inner(place: accelerator.Place) -> Any:
        store = PrefixStore(NAME, place.store)
        return native.make_collectives(store, place.rank, place.size, nccl)

    accelerator.KNOWN.insert(0, accelerator.Accelerator(NAME, lambda: True, make_inner, True))
    return Standin(cuda)


def _import(file: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(file.stem, str(file))
    spec = importlib.util.spec_from_file_location(file.stem, file, loader=loader)
    if spec is None:
        raise ImportError(f"{file} is no extension")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _device_module(native: Any) -> types.ModuleType:
    """`torch.standin`: the functions that torch and DDP expect in a device's module."""
    module = types.ModuleType(f"torch.{NAME}")
    module.is_available = lambda: native.device_count() > 0
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = native.device_count
    module.current_device = native.current_device
    module.set_device = lambda device: native.set_device(torch.device(device).index)
    module.current_stream = torch.accelerator.current_stream
    module.synchronize = torch.accelerator.synchronize
    module.Stream = functools.partial(torch.Stream, device=NAME)
    module.Event = functools.partial(torch.Event, device=NAME)
    module.manual_seed_all = lambda seed: None
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    return module
