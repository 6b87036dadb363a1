"""What gflow does when a model is wrapped in DDP: it looks at its element types, and tells the
engine where its parameters are if steps may leave some of them unused.

Gradients of some types are never compressed. A model that has no others, on a group whose user has
chosen a method that compresses, is refused; if only some are left out, a warning names them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gflow import unused
from gflow.backend import backend_of, is_served_by_gflow
from gflow.buckets import engine_buckets, parameters_of
from gflow.logs import GroupLogger

_MAKE_BUCKETS = "_ddp_init_helper"

#: The element types that methods with loss take.
COMPRESSIBLE = (torch.float32, torch.float16, torch.bfloat16)
#: The methods that fit every type, because they leave what they cannot compress as it is.
FIT_ALL = ("auto", "exact", "fp32")

#: The method of each group whose user has chosen one with loss, by the group's name.
_chosen: dict[str, str] = {}


def expect_models(group: str, method: str, *, is_off: bool) -> None:
    """Look at every DDP model that is made from now on for this new group.

    Args:
        group: its name.
        method: of the group.
        is_off: whether nothing is compressed, whatever the method.
    """
    _chosen.pop(group, None)
    if method not in FIT_ALL and not is_off:
        _chosen[group] = method
    make_buckets = getattr(DistributedDataParallel, _MAKE_BUCKETS)
    if hasattr(make_buckets, "__wrapped__"):
        return

    @functools.wraps(make_buckets)
    def make_known_buckets(model: DistributedDataParallel, *args: Any, **options: Any) -> None:
        group = model.process_group
        if group is None or not is_served_by_gflow(group):
            make_buckets(model, *args, **options)
            return
        _check_types(model, group)
        backend = backend_of(group)
        before = {bucket.number for bucket in engine_buckets(backend)}
        make_buckets(model, *args, **options)
        if model.find_unused_parameters:
            made = [one.number for one in engine_buckets(backend) if one.number not in before]
            unused.tell_layout(model, backend, made)

    setattr(DistributedDataParallel, _MAKE_BUCKETS, make_known_buckets)


def _check_types(model: DistributedDataParallel, group: dist.ProcessGroup) -> None:
    method = _chosen.get(group.group_name)
    parameters = parameters_of(model)
    others = {name: p.dtype for name, p in parameters.items() if p.dtype not in COMPRESSIBLE}
    if not method or not others:
        return
    found = ", ".join(sorted({_name_of(dtype) for dtype in others.values()}))
    takes = ", ".join(map(_name_of, COMPRESSIBLE))
    if len(others) == len(parameters):
        fit = " or ".join(f"method={one!r}" for one in FIT_ALL)
        raise ValueError(
            f"gflow: method={method!r} was chosen for this process group, but it cannot compress "
            f"this model: all of its parameters are {found}, and {method!r} takes {takes}. Use one "
            f"of these types, or {fit}: these exchange gradients of other types exactly."
        )
    if group.rank() == 0:
        first = list(others)[:5]
        more = f" and {len(others) - len(first)} more" if len(others) > len(first) else ""
        GroupLogger.of_group(group).warning(
            "method=%r takes %s only: the gradients of %s%s (%s) are exchanged exactly",
            method,
            takes,
            ", ".join(first),
            more,
            found,
        )


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
