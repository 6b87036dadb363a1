"""Loads a saved state into a job that may have other ranks, hosts, buckets or parameters.

What a job has not sent yet is a sum over its ranks, so it may be moved between them: what a host
kept goes to the host of the same number, modulo the number of hosts. Within a parameter, every
element keeps its position. Every element of a saved state goes to exactly one rank, or is reported
as dropped; nothing is loaded twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gflow import native
from gflow.buckets import Bucket

#: The result of :func:`gflow.state_dict`.
State = dict[str, Any]
#: Name and size of each parameter of a model.
Names = list[list[Any]]


@dataclass(frozen=True)
class Target:
    """The job that a state is loaded into, as this rank sees it.

    Attributes:
        rank, world_size: of the group.
        hosts, carriers: how many hosts the group has, and ranks on each that carry gradients.
        host, local_rank: the number of this rank's host, and this rank's index on it.
        models: name and size of the parameters of each model.
        method: what gradients are sent as.
    """

    rank: int
    world_size: int
    hosts: int
    carriers: int
    host: int
    local_rank: int
    models: list[Names]
    method: str


def differences(states: list[State], target: Target) -> list[str]:
    """How the states and this job differ, in words; empty if they can be loaded as they are."""
    found = []
    first = states[0]
    for name, here in (("world_size", target.world_size), ("hosts", target.hosts)):
        if first[name] != here:
            found.append(f"{name} was {first[name]} and is {here}")
    if not found:
        own = next((state for state in states if state["rank"] == target.rank), None)
        if own is None:
            return [f"it is of rank {first['rank']}, and this is rank {target.rank}"]
        # "place" is what the saved format calls the local rank.
        for name, here in (("host", target.host), ("place", target.local_rank)):
            if (was := own[name]) != here:
                found.append(f"the {name} of rank {target.rank} was {was} and is {here}")
        if own["carriers"] != target.carriers:
            carriers = f"{own['carriers']} and are {target.carriers}"
            found.append(f"ranks of each host that carry gradients were {carriers}")
    saved = [model["parameters"] for model in first["models"]]
    if len(saved) != len(target.models):
        found.append(f"it is of {len(saved)} models, and this job has {len(target.models)}")
    for old, new in zip(saved, target.models, strict=False):
        found += _different_parameters(dict(map(tuple, old)), dict(map(tuple, new)))
    return found


def different_method(states: list[State], target: Target) -> list[str]:
    """How the method has changed, in words. What is kept is a gradient with every method, so it
    can be loaded as it is."""
    # States that were saved before there were several methods name none.
    methods = {state.get("method", target.method) for state in states}
    saved = sorted(one for one in methods if _effect_of(one) != _effect_of(target.method))
    return [f"the method was {', '.join(saved)} and is {target.method}"] if saved else []


def _effect_of(method: str) -> str:
    """The same for two names of one method."""
    return "exact" if method == "fp32" else method


def _different_parameters(old: dict[str, int], new: dict[str, int]) -> Iterator[str]:
    for what, names in (
        ("is not in the model any more", old.keys() - new.keys()),
        ("was not in the model", new.keys() - old.keys()),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            yield f"parameter {min(names)}{more} {what}"
    for name in sorted(old.keys() & new.keys()):
        if old[name] != new[name]:
            yield f"parameter {name} had {old[name]} elements and has {new[name]}"


def different_layout(
    states: list[State],
    target: Target,
    buckets: list[list[Bucket]],
    backend: Any,
) -> list[str]:
    """The models whose buckets, or this rank's shards of them, differ from its saved state."""
    own = next((state for state in states if state["rank"] == target.rank), states[0])
    found = []
    for index, names in enumerate(target.models):
        saved = saved_model(own, names, index)
        if saved is None or saved["parameters"] != names:
            continue
        here = [[bucket.parameters, shard_of(bucket, backend)] for bucket in buckets[index]]
        there = [[one["parameters"], list(one["shard"])] for one in saved["buckets"]]
        if here != there:
            found.append(f"the gradient buckets of the model with {names[0][0]} are other ones")
    return found


def missing_ranks(states: list[State], target: Target, *, moved: bool, relaid: bool) -> list[str]:
    """The ranks whose states are needed here but were not given, in words."""
    first = states[0]
    if not (moved or (relaid and first["carriers"] > 1)):
        return []
    same = all(first[name] == getattr(target, name) for name in ("world_size", "hosts", "carriers"))
    if same and first["carriers"] == 1:
        return []
    missing = sorted(set(range(first["world_size"])) - {state["rank"] for state in states})
    return [f"all of ranks {missing}, whose states were not given"] if missing else []


