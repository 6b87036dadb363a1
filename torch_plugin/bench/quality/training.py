"""The trainings of ``gflow bench quality``, on the ranks, one after the other.

Each has a process group of its own, so nothing is left of the previous one; the processes stay,
because starting them and loading torch takes seconds. Weights and data depend on task, seed and
number of ranks alone. Every training is evaluated at the same steps, and evaluations do not count
as training time.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from gflow.bench.groups import gflow_warnings
from gflow.bench.quality.evaluation import evaluate, mean_loss
from gflow.bench.quality.runs import Run
from gflow.bench.quality.tasks import TASKS, Dataset
from gflow.launch.rank import Rank
from gflow.registration import register

#: A training is evaluated so often, besides before its first step; a short one less often.
_EVALUATIONS = 10
#: The learning rate rises for so many steps, but for no more than this part of them, and falls to
#: this part of its maximum.
_RISING_STEPS, _MAX_RISING_PART = 100, 0.05
_LEAST_RATE = 0.1
#: More often than audits end.
_AUDITS_READ_EVERY = 100
#: Norm of the gradient above which it is clipped.
CLIP = 1.0


def measure(rank: Rank, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Train; rank 0 tells a row for each training as soon as it has ended.

    Args:
        rank: this rank.
        runs: the fields of each :class:`Run`.
    """
    import torch
    import torch.distributed as dist

    register()
    torch.set_num_threads(1)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, rank.world, is_master=rank.number == 0)
    datasets: dict[str, Dataset] = {}
    for number, fields in enumerate(runs):
        run = Run(**fields)
        task = TASKS[run.task]
        if task.dataset not in datasets:
            datasets[task.dataset] = task.load()
        with gflow_warnings() as warnings:
            _make_group(rank, dist.PrefixStore(f"run {number}", store), run)
        try:
            result = _train(rank, datasets[task.dataset], run)
            dist.barrier()
        finally:
            dist.destroy_process_group()
        if rank.number == 0:
            about = {"warnings": warnings, "torch": torch.__version__}
            rank.tell({"row": fields | result | about})
    return {}


def _make_group(rank: Rank, store: Any, run: Run) -> None:
    """Make the group of a training. Its options keep their defaults, but for method and chunk.

    Without links, every rank counts as a host.
    """
    import torch.distributed as dist

    import gflow

    compress = "on" if run.rate is None else "auto"
    dist.init_process_group(
        "gflow",
        store=store,
        rank=rank.number,
        world_size=rank.world,
        pg_options=gflow.Options(compress=compress, method=run.method, chunk=run.chunk),
    )


@dataclass
class _Training:
    """A training on this rank, as far as it has come."""

    rank: Rank
    run: Run
    dataset: Dataset
    network: Any
    seconds: list[float] = field(default_factory=list)
    curve: list[dict[str, float]] = field(default_factory=list)
    audits: list[dict[str, Any]] = field(default_factory=list)

    def note_audit(self) -> None:
        """Keep what gflow's last audit has found, if it is new."""
        import gflow

        found = gflow.metrics().certificate
        if found is None or (self.audits and self.audits[-1]["step"] == found.step):
            return
        self.audits.append(
            {
                "step": found.step,
                "method": found.method,
                "noise": found.noise,
                "window_relative_error": found.window_relative_error,
            }
        )

    def evaluate(self, step: int) -> None:
        """Add a point to the curve."""
        loss, accuracy = evaluate(self.rank, self.network, self.dataset.held_out)
        point = {"step": step, "seconds": sum(self.seconds)}
        self.curve.append(point | {"loss": loss, "accuracy": accuracy})
        if self.rank.number == 0:
            self.rank.tell({"step": {"of": self.run.label} | self.curve[-1]})


def _train(rank: Rank, dataset: Dataset, run: Run) -> dict[str, Any]:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    task = TASKS[run.task]
    torch.manual_seed(run.seed)
    network = dataset.network()
    parallel = DistributedDataParallel(network)
    optimizer = task.optimizer(network.parameters(), run.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, run.steps))
    batches = dataset.batches(run.seed, rank.number, rank.world)
    training = _Training(rank, run, dataset, network)
    interval = max(1, run.steps // _EVALUATIONS)
    settled = run.steps // 2
    sent_when_settled = (0.0, 0.0)
    for step in range(run.steps):
        if step % interval == 0 and run.steps - step >= interval:
            training.evaluate(step)
        if step % _AUDITS_READ_EVERY == 0:
            training.note_audit()
        if step == settled:
            sent_when_settled = _carried_and_sent()
        inputs, expected = next(batches)
        start = time.perf_counter()
        mean_loss(parallel(inputs), expected).backward()
        if task.clips:
            torch.nn.utils.clip_grad_norm_(network.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        training.seconds.append(time.perf_counter() - start)
    training.evaluate(run.steps)
    training.note_audit()
    carried, sent = (
        now - before for now, before in zip(_carried_and_sent(), sent_when_settled, strict=True)
    )
    end = training.curve[-1]
    return {
        "loss": end["loss"],
        "accuracy": end["accuracy"],
        "seconds": end["seconds"],
        "step_ms": statistics.median(training.seconds) * 1e3,
        "ratio": carried * 2 * (run.hosts - 1) / run.hosts / sent if sent else 1.0,
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "curve": training.curve,
        "audits": training.audits,
    }


def _carried_and_sent() -> tuple[float, float]:
    """Bytes of gradient that this rank has carried so far, and bytes that it has sent for that."""
    import gflow

    metrics = gflow.metrics()
    return metrics.carried_bytes, metrics.wire_bytes


def rate_at(step: int, steps: int) -> float:
    """The learning rate over its maximum: it rises for a short while, then falls as a cosine.

    Example:
        >>> [round(rate_at(step, 1000), 2) for step in (0, 49, 500, 1000)]
        [0.02, 0.99, 0.55, 0.1]
    """
    rising = (step + 1) / max(1, min(_RISING_STEPS, _MAX_RISING_PART * steps))
    falling = (1 + math.cos(math.pi * min(1.0, step / steps))) / 2
    return min(1.0, rising) * (_LEAST_RATE + (1 - _LEAST_RATE) * falling)
