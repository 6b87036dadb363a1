"""Tests that a training resumed from a saved state matches the uninterrupted one to the bit, in
every mode of DDP."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gflow
from tests.compression.jobs import FAMILIES, options_of, residuals, same_bits
from tests.ddp.models import WIDTH, batch, loss_of
from tests.ranks import Team

BEFORE, AFTER = 8, 7


class Network(nn.Module):
    """Layers that are created in a different order than they are used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.last = nn.Linear(40, 3)
        self.first = nn.Linear(WIDTH, 40)
        self.middle = nn.Linear(40, 40)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(inputs).tanh()).tanh())


def through_a_file(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer)


def steps(
    model: DistributedDataParallel, optimizer: Any, rank: int, numbers: range
) -> list[torch.Tensor]:
    losses = []
    for step in numbers:
        optimizer.zero_grad()
        loss = loss_of(model, batch(rank, step % 5))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def job(ddp_options: dict[str, Any], momentum: str) -> tuple[DistributedDataParallel, Any]:
    model = DistributedDataParallel(Network(), bucket_cap_mb=0.004, **ddp_options)
    kinds = {"momentum": 0.9, "taken": 0.9, "none": 0.0}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=kinds[momentum])
    if momentum == "taken":
        assert gflow.take_momentum(optimizer)
    return model, optimizer


def interrupted(
    rank: int, world: int, ddp_options: dict[str, Any], momentum: str
) -> dict[str, Any]:
    whole, optimizer = job(ddp_options, momentum)
    steps(whole, optimizer, rank, range(BEFORE))
    saved = through_a_file(
        {
            "model": whole.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "gflow": gflow.state_dict(),
        }
    )
    kept = gflow.state_dict()
    expected = steps(whole, optimizer, rank, range(BEFORE, BEFORE + AFTER))
    end = gflow.state_dict()
    weights = copy.deepcopy(whole.module.state_dict())
    # DDP and its Reducer reference each other: without this the old model would stay alive.
    del whole, optimizer

    model, optimizer = job(ddp_options, momentum)
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    if momentum == "taken":
        gflow.take_momentum(optimizer)
    loaded = gflow.load_state_dict(saved["gflow"])
    at_once = gflow.state_dict()
    losses = steps(model, optimizer, rank, range(BEFORE, BEFORE + AFTER))
    return {
        "loaded": (list(loaded.differences), list(loaded.dropped)),
        "state": same_bits(at_once, kept),
        "losses": same_bits(losses, expected),
        "weights": same_bits(dict(model.module.state_dict()), dict(weights)),
        "end": same_bits(gflow.state_dict(), end),
        "something was kept": any(bool(one.any()) for one in residuals(kept)),
    }


RIGHT = {
    "loaded": ([], []),
    "state": True,
    "losses": True,
    "weights": True,
    "end": True,
    "something was kept": True,
}

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "find_unused": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "bucket_view": {"gradient_as_bucket_view": True},
    "static_graph_and_bucket_view": {"static_graph": True, "gradient_as_bucket_view": True},
}


@pytest.mark.parametrize("momentum", ["none", "taken"])
@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_training_is_the_one_that_was_not_interrupted(
    compressing: Callable[..., Team], mode: str, momentum: str
) -> None:
    assert compressing(2).run(interrupted, MODES[mode], momentum) == [RIGHT] * 2


@pytest.mark.parametrize("momentum", ["momentum", "taken"])
@pytest.mark.parametrize(
    ("where", "options"),
    [
        ("ab", {"fusion_bytes": 1 << 24}),
        ("abc", {}),
        ("aabb", {"fusion_bytes": 1 << 24}),
        ("aab", {"wire": "bf16"}),
        ("ab", {"warmup_steps": 5, "ramp_steps": 6}),
        ("ab", {"warmup_steps": 12}),
        *(("ab", options_of(family)) for family in FAMILIES),
        ("aabb", options_of("int3")),
        ("aab", options_of("ternary-adam")),
    ],
    ids=str,
)
def test_so_it_is_with_other_hosts_schedules_and_codecs(
    compressing: Callable[..., Team], where: str, options: dict[str, Any], momentum: str
) -> None:
    answers = compressing(where, **options).run(interrupted, {}, momentum)
    keeping = [answer.pop("something was kept") for answer in answers]
    right = {name: value for name, value in RIGHT.items() if name != "something was kept"}
    assert answers == [right] * len(where)
    # Nothing in a warm-up, and nothing on a rank of a larger host that carries nothing.
    assert any(keeping) == (options.get("warmup_steps") != 12)