def shard_of(bucket: Bucket, backend: Any) -> list[int]:
    """Start and end of the elements of a bucket that this rank carries."""
    size = bucket.dtype.itemsize
    start, end = native.library.shard_of(backend, bucket.numel * size)
    return [start // size, end // size]


@dataclass(frozen=True)
class Loadable:
    """What states hold for this rank.

    Attributes:
        steps: the last step of each model.
        kept: for each bucket, by number: its model, residual, velocity and sizes.
    """

    steps: list[int]
    kept: dict[int, tuple[int, dict[str, torch.Tensor]]]

    def owes(self) -> bool:
        """Whether a residual is kept here."""
        return any(bool(kept["residual"].any()) for _, kept in self.kept.values())

    def digest_of_sizes(self) -> str:
        """Equal for equal sizes."""
        digest = hashlib.sha256()
        for _, kept in self.kept.values():
            digest.update(kept["sizes"].numpy().tobytes() + b";")
        return digest.hexdigest()


def loadable(
    states: list[State], target: Target, buckets: list[list[Bucket]], backend: Any
) -> Loadable:
    """Gather what ``states`` hold for this rank."""
    found = Loadable([], {})
    for index, model in enumerate(target.models):
        owed = [state for state in states if state["host"] % target.hosts == target.host]
        # All hosts keep the same sizes, so those of one host are enough.
        first_host = min(state["host"] for state in states)
        sized = [state for state in states if state["host"] == first_host]
        gathered = {
            "residual": _by_parameter(owed, target, index, "residual"),
            "velocity": _by_parameter(owed, target, index, "velocity"),
            "sizes": _by_parameter(sized, target, index, "sizes"),
        }
        steps = [step for state in states for step in _steps(state, model, index)]
        found.steps.append(max(steps, default=0))
        for bucket in buckets[index]:
            start, end = shard_of(bucket, backend)
            kept = {
                kind: _whole_bucket(by_parameter, model, bucket)[start:end]
                for kind, by_parameter in gathered.items()
            }
            found.kept[bucket.number] = (index, kept)
    return found


def restore(
    found: Loadable, steps: list[int], *, with_sizes: bool, owes: bool, backend: Any
) -> None:
    """Load it.

    Args:
        found: for this rank.
        steps: of each model, the same on all ranks.
        with_sizes: whether all hosts have the same sizes. They must: so otherwise all start with
            none, and the exchange measures them anew.
        owes: whether some rank keeps a residual. Then exact exchanges bring it first.
        backend: of the group.
    """
    for number, (model, kept) in found.kept.items():
        sizes = {} if with_sizes else {"sizes": torch.zeros(0)}
        native.library.load_bucket(backend, number, steps[model], **(kept | sizes), owes=owes)


def saved_model(state: State, names: Names, index: int) -> dict[str, Any] | None:
    """The saved model that corresponds to the one with these parameters."""
    models: list[State] = state["models"]
    same = [model for model in models if model["parameters"] == names]
    if len(same) == 1:
        return same[0]
    return models[index] if index < len(models) else None


def _steps(state: State, names: Names, index: int) -> Iterator[int]:
    saved = saved_model(state, names, index)
    yield from (bucket["step"] for bucket in (saved["buckets"] if saved else ()))


def _by_parameter(
    states: list[State], target: Target, index: int, kind: str
) -> dict[str, torch.Tensor]:
    """For each parameter, the sum of what these states keep of it."""
    sums: dict[str, torch.Tensor] = {}
    for state in states:
        saved = saved_model(state, target.models[index], index)
        if saved is None:
            continue
        for bucket in saved["buckets"]:
            # States that were saved before there were sizes have none.
            kept: torch.Tensor = bucket.get(kind, torch.zeros(0))
            if not kept.numel():
                continue
            numels = [saved["parameters"][number][1] for number in bucket["parameters"]]
            whole = torch.zeros(sum(numels))
            whole[slice(*bucket["shard"])] = kept
            for number, part in zip(bucket["parameters"], whole.split(numels), strict=True):
                name = saved["parameters"][number][0]
                sums[name] = sums[name] + part if name in sums else part.clone()
    return sums


def _whole_bucket(gathered: dict[str, torch.Tensor], names: Names, bucket: Bucket) -> torch.Tensor:
    """A bucket of what was gathered, with zeros for parameters without a saved value."""
    if not gathered:
        return torch.zeros(0)
    parts = []
    for number in bucket.parameters:
        name, numel = names[number]
        part = gathered.get(name)
        parts.append(part if part is not None and part.numel() == numel else torch.zeros(numel))
    return torch.cat(parts)


def dropped_parameters(states: list[State], target: Target) -> list[str]:
    """Parameters of the states that this job does not have, in words."""
    dropped = []
    here = [dict(map(tuple, names)) for names in target.models]
    for index, model in enumerate(states[0]["models"]):
        same = [names for names in target.models if names == model["parameters"]]
        known = dict(map(tuple, same[0])) if same else (here[index] if index < len(here) else {})
        for name, numel in model["parameters"]:
            norm = 0.0
            if known.get(name) != numel:
                norm = sum(_norm_of(state, index, name) for state in states)
            if norm:
                dropped.append(f"parameter {name}, with an L1 norm of {norm:.4g}")
    return dropped


def _norm_of(state: State, index: int, name: str) -> float:
    """The L1 norm of a parameter's residual in a state."""
    model = state["models"][index]
    total = 0.0
    for bucket in model["buckets"]:
        start = 0
        first, last = bucket["shard"]
        for number in bucket["parameters"]:
            own_name, numel = model["parameters"][number]
            low, high = max(start, first), min(start + numel, last)
            if own_name == name and low < high and bucket["residual"].numel():
                total += bucket["residual"][low - first : high - first].abs().sum().item()
            start += numel
    return total
