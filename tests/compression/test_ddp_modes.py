"""Tests that nothing is lost but what a codec says, and that replicas agree, however DDP is used:
its modes, accumulation, clipping, joins, activation checkpoints, frozen and unused layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gflow
from tests.compression.jobs import (
    EVERY_FAMILY,
    LOSSLESS,
    REPEATED,
    SIZES,
    SMALL_BUCKETS,
    Chosen,
    PrescribedGradients,
    Record,
    divided,
    gradients,
    kept,
    options_of,
    own_sum,
    same_bits,
    sum_of_step,
    take_gradients,
    train,
)
from tests.compression.test_conservation import check_every_step, check_that_nothing_is_lost
from tests.ddp.models import WIDTH, batch, loss_of
from tests.ranks import Team
from tests.ranks.membership import rendezvous

STEPS = 12
# 9 of 83 chunks in one bucket, up to 11 in several.
SENT = 64 * 11


def nonzero(delivered: list[torch.Tensor]) -> int:
    return sum(int(part.count_nonzero()) for part in delivered)


MODES: dict[str, dict[str, Any]] = {
    "find_unused": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "bucket_view": {"gradient_as_bucket_view": True},
    "static_graph_and_bucket_view": {"static_graph": True, "gradient_as_bucket_view": True},
    "find_unused_and_bucket_view": {
        "find_unused_parameters": True,
        "gradient_as_bucket_view": True,
    },
    "no_buffers": {"broadcast_buffers": False},
}


@pytest.mark.parametrize("fusion_bytes", [0, 1 << 24], ids=["one_by_one", "fused"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", REPEATED)
def test_every_step_loses_only_what_the_codec_says_in_any_mode_of_ddp(
    compressing: Callable[..., Team], family: str, mode: str, fusion_bytes: int
) -> None:
    options = {"bucket_cap_mb": SMALL_BUCKETS, **MODES[mode]}
    team = compressing(2, fusion_bytes=fusion_bytes, **options_of(family))
    records = team.run(train, STEPS, options)
    assert 0 < nonzero(records[0].delivered[-1]) <= (SENT if family == "chunks" else sum(SIZES))
    check_every_step(records, family, partial(sum_of_step, 2))


def lazily(rank: int, world: int) -> list[int]:
    model = DistributedDataParallel(PrescribedGradients(), lazy_bucket_allocation=True)
    counts = []
    for step in range(6):
        model(gradients(rank, step)).backward()
        counts.append(nonzero(take_gradients(model)))
    return counts


def test_buckets_with_new_memory_in_every_step_are_exact(compressing: Callable[..., Team]) -> None:
    assert compressing(2).run(lazily) == [[sum(SIZES)] * 6] * 2


def in_detail(rank: int, world: int) -> Any:
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        dist.init_process_group(
            "gflow",
            store=rendezvous(),
            rank=rank,
            world_size=world,
            pg_options=Chosen(None)(),
        )
        return train(rank, world, STEPS)
    finally:
        dist.destroy_process_group()
        dist.set_debug_level(level)


def test_the_debugging_wrapper_of_torch_changes_nothing(ranks: Callable[..., Team]) -> None:
    records = ranks(2, group=None).run(in_detail)
    assert 0 < nonzero(records[0].delivered[-1]) <= SENT
    check_that_nothing_is_lost(records, 2, STEPS)


def accumulate(rank: int, world: int, how: str) -> Any:
    """Three backward passes per step; the last is exchanged."""
    options = {"gradient_as_bucket_view": True} if how == "bucket_view" else {}
    model = DistributedDataParallel(PrescribedGradients(), **options)
    record = Record()
    for step in range(STEPS):
        for part in range(2):
            with model.no_sync():
                model(gradients(rank, 3 * step + part)).backward()
        model(gradients(rank, 3 * step + 2)).backward()
        record.note(model)
    return record


def sum_of_three_passes(step: int) -> list[torch.Tensor | None]:
    passes = (sum_of_step(2, 3 * step + part) for part in range(3))
    return [sum(parts) for parts in zip(*passes, strict=True)]


@pytest.mark.parametrize("how", ["plain", "bucket_view"])
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_accumulated_gradients_are_exchanged_once(
    compressing: Callable[..., Team], family: str, how: str
) -> None:
    records = compressing(2, **options_of(family)).run(accumulate, how)
    assert 0 < nonzero(records[0].delivered[-1]) <= (SENT if family == "chunks" else sum(SIZES))
    check_every_step(records, family, sum_of_three_passes)


def accumulate_what_was_exchanged(rank: int, world: int) -> Any:
    """Two exchanged backward passes per step, into the same gradients."""
    model = DistributedDataParallel(PrescribedGradients())
    record = Record()
    for step in range(STEPS):
        model(gradients(rank, 2 * step)).backward()
        model(gradients(rank, 2 * step + 1)).backward()
        record.delivered.append(take_gradients(model))
    record.state = gflow.state_dict()
    return record


@pytest.mark.parametrize("family", LOSSLESS)
def test_nothing_is_lost_when_exchanged_gradients_are_added_to(
    compressing: Callable[..., Team], family: str
) -> None:
    records = compressing(2, **options_of(family)).run(accumulate_what_was_exchanged)
    assert same_bits(records[0].delivered, records[1].delivered)
    check_that_nothing_is_lost(records, 2, 2 * STEPS)


def clip(rank: int, world: int) -> tuple[list[float], list[torch.Tensor]]:
    model = DistributedDataParallel(PrescribedGradients())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for step in range(8):
        optimizer.zero_grad()
        model(gradients(rank, step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        total = math.sqrt(sum(p.grad.double().square().sum() for p in model.parameters()))
        norms.append(total)
        optimizer.step()
    return norms, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_gradients_can_be_clipped(compressing: Callable[..., Team], family: str) -> None:
    (norms, weights), (_, others) = compressing(2, **options_of(family)).run(clip)
    assert norms == pytest.approx([1.0] * 8, rel=1e-3)
    assert same_bits(weights, others)


class Noting(Joinable, JoinHook):
    """Notes what is kept on a rank that has run out of data, after each step of the others."""

    join_device = torch.device("cpu")

    def __init__(self, model: DistributedDataParallel, record: Record) -> None:
        super().__init__()
        self.model, self.record = model, record

    @property
    def join_process_group(self) -> Any:
        return self.model.process_group

    def join_hook(self, **_: Any) -> JoinHook:
        return self

    def main_hook(self) -> None:
        self.record.states.append(gflow.state_dict(models=[self.model]))


def uneven(rank: int, world: int, counts: list[int]) -> tuple[Record, list[torch.Tensor]]:
    model = DistributedDataParallel(PrescribedGradients(), bucket_cap_mb=SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    record = Record()
    with Join([model, Noting(model, record)]):
        for step in range(counts[rank]):
            model(gradients(rank, step)).backward()
            optimizer.step()
            record.note(model)
    return record, [weight.detach() for weight in model.parameters()]


@pytest.mark.parametrize("fusion_bytes", [0, 1 << 24], ids=["one_by_one", "fused"])
@pytest.mark.parametrize(
    ("where", "counts"),
    [("ab", [6, 14]), ("ab", [14, 9]), ("abc", [5, 14, 8]), ("aab", [9, 5, 14])],
)
@pytest.mark.parametrize("family", REPEATED)
def test_every_step_loses_only_what_the_codec_says_when_ranks_run_out_of_data(
    compressing: Callable[..., Team],
    family: str,
    where: str,
    counts: list[int],
    fusion_bytes: int,
) -> None:
    def came(step: int) -> list[torch.Tensor | None]:
        ranks = [rank for rank, count in enumerate(counts) if step < count]
        own = (divided(gradients(rank, step), len(counts)) for rank in ranks)
        return [sum(part.double() for part in parts) for parts in zip(*own, strict=True)]

    team = compressing(where, fusion_bytes=fusion_bytes, **options_of(family))
    first, second = team.run(uneven, counts), team.run(uneven, counts)
    check_every_step([record for record, _ in first], family, came)
    # join() gave all ranks the weights of the one that finished last.
    for (record, weights), (again, weights_again) in zip(first, second, strict=True):
        assert same_bits(weights, first[0][1])
        assert same_bits([vars(record), weights], [vars(again), weights_again])


class Branches(nn.Module):
    """A step uses one of two branches, the same on all ranks or not."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(n)) for n in (640, 640, 640))

    def forward(self, given: list[torch.Tensor | None]) -> torch.Tensor:
        used = zip(self.weights, given, strict=True)
        return sum((weight * one).sum() for weight, one in used if one is not None)


