"""Tests that a state from other ranks, hosts, buckets or parameters is either refused, naming what
differs, or carried over without loss, and that garbage is never loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gflow
from tests.compression.jobs import (
    FEEDBACK,
    REPEATED,
    PrescribedGradients,
    gradients,
    kept,
    options_of,
    residuals,
    same_bits,
    sum_of_step,
)
from tests.ranks import Team

SIZES = (1500, 64, 700, 10)
STEPS = 8


class Named(nn.Module):
    """A model with prescribed gradients and named parameters."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({k: nn.Parameter(torch.zeros(n)) for k, n in sizes.items()})

    def forward(self, given: list[torch.Tensor]) -> torch.Tensor:
        return sum((w * g).sum() for w, g in zip(self.weights.values(), given, strict=True))


SHAPES = {"a": 1500, "b": 64, "c": 700, "d": 10}


def train(model: DistributedDataParallel, rank: int, numbers: range) -> None:
    sizes = tuple(parameter.numel() for parameter in model.parameters())
    for step in numbers:
        model.zero_grad()
        model(gradients(rank, step, sizes)).backward()


def save(rank: int, world: int, sizes: dict[str, int], cap: float, momentum: float) -> Any:
    model = DistributedDataParallel(Named(sizes), bucket_cap_mb=cap)
    if momentum:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        gflow.take_momentum(optimizer)
    train(model, rank, range(STEPS))
    return gflow.state_dict()


def load(
    rank: int,
    world: int,
    states: list[Any],
    sizes: dict[str, int],
    cap: float,
    momentum: float,
    ddp_options: dict[str, Any],
) -> dict[str, Any]:
    model = DistributedDataParallel(Named(sizes), bucket_cap_mb=cap, **ddp_options)
    if momentum:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        gflow.take_momentum(optimizer)
    loaded = gflow.load_state_dict(states, strict=False)
    state = gflow.state_dict()
    # Training continues from it.
    train(model, rank, range(STEPS, STEPS + 3))
    grads = [p.grad for p in model.parameters()]
    return {"loaded": loaded._asdict(), "state": state, "end": gflow.state_dict(), "grads": grads}


def check_that_it_is_all_there(
    states: list[Any], answers: list[Any], kinds: tuple[str, ...], names: list[str]
) -> None:
    for kind in kinds:
        before = kept(states, kind)
        after = kept([answer["state"] for answer in answers], kind)
        assert sum(one.abs().sum() for one in before.values()) > 0
        for name in names:
            off = (after[f"weights.{name}"] - before[f"weights.{name}"]).abs().max()
            assert off <= 1e-6 * before[f"weights.{name}"].abs().max(), name
    for answer in answers:
        assert same_bits(answer["grads"], answers[0]["grads"])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("abcd", "ab"),
        ("ab", "abcd"),
        ("abc", "ab"),
        ("aabb", "ab"),
        ("ab", "aabb"),
        ("aab", "abb"),
        ("abab", "abc"),
    ],
)
@pytest.mark.parametrize("family", REPEATED)
def test_nothing_is_lost_when_the_ranks_change(
    compressing: Callable[..., Team], old: str, new: str, family: str
) -> None:
    options = options_of(family)
    states = compressing(old, **options).run(save, SHAPES, 0.003, 0.9)
    answers = compressing(new, **options).run(load, states, SHAPES, 0.003, 0.9, {})
    check_that_it_is_all_there(states, answers, ("residual", "velocity"), list(SHAPES))
    loaded = [answer["state"] for answer in answers]
    assert same_bits(sizes_of(loaded), sizes_of(states))
    for answer in answers:
        assert answer["loaded"]["dropped"] == []
        assert answer["loaded"]["differences"]


@pytest.mark.parametrize(("old", "new"), [("fp32", "exact"), ("exact", "fp32")])
def test_a_method_that_has_two_names_is_the_same(
    compressing: Callable[..., Team], old: str, new: str
) -> None:
    states = compressing("aab", method=old).run(save, SHAPES, 0.003, 0.0)
    for said, _ in compressing("aab", method=new).run(load_strictly, tuple(states), SHAPES):
        assert said == "loaded"


def sizes_of(states: list[Any]) -> dict[str, torch.Tensor]:
    """By parameter, the sizes that hosts follow; they must be the same on all."""
    hosts = {
        state["host"]: [one for one in states if one["host"] == state["host"]] for state in states
    }
    first, *others = (kept(of_host, "sizes") for of_host in hosts.values())
    assert all(same_bits(first, other) for other in others)
    return first


