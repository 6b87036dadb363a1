"""gflow: a ``torch.distributed`` backend for data-parallel training on ordinary networks.

Nothing has to be imported to use it: ``torch.distributed`` finds it by its name.

Example:
    >>> import torch.distributed as dist
    >>> dist.init_process_group(backend="gflow")  # doctest: +SKIP

This module is imported by ``import torch`` on older versions of torch. It must never load the
native library or import torch by itself, and must never raise.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gflow.registration import register, register_on_older_torch
from gflow.version import __version__

if TYPE_CHECKING:
    from gflow.metrics import Metrics, metrics
    from gflow.options import Options

__all__ = ["Metrics", "Options", "__version__", "metrics", "register", "register_on_older_torch"]

_HOMES = {"Metrics": "gflow.metrics", "Options": "gflow.options"}


def __getattr__(name: str) -> Any:
    """Import the parts that need torch only when they are used."""
    if name == "metrics":
        # The function hides the module of the same name, which is where it lives.
        return importlib.import_module("gflow.metrics").metrics
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'gflow' has no attribute {name!r}")