def branch_of(rank: int, step: int, same: bool) -> int:
    return 1 + (step if same else step + rank) % 2


def alternate(rank: int, world: int, same: bool, bucket_view: bool) -> Any:
    model = DistributedDataParallel(
        Branches(), find_unused_parameters=True, gradient_as_bucket_view=bucket_view
    )
    record = Record()
    for step in range(20):
        given: list[torch.Tensor | None] = list(gradients(rank, step, (640, 640, 640)))
        given[3 - branch_of(rank, step, same)] = None
        model(given).backward()
        record.note(model)
    return record


@pytest.mark.parametrize("bucket_view", [False, True], ids=["plain", "bucket_view"])
@pytest.mark.parametrize("same", [True, False], ids=["same_on_all", "different"])
@pytest.mark.parametrize("where", ["ab", "aab", "abc", "aabb"])
@pytest.mark.parametrize("family", REPEATED)
def test_every_step_loses_only_what_the_codec_says_when_layers_are_used_in_turns(
    compressing: Callable[..., Team], family: str, where: str, same: bool, bucket_view: bool
) -> None:
    def came(step: int) -> list[torch.Tensor | None]:
        sums: list[torch.Tensor | None] = [None] * 3
        for rank in range(len(where)):
            own = divided(gradients(rank, step, (640, 640, 640)), len(where))
            for index in (0, branch_of(rank, step, same)):
                sums[index] = own[index].double() + (0.0 if sums[index] is None else sums[index])
        return sums

    team = compressing(where, density=0.4, **options_of(family))
    records = team.run(alternate, same, bucket_view)
    check_every_step(records, family, came, tolerance=5e-6)


