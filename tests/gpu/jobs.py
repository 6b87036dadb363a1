"""Jobs that ranks run in the device tests. Training jobs take the device as an argument, so that
their results can be compared bit for bit with the CPU's.

A group's options load the device, because a rank evaluates them before it makes the group.
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
from tests.compression import jobs as plain
from tests.compression.jobs import RANK_VARIABLE, SMALL_BUCKETS, same_bits
from tests.gpu.device import NAME, Standin, load

__all__ = ["CPU", "NAME", "RANK_VARIABLE", "same_bits"]

CPU = "cpu"
_loaded: Standin | None = None


@dataclass(frozen=True)
class Chosen:
    """Makes a group's options in the rank, and loads the device there."""

    files: tuple[str, str, str]
    layout: str | None
    options: tuple[tuple[str, Any], ...] = ()

    def __call__(self) -> gflow.Options:
        global _loaded
        _loaded = load(*self.files)
        return plain.Chosen(self.layout, self.options)()


def standin() -> Standin:
    """The stand-in's hooks, in a rank."""
    assert _loaded is not None, "the group of this rank was not made with Chosen"
    return _loaded


def clean(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a job fail if there was a race or an invalid access on the device."""

    @functools.wraps(function)
    def job(*arguments: Any) -> Any:
        standin().clear()
        # Random delays, so that streams don't stay in step by chance and hide a missing wait.
        standin().delay(100)
        try:
            value = function(*arguments)
            torch.accelerator.synchronize()
        finally:
            standin().delay(0)
        assert not standin().races(), standin().races()
        assert not standin().faults(), standin().faults()
        return value

    return job


def to_host(value: Any) -> Any:
    """The same value with all tensors in host memory."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: to_host(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_host(one) for one in value)
    return value


def model_on(device: str, **options: Any) -> DistributedDataParallel:
    """A model with prescribed gradients in DDP, with several buckets."""
    options.setdefault("bucket_cap_mb", SMALL_BUCKETS)
    return DistributedDataParallel(plain.PrescribedGradients().to(device), **options)


def given_on(device: str, rank: int, step: int) -> list[torch.Tensor]:
    return [gradient.to(device) for gradient in plain.gradients(rank, step)]


def delivered_by(model: nn.Module) -> list[torch.Tensor]:
    return to_host(plain.take_gradients(model))


@clean
def train(
    rank: int, world: int, device: str, steps: int, options: dict[str, Any] | None = None
) -> plain.Record:
    """A few steps of a model with prescribed gradients."""
    model = model_on(device, **(options or {}))
    record = plain.Record()
    for step in range(steps):
        model(given_on(device, rank, step)).backward()
        record.delivered.append(delivered_by(model))
    record.layout = plain.layout_of(model)
    record.state = gflow.state_dict()
    return record
