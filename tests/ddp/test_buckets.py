"""Tests that gradient buckets are recognised, all of them and nothing else, and come out right.

A missed bucket costs speed; another tensor taken for a bucket would corrupt a user's results. So
every case counts both, and compares the gradients with a plain computation.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import gflow
from tests.ddp.models import (
    ComplexLayer,
    WithUnusedLayer,
    batch,
    gradient_bytes,
    loss_of,
    mean_gradients,
    perceptron,
)
from tests.ranks import Team
from tests.ranks.membership import rendezvous

pytestmark = pytest.mark.gflow_only("counts what gflow recognises")

STEPS = 4


class Delta:
    """A group's counts since this object was made."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.before = gflow.metrics(group)

    def take(self) -> dict[str, int]:
        now, before = gflow.metrics(self.group), self.before
        self.before = now
        names = ("gradient_buckets", "gradient_bytes", "exact_tensors")
        return {name: getattr(now, name) - getattr(before, name) for name in names}


def check_gradients(model: nn.Module, inputs_of: Callable[[int], list[torch.Tensor]], world: int):
    expected = mean_gradients(model, inputs_of, world)
    for parameter, mean in zip(model.parameters(), expected, strict=True):
        if mean is None:
            assert parameter.grad is None or not parameter.grad.any()
        else:
            torch.testing.assert_close(parameter.grad, mean.to(parameter.dtype))


def train(
    rank: int, world: int, build: Callable[[], nn.Module], ddp_options: dict[str, Any]
) -> list[dict[str, int]]:
    """Trains for some steps, checks every gradient, and returns what each step counted."""
    plain = build()
    model = DistributedDataParallel(plain, **ddp_options)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    counted = []
    delta = Delta()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        counted.append(delta.take())
        check_gradients(plain, lambda peer, step=step: [batch(peer, step)], world)
        optimizer.step()
    return counted


@pytest.mark.parametrize(
    ("build", "ddp_options"),
    [
        pytest.param(perceptron, {}, id="plain"),
        pytest.param(perceptron, {"bucket_cap_mb": 0.0002}, id="many_buckets"),
        pytest.param(perceptron, {"static_graph": True}, id="static_graph"),
        pytest.param(perceptron, {"gradient_as_bucket_view": True}, id="bucket_view"),
        pytest.param(perceptron, {"lazy_bucket_allocation": True}, id="lazy_bucket_allocation"),
        pytest.param(perceptron, {"find_unused_parameters": True}, id="find_unused_none"),
        pytest.param(WithUnusedLayer, {"find_unused_parameters": True}, id="find_unused_some"),
        pytest.param(
            perceptron,
            {"static_graph": True, "gradient_as_bucket_view": True},
            id="static_graph_and_bucket_view",
        ),
    ],
)
@pytest.mark.parametrize("world", [2, 3])
def test_every_byte_of_gradient_is_recognised_in_every_step(
    ranks: Callable[..., Team],
    world: int,
    build: Callable[[], nn.Module],
    ddp_options: dict[str, Any],
) -> None:
    whole = gradient_bytes(build())
    for counted in ranks(world).run(train, build, ddp_options):
        assert [step["gradient_bytes"] for step in counted] == [whole] * STEPS
        assert all(step["gradient_buckets"] >= 1 for step in counted)


def test_small_buckets_are_counted_one_by_one(ranks: Callable[..., Team]) -> None:
    for counted in ranks(2).run(train, perceptron, {"bucket_cap_mb": 0.0002}):
        # DDP rebuilds its buckets after the first step; then 0.2 kB splits these layers in two.
        assert counted[-1]["gradient_buckets"] == 2


def test_complex_gradients_are_exact_and_their_real_neighbours_are_buckets(
    ranks: Callable[..., Team],
) -> None:
    for counted in ranks(2).run(train, ComplexLayer, {}):
        assert [step["gradient_bytes"] for step in counted] == [gradient_bytes(ComplexLayer())] * 4
        assert all(step["exact_tensors"] >= 1 for step in counted)


def train_in_detail(rank: int, world: int) -> list[dict[str, int]]:
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        dist.init_process_group("gflow", store=rendezvous(), rank=rank, world_size=world)
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert type(backend).__name__ == "_ProcessGroupWrapper"
        return train(rank, world, perceptron, {})
    finally:
        dist.destroy_process_group()
        dist.set_debug_level(level)


