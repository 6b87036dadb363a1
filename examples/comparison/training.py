"""The trainings of the demo, as each rank runs them: one after the other, in a process group each.

Between two steps nothing happens that costs one method more than another, and evaluations stop the
clock.
"""

from __future__ import annotations

import math
import os
import time
from typing import Any

from gflow.bench.machine import sent_bytes
from gflow.launch.rank import Rank

#: What is held out is evaluated after so many steps.
EVALUATION_STEPS = 10
#: Much less than the benchmark's: most digits can be read.
_NOISE = 0.25
#: So many held-out images, shared among the ranks.
_HELD_OUT = 1000
#: Fields of ``gflow.metrics`` to report.
_COUNTERS = ("gradient_bytes", "wire_bytes", "hidden_seconds", "exposed_seconds")


def train_all(rank: Rank, trainings: list[dict[str, Any]], steps: int, interface: str) -> None:
    """Train with each method in turn; rank 0 tells the progress and what was measured.

    Args:
        rank: this rank.
        trainings: for each its ``method`` (a word for it), ``backend``, ``fp16_hook`` and ``seed``.
        steps: of each.
        interface: whose sent bytes are counted.
    """
    import torch
    import torch.distributed as dist

    from gflow.bench.quality.datasets import Digits
    from gflow.registration import register

    register()
    torch.set_num_threads(1)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, rank.world, is_master=rank.number == 0)
    data = Digits(noise=_NOISE)
    for number, training in enumerate(trainings):
        own_store = dist.PrefixStore(f"training {number}", store)
        dist.init_process_group(
            training["backend"], store=own_store, rank=rank.number, world_size=rank.world
        )
        try:
            measured = _train(rank, data, training, steps, interface)
            dist.barrier()
        finally:
            dist.destroy_process_group()
        if rank.number == 0:
            rank.tell({"run": {"method": training["method"], "seed": training["seed"], **measured}})


def _train(
    rank: Rank, data: Any, training: dict[str, Any], steps: int, interface: str
) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.nn.parallel import DistributedDataParallel

    from gflow.models import DigitsCNN

    torch.manual_seed(training["seed"])
    network = DigitsCNN(channels=(16, 32, 64), hidden=1024)
    model = DistributedDataParallel(network)
    if training["fp16_hook"]:
        model.register_comm_hook(None, fp16_compress_hook)
    # Fused: the same settings and arithmetic, in one pass over the memory instead of ten.
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2
    )
    batches = data.batches(training["seed"], rank.number, rank.world)
    held_out = [part[:_HELD_OUT].tensor_split(rank.world)[rank.number] for part in data.held_out]

    clock, sent, curve = 0.0, 0, []
    step_ms: list[float] = []
    step_bytes: list[int] = []
    for step in range(steps + 1):
        if step % EVALUATION_STEPS == 0 or step == steps:
            loss, accuracy = _evaluate(network, *held_out)
            curve.append({"step": step, "seconds": clock, "loss": loss, "accuracy": accuracy})
            if rank.number == 0:
                rank.tell({"step": curve[-1]})
            dist.barrier()
        if step == steps:
            break
        images, labels = next(batches)
        sent = sent_bytes(interface)
        start = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        schedule.step()
        seconds = time.perf_counter() - start
        clock += seconds
        step_ms.append(seconds * 1e3)
        step_bytes.append(sent_bytes(interface) - sent)
    return {
        "curve": curve,
        "step_ms": step_ms,
        "sent_bytes": step_bytes,
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "counters": {name: value / steps for name, value in _counters(training).items()},
    }


def _evaluate(network: Any, images: Any, labels: Any) -> tuple[float, float]:
    """Mean held-out loss and accuracy; each rank has a part of the images."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional

    # What layers count while they train, only the first rank has for all.
    for buffer in network.buffers():
        dist.broadcast(buffer, 0)
    network.eval()
    with torch.no_grad():
        scores = network(images)
    network.train()
    loss = functional.cross_entropy(scores, labels, reduction="sum")
    right = (scores.argmax(dim=1) == labels).sum()
    sums = torch.tensor([float(loss), float(right), len(labels)], dtype=torch.float64)
    dist.all_reduce(sums)
    return float(sums[0] / sums[2]), float(sums[1] / sums[2])


def _counters(training: dict[str, Any]) -> dict[str, float]:
    if training["backend"] != "gflow":
        return {}
    import gflow

    metrics = gflow.metrics()
    return {name: getattr(metrics, name) for name in _COUNTERS}
