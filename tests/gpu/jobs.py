"""What ranks do in the tests on the device, and what a test can expect of it.

The options of a group load the device, because they are asked for in the rank before its group is
made. What a model on the device must deliver is what the same model delivers on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gflow
from tests.compression import jobs as on_cpu
from tests.compression.jobs import RANK_VARIABLE, SIZES, SMALL_BUCKETS
from tests.gpu.device import NAME, Standin, load

__all__ = ["RANK_VARIABLE", "Chosen", "clean", "standin", "train"]

_loaded: Standin | None = None


@dataclass(frozen=True)
class Chosen:
    """Gives the options of a group in the rank, which has the device from then on."""

    files: tuple[str, str, str]
    layout: str | None
    options: tuple[tuple[str, Any], ...] = ()

    def __call__(self) -> gflow.Options:
        global _loaded
        _loaded = load(*self.files)
        return on_cpu.Chosen(self.layout, self.options)()


def standin() -> Standin:
    """The hooks of the stand-in, in a rank."""
    assert _loaded is not None, "the group of this rank was not made with Chosen"
    return _loaded


def clean(function: Callable[..., Any]) -> Callable[..., Any]:
    """A job that fails if anything on the device was not ordered, or went astray."""

    @functools.wraps(function)
    def job(*arguments: Any) -> Any:
        standin().clear()
        # What is missing shows only where streams are not in step by chance.
        standin().delay(200)
        try:
            value = function(*arguments)
            torch.accelerator.synchronize()
        finally:
            standin().delay(0)
        assert not standin().races(), standin().races()
        assert not standin().faults(), standin().faults()
        return value

    return job


def on_device(tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [None if tensor is None else tensor.to(NAME) for tensor in tensors]


def to_host(value: Any) -> Any:
    """The same with all tensors in the memory of the host."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: to_host(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_host(one) for one in value)
    return value


def wrapped(module: nn.Module, **options: Any) -> DistributedDataParallel:
    """The module on the device, in DDP."""
    options.setdefault("bucket_cap_mb", SMALL_BUCKETS)
    return DistributedDataParallel(module.to(NAME), **options)


def backward(model: nn.Module, given: list[torch.Tensor | None]) -> None:
    model(on_device(given)).backward()


@clean
def train(
    rank: int,
    world: int,
    steps: int,
    ddp_options: dict[str, Any] | None = None,
    sizes: tuple[int, ...] = SIZES,
    dtype: torch.dtype = torch.float32,
) -> on_cpu.Record:
    """Some steps of a dictated model, as tests.compression.jobs.train makes them on the CPU."""
    model = wrapped(on_cpu.Dictated(sizes, dtype), **(ddp_options or {}))
    record = on_cpu.Record()
    for step in range(steps):
        backward(model, on_cpu.gradients(rank, step, sizes, dtype))
        record.delivered.append(to_host(on_cpu.take_gradients(model)))
    record.layout = on_cpu.layout_of(model)
    record.state = to_host(gflow.state_dict())
    return record
