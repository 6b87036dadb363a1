"""Tells the engine which kind of optimizer steps by the gradients of each bucket.

A quantiser with few levels sends gradients best if it knows what becomes of them: Adam and its kin
divide every element by its usual size, so small elements matter as much as large ones; SGD steps in
proportion. torch calls a hook before every step of every optimizer, which shows who steps by which
parameters. A bucket is known if all of its parameters are, and step alike. The ranks agree on it
with every bucket. As long as they do not know, nothing below five levels is used for that bucket,
and levels are chosen as for SGD.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from gflow import native
from gflow.backend import backend_of, is_served_by_gflow
from gflow.buckets import buckets_in_use, models_of
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
_SIZES = {"exp_avg_sq", "exp_inf", "max_exp_avg_sq", "square_avg", "sum_of_squares"}
#: The two moments of the paper on Adam. One alone tells nothing: a velocity is called ``v``, too.
_MOMENTS = {"m", "v"}

#: A bucket, by its number, and its parameters.
Contents = tuple[int, Sequence[torch.Tensor]]

#: How many parameter tensors each optimizer had when it was looked at.
_seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
#: Those that were not known at their first step, when they had kept nothing yet.
_unknown_at_first: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
#: The kinds of those that have stepped, empty for one that is not known, whatever group their
#: parameters belong to, or none yet.
_kinds: weakref.WeakKeyDictionary[torch.optim.Optimizer, str] = weakref.WeakKeyDictionary()
#: How often optimizers were added to ``_kinds``.
_additions = 0
#: For parameters of a state that was loaded: the kind of the optimizer that was seen before.
_expected = WeakTensorKeyDictionary()
#: Each group that follows its optimizers, by name.
_following: dict[str, _Following] = {}
_is_watching = False


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """``normalized`` or ``proportional``, or an empty string for an optimizer that is not known.

    Example:
        >>> from gflow.stepping import kind_of
        >>> kind_of(torch.optim.AdamW(model.parameters()))
        'normalized'
    """
    # One that holds another steps by it, as torch's ZeRO does.
    held = [one for one in vars(optimizer).values() if isinstance(one, torch.optim.Optimizer)]
    return _own_kind_of(optimizer) or _together({_own_kind_of(one) for one in held})


def _own_kind_of(optimizer: torch.optim.Optimizer) -> str:
    # An optimizer that inherits from one of torch's steps like it.
    for ancestor in type(optimizer).__mro__:
        if ancestor.__module__.split(".")[0] == "torch":
            if ancestor.__name__ in _NORMALIZED:
                return "normalized"
            if ancestor.__name__ in _PROPORTIONAL:
                return "proportional"
    kept = {name for state in optimizer.state.values() for name in state}
    return "normalized" if kept & _SIZES or kept >= _MOMENTS else ""


def follow(group: str, backend: Any, option: str) -> None:
    """Tell a new group what its option ``optimizer`` says, or else which optimizers step."""
    global _is_watching
    _following.pop(group, None)
    if option == "auto":
        _following[group] = _Following()
    else:
        native.library.set_stepping(backend, NAMES[option], [])
    if not _is_watching:
        register_optimizer_step_pre_hook(_look_at)
        _is_watching = True


def seen(parameters: Iterable[torch.nn.Parameter]) -> list[str]:
    """The kind of optimizer that steps by each of these, for a saved state; empty if unknown."""
    by_number = _kinds_by_number()
    return [_kind_for(parameter, by_number) for parameter in parameters]


def expect(
    group: dist.ProcessGroup, kinds: dict[torch.nn.Parameter, str], contents: list[Contents]
) -> None:
    """Go on with the kinds of a saved state until an optimizer is seen: gradients come first."""
    _expected.update(kinds)
    if group.group_name in _following:
        _following[group.group_name].tell(group, contents)


def _look_at(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before a step of any optimizer: tell the groups what is new of optimizers and buckets."""
    _take_note_of(optimizer)
    if not _following or not dist.is_initialized():
        return
    for group, name in list(dist.distributed_c10d._world.pg_names.items()):
        # The name may be that of an earlier group, which was gflow's.
        if name in _following and is_served_by_gflow(group):
            _following[name].look(group)


def _take_note_of(optimizer: torch.optim.Optimizer) -> None:
    global _additions
    parameters = sum(len(params["params"]) for params in optimizer.param_groups)
    if _seen.get(optimizer) == parameters:
        return
    kind = kind_of(optimizer)
    if not kind and not optimizer.state and optimizer not in _unknown_at_first:
        # It is looked at again before its next step: what it has kept by then may tell.
        _unknown_at_first.add(optimizer)
        return
    _seen[optimizer] = parameters
    _kinds[optimizer] = kind
    _additions += 1


def _kinds_by_number() -> dict[int, set[str]]:
    """For each parameter of optimizers that have stepped, by its id: their kinds."""
    found: dict[int, set[str]] = {}
    for optimizer, kind in list(_kinds.items()):
        for params in optimizer.param_groups:
            for parameter in params["params"]:
                found.setdefault(id(parameter), set()).add(kind)
    return found


def _kind_for(parameter: torch.Tensor, by_number: dict[int, set[str]]) -> str:
    kinds = by_number.get(id(parameter))
    return _together(kinds) if kinds else _expected.get(parameter, "")


def _together(kinds: Collection[str]) -> str:
    # Of optimizers of different kinds nothing can be said.
    return next(iter(kinds)) if len(kinds) == 1 else ""


def _alive(references: Iterable[weakref.ref[torch.Tensor]]) -> list[torch.Tensor]:
    found = (reference() for reference in references)
    return [tensor for tensor in found if tensor is not None]


class _Following:
    """What the engine of a group was told last, and what that came from."""

    def __init__(self) -> None:
        self._optimizers = (-1, -1)
        self._live: list[tuple[int, int, int]] = []
        # Weakly: nothing here may keep a model.
        self._contents: list[tuple[int, list[weakref.ref[torch.Tensor]]]] = []
        self._told: dict[int, str] = {}

    def look(self, group: dist.ProcessGroup) -> None:
        """Tell the engine what is new of optimizers and buckets, if anything is."""
        optimizers = (_additions, len(_kinds))
        live = native.library.live_buckets(backend_of(group))
        if optimizers == self._optimizers and live == self._live:
            return
        try:
            # Buckets are laid out anew after the first step, and by every new model.
            if live != self._live:
                found = buckets_in_use(models_of(group, None), backend_of(group))
                self._contents = [(number, [*map(weakref.ref, own)]) for number, own in found]
            self.tell(group, [(number, _alive(own)) for number, own in self._contents])
        except RuntimeError as error:
            # No error of ours may end an optimizer's step. What is not known costs some bytes.
            GroupLogger.of_group(group).debug("not told of the optimizer: %s", error)
        self._optimizers, self._live = optimizers, live

    def tell(self, group: dist.ProcessGroup, contents: list[Contents]) -> None:
        """Tell the engine the kind of each of these buckets that it does not know yet."""
        by_number = _kinds_by_number()
        news: dict[str, list[int]] = {}
        for number, parameters in contents:
            # A parameter that is unknown makes its bucket unknown.
            kind = _together({_kind_for(parameter, by_number) for parameter in parameters})
            if self._told.get(number, "") != kind:
                news.setdefault(kind, []).append(number)
        for kind, buckets in sorted(news.items()):
            native.library.set_stepping(backend_of(group), kind, buckets)
            self._told |= dict.fromkeys(buckets, kind)
            GroupLogger.of_group(group).info(
                "the optimizer steps: %s for buckets %s", kind or "unknown or mixed", buckets
            )