def leave_out(rank: int, world: int, momentum: bool) -> list[dict[str, Any]]:
    """What is kept before and after some steps in which no rank uses the last parameter."""
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5 if momentum else 0.0)
    if momentum:
        assert gflow.take_momentum(optimizer)
    states = []
    for step in range(16):
        optimizer.zero_grad()
        given: list[torch.Tensor | None] = list(gradients(rank, step, (640, 640, 640)))
        if step >= 9:
            given[2] = None
        model(given).backward()
        assert (model.module.weights[2].grad is None) == (step >= 9)
        optimizer.step()
        if step in (8, 15):
            states.append(gflow.state_dict())
    return states


@pytest.mark.parametrize("momentum", [False, True], ids=["plain", "take_momentum"])
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_what_is_kept_of_a_parameter_stays_while_no_rank_uses_it(
    compressing: Callable[..., Team], family: str, momentum: bool
) -> None:
    team = compressing("abc", density=0.4, **options_of(family))
    answers = team.run(leave_out, momentum)
    for kind in ("residual", "velocity"):
        before, after = (kept([states[when] for states in answers], kind) for when in (0, 1))
        if kind == "velocity" and not momentum:
            assert not any(bool(one.any()) for one in after.values())
            continue
        for index in range(3):
            name = f"weights.{index}"
            size = before[name].abs().max()
            assert size > 0
            changed = (after[name] - before[name]).abs().max() > 1e-4 * size
            assert changed == (index < 2), (kind, name)


def keep_something(rank: int, world: int) -> dict[str, Any]:
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    for step in range(8):
        model(list(gradients(rank, step, (640, 640, 640)))).backward()
    return gflow.state_dict()


def leave_out_then_use(rank: int, world: int, states: list[dict[str, Any]]) -> torch.Tensor:
    """What comes of the last parameter when it is used again; no rank uses it in the first step."""
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    gflow.load_state_dict(states, strict=False)
    for step in (8, 9):
        model.zero_grad()
        given: list[torch.Tensor | None] = list(gradients(rank, step, (640, 640, 640)))
        if step == 8:
            given[2] = None
        model(given).backward()
    return model.module.weights[2].grad


def test_exact_steps_bring_what_is_kept_of_a_parameter_once_it_is_used(
    compressing: Callable[..., Team],
) -> None:
    states = compressing("abc", method="int3").run(keep_something)
    owed = kept(states)["weights.2"]
    assert owed.abs().max() > 0
    due = sum_of_step(3, 9, (640, 640, 640))[2] + owed
    for delivered in compressing("abc", method="exact").run(leave_out_then_use, states):
        torch.testing.assert_close(delivered.double(), due.double(), rtol=1e-5, atol=1e-6)


def frozen(rank: int, world: int) -> tuple[list[bool], int, int]:
    plain = PrescribedGradients()
    plain.weights[0].requires_grad_(False)
    model = DistributedDataParallel(plain)
    for step in range(8):
        model.zero_grad()
        model(gradients(rank, step)).backward()
    names = gflow.state_dict()["models"][0]["parameters"]
    counted = sum(int(w.grad.count_nonzero()) for w in plain.weights if w.grad is not None)
    return [w.grad is None for w in plain.weights], counted, len(names)