@pytest.mark.parametrize(
    ("old", "new"),
    [("int3", "chunks"), ("chunks", "int3"), ("int8", "fp16"), ("int3", "exact"), ("int3", "auto")],
)
def test_a_state_of_another_method_is_named_and_all_of_it_is_sent(
    compressing: Callable[..., Team], old: str, new: str
) -> None:
    states = compressing("aab", method=old).run(save, SHAPES, 0.003, 0.0)
    team = compressing("aab", method=new)
    for said, _ in team.run(load_strictly, tuple(states), SHAPES):
        assert f"the method was {old} and is {new}" in said
    before = kept(states)
    answers = team.run(load_and_step, states)
    for answer in answers:
        assert answer["loaded"]["differences"] == [f"the method was {old} and is {new}"]
        assert answer["loaded"]["dropped"] == []
        assert same_bits(answer["grads"], answers[0]["grads"])
    loaded, after = (kept([answer[when] for answer in answers]) for when in ("state", "end"))
    came = sum_of_step(3, STEPS, tuple(SHAPES.values()))
    for key, gradient, delivered in zip(SHAPES, came, answers[0]["grads"], strict=True):
        name = f"weights.{key}"
        assert same_bits(loaded[name], before[name])
        due = gradient + FEEDBACK.get(new, 1.0) * before[name]
        off = (delivered.double() + after[name] - due).abs().max()
        assert off <= 5e-6 * due.abs().max(), name
        if new in ("exact", "auto"):
            assert not after[name].any()


def load_and_step(rank: int, world: int, states: list[Any]) -> dict[str, Any]:
    """Loads all states and makes one step."""
    model = DistributedDataParallel(Named(SHAPES), bucket_cap_mb=0.003)
    loaded = gflow.load_state_dict(states, strict=False)._asdict()
    state = gflow.state_dict()
    train(model, rank, range(STEPS, STEPS + 1))
    grads = [p.grad for p in model.parameters()]
    return {"loaded": loaded, "state": state, "end": gflow.state_dict(), "grads": grads}


def go_on_as(rank: int, world: int, states: list[Any], chosen: str) -> tuple[str, list[str]]:
    """What gradients are sent as after a state of `auto` that stood for this was loaded."""
    model = DistributedDataParallel(Named(SHAPES), bucket_cap_mb=0.003)
    try:
        gflow.load_state_dict([state | {"chosen_method": chosen} for state in states])
    except (RuntimeError, ValueError) as error:
        return str(error), []
    used = []
    for step in range(3):
        train(model, rank, range(STEPS + step, STEPS + step + 1))
        used.append(gflow.metrics().method)
    return "", [*used, gflow.state_dict()["chosen_method"]]


def test_auto_goes_on_with_what_it_stood_for(compressing: Callable[..., Team]) -> None:
    team = compressing(2, method="auto")
    states = team.run(save, SHAPES, 0.003, 0.0)
    assert [state["chosen_method"] for state in states] == ["exact"] * 2
    assert team.run(go_on_as, states, "int4") == [("", ["int4"] * 4)] * 2
    for said, _ in team.run(go_on_as, states, "int2"):
        assert "the chosen method is 'int2'" in said


def go_on_as_each(rank: int, world: int, states: list[Any]) -> tuple[str, list[str], list[str]]:
    """The same with states in which `auto` stood for something else on each rank."""
    model = DistributedDataParallel(Named(SHAPES), bucket_cap_mb=0.003)
    own = states[rank] | {"chosen_method": ["int4", "fp16"][rank]}
    try:
        gflow.load_state_dict(own)
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    found = gflow.load_state_dict(own, strict=False).differences
    used = []
    for step in range(3):
        train(model, rank, range(STEPS + step, STEPS + step + 1))
        used.append(gflow.metrics().method)
    return refused, found, used


def test_all_ranks_go_on_with_the_same_method_whatever_their_states_say(
    compressing: Callable[..., Team],
) -> None:
    team = compressing(2, method="auto")
    for refused, found, used in team.run(go_on_as_each, team.run(save, SHAPES, 0.003, 0.0)):
        assert "stood for different methods" in refused
        assert any("(int4, fp16)" in what for what in found)
        assert used == ["int4"] * 3


@pytest.mark.parametrize(
    ("cap", "ddp_options"),
    [
        (25, {}),
        (0.001, {}),
        (0.003, {"find_unused_parameters": True}),
        (25, {"static_graph": True}),
    ],
    ids=["one_bucket", "more_buckets", "find_unused", "static_graph"],
)
def test_nothing_is_lost_when_the_buckets_change(
    compressing: Callable[..., Team], cap: float, ddp_options: dict[str, Any]
) -> None:
    team = compressing(2)
    states = team.run(save, SHAPES, 0.003, 0.0)
    answers = team.run(load, states, SHAPES, cap, 0.0, ddp_options)
    check_that_it_is_all_there(states, answers, ("residual",), list(SHAPES))
    assert all(answer["loaded"]["dropped"] == [] for answer in answers)


