"""Keeps residuals in step with a ``GradScaler``.

What is kept of the gradients is in the unit that the scaler multiplies the loss by. When that
changes, what is kept must change with it; and when the scaler skips a step because something was
not finite, what was sent in that step was never used, so it goes back to be sent again. If there
are several optimizers, that is done when all of them have skipped: which gradients are whose is not
known here.
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


def watch(
    scaler: torch.amp.GradScaler, group: dist.ProcessGroup | None = None
) -> torch.amp.GradScaler:
    """Follow ``scaler.update()`` from now on. Call it once for each scaler, on every rank.

    It costs memory: a second copy of what is kept of the gradients, to go back to.

    Args:
        scaler: the job's scaler.
        group: the process group that DDP uses; by default the whole world's.

    Returns:
        The scaler itself.

    Example:
        >>> scaler = gflow.watch(torch.amp.GradScaler("cuda"))  # doctest: +SKIP
    """
    if not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"gflow.watch: expected a GradScaler, got {type(scaler).__name__}")
    library, backend = native.load(), backend_of(group)
    if not scaler.is_enabled() or not library.metrics(backend)["compresses"]:
        return scaler
    if getattr(scaler, _WATCHED, False):
        raise RuntimeError("gflow.watch: this scaler is watched already")
    library.keep_for_undo(backend, True)
    update = scaler.update

    @functools.wraps(update)
    def update_and_tell(new_scale: Any = None) -> None:
        before, skipped = scaler.get_scale(), _has_skipped(scaler)
        update(new_scale)
        after = scaler.get_scale()
        library.record_step(backend, skipped, after / before if before else 1.0)

    scaler.update = update_and_tell  # type: ignore[method-assign]
    setattr(scaler, _WATCHED, True)
    return scaler


def _has_skipped(scaler: torch.amp.GradScaler) -> bool:
    """Whether all optimizers have skipped this step."""
    found = [
        sum(float(one) for one in state["found_inf_per_device"].values())
        for state in scaler._per_optimizer_states.values()
    ]
    return bool(found) and all(found)
