"""Tests that everything but DDP's own gradient buckets is exact: users' collectives, comm hooks,
double, complex and sparse gradients, even next to compressed gradients."""

# No postponed annotations here: torch inspects those of a hook.

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import gflow
from tests.compression.jobs import (
    SIZES,
    Chosen,
    PrescribedGradients,
    divided,
    gradients,
    same_bits,
    take_gradients,
)
from tests.ranks import Team
from tests.ranks.membership import rendezvous

STEPS = 8


def own_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    bucket.buffer().div_(dist.get_world_size())
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def waiting_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    dist.all_reduce(bucket.buffer().div_(dist.get_world_size()))
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


HOOKS: dict[str, Callable[..., Any]] = {
    "torch": default_hooks.allreduce_hook,
    "own": own_hook,
    "waiting": waiting_hook,
}


def with_hook(rank: int, world: int, name: str) -> list[list[torch.Tensor]]:
    model = DistributedDataParallel(PrescribedGradients(), bucket_cap_mb=0.001)
    model.register_comm_hook(None, HOOKS[name])
    delivered = []
    for step in range(STEPS):
        model(gradients(rank, step)).backward()
        delivered.append(take_gradients(model))
    return delivered


@pytest.mark.parametrize("fusion_bytes", [0, 1 << 24], ids=["one_by_one", "fused"])
@pytest.mark.parametrize("name", HOOKS)
def test_a_users_hook_gets_exact_sums(
    compressing: Callable[..., Team], name: str, fusion_bytes: int
) -> None:
    for delivered in compressing(2, fusion_bytes=fusion_bytes).run(with_hook, name):
        for step, parts in enumerate(delivered):
            own = [divided(gradients(rank, step), 2) for rank in range(2)]
            assert same_bits(parts, [a + b for a, b in zip(*own, strict=True)])


BUILTIN = ("ALLREDUCE", "FP16_COMPRESS")


def with_builtin_hook(
    rank: int, world: int, name: str, method: str, directly: bool
) -> dict[str, list[list[torch.Tensor]]]:
    """Gradients with a hook that is built into torch, on gflow and on Gloo."""
    delivered: dict[str, list[list[torch.Tensor]]] = {}
    for backend in ("gflow", "gloo"):
        options = Chosen(None, (("method", method),))() if backend == "gflow" else None
        store = rendezvous(backend)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world, pg_options=options
        )
        try:
            # Another group than the default one, which hooks use if they are given none.
            group = dist.new_group([0, 1], pg_options=options)
            model = DistributedDataParallel(
                PrescribedGradients(), bucket_cap_mb=0.001, process_group=group
            )
            kind = getattr(dist.BuiltinCommHookType, name)
            if directly:
                dist._register_builtin_comm_hook(model.reducer, kind)
            else:
                model._register_builtin_comm_hook(kind)
            delivered[backend] = []
            for step in range(STEPS):
                model(gradients(rank, step)).backward()
                delivered[backend].append(take_gradients(model))
        finally:
            dist.destroy_process_group()
    return delivered


@pytest.mark.parametrize("method", ["chunks", "int3"])
@pytest.mark.parametrize("directly", [False, True], ids=["by_model", "by_reducer"])
@pytest.mark.parametrize("name", BUILTIN)
def test_torchs_builtin_hooks_give_what_they_give_on_gloo(
    ranks: Callable[..., Team], name: str, directly: bool, method: str
) -> None:
    answers = ranks(2, group=None).run(with_builtin_hook, name, method, directly)
    for delivered in answers:
        assert same_bits(delivered["gflow"], delivered["gloo"])
    if name == "ALLREDUCE":
        for step, parts in enumerate(answers[0]["gflow"]):
            own = [divided(gradients(rank, step), 2) for rank in range(2)]
            assert same_bits(parts, [a + b for a, b in zip(*own, strict=True)])


def with_builtin_hook_of_another_group(rank: int, world: int) -> list[str]:
    """The hooks of a model of Gloo, after a group of gflow was made."""
    group = dist.new_group([0, 1], backend="gloo")
    model = DistributedDataParallel(PrescribedGradients(), process_group=group)
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    return [hook.__name__ for hook, _ in model._comm_hooks]


def test_models_of_other_backends_keep_the_hooks_in_c_plus_plus(
    compressing: Callable[..., Team],
) -> None:
    assert compressing(2).run(with_builtin_hook_of_another_group) == [[], []]


