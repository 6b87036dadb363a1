"""Tells the engine where the parameters of a model are whose steps may leave some of them unused.

With ``find_unused_parameters`` DDP throws away what is delivered for a parameter that no rank has
used, and finds out which those are only after the buckets were exchanged. The engine then takes
back what it has delivered for them, and has to know where in the buckets they are. Such a model
keeps its first buckets, so it is enough to tell that once, when DDP has made them.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from gflow import native
from gflow.backend import backend_of, is_served_by_gflow
from gflow.buckets import engine_buckets, layout_of, parameters_of

_MAKE_BUCKETS = "_ddp_init_helper"


def tell_layouts() -> None:
    """Have every DDP model that is made from now on tell its layout, if it has to.

    Calling it again does nothing. Only models of gflow's groups are concerned.
    """
    make_buckets = getattr(DistributedDataParallel, _MAKE_BUCKETS)
    if hasattr(make_buckets, "__wrapped__"):
        return

    @functools.wraps(make_buckets)
    def make_known_buckets(model: DistributedDataParallel, *args: Any, **options: Any) -> None:
        group = model.process_group
        if not model.find_unused_parameters or group is None or not is_served_by_gflow(group):
            make_buckets(model, *args, **options)
            return
        backend = backend_of(group)
        before = {bucket.number for bucket in engine_buckets(backend)}
        make_buckets(model, *args, **options)
        made = [one.number for one in engine_buckets(backend) if one.number not in before]
        _tell_layout(model, backend, made)

    setattr(DistributedDataParallel, _MAKE_BUCKETS, make_known_buckets)


def _tell_layout(model: DistributedDataParallel, backend: Any, made: list[int]) -> None:
    layout = layout_of(model)
    if len(made) != len(layout):
        return  # Their memory is not gflow's: they are exchanged exactly.
    numels = [parameter.numel() for parameter in parameters_of(model).values()]
    parts = [
        (number, index)
        for number, (indices, _, _) in zip(made, layout, strict=True)
        for index in indices
    ]
    native.library.add_layout(
        backend,
        len(numels),
        [number for number, _ in parts],
        [index for _, index in parts],
        [numels[index] for _, index in parts],
    )
