"""The trainings of ``gflow bench quality``, on the ranks: every variant with every seed.

Each has a process group of its own, so nothing is left of the previous one. A training depends on
task, variant and seed alone, and is evaluated at the same steps in all variants; evaluations do not
count as training time.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from typing import Any

from gflow.bench import machine
from gflow.bench.groups import gflow_warnings
from gflow.bench.quality.tasks import TASKS, Dataset
from gflow.bench.quality.variants import Variant
from gflow.launch.rank import Rank
from gflow.registration import register

#: A training is evaluated about this often, and before its first step; short ones less often.
_EVALUATIONS = 12
_MIN_INTERVAL = 10
_EVALUATION_BATCH = 128


def measure(
    rank: Rank, plans: dict[str, Any], seeds: int, chunk: int, hosts: int
) -> dict[str, Any]:
    """Train; rank 0 tells a row for each training. Return what the numbers depend on.

    Args:
        rank: this rank.
        plans: by task, its ``steps`` and ``variants``.
        seeds: how many trainings of each variant.
        chunk: elements in a chunk.
        hosts: how many there are.
    """
    import torch
    import torch.distributed as dist

    if not plans:
        raise RuntimeError("all tasks are left out")
    register()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, rank.world, is_master=rank.number == 0)
    warnings: set[str] = set()
    for name, plan in plans.items():
        dataset = TASKS[name].load()
        for seed in range(seeds):
            # Variants alternate, so that noise of the machine hits all of them.
            for details in plan["variants"]:
                variant = Variant(**details)
                own_store = dist.PrefixStore(f"{name}, {seed}, {variant.name}", store)
                options = variant.options(plan["steps"], chunk, hosts)
                for warning in _make_group(rank, own_store, options):
                    if warning not in warnings and rank.number == 0:
                        rank.tell({"note": f"note: {warning}"})
                    warnings.add(warning)
                try:
                    row = _train(rank, dataset, variant, seed, plan["steps"], hosts)
                    dist.barrier()
                finally:
                    dist.destroy_process_group()
                if rank.number == 0:
                    rank.tell({"row": {"task": name} | row})
    return {
        "torch": torch.__version__,
        "chunk": chunk,
        "seeds": seeds,
        "warnings": sorted(warnings),
    }


def _make_group(rank: Rank, store: Any, options: dict[str, Any]) -> list[str]:
    """Make the group of a training; return gflow's warnings."""
    import torch.distributed as dist

    import gflow

    with gflow_warnings() as warnings:
        dist.init_process_group(
            "gflow",
            store=store,
            rank=rank.number,
            world_size=rank.world,
            pg_options=gflow.Options(**options),
        )
    return warnings


def _train(
    rank: Rank, dataset: Dataset, variant: Variant, seed: int, steps: int, hosts: int
) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import gflow

    torch.manual_seed(seed)
    network = dataset.network()
    parallel = DistributedDataParallel(network)
    optimizer = dataset.optimizer(network.parameters())
    if variant.takes_momentum:
        gflow.take_momentum(optimizer)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate_at(step, steps))
    batches = dataset.batches(seed, rank.number, rank.world)
    interval = max(_MIN_INTERVAL, steps // _EVALUATIONS)
    seconds: list[float] = []
    curve = []
    dist.barrier()
    interface = machine.interface_between(hosts)
    sent = machine.sent_bytes(interface)
    for step in range(steps + 1):
        if step % interval == 0 or step == steps:
            if rank.number == 0:
                curve.append({"step": step, "seconds": sum(seconds)} | _evaluate(network, dataset))
            # A rank that is ahead would make the next step look short.
            dist.barrier()
        if step < steps:
            inputs, expected = next(batches)
            start = time.perf_counter()
            _loss(parallel(inputs), expected).backward()
            optimizer.step()
            optimizer.zero_grad()
            rate.step()
            seconds.append(time.perf_counter() - start)
    sent_bytes = machine.max_over_ranks(machine.sent_bytes(interface) - sent)
    return {
        "variant": variant.name,
        "seed": seed,
        "steps": steps,
        "median_ms": statistics.median(seconds) * 1e3,
        "sent_bytes_per_step": sent_bytes / steps,
        "curve": curve,
    }


def _rate_at(step: int, steps: int) -> float:
    """The learning rate over its maximum: it rises for a tenth, then falls to zero as a cosine."""
    rising = (step + 1) / max(1, steps // 10)
    falling = (1 + math.cos(math.pi * min(1.0, step / steps))) / 2
    return min(rising, falling)


def _evaluate(network: Any, dataset: Dataset) -> dict[str, float]:
    train_loss, _ = _loss_and_accuracy(network, dataset.train_sample)
    loss, accuracy = _loss_and_accuracy(network, dataset.held_out)
    return {"train_loss": train_loss, "held_out_loss": loss, "held_out_accuracy": accuracy}


def _loss_and_accuracy(network: Any, sample: Any) -> tuple[float, float]:
    import torch

    inputs, expected = sample
    network.eval()
    with torch.no_grad():
        outputs = torch.cat([network(part) for part in inputs.split(_EVALUATION_BATCH)])
    network.train()
    right = outputs.argmax(dim=-1) == expected
    return float(_loss(outputs, expected)), float(right.float().mean())


def _loss(outputs: Any, expected: Any) -> Any:
    from torch.nn import functional

    return functional.cross_entropy(outputs.flatten(0, -2), expected.flatten())
