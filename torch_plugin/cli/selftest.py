"""The self-test that the ranks of ``gflow doctor`` run: a small but complete use of gflow.

Nothing here may depend on luck: a self-test that fails on a machine that is fine is worse than
none.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import Any

import gflow
from gflow import native
from gflow.launch.rank import Rank

#: A peer that is silent for this long fails the test, before the overall deadline does.
_TIMEOUT = timedelta(seconds=30)
_STEPS = 3
#: Enough that some come after DDP's final buckets and after the dense steps.
_COMPRESSED_STEPS, _DENSE_STEPS = 6, 2
_INPUTS, _OUTPUTS, _BATCH = 64, 16, 8


def provoke_failures(rank: Rank) -> dict[str, str]:
    """Let Rust fail in each way, and return by way what arrived in Python.

    A panic prints to standard error, and one that escaped from Rust would end the process, so this
    does not run in the doctor's own process.
    """
    arrived = {}
    for way in ("error", "panic"):
        try:
            native.library.provoke(way)
            arrived[way] = "nothing"
        except Exception as error:
            arrived[way] = f"{type(error).__name__}: {error}"
    return arrived


def exchange(rank: Rank) -> dict[str, Any]:
    """Make a group, all-reduce a tensor, train a model for a few steps, and check the results."""
    import torch.distributed as dist

    dist.init_process_group("gflow", timeout=_TIMEOUT)
    try:
        _check_all_reduce(rank)
        weights, _ = _train(rank)
        done = gflow.metrics()
        return {"buckets": done.gradient_buckets, "hosts": done.hosts, "weights": weights}
    finally:
        dist.destroy_process_group()


def exchange_on_devices(rank: Rank, device_type: str) -> dict[str, Any]:
    """The same on accelerators, one for each rank, with compressed gradients."""
    import torch
    import torch.distributed as dist

    device = torch.device(device_type, rank.number)
    torch.accelerator.set_device_index(rank.number)
    # Send all chunks in full: then training is as exact as without compression.
    options = gflow.Options(
        compress="on",
        method="chunks",
        density=1.0,
        chunk=64,
        warmup_steps=_DENSE_STEPS,
        ramp_steps=0,
        wire="fp32",
    )
    dist.init_process_group("gflow", timeout=_TIMEOUT, pg_options=options)
    try:
        _check_all_reduce(rank, device)
        weights, steps = _train(rank, device, _COMPRESSED_STEPS)
        return {"compressed": sum(one > _DENSE_STEPS for one in steps), "weights": weights}
    finally:
        dist.destroy_process_group()


def _check_all_reduce(rank: Rank, device: Any = "cpu") -> None:
    import torch
    import torch.distributed as dist

    counting = torch.arange(10_000, dtype=torch.float32).to(device)
    tensor = counting * (rank.number + 1)
    dist.all_reduce(tensor)
    # The sum of whole numbers this small is exact.
    expected = counting * sum(range(1, rank.world + 1))
    if not torch.equal(tensor, expected):
        at = int((tensor != expected).nonzero()[0])
        raise RuntimeError(
            f"all_reduce gave a wrong sum: element {at} is {tensor[at].item()}, but should be "
            f"{expected[at].item()}"
        )


def _train(rank: Rank, device: Any = "cpu", steps: int = _STEPS) -> tuple[str, list[int]]:
    """Train with DDP, and compare with training in one process.

    Returns a digest of the weights, and how often each gradient bucket was exchanged.
    """
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model, alone = _model().to(device), _model().to(device)
    parallel = DistributedDataParallel(model)
    for step in range(steps):
        batches = [_batch(step, number).to(device) for number in range(rank.world)]
        parallel(batches[rank.number]).square().mean().backward()
        alone(torch.cat(batches)).square().mean().backward()
        for one in (model, alone):
            _descend(one)
    for (name, trained), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
        # The order of sums differs, and the ranks may exchange 16-bit numbers.
        if not torch.allclose(trained, expected, rtol=1e-2, atol=1e-3):
            off = (trained - expected).abs().max().item()
            raise RuntimeError(
                f"after {steps} steps of DDP {name} is off by up to {off:g} from the same "
                "training in one process"
            )
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).cpu()
    digest = hashlib.sha256(bytes(flat.view(torch.uint8).tolist())).hexdigest()
    return digest, [bucket.steps for bucket in gflow.metrics().buckets]


def _model() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Linear(_INPUTS, _OUTPUTS)


def _batch(step: int, rank: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(_BATCH, _INPUTS, generator=generator)


def _descend(model: Any) -> None:
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
