"""The trainings of the demo, as each rank runs them: one after the other, in a process group each.

Between two steps nothing happens that costs one method more than another, and evaluations stop the
clock.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from typing import Any

from comparison.tasks import TASKS, Task
from gflow.bench.machine import sent_bytes
from gflow.bench.quality.evaluation import evaluate, mean_loss
from gflow.bench.quality.training import CLIP, rate_at
from gflow.launch.rank import Rank

#: Fields of ``gflow.metrics`` to report.
_COUNTERS = ("gradient_bytes", "wire_bytes", "hidden_seconds", "exposed_seconds")


@dataclass(frozen=True)
class Setup:
    """What all trainings have in common."""

    task: Task
    data: Any
    steps: int
    learning_rate: float

    def rate_at(self, step: int) -> float:
        """The learning rate over its maximum."""
        if self.task.rises:
            return rate_at(step, self.steps)
        return (1 + math.cos(math.pi * step / self.steps)) / 2


def train_all(
    rank: Rank,
    task: str,
    trainings: list[dict[str, Any]],
    steps: int,
    learning_rate: float,
    interface: str,
) -> None:
    """Train with each method in turn; rank 0 tells the progress and what was measured.

    Args:
        rank: this rank.
        task: its word in ``TASKS``.
        trainings: for each its ``method`` (a word for it), ``backend``, ``fp16_hook`` and ``seed``.
        steps: of each.
        learning_rate: at its highest.
        interface: whose sent bytes are counted.
    """
    import torch
    import torch.distributed as dist

    from gflow.registration import register

    register()
    torch.set_num_threads(1)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, rank.world, is_master=rank.number == 0)
    setup = Setup(TASKS[task], TASKS[task].load(), steps, learning_rate)
    for number, training in enumerate(trainings):
        own_store = dist.PrefixStore(f"training {number}", store)
        dist.init_process_group(
            training["backend"], store=own_store, rank=rank.number, world_size=rank.world
        )
        try:
            measured = _train(rank, setup, training, interface)
            dist.barrier()
        finally:
            dist.destroy_process_group()
        if rank.number == 0:
            rank.tell({"run": {"method": training["method"], "seed": training["seed"], **measured}})


def _train(rank: Rank, setup: Setup, training: dict[str, Any], interface: str) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.nn.parallel import DistributedDataParallel

    task, data, steps = setup.task, setup.data, setup.steps
    torch.manual_seed(training["seed"])
    network = data.network()
    model = DistributedDataParallel(network)
    if training["fp16_hook"]:
        model.register_comm_hook(None, fp16_compress_hook)
    optimizer = task.optimizer(network.parameters(), setup.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, setup.rate_at)
    batches = data.batches(training["seed"], rank.number, rank.world)
    # Each rank drops out other neurons.
    torch.manual_seed(rank.world * training["seed"] + rank.number)

    clock, sent, curve = 0.0, 0, []
    step_ms: list[float] = []
    step_bytes: list[int] = []
    for step in range(steps + 1):
        if step % task.evaluation_steps == 0 or step == steps:
            loss, accuracy = evaluate(rank, network, data.held_out)
            curve.append({"step": step, "seconds": clock, "loss": loss, "accuracy": accuracy})
            if rank.number == 0:
                rank.tell({"step": curve[-1]})
            dist.barrier()
        if step == steps:
            break
        inputs, expected = next(batches)
        sent = sent_bytes(interface)
        start = time.perf_counter()
        optimizer.zero_grad()
        mean_loss(model(inputs), expected).backward()
        if task.clips:
            torch.nn.utils.clip_grad_norm_(network.parameters(), CLIP)
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
        **_own_count(training, steps),
    }


def _own_count(training: dict[str, Any], steps: int) -> dict[str, Any]:
    """By gflow's own count: counters per step, and what gradients were sent as last."""
    if training["backend"] != "gflow":
        return {"counters": {}, "sent_as": None}
    import gflow

    metrics = gflow.metrics()
    counters = {name: getattr(metrics, name) / steps for name in _COUNTERS}
    return {"counters": counters, "sent_as": metrics.method}
