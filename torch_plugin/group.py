"""Makes the backend of a process group. torch calls :func:`create` once per group and rank."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from gflow import accelerator, comm_hooks, logs, native, stepping, wrapping
from gflow.network import choose_address
from gflow.options import Options, Settings, resolve
from gflow.rendezvous import GroupSpec, RankInfo, gather_ranks, wait_until_connected

#: All ranks are there when connecting starts, so it takes seconds or never ends. Ctrl-C has to
#: wait for it.
CONNECT_TIMEOUT = timedelta(seconds=60)


#: The method of each group of this process, by its name.
_methods: dict[str, str] = {}


def method_of(group: dist.ProcessGroup) -> str:
    """What the gradients of ``group`` are sent as, by the name of the option."""
    return _methods.get(group.group_name, "")


def create(backend_options: Any, pg_options: Options | None) -> Any:
    """Build the backend for ``init_process_group`` or ``new_group``.

    Args:
        backend_options: torch's ``_DistributedBackendOptions``: store, rank, size, timeout.
        pg_options: the user's ``pg_options``.
    """
    settings = resolve(pg_options)
    library = native.library
    logs.start()
    # The Reducer asks a backend for bucket memory only if this is 0; a user's own choice stays.
    os.environ.setdefault("DDP_DISABLE_COMM_MEM", "0")

    store: Store = backend_options.store
    rank, size = backend_options.group_rank, backend_options.group_size
    timeout = _as_timedelta(backend_options.timeout)
    group = str(backend_options.group_id)
    # Before any model can be wrapped for this group.
    comm_hooks.recognise_builtin_hooks()
    wrapping.expect_models(group, settings["method"], is_off=settings["compress"] == "off")

    log = logs.GroupLogger.of(group, rank)
    address, reason = choose_address(store, settings["ifname"])
    log.info("using address %s: %s", address, reason)
    endpoint = library.Endpoint(address)
    own = RankInfo.of_this_process(rank, endpoint.address, endpoint.fd_socket, settings)
    global_ranks = backend_options.global_ranks_in_group
    spec = GroupSpec(group, size, global_ranks)
    found = gather_ranks(store, own, spec, settings["secret"], timeout)

    config = library.GroupConfig(
        name=group,
        rank=rank,
        labels=_labels(found.ranks, global_ranks),
        addresses=[one.address for one in found.ranks],
        hosts=_host_ids(found.ranks, settings),
        fd_sockets=[one.fd_socket for one in found.ranks],
        key=found.key,
        timeout=min(timeout, CONNECT_TIMEOUT),
        compression=library.Compression(
            enabled=settings["compress"] != "off",
            cores_are_busy=_cores_are_busy(found.ranks, rank),
            **{name: settings[name] for name in _ENGINE_OPTIONS},
        ),
    )
    # Connect before Gloo does: our errors explain better why a connection fails.
    joined = library.join(endpoint, config)
    if joined.notice:
        _warn_once(log, joined.notice)
    inner_store = PrefixStore(found.prefix, store)
    gloo = _inner_gloo(PrefixStore("gloo", inner_store), rank, size, timeout, settings, address)
    wait_until_connected(inner_store, rank, size)
    member = accelerator.GroupMember(inner_store, rank, size, timeout, backend_options)
    backend = library.make_backend(
        joined, rank, size, timeout, gloo, **_inner_of_devices(member, log)
    )
    stepping.follow(group, backend, settings["optimizer"])
    _methods[group] = settings["method"]
    if settings["keep_last_step"] == "on":
        library.keep_last_step(backend)
    return backend


def _inner_of_devices(member: accelerator.GroupMember, log: logs.GroupLogger) -> dict[str, Any]:
    """What the native backend has to know of this machine's accelerators; nothing without any."""
    devices = accelerator.available()
    if devices is None:
        log.debug("inner backend: Gloo")
        return {}
    log.debug("inner backends: Gloo, and one for %s", devices.device_type)
    return {
        "accelerator": devices.device_type,
        "inner": devices.make_inner(member),
        "known_to_engine": devices.is_cuda,
    }


#: The options that the engine gets under their own names.
_ENGINE_OPTIONS = (
    "method",
    "density",
    "chunk",
    "warmup_steps",
    "ramp_steps",
    "wire",
    "fusion_bytes",
    "momentum",
    "max_noise",
    "audit_steps",
)


def _cores_are_busy(ranks: list[RankInfo], rank: int) -> bool:
    """Whether the ranks of this machine alone keep all of its cores busy while they train."""
    # Not host_id: with compress="on" each rank has one of its own.
    here = sum(one.host == ranks[rank].host for one in ranks)
    return here * torch.get_num_threads() >= len(os.sched_getaffinity(0))


def _host_ids(ranks: list[RankInfo], settings: Settings) -> list[str]:
    """The id of each rank's host; ranks with the same id share memory."""
    if settings["compress"] == "on":
        # Make every rank a host of its own, so that everything crosses hosts.
        return [f"{one.host_id}/rank {one.rank}" for one in ranks]
    return [one.host_id for one in ranks]


_warned = False


def _warn_once(log: logs.GroupLogger, notice: str) -> None:
    # Every further group of the job would say the same.
    global _warned
    if not _warned:
        log.warning("%s", notice)
    _warned = True


def _labels(ranks: list[RankInfo], global_ranks: list[int]) -> list[str]:
    def label(one: RankInfo) -> str:
        world = f"global rank {global_ranks[one.rank]}, " if global_ranks else ""
        return f"rank {one.rank} ({world}host {one.host}, pid {one.pid})"

    return [label(one) for one in ranks]


def _inner_gloo(
    store: Store, rank: int, size: int, timeout: timedelta, settings: Settings, address: str
) -> Any:
    """The Gloo backend for collectives that the engine does not do itself."""
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()  # type: ignore[attr-defined]  # not in torch's stub
    options._timeout = timeout
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
    if settings["ifname"] is None and interfaces:
        # Read here: torch's default device ignores the variable.
        options._devices = [gloo.create_device(interface=name) for name in interfaces.split(",")]
    else:
        options._devices = [gloo.create_device(hostname=address)]
    return gloo(store, rank, size, options)


def _as_timedelta(timeout: timedelta | float) -> timedelta:
    return timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
