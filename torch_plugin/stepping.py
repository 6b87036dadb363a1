"""Tells the engine which kind of optimizer steps by the gradients of a group.

A quantiser with few levels sends gradients best if it knows what becomes of them: Adam and its kin
divide every element by its usual size, so small elements matter as much as large ones; SGD steps in
proportion. torch calls a hook before every step of every optimizer, which shows who steps. The
ranks agree on it with every bucket. As long as they do not know, nothing below five levels is used,
and levels are chosen as for SGD.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gflow import native
from gflow.backend import backend_of, is_served_by_gflow
from gflow.buckets import models_of, parameters_of
from gflow.logs import GroupLogger

#: What the option ``optimizer`` calls the kinds, and what the engine calls them.
NAMES = {"adam": "normalized", "sgd": "proportional"}

#: Optimizers of torch that divide every element by its usual size, or use its sign alone.
_NORMALIZED = (
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SparseAdam",
)
_PROPORTIONAL = ("ASGD", "LBFGS", "SGD")
#: What optimizers that divide keep for every parameter, by the names that are usual for it.
_SIZES = {"exp_avg_sq", "exp_inf", "max_exp_avg_sq", "square_avg", "sum_of_squares", "v"}

#: How many parameter tensors each optimizer had when it was looked at.
_seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
#: Those that were not known at their first step, when they had kept nothing yet.
_unknown_at_first: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
#: For each group that follows its optimizers, by name: the kinds of those that were seen.
_groups: dict[str, weakref.WeakKeyDictionary[torch.optim.Optimizer, str]] = {}
#: For each such group that has loaded a state: the kinds that were seen before.
_expected: dict[str, list[str]] = {}
_is_watching = False


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """``normalized`` or ``proportional``, or an empty string for an optimizer that is not known.

    Example:
        >>> from gflow.stepping import kind_of
        >>> kind_of(torch.optim.AdamW(model.parameters()))
        'normalized'
    """
    # An optimizer that inherits from one of torch's steps like it.
    for ancestor in type(optimizer).__mro__:
        if ancestor.__module__.split(".")[0] == "torch":
            if ancestor.__name__ in _NORMALIZED:
                return "normalized"
            if ancestor.__name__ in _PROPORTIONAL:
                return "proportional"
    kept = {name for state in optimizer.state.values() for name in state}
    return "normalized" if kept & _SIZES else ""


def follow(group: str, backend: Any, option: str) -> None:
    """Tell a new group what its option ``optimizer`` says, or else which optimizers step."""
    global _is_watching
    _groups.pop(group, None)
    _expected.pop(group, None)
    if option != "auto":
        native.library.set_stepping(backend, NAMES[option])
        return
    _groups[group] = weakref.WeakKeyDictionary()
    # Its models may belong to optimizers that were seen for another group.
    _seen.clear()
    if not _is_watching:
        register_optimizer_step_pre_hook(_look_at)
        _is_watching = True


def seen(group: dist.ProcessGroup) -> list[str]:
    """The kinds of optimizers that were seen to step for a group, for its saved state."""
    name = dist.distributed_c10d._world.pg_names[group]
    kinds = set(_groups[name].values()) if name in _groups else set()
    return sorted(kinds) or _expected.get(name, [])


def expect(group: dist.ProcessGroup, kinds: list[str]) -> None:
    """Go on with the kinds of a saved state until an optimizer is seen: gradients come first."""
    name = dist.distributed_c10d._world.pg_names[group]
    if name in _groups and not _groups[name]:
        _expected[name] = kinds
        native.library.set_stepping(backend_of(group), _together(kinds))


def _look_at(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before a step of any optimizer: if it is new, tell the groups whose parameters it has."""
    numbers = _numbers_of(optimizer)
    if _seen.get(optimizer) == len(numbers):
        return
    kind = kind_of(optimizer)
    if not kind and not optimizer.state and optimizer not in _unknown_at_first:
        # It is looked at again before its next step: what it has kept by then may tell.
        _unknown_at_first.add(optimizer)
        return
    _seen[optimizer] = len(numbers)
    if not dist.is_initialized():
        return
    for group, name in list(dist.distributed_c10d._world.pg_names.items()):
        # The name may be that of an earlier group, which was gflow's.
        if name not in _groups or not is_served_by_gflow(group):
            continue
        others = [other for other, known in _groups[name].items() if known]
        # An optimizer that is not known may hold one that is, and step by it, as torch's ZeRO does.
        if not kind and any(numbers & _numbers_of(other) for other in others):
            continue
        if _steps_for(numbers, group):
            _groups[name][optimizer] = kind
            _tell(group, name)


def _numbers_of(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for params in optimizer.param_groups for parameter in params["params"]}


def _steps_for(numbers: set[int], group: dist.ProcessGroup) -> bool:
    models = models_of(group, None)
    return any(id(p) in numbers for model in models for p in parameters_of(model).values())


def _together(kinds: Collection[str]) -> str:
    # Of optimizers of different kinds, which may share a bucket, nothing can be said.
    return next(iter(kinds)) if len(kinds) == 1 else ""


def _tell(group: dist.ProcessGroup, name: str) -> None:
    said = _together(set(_groups[name].values()))
    try:
        native.library.set_stepping(backend_of(group), said)
    except RuntimeError as error:
        # The group has failed or was closed. Its next collective says so, not the optimizer.
        GroupLogger.of_group(group).debug("not told of the optimizer: %s", error)
    else:
        GroupLogger.of_group(group).info("the optimizer steps: %s", said or "unknown or mixed")
