"""DDP's built-in communication hooks, in a form in which gflow recognises them as hooks.

Whoever registers a hook gets exactly what it asks for. gflow sees that a call comes from a hook by
the Python function that makes it, but the hooks that are built into torch are C++: their buckets
would look like those of a model without any hook, and be compressed. Models of a gflow group get
torch's own Python versions of these hooks instead, which compute the same to the bit.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from gflow.backend import is_served_by_gflow

_REGISTER = "_register_builtin_comm_hook"
_PYTHON_VERSIONS: dict[str, Callable[..., Any]] = {
    "ALLREDUCE": default_hooks.allreduce_hook,
    "FP16_COMPRESS": default_hooks.fp16_compress_hook,
}


def recognise_builtin_hooks() -> None:
    """Have DDP register built-in hooks in their Python versions; calling it again does nothing.

    Only models of gflow's groups are concerned.
    """
    register = getattr(dist, _REGISTER)
    if hasattr(register, "__wrapped__"):
        return

    @functools.wraps(register)
    def register_recognisably(reducer: Any, comm_hook_type: Any) -> None:
        model = _model_of(reducer)
        hook = _PYTHON_VERSIONS.get(comm_hook_type.name)
        if model is None or hook is None or not is_served_by_gflow(model.process_group):
            register(reducer, comm_hook_type)
            return
        dist._register_comm_hook(reducer, model.process_group, hook)
        # Only if torch has accepted it.
        model._comm_hooks.append((hook, model.process_group))

    setattr(dist, _REGISTER, register_recognisably)


def _model_of(reducer: Any) -> DistributedDataParallel | None:
    """The DDP model that has this Reducer."""
    # The same search as for a group's models: DDP keeps no list, and some objects warn when an
    # attribute is read.
    found = (one for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel))
    return next((one for one in found if getattr(one, "reducer", None) is reducer), None)