def test_a_parameter_that_is_new_starts_empty_and_one_that_is_gone_is_named(
    compressing: Callable[..., Team],
) -> None:
    team = compressing(2)
    states = team.run(save, SHAPES, 0.003, 0.0)
    changed = {"a": 1500, "c": 700, "d": 12, "e": 300}
    answers = team.run(load, states, changed, 0.003, 0.0, {})
    check_that_it_is_all_there(states, answers, ("residual",), ["a", "c"])
    after = kept([answer["state"] for answer in answers])
    assert not after["weights.e"].any()
    assert not after["weights.d"].any()
    for answer in answers:
        dropped = answer["loaded"]["dropped"]
        assert len(dropped) == 2
        assert any("parameter weights.b," in what for what in dropped)
        assert any("parameter weights.d," in what for what in dropped)
        text = "; ".join(answer["loaded"]["differences"])
        assert "weights.b is not in the model any more" in text
        assert "weights.e was not in the model" in text
        assert "weights.d had 10 elements and has 12" in text


def load_strictly(
    rank: int, world: int, given: Any, sizes: dict[str, int], steps: int = 3
) -> tuple[str, Any]:
    model = DistributedDataParallel(Named(sizes), bucket_cap_mb=0.003)
    try:
        gflow.load_state_dict(given[rank] if isinstance(given, tuple) else given)
        said = "loaded"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    # The refused state left no trace.
    train(model, rank, range(steps))
    return said, gflow.state_dict()


def test_a_state_that_does_not_fit_is_refused_with_what_differs(
    compressing: Callable[..., Team],
) -> None:
    states = compressing(3).run(save, SHAPES, 0.003, 0.0)
    for said, state in compressing(2).run(load_strictly, states, SHAPES):
        assert said.startswith("RuntimeError: gflow: this state does not fit: ")
        assert "world_size was 3 and is 2" in said
        assert "strict=False" in said
        assert not any(one.any() for one in residuals(state))
    others = {"a": 1500, "b": 64, "c": 701}
    for said, _ in compressing(3).run(load_strictly, tuple(states), others):
        assert "parameter weights.d is not in the model any more" in said
        assert "parameter weights.c had 700 elements and has 701" in said


def test_the_state_of_another_rank_is_refused(compressing: Callable[..., Team]) -> None:
    team = compressing(2)
    states = team.run(save, SHAPES, 0.003, 0.0)
    for rank, (said, _) in enumerate(team.run(load_strictly, tuple(states[::-1]), SHAPES)):
        assert f"it is of rank {1 - rank}, and this is rank {rank}" in said


def test_ranks_of_the_same_number_on_other_hosts_are_refused(
    compressing: Callable[..., Team],
) -> None:
    states = compressing("aabb").run(save, SHAPES, 0.003, 0.0)
    for said, _ in compressing("abbb").run(load_strictly, tuple(states), SHAPES):
        assert "this state does not fit" in said


def test_ranks_that_have_changed_places_are_refused_or_nothing_is_lost(
    compressing: Callable[..., Team],
) -> None:
    states = compressing("aabb").run(save, SHAPES, 0.003, 0.0)
    before = kept(states)
    answers = compressing("abab").run(load_strictly, tuple(states), SHAPES, 0)
    if any("this state does not fit" in said for said, _ in answers):
        return
    after = kept([state for _, state in answers])
    for name, residual in before.items():
        torch.testing.assert_close(after[name], residual, rtol=1e-6, atol=1e-6)


def test_ranks_that_have_changed_places_bring_all_of_it(compressing: Callable[..., Team]) -> None:
    states = compressing("aabb").run(save, SHAPES, 0.003, 0.0)
    answers = compressing("abab").run(load, states, SHAPES, 0.003, 0.0, {})
    check_that_it_is_all_there(states, answers, ("residual",), list(SHAPES))


def load_own(rank: int, world: int, states: list[Any], ddp_options: dict[str, Any]) -> Any:
    model = DistributedDataParallel(Named(SHAPES), **ddp_options)
    try:
        gflow.load_state_dict(states[rank])
        said = "loaded"
    except RuntimeError as error:
        said = str(error)
    assert len(list(model.parameters())) == len(SHAPES)
    return said, gflow.state_dict()


@pytest.mark.parametrize(
    "ddp_options",
    [
        {"bucket_cap_mb": 0.001},
        {"bucket_cap_mb": 25, "find_unused_parameters": True},
        {"bucket_cap_mb": 0.001, "find_unused_parameters": True},
    ],
    ids=["settles", "one_bucket", "more_buckets"],
)
def test_other_buckets_on_hosts_of_two_are_refused_or_nothing_is_lost(
    compressing: Callable[..., Team], ddp_options: dict[str, Any]
) -> None:
    team = compressing("aabb")
    states = team.run(save, SHAPES, 0.003, 0.0)
    answers = team.run(load_own, states, ddp_options)
    if all("this state does not fit" in said for said, _ in answers):
        return
    before, after = kept(states), kept([state for _, state in answers])
    for name, residual in before.items():
        torch.testing.assert_close(after[name], residual, rtol=1e-6, atol=1e-6)


