"""The contenders of ``gflow bench ddp``: replicas of one network that differ in who exchanges
gradients.

A competitor never does less than the others: after a step its replicas have the same weights on all
ranks. Contenders that exchange nothing only show what a step takes without communication.
"""

from __future__ import annotations

import time
from typing import Any

from gflow.bench.ddp.networks import NETWORKS
from gflow.bench.groups import compress_between, gflow_warnings
from gflow.bench.turns import Device
from gflow.launch.rank import Rank

#: What gradients can be sent as by a contender that is called gflow-METHOD.
_METHODS = (
    "exact",
    "fp16",
    "bf16",
    "int8",
    "int4",
    "int3",
    "quinary",
    "ternary",
    "chunks",
)
#: By name on the command line, how each is shown; in this order.
LABELS = {
    "none": "no communication",
    "ddp-only": "DDP alone",
    "gloo": "Gloo",
    "gloo-fp16": "Gloo, fp16 hook",
    "nccl": "NCCL",
    "nccl-fp16": "NCCL, fp16 hook",
    "powersgd": "PowerSGD",
    **{f"gflow-{method}": f"gflow, {method}" for method in _METHODS},
    "gflow": "gflow",
}
#: These always send less than an exact exchange: at most so much of it.
_LESS = 0.75
_COMPRESSING = tuple(method for method in _METHODS if method != "exact")
#: Not among the contenders if no names are given: each holds a network of its own in memory.
_ON_REQUEST = ("gflow-fp16", "gflow-bf16", "gflow-int8", "gflow-int4", "gflow-quinary")
#: The baseline for the others, by type of device.
RIVALS = {"cpu": "gloo", "cuda": "nccl"}
#: Exchanged by torch's hook; gflow has fp16 as a method.
_FP16_HOOKS = tuple(f"{rival}-fp16" for rival in RIVALS.values())
_OF_RIVALS = tuple(name for name in LABELS if name.partition("-")[0] in RIVALS.values())
#: Their replicas drift apart; they only show the cost of the rest of a step.
WITHOUT_EXCHANGE = ("none", "ddp-only")
#: A contender with a method of its own sends by it after as few dense steps as gflow allows.
_WARMUP_STEPS, _RAMP_STEPS = 2, 0
#: gflow's default method may take its choice at the end of the dense steps, by what it has measured
#: in them.
_DEFAULT_WARMUP_STEPS = 20
#: After the dense steps: the first one by the method allocates what is kept from then on. DDP
#: rebuilds its buckets in the dense ones.
_SETTLING_STEPS = 4
_POWERSGD_RANK = 2
#: With several buckets PowerSGD's collectives race on Gloo, and ranks disagree on their order.
_ONE_BUCKET_MB = 1 << 14
#: Small enough for weights trained on random data to stay finite, large enough to change them.
_LEARNING_RATE = 1e-3
#: Fields of ``gflow.metrics`` that grow from step to step, besides the stages.
_COUNTERS = (
    "gradient_buckets",
    "gradient_bytes",
    "wire_bytes",
    "hidden_seconds",
    "exposed_seconds",
)


def default_names(device: str) -> list[str]:
    """The contenders if no names are given.

    On GPUs, where it takes a network to be slower than them, those that send few bits are on
    request only.
    """
    few_bits = ("gflow-int3", "gflow-ternary") if device == "cuda" else ()
    return [
        name
        for name in LABELS
        if name not in (*_ON_REQUEST, *few_bits) and why_not(name, device) is None
    ]


def why_not(name: str, device: str) -> str | None:
    """Why a contender cannot take part with tensors on this type of device, if it cannot."""
    if name in _OF_RIVALS and name.partition("-")[0] != RIVALS[device]:
        return f"with --device {device} that is {LABELS[RIVALS[device]]}"
    return None


def settling_steps(name: str) -> int:
    """How many steps a contender takes before it is timed: gflow's dense ones and some more."""
    return _warmup_steps(name) + _SETTLING_STEPS


def _warmup_steps(name: str) -> int:
    return _DEFAULT_WARMUP_STEPS if name == "gflow" else _WARMUP_STEPS


def make(name: str, rank: Rank, plan: dict[str, Any]) -> Replica:
    """Make the contender of that name, from the plan of ``options.prepare``."""
    return Replica(name, rank, plan)


