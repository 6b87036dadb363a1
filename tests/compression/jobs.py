"""Jobs that ranks run in these tests: models with prescribed gradients, and their training.

A prescribed gradient is known to the bit before the backward pass, on every rank and in the test
itself, so what DDP must deliver can be computed without DDP.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gflow

RANK_VARIABLE = "COMPRESSION_TEST_RANK"

# With a cap of 0.001 MB these are three buckets; the last chunk of each is short.
SIZES = (3000, 64, 700, 1500, 10)
SMALL_BUCKETS = 0.001
CHUNK = 64
DENSITY = 0.1
WARMUP = 2

# One of each family of codecs, ternary for each kind of optimizer; and the part of what is kept
# that is added to the next gradient. The rest is let go.
FEEDBACK = {
    "chunks": 1.0,
    "fp16": 1.0,
    "int8": 1.0,
    "int3": 0.75,
    "ternary-adam": 0.75,
    "ternary-sgd": 0.75,
    # Like others of these, with other numbers.
    "bf16": 1.0,
    "int4": 0.75,
    "quinary": 0.75,
}
FAMILIES = ("chunks", "fp16", "int8", "int3", "ternary-adam", "ternary-sgd")
# As arguments of tests.
EVERY_FAMILY = [
    pytest.param(family, marks=() if family in FAMILIES else pytest.mark.thorough)
    for family in FEEDBACK
]
# Where a case is repeated: one that is summed on the wire, and one that goes in two legs.
REPEATED = [
    pytest.param(family, marks=() if family in ("chunks", "ternary-adam") else pytest.mark.thorough)
    for family in FEEDBACK
]
LOSSLESS = tuple(family for family in FAMILIES if FEEDBACK[family] == 1.0)


def options_of(family: str) -> dict[str, str]:
    """The options that choose a family."""
    method, _, optimizer = family.partition("-")
    return {"method": method} | ({"optimizer": optimizer} if optimizer else {})


@dataclass(frozen=True)
class Chosen:
    """Makes the options of a group in the rank. Comparable, so that a group can be kept."""

    layout: str | None
    options: tuple[tuple[str, Any], ...] = ()

    def __call__(self) -> gflow.Options:
        usual: dict[str, Any] = {
            "compress": "on",
            "method": "chunks",
            "warmup_steps": WARMUP,
            "ramp_steps": 0,
            "density": DENSITY,
            "chunk": CHUNK,
        }
        if self.layout:
            host = self.layout[int(os.environ[RANK_VARIABLE])]
            usual |= {"compress": "auto", "host_id": f"host {host}"}
        return gflow.Options(**(usual | dict(self.options)))


class PrescribedGradients(nn.Module):
    """A model whose gradients are exactly its inputs."""

    def __init__(self, sizes: tuple[int, ...] = SIZES, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(n, dtype=dtype)) for n in sizes)

    def forward(self, gradients: list[torch.Tensor | None]) -> torch.Tensor:
        pairs = zip(self.weights, gradients, strict=True)
        # A parameter whose gradient is None takes no part.
        return sum((w * g).sum() for w, g in pairs if g is not None)


def gradients(
    rank: int, step: int, sizes: tuple[int, ...] = SIZES, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """The gradient of each parameter, before DDP divides it. Stretches of it differ in size, or
    there would be nothing to choose between."""
    made = []
    for index, numel in enumerate(sizes):
        generator = torch.Generator().manual_seed(100_000 * step + 100 * rank + index)
        size = torch.randn(numel // 50 + 1, generator=generator).exp().repeat_interleave(50)
        made.append((torch.randn(numel, generator=generator) * size[:numel]).to(dtype))
    return made


def divided(given: list[torch.Tensor], world: int) -> list[torch.Tensor]:
    """As they are in DDP's buckets, to the bit."""
    return [gradient * (1.0 / world) for gradient in given]


def layout_of(model: DistributedDataParallel) -> list[list[int]]:
    """For each bucket, the indices of its parameters in order."""
    numbers = {id(parameter): index for index, parameter in enumerate(model.module.parameters())}
    buckets = model.reducer._get_zeros_like_grad_buckets()
    return [[numbers[id(parameter)] for parameter in bucket.parameters()] for bucket in buckets]


