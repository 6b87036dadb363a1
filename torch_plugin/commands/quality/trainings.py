"""The trainings of ``gflow bench quality``, on the ranks: every variant with every seed.

Each has a process group of its own, so that nothing is left of the one before. What happens in a
training must never depend on anything but task, variant and seed; what is evaluated, and when,
depends on the task alone. The time for evaluating is not in the time of a training.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from typing import Any

from gflow.commands import wire
from gflow.commands.quality.tasks import TASKS, Lesson
from gflow.commands.quality.variants import Variant
from gflow.commands.rank import Rank
from gflow.commands.warned import gflow_warnings
from gflow.registration import register

#: A training is evaluated about this often, and before its first step; a short one less often.
_EVALUATIONS = 12
_LEAST_INTERVAL = 10
_EVALUATED_AT_ONCE = 128


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
    said: set[str] = set()
    for name, plan in plans.items():
        lesson = TASKS[name].lesson()
        for seed in range(seeds):
            # One after the other, so that what else the machine does meets all of them.
            for details in plan["variants"]:
                variant = Variant(**details)
                own_store = dist.PrefixStore(f"{name}, {seed}, {variant.name}", store)
                options = variant.settings(plan["steps"], chunk, hosts)
                for warning in _make_group(rank, own_store, options):
                    if warning not in said and rank.number == 0:
                        rank.tell({"note": f"note: {warning}"})
                    said.add(warning)
                try:
                    row = _train(rank, lesson, variant, seed, plan["steps"], hosts)
                    dist.barrier()
                finally:
                    dist.destroy_process_group()
                if rank.number == 0:
                    rank.tell({"row": {"task": name} | row})
    return {
        "torch": torch.__version__,
        "chunk": chunk,
        "seeds": seeds,
        "warnings": sorted(said),
    }


def _make_group(rank: Rank, store: Any, options: dict[str, Any]) -> list[str]:
    """Make the group of a training; return what gflow warns of."""
    import torch.distributed as dist

    import gflow

    with gflow_warnings() as said:
        dist.init_process_group(
            "gflow",
            store=store,
            rank=rank.number,
            world_size=rank.world,
            pg_options=gflow.Options(**options),
        )
    return said


def _train(
    rank: Rank, lesson: Lesson, variant: Variant, seed: int, steps: int, hosts: int
) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import gflow

    torch.manual_seed(seed)
    network = lesson.network()
    parallel = DistributedDataParallel(network)
    optimizer = lesson.optimizer(network.parameters())
    if variant.takes_momentum:
        gflow.take_momentum(optimizer)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate_at(step, steps))
    batches = lesson.batches(seed, rank.number, rank.world)
    interval = max(_LEAST_INTERVAL, steps // _EVALUATIONS)
    seconds: list[float] = []
    curve = []
    dist.barrier()
    sent = wire.sent_bytes(hosts)
    for step in range(steps + 1):
        if step % interval == 0 or step == steps:
            if rank.number == 0:
                curve.append({"step": step, "seconds": sum(seconds)} | _evaluate(network, lesson))
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
    return {
        "variant": variant.name,
        "seed": seed,
        "steps": steps,
        "median_ms": statistics.median(seconds) * 1e3,
        "sent_bytes_per_step": wire.of_the_busiest_host(wire.sent_bytes(hosts) - sent) / steps,
        "curve": curve,
    }


def _rate_at(step: int, steps: int) -> float:
    """The learning rate over the highest: up in the first tenth, then to zero along a cosine."""
    rising = (step + 1) / max(1, steps // 10)
    falling = (1 + math.cos(math.pi * min(1.0, step / steps))) / 2
    return min(rising, falling)


def _evaluate(network: Any, lesson: Lesson) -> dict[str, float]:
    train_loss, _ = _loss_and_accuracy(network, lesson.train_sample)
    loss, accuracy = _loss_and_accuracy(network, lesson.held_out)
    return {"train_loss": train_loss, "held_out_loss": loss, "held_out_accuracy": accuracy}


def _loss_and_accuracy(network: Any, sample: Any) -> tuple[float, float]:
    import torch

    inputs, expected = sample
    network.eval()
    with torch.no_grad():
        outputs = torch.cat([network(part) for part in inputs.split(_EVALUATED_AT_ONCE)])
    network.train()
    right = outputs.argmax(dim=-1) == expected
    return float(_loss(outputs, expected)), float(right.float().mean())


def _loss(outputs: Any, expected: Any) -> Any:
    from torch.nn import functional

    return functional.cross_entropy(outputs.flatten(0, -2), expected.flatten())
