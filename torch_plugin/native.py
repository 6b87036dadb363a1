"""Loads the native library, or explains why it cannot be used with this torch."""

from __future__ import annotations

import atexit
import functools
from types import ModuleType
from typing import TYPE_CHECKING

__all__ = ["built_for", "library", "load", "minor_of"]

if TYPE_CHECKING:
    #: The native library, loaded when it is first used.
    from gflow import _C as library
else:

    def __getattr__(name: str) -> ModuleType:
        if name != "library":
            raise AttributeError(f"module 'gflow.native' has no attribute {name!r}")
        return load()


@functools.cache
def load() -> ModuleType:
    """Return ``gflow._C``, or raise ImportError with what is wrong and what to do."""
    import torch

    built = built_for()
    if minor_of(torch.__version__) != minor_of(built):
        raise ImportError(
            f"this gflow was built for torch {minor_of(built)}.*, but torch {torch.__version__} "
            f"is installed. c10d has no stable binary interface, so each minor version of torch "
            f"needs its own build: install torch=={minor_of(built)}.*, or rebuild gflow in its "
            f"source tree with `pip install --no-build-isolation --force-reinstall --no-deps .`"
        )
    try:
        from gflow import _C
    except ImportError as error:
        raise ImportError(
            f"gflow's native library could not be loaded with torch {torch.__version__} (it was "
            f"built for {built}): {error}. Reinstall gflow in this environment."
        ) from error
    # The engine's threads must not outlive the interpreter.
    atexit.register(_C.close_all_groups)
    return _C


def built_for() -> str:
    """The version of torch that the native library was compiled for."""
    try:
        from gflow._built_for import TORCH_VERSION
    except ImportError as error:
        raise ImportError(
            "gflow is not built: its native library is missing. In the source tree run "
            "`pip install --no-build-isolation .`, or `make` anything."
        ) from error
    return str(TORCH_VERSION)


def minor_of(version: str) -> str:
    """The part of a torch version that has to match.

    Example:
        >>> minor_of("2.15.1+cpu")
        '2.15'
    """
    return ".".join(version.split(".")[:2])