def take_gradients(model: nn.Module) -> list[torch.Tensor]:
    """Takes the gradients from the model, with zeros where there are none."""
    taken = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return taken


@dataclass
class Record:
    """One rank's record of a training."""

    # By step and parameter.
    delivered: list[list[torch.Tensor]] = field(default_factory=list)
    layout: list[list[int]] = field(default_factory=list)
    # After each step; and at the end.
    states: list[dict[str, Any]] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)

    def note(self, model: DistributedDataParallel) -> None:
        """Takes the gradients of a step from the model, and notes them with what is kept."""
        self.delivered.append(take_gradients(model))
        # Looking for all models would take a tenth of a second.
        self.state = gflow.state_dict(models=[model])
        self.states.append(self.state)


def train(
    rank: int,
    world: int,
    steps: int,
    ddp_options: dict[str, Any] | None = None,
    sizes: tuple[int, ...] = SIZES,
    dtype: torch.dtype = torch.float32,
) -> Record:
    """A few steps of a model with prescribed gradients."""
    model = DistributedDataParallel(PrescribedGradients(sizes, dtype), **(ddp_options or {}))
    record = Record()
    for step in range(steps):
        model(gradients(rank, step, sizes, dtype)).backward()
        record.note(model)
    record.layout = layout_of(model)
    return record


class Listener(logging.Handler):
    """While it is entered, it hears what gflow logs: level and text of each record."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append((record.levelno, record.getMessage()))

    def __enter__(self) -> Listener:
        logging.getLogger("gflow").addHandler(self)
        return self

    def __exit__(self, *_: Any) -> None:
        logging.getLogger("gflow").removeHandler(self)


def own_sum(
    world: int,
    steps: int,
    sizes: tuple[int, ...] = SIZES,
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """For each parameter, the sum of all ranks' gradients, in double precision."""
    every = (sum_of_step(world, step, sizes, dtype) for step in range(steps))
    return [sum(parts) for parts in zip(*every, strict=True)]


def sum_of_step(
    world: int,
    step: int,
    sizes: tuple[int, ...] = SIZES,
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """The same for one step."""
    own = (divided(gradients(rank, step, sizes, dtype), world) for rank in range(world))
    return [sum(part.double() for part in parts) for parts in zip(*own, strict=True)]


def kept(
    states: list[dict[str, Any]], kind: str = "residual", model: int = 0
) -> dict[str, torch.Tensor]:
    """For each parameter, what all ranks together have not sent yet, in double precision."""
    totals: dict[str, torch.Tensor] = {}
    for state in states:
        saved = state["models"][model]
        for bucket in saved["buckets"]:
            names = [saved["parameters"][number] for number in bucket["parameters"]]
            whole = torch.zeros(sum(numel for _, numel in names), dtype=torch.float64)
            start, end = bucket["shard"]
            if bucket[kind].numel():
                assert bucket[kind].numel() == end - start
                whole[start:end] = bucket[kind].double()
            for (name, numel), part in zip(
                names, whole.split([numel for _, numel in names]), strict=True
            ):
                assert part.numel() == numel
                totals[name] = totals.get(name, 0) + part
    return totals


def residuals(state: dict[str, Any]) -> list[torch.Tensor]:
    """The residuals of one rank, bucket by bucket."""
    return [bucket["residual"] for model in state["models"] for bucket in model["buckets"]]


def everything_kept(state: dict[str, Any]) -> list[torch.Tensor]:
    """Residuals, velocities and sizes of one rank, bucket by bucket."""
    buckets = [bucket for model in state["models"] for bucket in model["buckets"]]
    return [bucket[kind] for bucket in buckets for kind in ("residual", "velocity", "sizes")]


def bytes_of(tensor: torch.Tensor) -> bytes:
    # NumPy does not know bfloat16.
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same_bits(left: Any, right: Any) -> bool:
    """Whether two nested structures are equal, tensors to the bit."""
    if isinstance(left, torch.Tensor):
        return (
            isinstance(right, torch.Tensor)
            and left.dtype == right.dtype
            and left.shape == right.shape
            and bytes_of(left) == bytes_of(right)
        )
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same_bits(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same_bits, left, right))
    return left == right