def test_frozen_layers_are_left_alone(compressing: Callable[..., Team]) -> None:
    for without, counted, names in compressing(2).run(frozen):
        assert without == [True, False, False, False, False]
        assert 0 < counted <= 4 * 64  # of 36 chunks
        assert names == 4


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.reentrant = reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out = inputs
        for layer in self.layers:
            if self.reentrant is None:
                out = layer(out).tanh()
            else:
                out = checkpoint(
                    lambda x, layer=layer: layer(x).tanh(), out, use_reentrant=self.reentrant
                )
        return out


def train_checkpointed(
    rank: int, world: int, reentrant: bool | None, static_graph: bool
) -> list[torch.Tensor]:
    model = DistributedDataParallel(
        Checkpointed(reentrant), static_graph=static_graph, bucket_cap_mb=0.0005
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(12):
        optimizer.zero_grad()
        inputs = batch(rank, step).requires_grad_()
        loss_of(model, inputs).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("fusion_bytes", [0, 1 << 24], ids=["one_by_one", "fused"])
@pytest.mark.parametrize(("reentrant", "static_graph"), [(False, False), (True, True)])
@pytest.mark.parametrize("family", REPEATED)
def test_layers_that_are_computed_twice_train_as_others(
    compressing: Callable[..., Team],
    family: str,
    reentrant: bool,
    static_graph: bool,
    fusion_bytes: int,
) -> None:
    options = {"fusion_bytes": fusion_bytes, "density": 0.3, "chunk": 16}
    team = compressing(2, **options, **options_of(family))
    found = team.run(train_checkpointed, reentrant, static_graph)
    expected = team.run(train_checkpointed, None, static_graph)
    assert same_bits(found[0], found[1])
    for one, other in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def skip_checkpointed(rank: int, world: int) -> dict[str, Any]:
    """A skipped step that consists of several backward passes."""
    model = DistributedDataParallel(Checkpointed(True), static_graph=True, bucket_cap_mb=0.0005)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = gflow.watch_scaler(torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000))
    states = {}
    for step in range(8):
        optimizer.zero_grad()
        inputs = batch(rank, step)
        if step == 7:
            states["before"] = gflow.state_dict()
        inputs.requires_grad_()
        loss = loss_of(model, inputs)
        if step == 7:
            # Only the first layer's weights, which come last, are not finite.
            hook = model.module.layers[0].weight.register_hook(lambda g: g * float("inf"))
        scaler.scale(loss).backward()
        if step == 7:
            hook.remove()
        scaler.step(optimizer)
        scaler.update()
    states["after"] = gflow.state_dict()
    states["scale"] = scaler.get_scale()
    return states


def test_a_skipped_step_is_undone_also_if_its_layers_are_computed_twice(
    compressing: Callable[..., Team],
) -> None:
    for states in compressing(2, chunk=16).run(skip_checkpointed):
        assert states["scale"] == 2.0
        before, after = (
            [bucket["residual"] for bucket in states[when]["models"][0]["buckets"]]
            for when in ("before", "after")
        )
        assert len(before) > 1
        assert same_bits([one * 0.5 for one in before], after)


def in_a_sub_group(rank: int, world: int) -> Any:
    """Ranks 0 and 2 train one model, rank 1 trains another alone; each compresses separately."""
    pair = dist.new_group([0, 2], pg_options=Chosen(None)())
    alone = dist.new_group([1], pg_options=Chosen(None)())
    group = alone if rank == 1 else pair
    model = DistributedDataParallel(PrescribedGradients(), process_group=group)
    record = Record()
    for step in range(STEPS):
        model(gradients(rank // 2, step)).backward()
        record.delivered.append(take_gradients(model))
    record.state = gflow.state_dict(group)
    metrics = gflow.metrics(group)
    return record, metrics.hosts, metrics.compresses, gflow.metrics().gradient_buckets


def test_a_sub_group_compresses_by_itself(compressing: Callable[..., Team]) -> None:
    answers = compressing(3).run(in_a_sub_group)
    assert [answer[1:3] for answer in answers] == [(2, True), (1, False), (2, True)]
    # The default group is not involved.
    assert [answer[3] for answer in answers] == [0, 0, 0]
    check_that_nothing_is_lost([answers[0][0], answers[2][0]], 2, STEPS)
    alone = answers[1][0].delivered
    assert same_bits(alone[-1], gradients(0, STEPS - 1))


def test_a_job_of_one_rank_is_exact(compressing: Callable[..., Team]) -> None:
    (record,) = compressing(1).run(train, 6)
    for step, delivered in enumerate(record.delivered):
        assert same_bits(delivered, gradients(0, step))
    assert own_sum(1, 1)[0].abs().sum() > 0