def broken(states: list[Any], how: str) -> Any:
    """Broken states."""
    state = states[0]
    bucket = state["models"][0]["buckets"][0]
    if how == "not a number":
        bucket["residual"][3] = float("nan")
    elif how == "infinite velocity":
        bucket["velocity"] = torch.full_like(bucket["residual"], float("inf"))
    elif how == "a size that is too large":
        bucket["sizes"] = torch.full_like(bucket["residual"], 1e38)
    elif how == "a negative size":
        bucket["sizes"] = torch.full_like(bucket["residual"], -1.0)
    elif how == "an unknown kind of optimizer":
        state["models"][0]["stepping"][0] = "sideways"
    elif how == "too short":
        bucket["residual"] = bucket["residual"][:5]
    elif how == "no tensor":
        bucket["residual"] = "residual"
    elif how == "negative step":
        bucket["step"] = -1
    elif how == "no buckets":
        del state["models"][0]["buckets"]
    elif how == "no models":
        del state["models"]
    elif how == "models are a number":
        state["models"] = 7
    elif how == "unknown parameter":
        bucket["parameters"] = [0, 99]
    elif how == "another format":
        state["gflow"] = 99
    elif how == "of a model":
        return {"weight": torch.zeros(3)}
    elif how == "none":
        return None
    elif how == "a number":
        return 3
    elif how == "empty":
        return []
    elif how == "a list of garbage":
        return [1, 2]
    return state


GARBAGE = [
    "not a number",
    "infinite velocity",
    "a size that is too large",
    "a negative size",
    "an unknown kind of optimizer",
    "too short",
    "no tensor",
    "negative step",
    "no buckets",
    "no models",
    "models are a number",
    "unknown parameter",
    "another format",
    "of a model",
    "none",
    "a number",
    "empty",
    "a list of garbage",
]


def load_garbage(rank: int, world: int, how: str) -> tuple[str, bool]:
    states = [save(rank, world, SHAPES, 0.003, 0.0)]
    model = DistributedDataParallel(Named(SHAPES), bucket_cap_mb=0.003)
    given = broken(states, how)
    try:
        gflow.load_state_dict(given)
        said = "loaded"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    train(model, rank, range(4))
    finite = all(bool(one.isfinite().all()) for one in residuals(gflow.state_dict()))
    return said, finite and all(bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("how", GARBAGE)
def test_garbage_is_refused_in_words(compressing: Callable[..., Team], how: str) -> None:
    for said, finite in compressing(2).run(load_garbage, how):
        assert said.startswith("ValueError: gflow: "), said
        assert finite


def load_with_nothing_wrapped(rank: int, world: int, state: Any) -> str:
    try:
        gflow.load_state_dict(state[rank])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def test_loading_before_the_model_is_wrapped_is_refused(compressing: Callable[..., Team]) -> None:
    team = compressing(2)
    states = team.run(save, SHAPES, 0.003, 0.0)
    for said in team.run(load_with_nothing_wrapped, states):
        assert "it is of 1 models, and this job has 0" in said


def load_late(rank: int, world: int) -> dict[str, Any]:
    """Loads a state into a model that has already been trained."""
    model = DistributedDataParallel(PrescribedGradients(SIZES), bucket_cap_mb=0.003)
    train(model, rank, range(6))
    saved = gflow.state_dict()
    train(model, rank, range(6, 9))
    grads = [p.grad.clone() for p in model.parameters()]
    gflow.load_state_dict(saved)
    back = gflow.state_dict()
    train(model, rank, range(6, 9))
    again = [p.grad.clone() for p in model.parameters()]
    return {"back": same_bits(saved, back), "again": same_bits(grads, again)}


def test_a_trained_model_can_go_back(compressing: Callable[..., Team]) -> None:
    assert compressing(2).run(load_late) == [{"back": True, "again": True}] * 2


def is_a_copy(rank: int, world: int) -> bool:
    model = DistributedDataParallel(PrescribedGradients(SIZES))
    train(model, rank, range(6))
    saved = gflow.state_dict()
    before = [one.clone() for one in residuals(saved)]
    train(model, rank, range(6, 8))
    kept_saved = same_bits(before, residuals(saved))
    for one in residuals(saved):
        one.zero_()
    return kept_saved and any(bool(one.any()) for one in residuals(gflow.state_dict()))


def test_a_state_does_not_change_when_the_training_goes_on(
    compressing: Callable[..., Team],
) -> None:
    assert compressing(2).run(is_a_copy) == [True, True]
