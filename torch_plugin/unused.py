"""Tells the engine where the parameters of a model are whose steps may leave some of them unused.

With ``find_unused_parameters`` DDP throws away what is delivered for a parameter that no rank has
used, and finds out which those are only after the buckets were exchanged. The engine then takes
back what it has delivered for them, and has to know where in the buckets they are. Such a model
keeps its first buckets, so it is enough to tell that once, when DDP has made them.
"""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from gflow import native
from gflow.buckets import layout_of, parameters_of


def tell_layout(model: DistributedDataParallel, backend: Any, made: list[int]) -> None:
    """Tell the engine the layout of a model, whose buckets with these numbers were just made."""
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
