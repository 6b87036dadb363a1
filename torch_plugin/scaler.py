"""Keeps residuals in step with a ``GradScaler``.

What is kept of the gradients has the scale of the loss, so it is rescaled when the scale changes.
When the scaler skips a step because something was not finite, what was sent in that step was never
used, so it is kept to be sent again. With several optimizers that happens only if all of them skip,
because it is not known here which gradients belong to which.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from gflow import native
from gflow.backend import backend_of

#: Set on a scaler that is watched.
_WATCHED = "_gflow_watches"


def watch_scaler(
    scaler: torch.amp.GradScaler, group: dist.ProcessGroup | None = None
) -> torch.amp.GradScaler:
    """Follow ``scaler.update()`` from now on. Call it once for each scaler, on every rank.

    It costs memory: a second copy of what is kept of the gradients, to undo a skipped step.

    Args:
        scaler: the scaler of the training.
        group: the process group that DDP uses; by default the default group.

    Returns:
        The scaler itself.

    Example:
        >>> scaler = gflow.watch_scaler(torch.amp.GradScaler("cpu"))
    """
    if not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"gflow.watch_scaler: expected a GradScaler, got {type(scaler).__name__}")
    backend = backend_of(group)
    if not scaler.is_enabled() or not native.library.metrics(backend)["compresses"]:
        return scaler
    if getattr(scaler, _WATCHED, False):
        raise RuntimeError("gflow.watch_scaler: this scaler is watched already")
    native.library.keep_for_undo(backend, True)
    update = scaler.update

    @functools.wraps(update)
    def update_and_report(new_scale: Any = None) -> None:
        before, skipped = scaler.get_scale(), _has_skipped(scaler)
        update(new_scale)
        after = scaler.get_scale()
        native.library.record_step(backend, skipped, after / before if before else 1.0)

    scaler.update = update_and_report  # type: ignore[method-assign]
    setattr(scaler, _WATCHED, True)
    return scaler


def _has_skipped(scaler: torch.amp.GradScaler) -> bool:
    """Whether all optimizers skip this step."""
    found = [
        sum(float(one) for one in state["found_inf_per_device"].values())
        for state in scaler._per_optimizer_states.values()
    ]
    return bool(found) and all(found)
