"""Tests that gflow learns which kind of optimizer steps, and uses it: three levels need to know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import gflow
from gflow.stepping import NAMES, kind_of
from tests.compression.jobs import (
    SMALL_BUCKETS,
    PrescribedGradients,
    gradients,
    layout_of,
    same_bits,
    take_gradients,
)
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


def test_a_velocity_is_not_taken_for_the_sizes_of_adam() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    own = KeepsNothing([parameter], lr=0.1)
    own.state[parameter]["v"] = torch.zeros(2)
    assert kind_of(own) == ""
    own.state[parameter]["m"] = torch.zeros(2)
    assert kind_of(own) == "normalized"


def test_an_optimizer_that_holds_another_steps_like_it() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2))]
    outer = KeepsNothing(parameters, lr=0.1)
    outer.inner = torch.optim.SGD(parameters, lr=0.1)
    assert kind_of(outer) == "proportional"
    outer.other = torch.optim.Adam(parameters, lr=0.1)
    assert kind_of(outer) == ""


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


def optimizers_of(model: torch.nn.Module, names: list[str]) -> list[torch.optim.Optimizer]:
    """For each parameter, in turn, the optimizer of this name steps by it; none if it is empty."""
    shares: dict[str, list[torch.nn.Parameter]] = {}
    for index, parameter in enumerate(model.parameters()):
        shares.setdefault(names[index % len(names)], []).append(parameter)
    return [
        (OPTIMIZERS.get(name) or getattr(torch.optim, name))(share, lr=0.0)
        for name, share in shares.items()
        if name
    ]


def used_by(
    model: DistributedDataParallel, optimizers: list[torch.optim.Optimizer], rank: int
) -> list[str]:
    """What gradients are sent as in each step of a training."""
    used = []
    for step in range(STEPS):
        model(gradients(rank, step)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        used.append(gflow.metrics().method)
    return used


def methods(rank: int, world: int, names: list[str]) -> list[str]:
    """What gradients are sent as in each step."""
    model = DistributedDataParallel(PrescribedGradients())
    return used_by(model, optimizers_of(model, names), rank)


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


Delivered = list[list[torch.Tensor]]


def train(
    rank: int, world: int, names: list[str], ddp_options: dict[str, Any], steps: int = STEPS
) -> dict[str, Any]:
    """What is delivered in each step, and how the parameters are laid out in the end."""
    model = DistributedDataParallel(PrescribedGradients(), **ddp_options)
    optimizers = optimizers_of(model, names)
    delivered: Delivered = []
    for step in range(steps):
        model(gradients(rank, step)).backward()
        for optimizer in optimizers:
            optimizer.step()
        delivered.append(take_gradients(model))
    return {"delivered": delivered, "layout": layout_of(model)}


def at_the_end(found: dict[str, Any], parameters: list[int]) -> Delivered:
    """What is delivered of these parameters while gradients are compressed."""
    return [[step[index] for index in parameters] for step in found["delivered"][3:]]


@pytest.mark.parametrize(
    ("name", "option"), [("AdamW", "adam"), ("SGD", "sgd"), ("LikeAdam", "adam"), ("zero", "adam")]
)
def test_what_is_seen_has_the_same_effect_as_what_is_said(
    compressing: Callable[..., Team], name: str, option: str
) -> None:
    seen = compressing(2, method="ternary").run(train, [name], {})
    said = {
        kind: compressing(2, method="ternary", optimizer=kind).run(train, [name], {})
        for kind in NAMES
    }
    assert same_bits(seen, said[option])
    assert not same_bits(said["adam"], said["sgd"])


# Laid out in three buckets: the last two parameters, the third, and the first two.
BY_PARAMETER = ["AdamW", "AdamW", "SGD", "AdamW", "SGD"]


@pytest.mark.parametrize(
    "ddp_options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ],
    ids=["plain", "bucket_view", "static_graph", "find_unused"],
)
@pytest.mark.parametrize(
    "names", [BY_PARAMETER, ["AdamW", "AdamW", "SGD", "AdamW", ""]], ids=["mixed", "unseen"]
)
def test_each_bucket_goes_by_the_optimizers_of_all_of_its_parameters(
    compressing: Callable[..., Team], names: list[str], ddp_options: dict[str, Any]
) -> None:
    small = ddp_options | {"bucket_cap_mb": SMALL_BUCKETS}
    alone = {"fusion_bytes": 0}

    def run(method: str, optimizer: str) -> dict[str, Any]:
        team = compressing(2, method=method, optimizer=optimizer, **alone)
        first, second = team.run(train, names, small, STEPS + 2)
        assert same_bits(first, second)
        return first

    seen = run("ternary", "auto")
    expected = {
        ("AdamW",): run("ternary", "adam"),
        ("SGD",): run("ternary", "sgd"),
        # As long as it is unknown, five levels, chosen as for SGD.
        None: run("quinary", "sgd"),
    }
    found = set()
    for bucket in seen["layout"]:
        kinds = tuple({names[index] for index in bucket})
        kinds = kinds if kinds in expected else None
        found.add(kinds)
        for other, run_of_it in expected.items():
            # Only what is compressed differs.
            alike = same_bits(at_the_end(seen, bucket)[-2:], at_the_end(run_of_it, bucket)[-2:])
            assert alike == (other == kinds), (bucket, kinds, other)
    # Models that may leave parameters unused keep their first buckets, in which others meet.
    assert found >= (
        {None, ("AdamW",)} if "find_unused_parameters" in ddp_options else expected.keys()
    )


def a_pair(rank: int, world: int) -> list[tuple[str, str]]:
    """What the gradients of two models are sent as; the second one's optimizer steps late."""
    models = [DistributedDataParallel(PrescribedGradients()) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.0) for model in models]
    used = []
    for step in range(10):
        of_step = []
        for model, optimizer, first in zip(models, optimizers, (0, 6), strict=True):
            model(gradients(rank, step)).backward()
            if step >= first:
                optimizer.step()
            of_step.append(gflow.metrics().method)
        used.append(tuple(of_step))
    return used