def test_the_debugging_wrapper_of_torch_does_not_hide_buckets(ranks: Callable[..., Team]) -> None:
    for counted in ranks(2, group=None).run(train_in_detail):
        assert [step["gradient_bytes"] for step in counted] == [gradient_bytes(perceptron())] * 4


def accumulate(rank: int, world: int) -> list[dict[str, int]]:
    plain = perceptron()
    model = DistributedDataParallel(plain)
    counted = []
    delta = Delta()
    for step in range(STEPS):
        model.zero_grad()
        with model.no_sync():
            loss_of(model, batch(rank, step)).backward()
        counted.append(delta.take())
        loss_of(model, batch(rank, step + 100)).backward()
        counted.append(delta.take())
        check_gradients(
            plain, lambda peer, step=step: [batch(peer, step), batch(peer, step + 100)], world
        )
    return counted


def test_no_sync_sends_nothing_and_the_next_backward_sends_the_sum(
    ranks: Callable[..., Team],
) -> None:
    whole = gradient_bytes(perceptron())
    for counted in ranks(2).run(accumulate):
        assert [step["gradient_bytes"] for step in counted] == [0, whole] * STEPS


def two_models(rank: int, world: int) -> list[dict[str, int]]:
    first, second = perceptron(1), perceptron(2)
    models = [DistributedDataParallel(first), DistributedDataParallel(second)]
    counted = []
    delta = Delta()
    for step in range(STEPS):
        for model in models:
            model.zero_grad()
        # One backward pass through both, and one through the second alone, as in a GAN.
        loss = sum(loss_of(model, batch(rank, step)) for model in models)
        loss.backward()
        for plain in (first, second):
            check_gradients(plain, lambda peer, step=step: [batch(peer, step)], world)
        counted.append(delta.take())
        models[1].zero_grad()
        loss_of(models[1], batch(rank, step)).backward()
        check_gradients(second, lambda peer, step=step: [batch(peer, step)], world)
        counted.append(delta.take())
    return counted


def test_two_models_in_one_process_are_both_recognised(ranks: Callable[..., Team]) -> None:
    whole = gradient_bytes(perceptron())
    for counted in ranks(2).run(two_models):
        assert [step["gradient_bytes"] for step in counted] == [2 * whole, whole] * STEPS


class SynchronisedMean(torch.autograd.Function):
    """Communicates like SyncBatchNorm, on CPU tensors: gathers forward, reduces backward."""

    @staticmethod
    def forward(context: Any, inputs: torch.Tensor) -> torch.Tensor:
        own = inputs.detach().mean(0)
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, own)
        return inputs - torch.stack(gathered).mean(0)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.mean(0)
        dist.all_reduce(total)
        return gradient - total / dist.get_world_size()


class WithSynchronisedMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = perceptron(4)[0], perceptron(5)[2]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(SynchronisedMean.apply(self.first(inputs)))


def train_with_synchronised_layer(rank: int, world: int) -> list[dict[str, int]]:
    model = DistributedDataParallel(WithSynchronisedMean())
    counted = []
    delta = Delta()
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        counted.append(delta.take())
    return counted


def test_a_layer_that_synchronises_inside_backward_stays_exact(ranks: Callable[..., Team]) -> None:
    whole = gradient_bytes(WithSynchronisedMean())
    for counted in ranks(2).run(train_with_synchronised_layer):
        assert [step["gradient_bytes"] for step in counted] == [whole] * STEPS
        # One all_gather forward and one all_reduce backward, besides DDP's own in the second step.
        assert [step["exact_tensors"] for step in counted if step is not counted[1]] == [2] * 3


def uneven(rank: int, world: int) -> tuple[dict[str, int], list[torch.Tensor]]:
    plain = perceptron()
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    delta = Delta()
    with Join([model]):
        for step in range(3 + 2 * rank):
            optimizer.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            optimizer.step()
    return delta.take(), [parameter.detach() for parameter in plain.parameters()]


def test_a_rank_out_of_data_counts_the_buckets_of_the_others(ranks: Callable[..., Team]) -> None:
    (early, weights), (late, other_weights) = ranks(2).run(uneven)
    # Rank 0 has 3 batches and then answers rank 1's remaining 2 with untagged zeros: what the
    # ranks agree on is what counts, and it is the same on both.
    assert early == late
    assert early["gradient_bytes"] == 5 * gradient_bytes(perceptron())
    assert all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True))


