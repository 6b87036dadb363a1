"""Tests that models compiled by torch train as they do without: their gradients are compressed with
every family of codecs, or exact where torch does not hand them over as buckets of DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

import gflow
from tests.compression.jobs import FEEDBACK, REPEATED, options_of, same_bits
from tests.ddp.models import WIDTH, batch, loss_of
from tests.ranks import Team

STEPS = 16
# DDP lays out its buckets anew after the first step; two exact steps follow.
FIRST_COMPRESSED = 3

COMPILED = {
    "split_by_bucket": {},
    "in_one": {"optimize_ddp": False},
    "python_reducer": {"compiled_autograd": True, "optimize_ddp": "python_reducer"},
}


class Network(nn.Module):
    """Large enough for two buckets, of the smallest size that compiled models can have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        sizes = (WIDTH, 400, 400, 400, 3)
        self.layers = nn.ModuleList(map(nn.Linear, sizes[:-1], sizes[1:]))

    # torch compiles no modules of its own here, such as a Sequential.
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs).tanh()
        return inputs


def go_back(model: nn.Module, inputs: torch.Tensor) -> None:
    loss_of(model, inputs).backward()


def train(rank: int, world: int, how: str | None, dropped: int | None = None) -> dict[str, Any]:
    """A training, compiled if it says how; of one layer the gradients are dropped while they are
    compressed, if that is wanted."""
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(COMPILED.get(how or "", {})):
        model: nn.Module = DistributedDataParallel(Network(), bucket_cap_mb=1)
        # In a compiled function, the backward pass is compiled as well, if that is switched on.
        step_with = torch.compile(go_back, backend="aot_eager") if how else go_back
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            optimizer.zero_grad()
            step_with(model, batch(rank, step))
            if dropped is not None and step >= FIRST_COMPRESSED:
                model.module.layers[dropped].zero_grad()
            optimizer.step()
    # The reducer in Python leaves this behind.
    torch._dynamo.trace_rules.LEGACY_MOD_INLINELIST.discard("torch.nn.parallel.distributed")
    torch._dynamo.trace_rules.get_legacy_mod_inlinelist.cache_clear()
    return {
        "weights": [p.detach() for p in model.parameters()],
        "sent as": gflow.metrics().method,
        "compiled": (counters["stats"]["unique_graphs"], counters["compiled_autograd"]["captures"]),
    }


def worst(found: list[torch.Tensor], plain: list[torch.Tensor]) -> float:
    """How far the weights are from those of the plain run, relative to how far those have moved:
    that of the parameter that is the farthest off."""
    start = [parameter.detach() for parameter in Network().parameters()]
    triples = zip(found, plain, start, strict=True)
    return max(float((f - p).norm() / (p - s).norm()) for f, p, s in triples)


# A compiled model adds up in another order, and its buckets are laid out differently. With few
# levels, that changes what an element is sent as; with chunks, which are sent.
MOST = dict.fromkeys(FEEDBACK, 0.5) | {"fp16": 0.01, "bf16": 0.01, "int8": 0.05}


@pytest.mark.parametrize("how", ["split_by_bucket", "in_one"])
@pytest.mark.parametrize("family", REPEATED)
def test_a_compiled_model_trains_as_it_does_without(
    compressing: Callable[..., Team], family: str, how: str
) -> None:
    team = compressing(2, **options_of(family))
    (plain, _), compiled = team.run(train, None), team.run(train, how)
    for found in compiled:
        assert found["compiled"][0] > 0
        assert found["sent as"] == plain["sent as"]
        assert same_bits(found["weights"], compiled[0]["weights"])
        assert worst(found["weights"], plain["weights"]) < MOST[family]


@pytest.mark.parametrize("family", REPEATED)
def test_gradients_of_any_layer_that_were_dropped_would_be_noticed(
    compressing: Callable[..., Team], family: str
) -> None:
    team = compressing(2, **options_of(family))
    plain, _ = team.run(train, None)
    for layer in range(4):
        found, _ = team.run(train, None, layer)
        assert worst(found["weights"], plain["weights"]) > MOST[family], layer


# Compiled autograd knows no other reducer.
def test_gradients_of_the_reducer_in_python_are_exact(compressing: Callable[..., Team]) -> None:
    found = compressing(2, method="int3").run(train, "python_reducer")
    (exact, _) = compressing(2, method="exact").run(train, None)
    assert same_bits(found[0], found[1])
    assert found[0]["compiled"][1] > 0
    assert found[0]["sent as"] == ""
    torch.testing.assert_close(found[0]["weights"], exact["weights"], rtol=1e-5, atol=1e-6)