def test_an_optimizer_that_has_not_stepped_yet_is_not_known_by_another_one(
    compressing: Callable[..., Team],
) -> None:
    for used in compressing(2, method="ternary").run(a_pair):
        assert used[4:] == 3 * [("ternary", "quinary")] + 3 * [("ternary", "ternary")]


def frozen_later(rank: int, world: int) -> list[str]:
    """What gradients are sent as, if a parameter is frozen after the model was wrapped."""
    plain = PrescribedGradients()
    model = DistributedDataParallel(plain, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.0)
    plain.weights[1].requires_grad_(False)
    return used_by(model, [optimizer], rank)


def test_a_parameter_that_is_frozen_later_does_no_harm(compressing: Callable[..., Team]) -> None:
    for used in compressing(2, method="ternary").run(frozen_later):
        assert used[-2:] == ["ternary", "ternary"]


def wrapped_late(rank: int, world: int) -> list[str]:
    """What gradients are sent as, if the optimizer has stepped before the model was wrapped."""
    plain = PrescribedGradients()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.0)
    plain(gradients(rank, 0)).backward()
    optimizer.step()
    model = DistributedDataParallel(plain)
    return used_by(model, [optimizer], rank)


def test_an_optimizer_that_has_stepped_before_the_model_was_wrapped_is_known(
    compressing: Callable[..., Team],
) -> None:
    for used in compressing(2, method="ternary").run(wrapped_late):
        assert used[-2:] == ["ternary", "ternary"]


def resume(rank: int, world: int, names: list[str]) -> dict[str, Any]:
    """What is delivered in the step after a state was saved, and by a job that resumes with it."""
    first = DistributedDataParallel(PrescribedGradients(), bucket_cap_mb=SMALL_BUCKETS)
    optimizers = optimizers_of(first, names)
    for step in range(STEPS):
        first(gradients(rank, step)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = gflow.state_dict(models=[first])
    first(gradients(rank, STEPS)).backward()
    second = DistributedDataParallel(PrescribedGradients(), bucket_cap_mb=SMALL_BUCKETS)
    gflow.load_state_dict(state, models=[second])
    at_once = gflow.state_dict(models=[second])
    second(gradients(rank, STEPS)).backward()
    return {
        "stepping": state["models"][0]["stepping"],
        "at once": same_bits(state, at_once),
        "same": same_bits(take_gradients(first), take_gradients(second)),
    }


def test_a_resumed_job_knows_the_optimizers_before_they_step(
    compressing: Callable[..., Team],
) -> None:
    kinds = {"AdamW": "normalized", "SGD": "proportional"}
    for found in compressing(2, method="ternary", fusion_bytes=0).run(resume, BY_PARAMETER):
        assert found == {
            "stepping": [kinds[name] for name in BY_PARAMETER],
            "at once": True,
            "same": True,
        }


def resumed_by_another(rank: int, world: int) -> list[str]:
    """What gradients are sent as by a job that resumes with an optimizer nobody knows."""
    first = DistributedDataParallel(PrescribedGradients())
    known = optimizers_of(first, ["AdamW"])
    used_by(first, known, rank)
    second = DistributedDataParallel(PrescribedGradients())
    gflow.load_state_dict(gflow.state_dict(models=[first]), models=[second])
    return used_by(second, optimizers_of(second, ["KeepsNothing"]), rank)


def test_an_optimizer_that_nobody_knows_counts_for_more_than_the_one_of_a_loaded_state(
    compressing: Callable[..., Team],
) -> None:
    for used in compressing(2, method="ternary").run(resumed_by_another):
        assert used[0] == "ternary"
        assert used[-1] == "quinary"


def stepped_twice(rank: int, world: int) -> list[str]:
    """What gradients are sent as if a second optimizer, which nobody knows, steps as well."""
    model = DistributedDataParallel(PrescribedGradients())
    optimizers = optimizers_of(model, ["AdamW"]) + optimizers_of(model, ["KeepsNothing"])
    return used_by(model, optimizers, rank)


def test_parameters_that_an_unknown_optimizer_steps_by_too_are_not_known(
    compressing: Callable[..., Team],
) -> None:
    for used in compressing(2, method="ternary").run(stepped_twice):
        assert used[-1] == "quinary"
