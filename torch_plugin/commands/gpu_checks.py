"""The checks of ``gflow doctor`` that concern GPUs.

A machine without one is well: then each says so and passes. None may load a library that a job on
this machine would not load, and none may use a GPU without being bounded in time.
"""

from __future__ import annotations

from gflow.commands import ranks, selftest
from gflow.commands.check import Fine, Wrong
from gflow.commands.gpus import findings
from gflow.options import KNOBS

_NO_GPU = "no GPU: skipped"
_EXACT = "or set GFLOW_COMPRESS=off, then everything on GPUs goes through torch's own NCCL backend."
#: NCCL has one rank on each GPU.
_WORLD = 2


def cuda() -> Fine:
    """What torch sees."""
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        return Fine("not available (no GPU, no driver, or a torch without CUDA): CPU tensors only")
    count = torch.cuda.device_count()
    detail = f"{count} x {torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}"
    if not dist.is_nccl_available():
        return Fine(f"{detail}; torch has no NCCL: CPU tensors only", "Install a torch with NCCL.")
    return Fine(detail)


def libraries() -> Fine:
    """What the engine finds of what it needs to compress gradients on GPUs."""
    import torch

    try:
        found = findings()
    except RuntimeError as error:
        if not torch.cuda.is_available():
            return Fine(f"{_NO_GPU} ({error})")
        raise Wrong(str(error), f"Please report this, {_EXACT}") from error
    said = "; ".join(f"{one.what}: {one.found}" for one in found)
    if not torch.cuda.is_available():
        return Fine(f"{_NO_GPU} ({said})")
    missing = [one.what for one in found if not one.is_there]
    if missing:
        raise Wrong(said, f"Gradients on GPUs cannot be compressed without: install what is "
                    f"missing ({', '.join(missing)}), {_EXACT}")  # fmt: skip
    return Fine(said)


def self_test(deadline: float) -> Fine:
    """Train on two GPUs with compression, and compare with training in one process."""
    import torch

    if not torch.cuda.is_available():
        return Fine(_NO_GPU)
    if torch.cuda.device_count() < _WORLD:
        return Fine("one GPU: skipped, NCCL needs one for each rank")
    unset = (KNOBS["timeline"].variable,)
    arguments = {"device_type": "cuda"}
    try:
        results = ranks.run(
            selftest.exchange_on_devices, _WORLD, arguments, deadline=deadline, unset=unset
        )
    except ranks.RanksFailed as error:
        advice = f"The output of the ranks is below. Please report it, {_EXACT}"
        raise Wrong(f"{_WORLD} ranks on GPUs failed", advice, str(error)) from error
    if len({result["weights"] for result in results}) != 1:
        raise Wrong("the ranks have different weights after the same training", "Please report it.")
    if not all(result["compressed"] for result in results):
        raise Wrong("DDP's gradients on GPUs were not compressed", "Please report it.")
    return Fine(
        f"{_WORLD} ranks on {_WORLD} GPUs: all_reduce exact, DDP trains as one process does with "
        f"{results[0]['compressed']} buckets compressed, same weights on all ranks"
    )
