"""Loads the native library, and says clearly when it cannot be used with this torch."""

from __future__ import annotations

import atexit
import functools
from types import ModuleType


@functools.cache
def load() -> ModuleType:
    """Return ``gflow._C``, or raise ImportError with what is wrong and what to do."""
    import torch

    built_for = _built_for()
    if _minor(torch.__version__) != _minor(built_for):
        raise ImportError(
            f"this gflow was built for torch {_minor(built_for)}.*, but torch {torch.__version__} "
            f"is installed. c10d has no stable binary interface, so each minor version of torch "
            f"needs its own build: install torch=={_minor(built_for)}.*, or rebuild gflow here "
            f"with `pip install --no-build-isolation --force-reinstall --no-deps gflow` (or `.` "
            f"in its source tree)."
        )
    try:
        from gflow import _C
    except ImportError as error:
        raise ImportError(
            f"gflow's native library could not be loaded with torch {torch.__version__} (it was "
            f"built for {built_for}): {error}. Reinstall gflow in this environment."
        ) from error
    # Threads of ours that wake up after the interpreter has gone would have nowhere to go.
    atexit.register(_C.close_all_groups)
    return _C


def _built_for() -> str:
    try:
        from gflow._built_for import TORCH_VERSION
    except ImportError as error:
        raise ImportError(
            "gflow is not built: its native library is missing. In the source tree run "
            "`pip install --no-build-isolation .`, or `make` anything."
        ) from error
    return str(TORCH_VERSION)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
