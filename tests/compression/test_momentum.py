"""Tests momentum in the engine: the same as in the optimizer while everything is exact, and after
that what the method prescribes, with the velocity cleared where an old one was sent."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gflow
from tests.compression.jobs import (
    CHUNK,
    SIZES,
    SMALL_BUCKETS,
    PrescribedGradients,
    divided,
    gradients,
    layout_of,
    same_bits,
    take_gradients,
)
from tests.compression.method import Bucket
from tests.ranks import Team

MOMENTUM = 0.9


def train(
    rank: int, world: int, steps: int, nesterov: bool, momentum: float = MOMENTUM
) -> dict[str, Any]:
    model = DistributedDataParallel(
        PrescribedGradients(), bucket_cap_mb=SMALL_BUCKETS, find_unused_parameters=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, nesterov=nesterov)
    assert gflow.take_momentum(optimizer)
    delivered = []
    for step in range(steps):
        model(gradients(rank, step)).backward()
        optimizer.step()
        delivered.append(take_gradients(model))
    return {
        "delivered": delivered,
        "layout": layout_of(model),
        "weights": [weight.detach() for weight in model.parameters()],
        "optimizer": optimizer.state_dict(),
    }


@pytest.mark.parametrize("nesterov", [False, True], ids=["plain", "nesterov"])
@pytest.mark.parametrize(
    ("world", "wire", "density", "momentum", "clears"),
    [
        (2, "fp32", 0.45, 0.9, False),
        (2, "fp16", 0.1, 0.9, False),
        (2, "fp16", 0.05, 0.1, True),
        (3, "fp16", 0.005, 0.9, True),
    ],
)
def test_the_velocity_is_added_up_and_cleared_where_it_is_sent_if_it_is_old_by_then(
    compressing: Callable[..., Team],
    world: int,
    wire: str,
    density: float,
    momentum: float,
    clears: bool,
    nesterov: bool,
) -> None:
    team = compressing(world, wire=wire, density=density)
    answers = team.run(train, 14, nesterov, momentum)
    for answer in answers:
        assert same_bits(answer["weights"], answers[0]["weights"])
    delivered, layout = answers[0]["delivered"], answers[0]["layout"]
    for indices in layout:
        bucket = Bucket(
            world,
            sum(SIZES[index] for index in indices),
            chunk=CHUNK,
            density=density,
            warmup=2,
            wire=wire,
            momentum=momentum,
            nesterov=nesterov,
            clears_velocity=clears,
        )
        for step, parts in enumerate(delivered):
            own = [divided(gradients(rank, step), world) for rank in range(world)]
            seen = torch.cat([parts[index] for index in indices])
            expected = bucket.exchange(
                [torch.cat([one[index] for index in indices]) for one in own], seen
            )
            nonzero = [index for index, c in enumerate(bucket.chunks) if seen[c].any()]
            assert nonzero == expected.chosen, f"step {step}"
            # The engine may use a fused multiply-add, which rounds once; this file rounds twice.
            allowed = expected.tolerance + 1e-5 * expected.gradient.abs().max()
            assert ((seen - expected.gradient).abs() <= allowed).all(), f"step {step}"


@pytest.mark.parametrize("nesterov", [False, True], ids=["plain", "nesterov"])
def test_while_all_is_exact_training_is_that_of_sgd(
    compressing: Callable[..., Team], nesterov: bool
) -> None:
    steps = 8
    answers = compressing(2, warmup_steps=20).run(train, steps, nesterov)
    weights = [torch.zeros(numel, dtype=torch.float64, requires_grad=True) for numel in SIZES]
    plain = torch.optim.SGD(weights, lr=0.1, momentum=MOMENTUM, nesterov=nesterov)
    for step in range(steps):
        for index, weight in enumerate(weights):
            weight.grad = sum(gradients(rank, step)[index].double() / 2 for rank in range(2))
        plain.step()
    for answer in answers:
        for weight, expected in zip(answer["weights"], weights, strict=True):
            limit = 1e-6 * expected.abs().max()
            assert (weight.double() - expected.detach()).abs().max() <= limit


def an_optimizer_before_and_after(rank: int, world: int) -> dict[str, Any]:
    model = nn.Linear(30, 30)
    optimizer = torch.optim.SGD(
        [
            {"params": [model.weight], "weight_decay": 0.01, "lr": 0.5},
            {"params": [model.bias], "weight_decay": 0.0},
        ],
        lr=0.1,
        momentum=MOMENTUM,
        nesterov=True,
    )
    model(torch.ones(30)).sum().backward()
    optimizer.step()
    had = len(optimizer.state_dict()["state"])
    taken = gflow.take_momentum(optimizer)
    groups = copy.deepcopy(optimizer.param_groups)
    again = gflow.take_momentum(optimizer)
    return {
        "had": had,
        "taken": (taken, again),
        "groups": [[g["momentum"], g["nesterov"], g["weight_decay"], g["lr"]] for g in groups],
        "again": [[g["momentum"], g["weight_decay"]] for g in optimizer.param_groups],
        "buffers": [s.get("momentum_buffer") for s in optimizer.state.values()],
    }


def test_the_optimizer_is_left_without_momentum_and_with_as_strong_a_weight_decay(
    compressing: Callable[..., Team],
) -> None:
    for seen in compressing(2).run(an_optimizer_before_and_after):
        assert seen["had"] == 2
        assert seen["taken"] == (True, True)
        assert seen["groups"][0] == [0.0, False, pytest.approx(0.1), 0.5]
        assert seen["groups"][1] == [0.0, False, 0.0, 0.1]
        # Taken twice, it is divided once.
        assert seen["again"] == [[0.0, pytest.approx(0.1)], [0.0, 0.0]]
        assert seen["buffers"] == [None, None]


def on_one_host(rank: int, world: int) -> list[Any]:
    weight = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, weight_decay=0.1)
    before = copy.deepcopy(optimizer.state_dict())
    return [gflow.take_momentum(optimizer), before == optimizer.state_dict()]


@pytest.mark.parametrize("options", [{"compress": "off"}, {"compress": "auto"}], ids=str)
def test_where_nothing_is_compressed_the_optimizer_keeps_its_momentum(
    compressing: Callable[..., Team], options: dict[str, Any]
) -> None:
    assert compressing(2, **options).run(on_one_host) == [[False, True]] * 2


def refusals(rank: int, world: int) -> dict[str, str]:
    def sgd(dtype: torch.dtype = torch.float32, **options: Any) -> torch.optim.Optimizer:
        weights = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3, dtype=dtype))]
        return torch.optim.SGD(weights, lr=0.1, **options)

    weights = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))]
    wrong = {
        "adam": torch.optim.Adam(weights),
        "nothing": None,
        "no momentum": sgd(),
        "dampening": sgd(momentum=0.9, dampening=0.1),
        "double": sgd(torch.float64, momentum=0.9),
        "complex": sgd(torch.complex64, momentum=0.9),
        "one": sgd(momentum=1.0),
        "different": torch.optim.SGD(
            [{"params": weights[:1], "momentum": 0.5}, {"params": weights[1:]}],
            lr=0.1,
            momentum=0.9,
        ),
    }
    said = {}
    for name, optimizer in wrong.items():
        before = copy.deepcopy(optimizer.state_dict()) if optimizer else None
        try:
            gflow.take_momentum(optimizer)
        except (TypeError, ValueError) as error:
            said[name] = f"{type(error).__name__}: {error}"
        assert optimizer is None or optimizer.state_dict() == before
    return said


def test_what_cannot_be_taken_is_refused_and_left_alone(compressing: Callable[..., Team]) -> None:
    for said in compressing(2).run(refusals):
        assert "expected a torch.optim.SGD, got Adam" in said["adam"]
        assert "got NoneType" in said["nothing"]
        assert "momentum 0" in said["no momentum"]
        assert "dampening is not supported" in said["dampening"]
        assert "1 parameters are of torch.float64" in said["double"]
        assert "1 parameters are of torch.complex64" in said["complex"]
        assert "momentum 1.0" in said["one"]
        assert "expected one momentum for all parameter groups" in said["different"]
        assert all(text.startswith(("TypeError: ", "ValueError: ")) for text in said.values())


def optimizer_states(rank: int, world: int, order: str) -> list[Any]:
    def make() -> tuple[nn.Parameter, torch.optim.SGD]:
        weight = nn.Parameter(torch.zeros(3))
        return weight, torch.optim.SGD([weight], lr=0.1, momentum=0.9, weight_decay=0.1)

    _, first = make()
    if order.startswith("taken"):
        gflow.take_momentum(first)
    saved = copy.deepcopy(first.state_dict())
    _, second = make()
    if order.endswith("before"):
        second.load_state_dict(saved)
        gflow.take_momentum(second)
    else:
        gflow.take_momentum(second)
        second.load_state_dict(saved)
        # A state from before take_momentum brings momentum back: it has to be taken again.
        if order.startswith("plain"):
            gflow.take_momentum(second)
    (group,) = second.param_groups
    return [group["momentum"], round(group["weight_decay"], 6)]


@pytest.mark.parametrize("order", ["taken before", "taken after", "plain before", "plain after"])
def test_an_optimizers_state_may_be_loaded_before_or_after(
    compressing: Callable[..., Team], order: str
) -> None:
    assert compressing(2, {"kept": True}).run(optimizer_states, order) == [[0.0, 1.0]] * 2


def back_on_one_host(rank: int, world: int) -> list[Any]:
    """A job resumed without compression, from an optimizer whose momentum was taken in a run with
    compression."""
    weight = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True)
    saved = copy.deepcopy(optimizer.state_dict())
    # As take_momentum leaves it.
    saved["param_groups"][0] |= {
        "momentum": 0.0,
        "nesterov": False,
        "weight_decay": 1.0,
        "gflow_momentum": [0.9, True],
    }
    optimizer.load_state_dict(saved)
    taken = gflow.take_momentum(optimizer)
    (group,) = optimizer.param_groups
    # Nobody leaves while another is still connecting.
    torch.distributed.barrier()
    return [taken, group["momentum"], group["nesterov"], round(group["weight_decay"], 6)]


def test_momentum_is_given_back_where_nothing_is_compressed(
    compressing: Callable[..., Team],
) -> None:
    team = compressing(2, compress="off")
    assert team.run(back_on_one_host) == [[False, 0.9, True, 0.1]] * 2


def momentum_by_option(rank: int, world: int) -> list[list[torch.Tensor]]:
    model = DistributedDataParallel(PrescribedGradients())
    delivered = []
    for step in range(3):
        model(gradients(rank, step)).backward()
        delivered.append(take_gradients(model))
    return delivered


def test_the_option_does_the_same_without_an_optimizer(compressing: Callable[..., Team]) -> None:
    for delivered in compressing(2, momentum=0.5).run(momentum_by_option):
        for index in range(len(SIZES)):
            means = [
                sum(gradients(rank, step)[index] for rank in range(2)) / 2 for step in range(3)
            ]
            # The first step had other buckets, whose velocity is gone with them.
            velocity = means[2] + 0.5 * means[1]
            torch.testing.assert_close(delivered[2][index], velocity, rtol=1e-5, atol=1e-5)


def a_sparse_parameter(rank: int, world: int) -> str:
    torch.manual_seed(0)
    model = nn.ModuleDict({"table": nn.Embedding(20, 4, sparse=True), "linear": nn.Linear(4, 3)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.parts["linear"](self.parts["table"](rows))

    ddp = DistributedDataParallel(Whole())
    try:
        gflow.take_momentum(optimizer)
        for step in range(3):
            optimizer.zero_grad()
            ddp(torch.tensor([step, 5, 7])).square().sum().backward()
            optimizer.step()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "no momentum for the table, and nobody said so"


def test_a_parameter_with_sparse_gradients_is_not_silently_left_without_momentum(
    compressing: Callable[..., Team],
) -> None:
    for said in compressing(2).run(a_sparse_parameter):
        assert "sparse" in said


def two_models_one_taken(rank: int, world: int) -> str:
    """Momentum is asked for with a second model in the group, which has another optimizer."""
    models = [DistributedDataParallel(nn.Linear(30, 2)) for _ in range(2)]
    optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1, momentum=0.9)
    try:
        gflow.take_momentum(optimizer)
    except ValueError as error:
        return str(error)
    return "taken"


def test_momentum_is_not_taken_for_models_that_the_optimizer_does_not_have(
    compressing: Callable[..., Team],
) -> None:
    for said in compressing(2).run(two_models_one_taken):
        assert "2 parameters that this optimizer does not have" in said
        assert "process group of their own" in said


def taken_on_one_rank_only(rank: int, world: int) -> str:
    model = DistributedDataParallel(nn.Linear(30, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if rank == 1:
        gflow.take_momentum(optimizer)
    try:
        model(torch.ones(30)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "trained"


def test_ranks_that_have_different_momentum_are_told_so(compressing: Callable[..., Team]) -> None:
    for said in compressing(2).run(taken_on_one_rank_only):
        assert "apply different momentum" in said
        assert "take_momentum alike on every rank" in said
