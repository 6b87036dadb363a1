"""Makes the backend of a process group. torch calls :func:`create` once per group and rank."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from gflow import accelerator, logs, native
from gflow.network import own_address
from gflow.options import Options, Settings, resolve
from gflow.rendezvous import Card, Party, meet

logger = logging.getLogger("gflow")

#: Everybody is there when connecting starts, so it takes seconds or never ends. (Ctrl-C waits too.)
CONNECT_TIMEOUT = timedelta(seconds=60)


def create(backend_options: Any, pg_options: Options | None) -> Any:
    """Build the backend for ``init_process_group`` or ``new_group``.

    Args:
        backend_options: torch's ``_DistributedBackendOptions``: store, rank, size, timeout.
        pg_options: what the user gave as ``pg_options``.
    """
    settings = resolve(pg_options)
    library = native.load()
    logs.start(library)
    # The Reducer asks a backend for bucket memory only if this is set; a user's own choice stays.
    os.environ.setdefault("DDP_DISABLE_COMM_MEM", "0")

    store: Store = backend_options.store
    rank, size = backend_options.group_rank, backend_options.group_size
    timeout = _as_timedelta(backend_options.timeout)
    group = str(backend_options.group_id)

    address = own_address(store, settings["ifname"])
    endpoint = library.Endpoint(address)
    card = Card.of_this_process(rank, endpoint.address, endpoint.fd_socket, settings)
    members = backend_options.global_ranks_in_group
    meeting = meet(store, card, Party(group, size, members), settings["secret"], timeout)

    # Our own connections first: what keeps them from being made, we say better than Gloo.
    place = library.join(
        endpoint=endpoint,
        group=group,
        rank=rank,
        labels=_labels(meeting.cards, members),
        addresses=[card.address for card in meeting.cards],
        hosts=_hosts(meeting.cards, settings),
        fd_sockets=[card.entrance for card in meeting.cards],
        key=meeting.key,
        timeout=min(timeout, CONNECT_TIMEOUT),
        compress=settings["compress"] != "off",
        **{name: settings[name] for name in _METHOD},
    )
    if place.notice:
        _warn_once(place.notice)
    inner_store = PrefixStore(meeting.prefix, store)
    gloo = _inner_gloo(PrefixStore("gloo", inner_store), rank, size, timeout, settings, address)
    backend = {"group": place, "rank": rank, "size": size, "timeout": timeout, "gloo": gloo}
    devices = accelerator.available()
    if devices:
        inner = accelerator.Place(inner_store, rank, size, timeout, backend_options)
        backend["accelerator"] = devices.device_type
        backend["inner"] = devices.make_inner(inner)
        backend["known_to_engine"] = devices.is_cuda
    return library.make_backend(**backend)


#: What the engine is told about the exchange of gradients, under the names of the options.
_METHOD = ("density", "chunk", "warmup_steps", "ramp_steps", "wire", "fusion_bytes", "momentum")


def _hosts(cards: list[Card], settings: Settings) -> list[str]:
    """A word for the host of each rank."""
    if settings["compress"] == "on":
        # Every rank is a host of its own, so that everything crosses hosts.
        return [f"{card.host_id}/rank {card.rank}" for card in cards]
    return [card.host_id for card in cards]


_warned = False


def _warn_once(notice: str) -> None:
    # Every further group of the job would say the same of its own ranks.
    global _warned
    if not _warned:
        logger.warning("gflow: %s", notice)
    _warned = True


def _labels(cards: list[Card], global_ranks: list[int]) -> list[str]:
    def label(card: Card) -> str:
        world = f"global rank {global_ranks[card.rank]}, " if global_ranks else ""
        return f"rank {card.rank} ({world}host {card.host}, pid {card.pid})"

    return [label(card) for card in cards]


def _inner_gloo(
    store: Store, rank: int, size: int, timeout: timedelta, settings: Settings, address: str
) -> Any:
    """The Gloo backend that does what the engine does not do itself."""
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
    if settings["ifname"] is None and interfaces:
        # Read here: what torch calls the default device does not look at the variable.
        options._devices = [gloo.create_device(interface=name) for name in interfaces.split(",")]
    else:
        options._devices = [gloo.create_device(hostname=address)]
    return gloo(store, rank, size, options)


def _as_timedelta(timeout: timedelta | float) -> timedelta:
    return timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
