"""Tests that gflow learns which kind of optimizer steps, and uses it: three levels need to know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import gflow
from gflow.stepping import kind_of
from tests.compression.jobs import PrescribedGradients, gradients
from tests.ranks import Team

# DDP lays out its buckets anew after the first step; two exact steps follow.
STEPS = 6


@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "Adamax"])
def test_optimizers_that_divide_by_the_size_of_each_element_are_told_apart(name: str) -> None:
    optimizer = getattr(torch.optim, name)([torch.nn.Parameter(torch.ones(2))])
    assert kind_of(optimizer) == "normalized"


@pytest.mark.parametrize("name", ["SGD", "ASGD", "LBFGS"])
def test_optimizers_that_step_in_proportion_are_told_apart(name: str) -> None:
    optimizer = getattr(torch.optim, name)([torch.nn.Parameter(torch.ones(2))])
    assert kind_of(optimizer) == "proportional"


def test_an_optimizer_of_somebody_else_is_known_by_what_it_keeps_or_by_its_ancestor() -> None:
    class Own(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> Any:
            return None

    class Derived(torch.optim.AdamW):
        pass

    parameter = torch.nn.Parameter(torch.ones(2))
    own = Own([parameter], {})
    assert kind_of(own) == ""
    own.state[parameter]["exp_avg_sq"] = torch.zeros(2)
    assert kind_of(own) == "normalized"
    assert kind_of(Derived([parameter])) == "normalized"


class LikeAdam(torch.optim.Optimizer):
    """Somebody else's: it shows what it is by what it keeps from its first step on."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["exp_avg_sq"] = parameter.grad.square()


class KeepsNothing(torch.optim.Optimizer):
    """Somebody else's: nothing shows what it is."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        return None


def zero(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """torch's ZeRO, which holds an Adam and is no Adam itself."""
    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=lr)


OPTIMIZERS = {"LikeAdam": LikeAdam, "KeepsNothing": KeepsNothing, "zero": zero}


def methods(rank: int, world: int, names: list[str]) -> list[str]:
    """What gradients are sent as in each step, if these optimizers step one half each."""
    model = DistributedDataParallel(PrescribedGradients())
    parameters = list(model.parameters())
    shares = [parameters[index :: len(names)] for index in range(len(names))]
    optimizers = [
        (OPTIMIZERS.get(name) or getattr(torch.optim, name))(share, lr=0.0)
        for name, share in zip(names, shares, strict=True)
    ]
    used = []
    for step in range(STEPS):
        model(gradients(rank, step)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        used.append(gflow.metrics().method)
    return used


@pytest.mark.parametrize(
    ("names", "option", "used"),
    [
        (["AdamW"], "auto", "ternary"),
        (["SGD"], "auto", "ternary"),
        (["AdamW", "SGD"], "auto", "quinary"),
        (["LikeAdam"], "auto", "ternary"),
        (["KeepsNothing"], "auto", "quinary"),
        (["zero"], "auto", "ternary"),
        (["AdamW", "SGD"], "adam", "ternary"),
    ],
)
def test_three_levels_are_used_where_it_is_known_who_steps(
    compressing: Callable[..., Team], names: list[str], option: str, used: str
) -> None:
    for result in compressing(2, method="ternary", optimizer=option).run(methods, names):
        assert result[:2] == ["exact", "exact"]
        assert result[-2:] == [used, used]