class Replica:
    """A contender, on a rank: its own network, process group and optimizer.

    Its first steps allocate the memory of its gradients, which is then kept, as in a job.
    """

    def __init__(self, name: str, rank: Rank, plan: dict[str, Any]) -> None:
        import torch

        self._name, self._world = name, rank.world
        with gflow_warnings() as warnings:
            self._group = _group(name, plan)
        self.info: dict[str, Any] = {"warnings": warnings}
        self._device = Device.of_rank(rank, plan["device"])
        torch.manual_seed(0)
        network = _network(plan["model"]).to(self._device.name)
        self._module = _parallel(name, network, self._group, plan)
        self._parameters = list(network.parameters())
        self._optimizer = torch.optim.SGD(self._parameters, lr=_LEARNING_RATE)
        self._loss = torch.nn.CrossEntropyLoss()
        # Each rank has its own images: without an exchange the weights would differ.
        torch.manual_seed(1 + rank.number)
        images = torch.randn(plan["batch"], 3, plan["image"], plan["image"])
        self._images = images.to(self._device.name)
        self._labels = torch.randint(1000, (plan["batch"],)).to(self._device.name)

    def turn(self, skipped: int, counted: int) -> list[float]:
        """Seconds of each step on this rank."""
        for _ in range(skipped):
            self._step()
        seconds = []
        for _ in range(counted):
            start = time.perf_counter()
            self._step()
            seconds.append(time.perf_counter() - start)
        return seconds

    def check(self) -> None:
        """Raise if the ranks of a contender that exchanges gradients have different weights."""
        import torch
        import torch.distributed as dist

        if self._name in WITHOUT_EXCHANGE:
            return
        # Sum the bits: different weights hardly ever have equal sums.
        sums = [one.detach().view(torch.int32).sum(dtype=torch.int64) for one in self._parameters]
        own = torch.stack(sums).cpu()
        all_ranks = [torch.empty_like(own) for _ in range(self._world)]
        dist.all_gather(all_ranks, own)
        if not all(torch.equal(own, other) for other in all_ranks):
            raise RuntimeError(f"{LABELS[self._name]}: the ranks have different weights")
        if not all(bool(one.isfinite().all()) for one in self._parameters):
            raise RuntimeError(f"{LABELS[self._name]}: the weights are no numbers any more")

    def settle(self) -> None:
        """Take the steps that come before timed ones; raise if it does not send less by then."""
        for _ in range(settling_steps(self._name) - 1):
            self._step()
        before = self._exact_and_sent()
        self._step()
        exact, sent = (now - then for now, then in zip(self._exact_and_sent(), before, strict=True))
        if self._name.removeprefix("gflow-") in _COMPRESSING and not 0 < sent < _LESS * exact:
            raise RuntimeError(f"{LABELS[self._name]}: it is not past its dense steps")

    def _exact_and_sent(self) -> tuple[float, float]:
        """Bytes that an exact exchange would have sent so far on this rank, and those sent."""
        if not self._name.startswith("gflow"):
            return 0.0, 0.0
        import gflow

        metrics = gflow.metrics(self._group)
        return metrics.carried_bytes * 2 * (1 - 1 / metrics.hosts), metrics.wire_bytes

    def counters(self) -> dict[str, float]:
        """gflow's own counters so far on this rank; empty for others."""
        if not self._name.startswith("gflow"):
            return {}
        import gflow

        metrics = gflow.metrics(self._group)
        counts = {name: float(getattr(metrics, name)) for name in _COUNTERS}
        # Stages are only timed where gradients are compressed.
        stages = metrics.stage_seconds if metrics.compresses else {}
        return counts | {f"stage_{name}_seconds": seconds for name, seconds in stages.items()}

    def close(self) -> None:
        """Free the memory; the group ends with all others."""
        del self._module, self._optimizer, self._parameters

    def _step(self) -> None:
        self._loss(self._module(self._images), self._labels).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._device.synchronize()


def _network(model: str) -> Any:
    from gflow import models

    return getattr(models, NETWORKS[model].name)()


def _group(name: str, plan: dict[str, Any]) -> Any:
    import torch.distributed as dist

    import gflow

    if name == "none":
        return None
    if name == "gflow-exact":
        return dist.new_group(backend="gflow", pg_options=gflow.Options(compress="off"))
    if name.startswith("gflow"):
        options = gflow.Options(
            compress=compress_between(plan["hosts"]),
            method=None if name == "gflow" else name.removeprefix("gflow-"),
            density=plan["density"],
            fusion_bytes=plan["fusion_bytes"],
            warmup_steps=_warmup_steps(name),
            ramp_steps=_RAMP_STEPS,
        )
        return dist.new_group(backend="gflow", pg_options=options)
    return dist.new_group(backend=RIVALS[plan["device"]])


def _parallel(name: str, network: Any, group: Any, plan: dict[str, Any]) -> Any:
    """The network as this contender trains it."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    if name == "none":
        return network
    module = DistributedDataParallel(
        network,
        process_group=group,
        gradient_as_bucket_view=plan["bucket_view"],
        bucket_cap_mb=_ONE_BUCKET_MB if name == "powersgd" else None,
    )
    if name == "ddp-only":
        module.register_comm_hook(None, _keep)
    if name in _FP16_HOOKS:
        module.register_comm_hook(group, default_hooks.fp16_compress_hook)
    if name == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=_POWERSGD_RANK, start_powerSGD_iter=_WARMUP_STEPS
        )
        module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return module


def _keep(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses hints that are not its own
    """A hook that exchanges nothing: each rank continues with its own gradients."""
    import torch

    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
