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
    from gflow.counters import BucketMetrics, Metrics, metrics
    from gflow.momentum import take_momentum
    from gflow.options import Options
    from gflow.scaler import watch
    from gflow.state import Loaded, State, load_state_dict, state_dict

__all__ = [
    "BucketMetrics",
    "Loaded",
    "Metrics",
    "Options",
    "State",
    "__version__",
    "load_state_dict",
    "metrics",
    "register",
    "register_on_older_torch",
    "state_dict",
    "take_momentum",
    "watch",
]

# Modules are not named like what they hold: importing one would hide the function.
_HOMES = {
    "BucketMetrics": "counters",
    "Loaded": "state",
    "Metrics": "counters",
    "Options": "options",
    "State": "state",
    "load_state_dict": "state",
    "metrics": "counters",
    "state_dict": "state",
    "take_momentum": "momentum",
    "watch": "scaler",
}


def __getattr__(name: str) -> Any:
    """Import the parts that need torch only when they are used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'gflow' has no attribute {name!r}")
    return getattr(importlib.import_module(f"gflow.{_HOMES[name]}"), name)
