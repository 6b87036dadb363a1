"""Saves and loads the state that the engine keeps for gradients from step to step.

Each rank has its own state: what it has not sent yet, its velocity and its steps. A training that
continues from a saved state is bit-identical to one that was not interrupted. If the ranks, the
hosts or the model have changed since, loading says so; with ``strict=False`` it loads all that this
job can use, so that no gradient is lost that still belongs somewhere.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gflow import native, stepping
from gflow.backend import backend_of, group_or_default
from gflow.buckets import (
    Bucket,
    buckets_of,
    expected_layout,
    fix_layout,
    models_of,
    names_of,
    parameters_of,
)
from gflow.group import method_of
from gflow.logs import GroupLogger
from gflow.options import OPTION_SPECS
from gflow.restore import (
    Loadable,
    Target,
    differences,
    different_layout,
    different_method,
    dropped_parameters,
    loadable,
    missing_ranks,
    restore,
    saved_model,
    shard_of,
)

FORMAT = 1
#: No size of an element is larger; rounded to bfloat16, somewhat more than what the engine allows.
_LARGEST_SIZE = 1.01e17

Models = list[DistributedDataParallel] | None


class Loaded(NamedTuple):
    """The findings of loading a state.

    Attributes:
        differences: how the state and this job differ; empty if it was loaded as it is.
        dropped: what the state holds and this job has no use for.

    Example:
        >>> gflow.load_state_dict(gflow.state_dict())
        Loaded(differences=[], dropped=[])
    """

    differences: list[str]
    dropped: list[str]


def state_dict(group: dist.ProcessGroup | None = None, *, models: Models = None) -> dict[str, Any]:
    """Return what this rank keeps of gradients, for ``torch.save``.

    Every rank must save its own. Call it between two steps, or after the group has failed: then it
    gives what was kept as of the last complete step, if the group has ``keep_last_step="on"`` or a
    ``GradScaler`` is watched, and otherwise what the failed step has left.

    Args:
        group: the process group that DDP uses; by default the default group.
        models: its DDP models, in the order in which they were wrapped; by default all. Needed, for
            saving and for loading, if two models have parameters of the same names.

    Example:
        >>> torch.save(gflow.state_dict(), f"gflow-{dist.get_rank()}.pt")
    """
    group = group_or_default(group)
    backend = backend_of(group)
    found = models_of(group, models)
    buckets = buckets_of(found, backend, in_order=models is not None)
    saved = [_model_state(*pair, backend) for pair in zip(found, buckets, strict=True)]
    _refuse_twins([model["parameters"] for model in saved], models)
    hosts, carriers, host, local_rank = native.library.topology(backend)
    return {
        "gflow": FORMAT,
        "rank": group.rank(),
        "world_size": group.size(),
        "method": method_of(group),
        "hosts": hosts,
        "carriers": carriers,
        "host": host,
        # The key is part of the saved format: states saved earlier must still load.
        "place": local_rank,
        # What "auto" stood for; empty with another method.
        "chosen_method": native.library.chosen_method(backend),
        "models": saved,
    }


def load_state_dict(
    state: dict[str, Any] | Sequence[dict[str, Any]],
    group: dist.ProcessGroup | None = None,
    *,
    models: Models = None,
    strict: bool = True,
) -> Loaded:
    """Continue from what :func:`state_dict` returned. Every rank must call it.

    Call it after wrapping the models in DDP and loading their parameters, before the first step.

    Args:
        state: of this rank; if ranks or hosts have changed, the states of all ranks that saved.
        group: the process group that DDP uses; by default the default group.
        models: as for :func:`state_dict`.
        strict: refuse a state of other ranks, hosts or models. Otherwise load all that this job can
            use; the rest is returned and logged.

    Example:
        >>> torch.save(gflow.state_dict(), f"gflow-{dist.get_rank()}.pt")
        >>> gflow.load_state_dict(torch.load(f"gflow-{dist.get_rank()}.pt"))
        Loaded(differences=[], dropped=[])
    """
    group = group_or_default(group)
    backend = backend_of(group)
    states: list[Any] = list(state) if isinstance(state, (list, tuple)) else [state]
    # If one rank cannot load its state, none does: the others would wait for it.
    damage = _damage_of(states)
    all_damage = _gather(group, [damage] if damage else [])
    if all_damage:
        raise ValueError(damage or f"gflow: another rank cannot load its state: {all_damage[0]}")
    found = models_of(group, models)
    names = [names_of(model) for model in found]
    _refuse_twins(names, models)
    hosts, carriers, host, local_rank = native.library.topology(backend)
    place = (hosts, carriers, host, local_rank)
    target = Target(group.rank(), group.size(), *place, names, method_of(group))
    different = _gather(group, differences(states, target))
    method = _gather(group, different_method(states, target))
    if strict:
        _refuse(different + method)
    buckets = _fix_layouts(found, names, states, backend, in_order=models is not None)
    layout = _gather(group, different_layout(states, target, buckets, backend))
    if strict:
        _refuse(layout)
    dropped = missing_ranks(states, target, moved=bool(different), relaid=bool(layout))
    dropped += dropped_parameters(states, target)
    own = loadable(states, target, buckets, backend)
    everyones = _everyones(group, own, local_rank, states[0].get("chosen_method", ""))
    unequal = _unequal(everyones)
    if strict:
        _refuse(unequal)
    steps = [max(of_model) for of_model in zip(*(one.steps for one in everyones), strict=True)]
    owes = any(one.owes for one in everyones)
    restore(own, steps, with_sizes=not _sizes_differ(everyones), owes=owes, backend=backend)
    # The same on all ranks, whatever their states say.
    if chosen := everyones[0].chosen:
        native.library.set_chosen_method(backend, chosen)
    _expect_steppings(group, found, buckets, states[0])
    log = GroupLogger.of_group(group)
    for what in dropped:
        log.warning("dropped from the state that was loaded: %s", what)
    return Loaded(different + method + layout + unequal, dropped)


class _Found(NamedTuple):
    """What a rank has found to load, as the others have to know it."""

    local_rank: int
    steps: list[int]
    sizes: str
    owes: bool
    #: What "auto" stood for.
    chosen: str


def _everyones(
    group: dist.ProcessGroup, own: Loadable, local_rank: int, chosen: str
) -> list[_Found]:
    everyones: list[Any] = [None] * group.size()
    found = _Found(local_rank, own.steps, own.digest_of_sizes(), own.owes(), chosen)
    dist.all_gather_object(everyones, found, group=group)
    return everyones


def _unequal(everyones: list[_Found]) -> list[str]:
    """How what the ranks have found differs where it must be the same, in words."""
    said = []
    for of_model in zip(*(one.steps for one in everyones), strict=True):
        steps = sorted(set(of_model))
        if len(steps) > 1:
            ranks = [of_model.index(step) for step in steps]
            texts = [f"rank {rank}'s of step {of_model[rank]}" for rank in ranks]
            said.append("the states are of different steps: " + ", ".join(texts))
    chosen = [one.chosen for one in everyones]
    if len(set(chosen)) > 1:
        said.append(
            f'method="auto" stood for different methods on different ranks ({", ".join(chosen)}); '
            "all go on with rank 0's"
        )
    if _sizes_differ(everyones):
        said.append(
            "the sizes of elements differ from host to host; all start without, and are measured "
            "anew"
        )
    return said


def _sizes_differ(everyones: list[_Found]) -> bool:
    """Whether ranks that carry the same shard have different sizes for it."""
    return len({(one.local_rank, one.sizes) for one in everyones}) > len(
        {one.local_rank for one in everyones}
    )


def _gather(group: dist.ProcessGroup, own: list[str]) -> list[str]:
    """The texts of all ranks, this rank's first, without repetitions."""
    everyones: list[Any] = [None] * group.size()
    dist.all_gather_object(everyones, own, group=group)
    return list(dict.fromkeys([*own, *(what for said in everyones for what in said)]))


