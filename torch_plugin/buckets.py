"""How DDP lays out the parameters of a model in gradient buckets, and which bucket is which.

A state is saved by parameter, because parameters have the same names in the next program. The
engine keeps it by bucket. This file maps one to the other, and never guesses: two models that
cannot be told apart are an error.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gflow import native


@dataclass(frozen=True)
class Bucket:
    """One bucket of one model.

    Attributes:
        number: its number in the engine.
        parameters: its parameters, in order, as indices into the model's list.
        numel: how many elements it has.
        dtype: of its elements.
    """

    number: int
    parameters: list[int]
    numel: int
    dtype: torch.dtype


@dataclass(frozen=True)
class EngineBucket:
    """A bucket as the engine knows it.

    Attributes:
        number: in the order in which they were made.
        nbytes: its size.
        parameter: the address of one of its model's parameters; 0 before the first step.
    """

    number: int
    nbytes: int
    parameter: int


def models_of(
    group: dist.ProcessGroup, given: list[DistributedDataParallel] | None
) -> list[DistributedDataParallel]:
    """The DDP models of ``group``: the given ones, or all."""
    if given is not None:
        for model in given:
            if not isinstance(model, DistributedDataParallel) or model.process_group != group:
                raise ValueError(
                    f"gflow: models must be DistributedDataParallel models of this process group, "
                    f"got {type(model).__name__}"
                )
        return list(given)
    # DDP keeps no list of its models, but the garbage collector knows every object. Look only at
    # types: some objects warn when an attribute is read.
    found = [one for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel)]
    mine = [model for model in found if getattr(model, "process_group", None) == group]
    # They come in no particular order, and every rank needs the same order.
    return sorted(mine, key=lambda model: names_of(model))


def names_of(model: DistributedDataParallel) -> list[list[Any]]:
    """Name and size of each parameter that DDP reduces."""
    return [[name, parameter.numel()] for name, parameter in parameters_of(model).items()]


def parameters_of(model: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    """The parameters that DDP reduces, by name, in the order of its own list."""
    ignored = getattr(model, "parameters_to_ignore", ())
    return {
        name: parameter
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    }


def engine_buckets(backend: Any) -> list[EngineBucket]:
    """The buckets that the engine knows, in the order in which they were made."""
    return [EngineBucket(*bucket) for bucket in native.library.live_buckets(backend)]


def buckets_of(
    models: list[DistributedDataParallel], backend: Any, *, in_order: bool
) -> list[list[Bucket]]:
    """The buckets of each model, in order, without those that are never compressed.

    Args:
        models: of one group.
        backend: of that group.
        in_order: whether the models are in the order in which they were wrapped. That
            distinguishes models that look alike and have not been trained yet.
    """
    known, unknown = _by_owner(models, backend)
    layouts = [layout_of(model) for model in models]
    all_sizes = [[_nbytes(*bucket) for bucket in layout] for layout in layouts]
    found = []
    for sizes, layout, mine in zip(all_sizes, layouts, known, strict=True):
        if [bucket.nbytes for bucket in mine] != sizes:
            if all_sizes.count(sizes) > 1 and not in_order:
                raise RuntimeError(
                    "gflow: this process group has models that look alike and have not been "
                    "trained yet: give models=[...] in the order in which they were wrapped"
                )
            mine = _take_run(sizes, unknown)
        found.append([Bucket(one.number, *rest) for one, rest in zip(mine, layout, strict=True)])
    return found


def _by_owner(
    models: list[DistributedDataParallel], backend: Any
) -> tuple[list[list[EngineBucket]], list[EngineBucket]]:
    """The engine's buckets of each model, in order, and those that were not reduced yet."""
    owners = {p._cdata: index for index, model in enumerate(models) for p in model.parameters()}
    known: list[list[EngineBucket]] = [[] for _ in models]
    unknown: list[EngineBucket] = []
    for bucket in engine_buckets(backend):
        owner = owners.get(bucket.parameter)
        if owner is not None:
            known[owner].append(bucket)
        elif not bucket.parameter:
            # Others are of models that were not given.
            unknown.append(bucket)
    return known, unknown


def buckets_in_use(
    models: list[DistributedDataParallel], backend: Any
) -> list[tuple[int, Sequence[torch.Tensor]]]:
    """Number and parameters of all buckets that DDP has reduced since it has laid them out."""
    found: list[tuple[int, Sequence[torch.Tensor]]] = []
    for model, mine in zip(models, _by_owner(models, backend)[0], strict=True):
        buckets = _compressible(model) if mine else []
        sizes = [bucket.buffer().nbytes for bucket in buckets]
        # Gradients may be views of the buckets before, and keep them alive.
        newest = mine[-len(sizes) :] if sizes else []
        if [bucket.nbytes for bucket in newest] == sizes:
            contents = [bucket.parameters() for bucket in buckets]
            found += [(one.number, own) for one, own in zip(newest, contents, strict=True)]
    return found