def save_to(
    rank: int, world: int, folder: str
) -> tuple[list[torch.Tensor], dict[str, Any], dict[str, Any]]:
    model, optimizer = job({}, "none")
    steps(model, optimizer, rank, range(BEFORE))
    dcp.save({"model": model.module, "gflow": gflow.State()}, checkpoint_id=folder)
    state = gflow.state_dict()
    losses = steps(model, optimizer, rank, range(BEFORE, BEFORE + AFTER))
    return losses, state, dict(model.module.state_dict())


def go_on_from(
    rank: int, world: int, folder: str, options: dict[str, Any]
) -> tuple[list[torch.Tensor], dict[str, Any], dict[str, Any]]:
    model, optimizer = job({}, "none")
    dcp.load({"model": model.module, "gflow": gflow.State(**options)}, checkpoint_id=folder)
    state = gflow.state_dict()
    losses = steps(model, optimizer, rank, range(BEFORE, BEFORE + AFTER))
    return losses, state, dict(model.module.state_dict())


@pytest.mark.parametrize(
    ("where", "options"),
    # Of ternary, with an optimizer that has to be seen.
    [("ab", {}), ("aab", {}), ("ab", {"method": "int3"}), ("ab", {"method": "ternary"})],
    ids=str,
)
def test_a_distributed_checkpoint_holds_it(
    compressing: Callable[..., Team], tmp_path: Path, where: str, options: dict[str, str]
) -> None:
    team = compressing(where, **options)
    saved = team.run(save_to, str(tmp_path))
    assert same_bits(saved, team.run(go_on_from, str(tmp_path), {}))


@pytest.mark.parametrize(("old", "new"), [(3, 2), (2, 3)])
def test_a_distributed_checkpoint_can_be_loaded_by_another_number_of_ranks(
    compressing: Callable[..., Team], tmp_path: Path, old: int, new: int
) -> None:
    from tests.compression.jobs import kept

    saved = compressing(old).run(save_to, str(tmp_path))
    before = kept([state for _, state, _ in saved])
    options = {"strict": False, "saved_ranks": old}
    answers = compressing(new).run(go_on_from, str(tmp_path), options)
    after = kept([state for _, state, _ in answers])
    assert before.keys() == after.keys()
    for name, residual in before.items():
        torch.testing.assert_close(after[name], residual, rtol=1e-6, atol=1e-6)
    assert all(same_bits(answer[2], answers[0][2]) for answer in answers)


def load_strictly(rank: int, world: int, folder: str, options: dict[str, Any]) -> str:
    model, _ = job({}, "none")
    try:
        dcp.load({"model": model.module, "gflow": gflow.State(**options)}, checkpoint_id=folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def test_a_distributed_checkpoint_of_other_ranks_is_refused_unless_asked_for(
    compressing: Callable[..., Team], tmp_path: Path
) -> None:
    compressing(3).run(save_to, str(tmp_path))
    for said in compressing(2).run(load_strictly, str(tmp_path), {"saved_ranks": 3}):
        assert "world_size was 3 and is 2" in said


def load_and_save_again(rank: int, world: int, folder: str, ranks: int) -> list[str]:
    model, _ = job({}, "none")
    app = {"model": model.module, "gflow": gflow.State(strict=False, saved_ranks=ranks)}
    dcp.load(app, checkpoint_id=folder)
    dcp.save(app, checkpoint_id=f"{folder}/again")
    return sorted(app["gflow"].state_dict())


def test_what_was_loaded_from_other_ranks_is_saved_with_those_that_there_are(
    compressing: Callable[..., Team], tmp_path: Path
) -> None:
    compressing(3).run(save_to, str(tmp_path))
    team = compressing(2)
    assert team.run(load_and_save_again, str(tmp_path), 3) == [["rank0"], ["rank1"]]
    assert team.run(load_strictly, str(tmp_path / "again"), {}) == ["loaded"] * 2