def _refuse(different: list[str]) -> None:
    if different:
        raise RuntimeError(
            "gflow: this state does not fit: " + "; ".join(different) + ". Load the state that "
            "fits, or bring over what still has a place with load_state_dict(states_of_all_ranks, "
            "strict=False)"
        )


class State:
    """The state as an object that ``torch.distributed.checkpoint`` saves and loads.

    Each rank has its own entry in the checkpoint. To load the checkpoint of a job with another
    number of ranks, give that number.

    Args:
        group: the process group that DDP uses; by default the default group.
        models: as for :func:`state_dict`.
        strict: as for :func:`load_state_dict`.
        saved_ranks: number of ranks of the job that saved, if it differs.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> app = {"model": model, "gflow": gflow.State()}
        >>> _ = dcp.save(app, checkpoint_id="step-100")
        >>> dcp.load(app, checkpoint_id="step-100")
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        models: Models = None,
        strict: bool = True,
        saved_ranks: int | None = None,
    ) -> None:
        self._group = group_or_default(group)
        self._models = models
        self._strict = strict
        self._saved_ranks = saved_ranks
        self._entry = f"rank{dist.get_global_rank(self._group, self._group.rank())}"

    def state_dict(self) -> dict[str, bytes]:
        """This rank's entry; before loading with ``saved_ranks``, the entries of all of those."""
        if self._saved_ranks is not None:
            return {f"rank{rank}": b"" for rank in range(self._saved_ranks)}
        # As bytes, because a checkpoint loads tensors only into existing tensors.
        buffer = io.BytesIO()
        torch.save(state_dict(self._group, models=self._models), buffer)
        return {self._entry: buffer.getvalue()}

    def load_state_dict(self, entries: dict[str, bytes]) -> None:
        """Load the entries of a checkpoint."""
        # The next checkpoint has the ranks of this job.
        self._saved_ranks = None
        states = [torch.load(io.BytesIO(entry)) for entry in entries.values()]
        load_state_dict(states, self._group, models=self._models, strict=self._strict)