def _take_run(sizes: list[int], unknown: list[EngineBucket]) -> list[EngineBucket]:
    """Remove consecutive buckets of these sizes from ``unknown``, and return them."""
    for start in range(len(unknown) - len(sizes) + 1):
        run = unknown[start : start + len(sizes)]
        if [bucket.nbytes for bucket in run] == sizes:
            del unknown[start : start + len(sizes)]
            return run
    raise RuntimeError(
        "gflow: a DDP model of this process group has no gradient buckets in gflow's memory: was "
        "it made before the group, or with DDP_DISABLE_COMM_MEM=1?"
    )


Layout = list[tuple[list[int], int, torch.dtype]]


def layout_of(model: DistributedDataParallel) -> Layout:
    """Parameters, number of elements and type of each bucket that may be compressed."""
    numbers = {id(p): number for number, p in enumerate(parameters_of(model).values())}
    layout = []
    for bucket in _compressible(model):
        indices = [numbers[id(parameter)] for parameter in bucket.parameters()]
        layout.append((indices, bucket.buffer().numel(), bucket.buffer().dtype))
    return layout


def _compressible(model: DistributedDataParallel) -> list[dist.GradBucket]:
    """The buckets that may be compressed, with zeros for gradients."""
    return [
        bucket
        for bucket in model.reducer._get_zeros_like_grad_buckets()
        if not bucket.buffer().is_sparse
        and not any(parameter.is_complex() for parameter in bucket.parameters())
    ]


def _nbytes(_: list[int], numel: int, dtype: torch.dtype) -> int:
    return numel * dtype.itemsize


def fix_layout(
    model: DistributedDataParallel, backend: Any, buckets: list[list[int]]
) -> list[Bucket] | None:
    """Make DDP use this layout from now on; all ranks must call it.

    DDP rebuilds its buckets after the first step, in the order in which gradients came, and
    broadcasts the result. Here it does so at once, and ``buckets`` (the parameters of each) takes
    the place of what it broadcasts. Returns the buckets, or None if the model has rebuilt them
    already or never does (``find_unused_parameters``), and keeps its layout.
    """
    before = {bucket.number for bucket in engine_buckets(backend)}
    indices = [index for bucket in buckets for index in bucket]
    sizes = [len(bucket) for bucket in buckets]
    native.library.replace_broadcasts(
        backend,
        [
            torch.tensor([*indices, len(buckets)], dtype=torch.int32),
            torch.tensor(sizes, dtype=torch.int32),
        ],
    )
    try:
        model.reducer._push_all_rebuilt_params()
        if not model.reducer._rebuild_buckets():
            return None
    finally:
        native.library.replace_broadcasts(backend, [])
    made = [bucket for bucket in engine_buckets(backend) if bucket.number not in before]
    parameters = list(parameters_of(model).values())
    sparse = sparse_parameters_of(model)
    dense = [
        bucket
        for bucket in buckets
        if not any(parameters[index].is_complex() or index in sparse for index in bucket)
    ]
    return [
        Bucket(
            one.number,
            bucket,
            sum(parameters[index].numel() for index in bucket),
            parameters[bucket[0]].dtype,
        )
        for one, bucket in zip(made, dense, strict=True)
    ]


def expected_layout(model: DistributedDataParallel) -> list[list[int]]:
    """The layout that DDP will most likely rebuild: last parameters first."""
    parameters = list(parameters_of(model).values())
    sparse = sparse_parameters_of(model)
    order = list(reversed(range(len(parameters))))
    limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, model.bucket_bytes_cap]
    buckets, _ = dist._compute_bucket_assignment_by_size(
        [parameters[index] for index in order], limits, [index in sparse for index in order], order
    )
    return [list(bucket) for bucket in buckets]


def sparse_parameters_of(model: DistributedDataParallel) -> set[int]:
    """The indices of the parameters with sparse gradients."""
    embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    sparse = {
        id(module.weight)
        for module in model.module.modules()
        if isinstance(module, embeddings) and module.sparse
    }
    parameters = parameters_of(model).values()
    return {number for number, parameter in enumerate(parameters) if id(parameter) in sparse}
