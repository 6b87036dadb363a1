"""One training as each rank runs it: examples/train_digits.py with a clock and counters.

Between two steps nothing happens that costs one method more than another.
"""

from __future__ import annotations

import time
from typing import Any

from gflow.bench.machine import sent_bytes
from gflow.launch.rank import Rank

#: Fields of ``gflow.metrics`` to report, if this version has them.
_COUNTERS = ("gradient_bytes", "wire_bytes", "hidden_seconds", "exposed_seconds")


def train(
    rank: Rank,
    backend: str,
    fp16_hook: bool,
    steps: int,
    warmup_steps: int,
    seed: int,
    interface: str,
) -> dict[str, Any]:
    """Train, tell the progress from rank 0, and return what this rank has measured.

    Args:
        rank: this rank.
        backend: name of the backend.
        fp16_hook: whether DDP gets PyTorch's fp16 hook.
        steps: how many.
        warmup_steps: how many of them gflow's own counters leave out.
        seed: of the weights.
        interface: whose sent bytes are counted.
    """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.nn.parallel import DistributedDataParallel
    from train_digits import batches, build_model, evaluate, load_digits

    dist.init_process_group(backend)
    torch.manual_seed(seed)
    train_data, test_data = load_digits()
    model = DistributedDataParallel(build_model())
    if fp16_hook:
        model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = batches(train_data, size=32)

    losses: list[float] = []
    counters_after_warmup = _counters(backend)
    dist.barrier()
    start = time.perf_counter()
    clock, sent = [0.0], [sent_bytes(interface)]
    for step in range(1, steps + 1):
        images, labels = next(data)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        clock.append(time.perf_counter() - start)
        sent.append(sent_bytes(interface))
        if step == warmup_steps:
            counters_after_warmup = _counters(backend)
        if rank.number == 0:
            rank.tell({"step": step, "loss": losses[-1], "seconds": clock[-1] - clock[-2]})
    dist.barrier()

    counted_steps = steps - warmup_steps
    counters = {
        name: (value - counters_after_warmup[name]) / counted_steps
        for name, value in _counters(backend).items()
    }
    train_loss, _ = evaluate(model.module, train_data)
    _, test_accuracy = evaluate(model.module, test_data)
    dist.destroy_process_group()
    return {
        "clock": clock,
        "sent": sent,
        "losses": losses,
        "train_loss": train_loss,
        "test_accuracy": test_accuracy,
        "counters": counters,
    }


def _counters(backend: str) -> dict[str, float]:
    if backend != "gflow":
        return {}
    import gflow

    metrics = gflow.metrics()
    return {name: getattr(metrics, name) for name in _COUNTERS if hasattr(metrics, name)}