def _model_state(
    model: DistributedDataParallel, buckets: list[Bucket], backend: Any
) -> dict[str, Any]:
    kept = [native.library.bucket_state(backend, bucket.number) for bucket in buckets]
    # In a group that has failed, some may be a step ahead of the others.
    last = min((step for step, *_ in kept), default=0)
    saved = []
    for bucket, newest in zip(buckets, kept, strict=True):
        step, residual, velocity, sizes = (
            newest
            if newest[0] == last
            else native.library.bucket_state(backend, bucket.number, last)
        )
        saved.append(
            {
                "parameters": bucket.parameters,
                "shard": shard_of(bucket, backend),
                "step": step,
                "residual": residual,
                "velocity": velocity,
                "sizes": sizes,
            }
        )
    return {
        "parameters": names_of(model),
        # What steps by each of them, as far as it was seen.
        "stepping": stepping.seen(parameters_of(model).values()),
        "buckets": saved,
        "layout": _whole_layout(model),
    }


def _whole_layout(model: DistributedDataParallel) -> list[list[int]]:
    """The parameters of each bucket, also of those that are never compressed."""
    numbers = {id(p): number for number, p in enumerate(parameters_of(model).values())}
    buckets = model.reducer._get_zeros_like_grad_buckets()
    return [[numbers[id(p)] for p in bucket.parameters()] for bucket in buckets]


def _fix_layouts(
    models: list[DistributedDataParallel],
    names: list[list[list[Any]]],
    states: list[dict[str, Any]],
    backend: Any,
    *,
    in_order: bool,
) -> list[list[Bucket]]:
    """Make DDP's layouts final, as saved where that is possible; return the buckets."""
    fixed: list[list[Bucket] | None] = []
    for index, (model, own) in enumerate(zip(models, names, strict=True)):
        saved = saved_model(states[0], own, index)
        if saved is not None and saved["parameters"] == own:
            layout = saved["layout"]
        else:
            layout = expected_layout(model)
        fixed.append(fix_layout(model, backend, layout))
    missing = [index for index, buckets in enumerate(fixed) if buckets is None]
    rest = buckets_of([models[index] for index in missing], backend, in_order=in_order)
    for index, buckets in zip(missing, rest, strict=True):
        fixed[index] = buckets
    return [buckets for buckets in fixed if buckets is not None]