def with_a_late_hook(rank: int, world: int) -> list[list[torch.Tensor]]:
    model = DistributedDataParallel(PrescribedGradients(), bucket_cap_mb=0.001)
    delivered = []
    for step in range(STEPS):
        if step == STEPS // 2:
            model.register_comm_hook(None, own_hook)
        model(gradients(rank, step)).backward()
        delivered.append(take_gradients(model))
    return delivered[STEPS // 2 :]


def test_a_hook_that_comes_in_the_middle_of_a_training_gets_exact_sums(
    compressing: Callable[..., Team],
) -> None:
    for delivered in compressing(2).run(with_a_late_hook):
        for step, parts in enumerate(delivered, STEPS // 2):
            own = [divided(gradients(rank, step), 2) for rank in range(2)]
            assert same_bits(parts, [a + b for a, b in zip(*own, strict=True)])


def with_fp16_hook(rank: int, world: int) -> dict[str, list[list[torch.Tensor]]]:
    delivered: dict[str, list[list[torch.Tensor]]] = {}
    for backend in ("gflow", "gloo"):
        options = Chosen(None)() if backend == "gflow" else None
        dist.init_process_group(
            backend,
            store=rendezvous(backend),
            rank=rank,
            world_size=world,
            pg_options=options,
        )
        try:
            model = DistributedDataParallel(PrescribedGradients())
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
            delivered[backend] = []
            for step in range(STEPS):
                model(gradients(rank, step)).backward()
                delivered[backend].append(take_gradients(model))
        finally:
            dist.destroy_process_group()
    return delivered


def test_torchs_hook_for_half_precision_gives_what_it_gives_on_gloo(
    ranks: Callable[..., Team],
) -> None:
    for delivered in ranks(2, group=None).run(with_fp16_hook):
        assert same_bits(delivered["gflow"], delivered["gloo"])


class Mixed(nn.Module):
    """An ordinary, a double, a complex and a sparse parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.ordinary = nn.Parameter(torch.zeros(3000))
        self.wide = nn.Parameter(torch.zeros(500, dtype=torch.float64))
        self.of_complex = nn.Parameter(torch.zeros(300, dtype=torch.complex64))
        self.table = nn.Embedding(50, 6, sparse=True)
        self.more = nn.Parameter(torch.zeros(2000))

    def forward(self, given: list[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        total = (self.ordinary * given[0]).sum() + (self.more * given[1]).sum()
        total = total + (self.wide * given[2].double()).sum().float()
        total = total + torch.view_as_real(self.of_complex)[:, 0].mul(given[3]).sum()
        return total + self.table(rows).sum()


MIXED = (3000, 2000, 500, 300)


def mixed(rank: int, world: int, ddp_options: dict[str, Any]) -> list[Any]:
    model = DistributedDataParallel(Mixed(), **ddp_options)
    seen = []
    for step in range(STEPS):
        model.zero_grad()
        rows = torch.tensor([step, 7, rank])
        model(gradients(rank, step, MIXED), rows).backward()
        plain = model.module
        seen.append(
            [
                plain.ordinary.grad.clone(),
                plain.more.grad.clone(),
                plain.wide.grad.clone(),
                torch.view_as_real(plain.of_complex.grad)[:, 0].clone(),
                plain.table.weight.grad.to_dense().clone(),
            ]
        )
    gflow.load_state_dict(gflow.state_dict())
    return seen


@pytest.mark.parametrize("fusion_bytes", [0, 1 << 24], ids=["one_by_one", "fused"])
@pytest.mark.parametrize(
    "ddp_options", [{}, {"bucket_cap_mb": 0.001}], ids=["few_buckets", "many_buckets"]
)
def test_double_complex_and_sparse_gradients_are_exact_next_to_others(
    compressing: Callable[..., Team], ddp_options: dict[str, Any], fusion_bytes: int
) -> None:
    answers = compressing(2, fusion_bytes=fusion_bytes).run(mixed, ddp_options)
    assert same_bits(answers[0], answers[1])
    for step, (ordinary, more, double, complex_, table) in enumerate(answers[0]):
        own = [gradients(rank, step, MIXED) for rank in range(2)]
        assert torch.equal(double, (own[0][2].double() + own[1][2].double()) / 2)
        assert torch.equal(complex_, own[0][3] / 2 + own[1][3] / 2)
        expected = torch.zeros(50, 6)
        for rank in range(2):
            for row in (step, 7, rank):
                expected[row] += 0.5
        assert torch.equal(table, expected)
        if step >= 3:
            assert 0 < int(ordinary.count_nonzero()) + int(more.count_nonzero()) <= 9 * 64


def all_kinds(rank: int, world: int) -> bool:
    """Users' collectives before, during and after compressed backward passes."""
    model = DistributedDataParallel(PrescribedGradients(), bucket_cap_mb=0.001)
    sums: list[torch.Tensor] = []
    given = torch.arange(5000.0) / 7

    def reduce_inside(gradient: torch.Tensor) -> None:
        total = given * (rank + 1)
        dist.all_reduce(total)
        sums.append(total)

    # In the middle of the pass: when this gradient is ready, others are still in flight.
    model.module.weights[2].register_hook(reduce_inside)
    pending = []
    for step in range(STEPS):
        model.zero_grad()
        pending.append((dist.all_reduce(before := given * (rank + 1), async_op=True), before))
        loss = model(gradients(rank, step))
        loss.backward()
        gathered = [torch.empty(10) for _ in range(world)]
        dist.all_gather(gathered, torch.full((10,), float(rank)))
        assert [one[0].item() for one in gathered] == list(range(world))
    for work, total in pending:
        work.wait()
        sums.append(total)
    expected = given * (1 + rank) + given * (2 - rank)
    assert len(sums) == 2 * STEPS
    delivered = sum(int(p.grad.count_nonzero()) for p in model.parameters())
    assert 0 < delivered <= 64 * 10
    return all(torch.equal(total, expected) for total in sums)


@pytest.mark.parametrize("fusion_bytes", [0, 1 << 24], ids=["one_by_one", "fused"])
def test_other_collectives_between_and_during_are_exact(
    compressing: Callable[..., Team], fusion_bytes: int
) -> None:
    assert compressing(2, fusion_bytes=fusion_bytes).run(all_kinds) == [True, True]


def by_a_users_hand(rank: int, world: int) -> list[bool]:
    """A user who sums a model's gradients by hand, without DDP."""
    plain = PrescribedGradients()
    exact = []
    for step in range(6):
        plain.zero_grad()
        plain(gradients(rank, step)).backward()
        for parameter in plain.parameters():
            dist.all_reduce(parameter.grad)
        own = [gradients(peer, step) for peer in range(world)]
        summed = [a + b for a, b in zip(*own, strict=True)]
        exact.append(same_bits([p.grad for p in plain.parameters()], summed))
    return exact


def test_gradients_that_a_user_sums_by_hand_are_exact(compressing: Callable[..., Team]) -> None:
    assert compressing(2).run(by_a_users_hand) == [[True] * 6] * 2
    assert len(SIZES) == 5
