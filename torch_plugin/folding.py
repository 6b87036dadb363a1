"""Brings a saved state into a job that may have other ranks, hosts, buckets or parameters.

What a job has not sent yet is a sum over its ranks, so it may be moved between them: what a host
had goes to the host of the same number, or, if there are fewer now, to that number modulo the
hosts. Per parameter it keeps its place. It must never bring anything over twice: every element of a
saved state goes to exactly one rank, or is named as dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from gflow.layout import Place

Names = list[list[Any]]


@dataclass(frozen=True)
class Target:
    """The job that a state is brought into, as this rank sees it.

    Attributes:
        rank, world_size: of the group.
        hosts, carriers: of the group: how many hosts, and ranks of each that carry.
        host, place: of this rank.
        models: by model, name and size of its parameters.
    """

    rank: int
    world_size: int
    hosts: int
    carriers: int
    host: int
    place: int
    models: list[Names]


def differences(states: list[dict[str, Any]], target: Target) -> list[str]:
    """In what a state and this job differ, in words; empty if it can be loaded as it is."""
    found = []
    first = states[0]
    for name, here in (("world_size", target.world_size), ("hosts", target.hosts)):
        if first[name] != here:
            found.append(f"{name} was {first[name]} and is {here}")
    if not found:
        if first["carriers"] != target.carriers:
            carriers = f"{first['carriers']} and are {target.carriers}"
            found.append(f"ranks of each host that carry gradients were {carriers}")
        ranks = [state["rank"] for state in states]
        if target.rank not in ranks:
            found.append(f"it is of rank {ranks[0]}, and this is rank {target.rank}")
    saved = [model["parameters"] for model in first["models"]]
    if len(saved) != len(target.models):
        found.append(f"it is of {len(saved)} models, and this job has {len(target.models)}")
    for old, new in zip(saved, target.models, strict=False):
        found += _different_parameters(dict(map(tuple, old)), dict(map(tuple, new)))
    return found


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


def fold(
    states: list[dict[str, Any]],
    target: Target,
    places: list[list[Place]],
    backend: Any,
    library: ModuleType,
) -> list[str]:
    """Load what ``states`` have for this rank; return what has no place anywhere, in words."""
    for index, model in enumerate(target.models):
        gathered = {
            kind: _by_parameter(states, target, index, kind) for kind in ("residual", "velocity")
        }
        steps = [step for state in states for step in _steps(state, model, index)]
        for place in places[index]:
            size = place.dtype.itemsize
            start, end = library.shard_of(backend, place.numel * size)
            residual, velocity = (
                _bucket(gathered[kind], model, place)[start // size : end // size]
                for kind in ("residual", "velocity")
            )
            step = max(steps, default=0)
            library.load_bucket(backend, place.number, step, residual, velocity)
    return _dropped(states, target)


def _saved_model(state: dict[str, Any], names: Names, index: int) -> dict[str, Any] | None:
    """The saved model that belongs to the one with these parameters."""
    models: list[dict[str, Any]] = state["models"]
    same = [model for model in models if model["parameters"] == names]
    if len(same) == 1:
        return same[0]
    return models[index] if index < len(models) else None


def _steps(state: dict[str, Any], names: Names, index: int) -> Iterator[int]:
    saved = _saved_model(state, names, index)
    yield from (bucket["step"] for bucket in (saved["buckets"] if saved else ()))


def _by_parameter(
    states: list[dict[str, Any]], target: Target, index: int, kind: str
) -> dict[str, torch.Tensor]:
    """What the hosts that this host stands for have kept, added up, by parameter."""
    sums: dict[str, torch.Tensor] = {}
    for state in states:
        if state["host"] % target.hosts != target.host:
            continue
        saved = _saved_model(state, target.models[index], index)
        for bucket in saved["buckets"] if saved else ():
            kept: torch.Tensor = bucket[kind]
            if not kept.numel():
                continue
            numels = [saved["parameters"][number][1] for number in bucket["parameters"]]
            whole = torch.zeros(sum(numels))
            whole[slice(*bucket["shard"])] = kept
            for number, part in zip(bucket["parameters"], whole.split(numels), strict=True):
                name = saved["parameters"][number][0]
                sums[name] = sums[name] + part if name in sums else part.clone()
    return sums


def _bucket(gathered: dict[str, torch.Tensor], names: Names, place: Place) -> torch.Tensor:
    """A whole bucket of what was gathered, with zeros for parameters that nothing is known of."""
    if not gathered:
        return torch.zeros(0)
    parts = []
    for number in place.parameters:
        name, numel = names[number]
        part = gathered.get(name)
        parts.append(part if part is not None and part.numel() == numel else torch.zeros(numel))
    return torch.cat(parts)


def _dropped(states: list[dict[str, Any]], target: Target) -> list[str]:
    dropped = []
    first = states[0]
    if (first["world_size"], first["hosts"]) != (target.world_size, target.hosts):
        given = {state["rank"] for state in states}
        missing = sorted(set(range(first["world_size"])) - given)
        if missing:
            dropped.append(f"all of ranks {missing}, whose states were not given")
    here = [dict(map(tuple, names)) for names in target.models]
    for index, model in enumerate(first["models"]):
        known = here[index] if index < len(here) else {}
        names = [name for name, numel in model["parameters"] if known.get(name) != numel]
        for name in names:
            norm = sum(_norm_of(state, index, name) for state in states)
            if norm:
                dropped.append(f"parameter {name}, with an L1 norm of {norm:.4g}")
    return dropped


def _norm_of(state: dict[str, Any], index: int, name: str) -> float:
    """The L1 norm of what a state has of a parameter."""
    model = state["models"][index]
    total = 0.0
    for bucket in model["buckets"]:
        start = 0
        first, last = bucket["shard"]
        for number in bucket["parameters"]:
            of, numel = model["parameters"][number]
            low, high = max(start, first), min(start + numel, last)
            if of == name and low < high and bucket["residual"].numel():
                total += bucket["residual"][low - first : high - first].abs().sum().item()
            start += numel
    return total