def _expect_steppings(
    group: dist.ProcessGroup,
    models: list[DistributedDataParallel],
    buckets: list[list[Bucket]],
    state: dict[str, Any],
) -> None:
    """Go on with what was seen of the optimizers, by parameter."""
    kinds: dict[torch.nn.Parameter, str] = {}
    contents: list[stepping.Contents] = []
    for index, model in enumerate(models):
        own = parameters_of(model)
        saved = saved_model(state, names_of(model), index)
        if saved is not None:
            names = [name for name, _ in saved["parameters"]]
            known = zip(names, _steppings_of(saved), strict=True)
            kinds |= {own[name]: kind for name, kind in known if kind and name in own}
        parameters = list(own.values())
        contents += [
            (bucket.number, [parameters[number] for number in bucket.parameters])
            for bucket in buckets[index]
        ]
    stepping.expect(group, kinds, contents)


def _steppings_of(model: dict[str, Any]) -> list[str]:
    """The kinds of optimizers by parameter; unknown in states of before they were saved."""
    kinds: list[str] = model.get("stepping", [""] * len(model["parameters"]))
    return kinds


def _refuse_twins(names: list[list[list[Any]]], models: Models) -> None:
    if models is None and any(names.count(one) > 1 for one in names):
        raise RuntimeError(
            "gflow: two models of this process group have parameters of the same names, so their "
            "states cannot be told apart: give models=[...] in the order in which they were "
            "wrapped, for saving and for loading"
        )


def _damage_of(states: list[Any]) -> str:
    """The problems with the given states; empty if there are none."""
    if not states:
        return "gflow: expected a state, or the states of several ranks, got none"
    for state in states:
        if not isinstance(state, dict) or "gflow" not in state:
            known = f" with {sorted(map(str, state))[:5]}" if isinstance(state, dict) else ""
            kind = type(state).__name__
            return f"gflow: expected what gflow.state_dict() returned, got {kind}{known}"
        if state["gflow"] != FORMAT:
            return (
                f"gflow: this state has format {state['gflow']}, expected {FORMAT}: it was saved "
                "by another version of gflow"
            )
        try:
            _check(state)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            return (
                f"gflow: this state is damaged ({type(error).__name__}: {error}): expected what "
                "gflow.state_dict() returned, unchanged"
            )
    return ""


def _check(state: dict[str, Any]) -> None:
    """Raise unless everything is there, of the right type and size."""
    for name in ("rank", "world_size", "hosts", "carriers", "host", "place"):
        _require(isinstance(state[name], int) and state[name] >= 0, f"{name} is {state[name]!r}")
    chosen = state.get("chosen_method", "")
    known = chosen == "" or (chosen != "auto" and OPTION_SPECS["method"].is_allowed(chosen))
    _require(known, f"the chosen method is {chosen!r}")
    for model in state["models"]:
        sizes = [numel for name, numel in model["parameters"] if isinstance(name, str)]
        _require(len(sizes) == len(model["parameters"]), "a parameter without a name")
        kinds = _steppings_of(model)
        known = set(kinds) <= {"", *stepping.NAMES.values()} and len(kinds) == len(sizes)
        _require(known, f"optimizers that step {kinds!r}")
        laid_out = sorted(number for bucket in model["layout"] for number in bucket)
        _require(laid_out == list(range(len(sizes))), "parameters that are in no bucket, or in two")
        for bucket in model["buckets"]:
            numel = sum(sizes[number] for number in bucket["parameters"])
            start, end = bucket["shard"]
            _require(0 <= start <= end <= numel, f"a shard from {start} to {end} of {numel}")
            _require(isinstance(bucket["step"], int) and bucket["step"] >= 0, "a wrong step")
            for kind in ("residual", "velocity", "sizes"):
                kept = bucket[kind] if kind != "sizes" else bucket.get(kind, torch.zeros(0))
                _require(kept.dtype == torch.float32 and kept.dim() == 1, f"a wrong {kind}")
                _require(kept.numel() in (0, end - start), f"a {kind} of {kept.numel()} elements")
                _require(bool(torch.isfinite(kept).all()), f"infinity or NaN in a {kind}")
            sized = bucket.get("sizes", torch.zeros(0))
            within = (sized >= 0) & (sized <= _LARGEST_SIZE)
            _require(bool(within.all()), "the size of an element is negative or too large")


def _require(fits: bool, what: str) -> None:
    if not fits:
        raise TypeError(what)
