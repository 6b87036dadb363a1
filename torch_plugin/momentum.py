"""Momentum that is not lost on gradients that are sent late.

An optimizer with momentum sees a chunk of gradient only in the steps that send it, with all that
was accumulated for it at once. Its momentum then keeps pushing in a direction that is many steps
old. With :func:`take_momentum` the engine keeps the velocity instead, where every step's gradient
is seen, sends it with the gradient, and clears it where it was sent if it is old by then.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from gflow import native
from gflow.backend import backend_of, group_or_default
from gflow.buckets import models_of, parameters_of, sparse_parameters_of
from gflow.logs import GroupLogger

#: Key of an optimizer's parameter groups, and of its state_dict, for what was taken over.
_TAKEN = "gflow_momentum"
_COMPRESSED = (torch.float32, torch.float16, torch.bfloat16)


def take_momentum(optimizer: torch.optim.Optimizer, group: dist.ProcessGroup | None = None) -> bool:
    """Let the engine of ``group`` apply the momentum of ``optimizer``, and switch off its own.

    Call it once on every rank, best after wrapping the model in DDP, before the first step. Where
    gradients are not compressed (one host, or ``compress="off"``) the optimizer keeps its momentum.

    It works for ``torch.optim.SGD`` with momentum, Nesterov's or not, whose parameters are those of
    the group's DDP models. The weight decay stays with the optimizer; because it no longer goes
    through the momentum, it is divided by ``1 - momentum``, which keeps its effect. Adam and its
    relatives need none of this: they divide by the size of the gradients that they see, and their
    first moment is an average, not a sum.

    Args:
        optimizer: its momentum is taken over.
        group: the process group that DDP uses; by default the default group.

    Returns:
        Whether the engine applies the momentum from now on.

    Example:
        >>> optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        >>> gflow.take_momentum(optimizer)  # True on several hosts; this is one
        False
    """
    backend = backend_of(group)
    if not isinstance(optimizer, torch.optim.SGD):
        raise TypeError(
            f"gflow.take_momentum: expected a torch.optim.SGD, got {type(optimizer).__name__}. "
            "Optimizers such as Adam need no correction: use them as they are."
        )
    factor, nesterov = _momentum_of(optimizer.param_groups)
    if not native.library.metrics(backend)["compresses"]:
        _give_back(optimizer)
        log = GroupLogger.of_group(group_or_default(group))
        log.info("gradients are not compressed here: the optimizer keeps its momentum")
        return False
    _refuse_parameters_without_momentum(optimizer, group_or_default(group))
    native.library.set_momentum(backend, factor, nesterov)
    _switch_off(optimizer, factor, nesterov)
    for state in optimizer.state.values():
        # It holds the steps before this one; the engine starts anew.
        state.pop("momentum_buffer", None)
    # Loading a state that was saved before must not bring the momentum back.
    optimizer.register_load_state_dict_post_hook(
        lambda loaded: _switch_off(loaded, factor, nesterov)
    )
    return True


def _switch_off(optimizer: Any, factor: float, nesterov: bool) -> None:
    for params in optimizer.param_groups:
        if _TAKEN not in params:
            params[_TAKEN] = [factor, nesterov]
            params["weight_decay"] = params["weight_decay"] / (1 - factor)
        params["momentum"], params["nesterov"] = 0.0, False
    # Also for parameter groups that are added later.
    optimizer.defaults["momentum"], optimizer.defaults["nesterov"] = 0.0, False


def _give_back(optimizer: Any) -> None:
    """Undo what an earlier job or call has taken over."""
    for params in optimizer.param_groups:
        if _TAKEN in params:
            params["momentum"], params["nesterov"] = params.pop(_TAKEN)
            params["weight_decay"] *= 1 - params["momentum"]


def _momentum_of(groups: list[dict[str, Any]]) -> tuple[float, bool]:
    """The one momentum of all parameter groups, also if it was taken over before."""
    found = {
        tuple(params.get(_TAKEN, (params["momentum"], params["nesterov"]))) for params in groups
    }
    if len(found) != 1:
        raise ValueError(
            f"gflow.take_momentum: expected one momentum for all parameter groups, got "
            f"{sorted(found)}. Give all groups the same, or leave the momentum to the optimizer."
        )
    ((factor, nesterov),) = found
    if not 0 < factor < 1:
        raise ValueError(
            f"gflow.take_momentum: the optimizer has momentum {factor}, expected a number between "
            "0 and 1. Without momentum there is nothing to take."
        )
    if any(params["dampening"] != 0 for params in groups):
        raise ValueError(
            "gflow.take_momentum: dampening is not supported: set dampening=0 and a learning rate "
            "that is smaller by as much, or leave the momentum to the optimizer."
        )
    return float(factor), bool(nesterov)


def _refuse_parameters_without_momentum(
    optimizer: torch.optim.Optimizer, group: dist.ProcessGroup
) -> None:
    """The engine applies one momentum to all that it compresses in a group, and to nothing else."""
    own = [p for params in optimizer.param_groups for p in params["params"] if p.requires_grad]
    exact = [parameter.dtype for parameter in own if parameter.dtype not in _COMPRESSED]
    if exact:
        names = ", ".join(sorted({str(dtype) for dtype in exact}))
        raise ValueError(
            f"gflow.take_momentum: {len(exact)} parameters are of {names}, whose gradients are "
            "always exchanged exactly and would be left without momentum. Give them an optimizer "
            "of their own."
        )
    models = models_of(group, None)
    if not models:
        return  # Not wrapped yet: there is nothing to compare with.
    reduced = {id(p) for model in models for p in parameters_of(model).values()}
    mine = {id(parameter) for parameter in own}
    if mine - reduced:
        raise ValueError(
            f"gflow.take_momentum: {len(mine - reduced)} parameters of the optimizer are in no DDP "
            "model of this process group, and would be left without momentum. Wrap the model in "
            "DDP first, and give other parameters an optimizer of their own."
        )
    if reduced - mine:
        raise ValueError(
            f"gflow.take_momentum: the DDP models of this process group have {len(reduced - mine)} "
            "parameters that this optimizer does not have, and that would get momentum as well. "
            "Give models with other optimizers a process group of their own (dist.new_group)."
        )
    for model in models:
        if sparse_parameters_of(model):
            what = "gradients that are sparse"
        elif getattr(model, "lazy_bucket_allocation", False):
            what = "lazy_bucket_allocation"
        elif getattr(model, "_comm_hooks", None):
            what = "a communication hook"
        else:
            continue
        raise ValueError(
            f"gflow.take_momentum: a DDP model has {what}, which is always exchanged exactly and "
            "would be left without momentum: leave the momentum to the optimizer."
        )
