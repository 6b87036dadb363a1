"""gflow: a ``torch.distributed`` backend for data-parallel training on ordinary networks.

Nothing has to be imported to use it: ``torch.distributed`` finds it by its name.

Example:
    >>> import torch.distributed as dist
    >>> dist.init_process_group(backend="gflow")  # doctest: +SKIP

Older versions of torch import this module at ``import torch``. It must not raise, import torch by
itself or load the native library.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from gflow.registration import register, register_on_older_torch
from gflow.version import __version__

if TYPE_CHECKING:
    from gflow.group_metrics import BucketMetrics, Certificate, Metrics, metrics
    from gflow.momentum import take_momentum
    from gflow.options import Options
    from gflow.scaler import watch_scaler
    from gflow.state import Loaded, State, load_state_dict, state_dict

__all__ = [
    "BucketMetrics",
    "Certificate",
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
    "watch_scaler",
]

# No module has the name of something public: importing the module would hide it.
_MODULES = {
    "BucketMetrics": "group_metrics",
    "Certificate": "group_metrics",
    "Loaded": "state",
    "Metrics": "group_metrics",
    "Options": "options",
    "State": "state",
    "load_state_dict": "state",
    "metrics": "group_metrics",
    "state_dict": "state",
    "take_momentum": "momentum",
    "watch_scaler": "scaler",
}

#: Old names, and what they are called now. They will be removed in the next version.
_DEPRECATED = {"watch": "watch_scaler"}


def __getattr__(name: str) -> Any:
    """Import the parts that need torch only when they are used."""
    if name in _DEPRECATED:
        new = _DEPRECATED[name]
        warnings.warn(
            f"gflow.{name} is now gflow.{new}; the old name will be removed in the next version",
            DeprecationWarning,
            stacklevel=2,
        )
        # From now on it is found without this function: the warning comes once.
        globals()[name] = _import(new)
        return globals()[name]
    if name not in _MODULES:
        raise AttributeError(f"module 'gflow' has no attribute {name!r}")
    return _import(name)


def _import(name: str) -> Any:
    return getattr(importlib.import_module(f"gflow.{_MODULES[name]}"), name)