def own_reductions(rank: int, world: int) -> list[dict[str, int]]:
    plain = perceptron()
    model = DistributedDataParallel(plain)
    inside = []

    def reduce_inside_backward(gradient: torch.Tensor) -> None:
        total = gradient.clone()
        dist.all_reduce(total)
        inside.append(total)

    counted = []
    delta = Delta()
    for step in range(STEPS):
        model.zero_grad()
        output = model(batch(rank, step))
        output.register_hook(reduce_inside_backward)
        output.square().mean().backward()
        counted.append(delta.take())
        dist.all_reduce(torch.ones(3))
        counted.append(delta.take())
    assert len(inside) == STEPS
    return counted


def test_a_users_own_all_reduce_is_exact_inside_and_outside_backward(
    ranks: Callable[..., Team],
) -> None:
    whole = gradient_bytes(perceptron())
    for counted in ranks(2).run(own_reductions):
        assert [step["gradient_bytes"] for step in counted] == [whole, 0] * STEPS
        outside = counted[1::2]
        assert all(step["exact_tensors"] == 1 for step in outside)


def bucket_memory_outside_backward(rank: int, world: int) -> list[dict[str, int]]:
    plain = perceptron()
    model = DistributedDataParallel(plain, gradient_as_bucket_view=True)
    for step in range(3):
        loss_of(model, batch(rank, step)).backward()
    delta = Delta()
    flat = plain[0].weight.grad
    # With gradient_as_bucket_view the gradient lies in a bucket's memory.
    whole = torch.empty(0).set_(flat.untyped_storage())
    # The bucket itself, but no backward pass: a user's own reduction.
    dist.all_reduce(whole)
    outside = delta.take()
    dist.all_reduce(flat.contiguous())
    return [outside, delta.take()]


def test_bucket_memory_reduced_outside_backward_is_exact(ranks: Callable[..., Team]) -> None:
    for counted in ranks(2).run(bucket_memory_outside_backward):
        assert [step["gradient_buckets"] for step in counted] == [0, 0]
        assert [step["exact_tensors"] for step in counted] == [1, 1]


def on_a_part(rank: int, world: int) -> dict[str, int] | None:
    group = dist.new_group([0, 2])
    if rank == 1:
        return None
    plain = perceptron()
    model = DistributedDataParallel(plain, process_group=group)
    delta, world_delta = Delta(group), Delta()
    position = dist.get_rank(group)
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model, batch(position, step)).backward()
        check_gradients(plain, lambda peer, step=step: [batch(peer, step)], 2)
    assert world_delta.take()["gradient_buckets"] == 0
    return delta.take()


def test_ddp_on_a_part_of_the_world_counts_in_that_group(ranks: Callable[..., Team]) -> None:
    first, outside, last = ranks(3).run(on_a_part)
    assert outside is None
    assert first == last
    assert first["gradient_bytes"] == STEPS * gradient_bytes(perceptron())


def with_own_hook(rank: int, world: int) -> tuple[list[int], dict[str, int]]:
    plain = perceptron()
    model = DistributedDataParallel(plain)
    seen: list[int] = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append(bucket.buffer().numel())
        half = bucket.buffer().to(torch.float16).div_(dist.get_world_size())
        future = dist.all_reduce(half, async_op=True).get_future()
        return future.then(lambda done: done.value()[0].to(torch.float32))

    model.register_comm_hook(None, hook)
    delta = Delta()
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        expected = mean_gradients(plain, lambda peer, step=step: [batch(peer, step)], world)
        for parameter, mean in zip(plain.parameters(), expected, strict=True):
            torch.testing.assert_close(
                parameter.grad, mean.to(parameter.dtype), rtol=1e-2, atol=1e-3
            )
    return seen, delta.take()


def test_a_users_own_comm_hook_gets_exactly_its_own_calls(ranks: Callable[..., Team]) -> None:
    for seen, counted in ranks(2).run(with_own_hook):
        assert len(seen) >= STEPS
        # The hook reduces its own copies, which are not buckets.
        assert counted["gradient_buckets"] == 0
