"""How the ranks of a new group find each other, through torch's store.

Each rank publishes a record (where it listens, who it is, how it is configured) and waits for all
others. Ranks that do not come are named; ranks that are configured differently are refused here,
before they could disagree in the middle of training.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import secrets
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from gflow.host_id import default_host_id
from gflow.logs import GroupLogger
from gflow.options import OPTION_SPECS, Settings
from gflow.version import __version__

#: How often a waiting rank logs what it is waiting for.
REPORT_SECONDS = 30.0
#: For how long a rank that is connected waits for the others. They are all there, so it is short.
COURTESY_SECONDS = 10.0


@dataclass(frozen=True)
class GroupSpec:
    """A group to be made: a name for messages, how many ranks, and their global ranks."""

    name: str
    size: int
    #: Empty for the default group.
    members: list[int]

    @property
    def prefix(self) -> str:
        """Its keys in the store start with this: torch may reuse a destroyed group's name."""
        members = ",".join(map(str, self.members))
        return f"gflow/{self.size}-{hashlib.sha256(members.encode()).hexdigest()[:16]}"


@dataclass(frozen=True)
class RankInfo:
    """Information that a rank publishes about itself."""

    rank: int
    #: Where it listens for TCP connections, and for ranks of its own host that pass memory.
    address: str
    fd_socket: str
    host: str
    #: Ranks with the same id share memory.
    host_id: str
    pid: int
    version: str
    settings: dict[str, Any]

    @classmethod
    def of_this_process(
        cls, rank: int, address: str, fd_socket: str, settings: Settings
    ) -> RankInfo:
        """This process as rank ``rank``, with the addresses of its endpoint."""
        return cls(
            rank=rank,
            address=address,
            fd_socket=fd_socket,
            host=socket.gethostname(),
            host_id=settings["host_id"] or default_host_id(),
            pid=os.getpid(),
            version=__version__,
            settings=settings.to_agree_on(),
        )


@dataclass(frozen=True)
class Rendezvous:
    """All ranks of a group, after they have found each other."""

    ranks: list[RankInfo]
    #: The secret of the group, for its handshakes.
    key: bytes
    #: Where this rendezvous has its keys in the store.
    prefix: str


def gather_ranks(
    store: Store, own: RankInfo, group: GroupSpec, secret: str | None, timeout: timedelta
) -> Rendezvous:
    """Publish ``own``, wait for all other ranks, and return them with the group's key."""
    log = GroupLogger.of(group.name, own.rank)
    # A program may destroy a group and make it again in the same store. Every rank arrives once per
    # generation, so the number of arrivals tells generations apart.
    arrivals = f"{group.prefix}/arrivals"
    generation = (store.add(arrivals, 1) - 1) // group.size
    prefix = f"{group.prefix}/{generation}"
    log.debug("listening on %s; waiting for %d ranks at %s", own.address, group.size, prefix)
    if own.rank == 0 and secret is None:
        store.set(f"{prefix}/key", secrets.token_hex(32))
    own_path = f"{prefix}/rank/{own.rank}"
    store.set(own_path, json.dumps(dataclasses.asdict(own)))
    try:
        _wait_for_all(store, prefix, group, own.rank, timeout)
    except BaseException:
        # Ranks that arrive later must not count on one that has given up.
        store.set(own_path, json.dumps(dataclasses.asdict(own) | {"gave_up": True}))
        store.add(arrivals, -1)
        raise
    published = [json.loads(store.get(f"{prefix}/rank/{rank}")) for rank in range(group.size)]
    _refuse_other_versions(published)
    gave_up = [one["rank"] for one in published if one.pop("gave_up", False)]
    if gave_up:
        store.add(arrivals, -1)
        raise RuntimeError(
            f"gflow: {_ranks(gave_up)} of group {group.name!r} had waited for rank {own.rank} "
            f"and given up when it came. Start all ranks at about the same time, or give "
            f"init_process_group a larger timeout."
        )
    ranks = [RankInfo(**one) for one in published]
    _refuse_different_settings(ranks, group.name)
    log.debug("all %d ranks are there and agree on %s", group.size, own.settings)
    return Rendezvous(ranks, _key(store, prefix, secret), prefix)


def _key(store: Store, prefix: str, secret: str | None) -> bytes:
    if secret is not None:
        # Each group has its own key: a rank of one group cannot join another.
        return hashlib.sha256(f"{prefix}\n{secret}".encode()).digest()
    return bytes.fromhex(store.get(f"{prefix}/key").decode())


def _wait_for_all(
    store: Store, prefix: str, group: GroupSpec, own: int, timeout: timedelta
) -> None:
    paths = {rank: f"{prefix}/rank/{rank}" for rank in range(group.size)}
    start = time.monotonic()
    reports = 1
    pause = 0.001
    # Polled, because store.wait() logs an error of its own at each timeout.
    while not store.check(list(paths.values())):
        waited = time.monotonic() - start
        late = waited >= timeout.total_seconds()
        if late or waited >= reports * REPORT_SECONDS:
            reports += 1
            missing = [rank for rank, path in paths.items() if not store.check([path])]
            if late and missing:
                raise RuntimeError(
                    f"gflow: rank {own} waited {waited:.0f} s for {_ranks(missing)} of group "
                    f"{group.name!r} ({group.size} ranks expected), which did not come. Was it "
                    f"started, with the same world size and the same master address, and is it "
                    f"still running?"
                )
            log = GroupLogger.of(group.name, own)
            log.warning("it has been waiting %.0f s for %s", waited, _ranks(missing))
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def wait_until_connected(store: Store, rank: int, size: int) -> None:
    """Wait a little until all ranks have connected to all others.

    A rank that ends early would close connections that a slower one is still making. If one of them
    does not come, that is for the next collective to say. Nothing else may use this ``store`` so.
    """
    end = time.monotonic() + COURTESY_SECONDS
    pause = 0.0005
    try:
        store.set(f"connected/{rank}", "")
        while not store.check([f"connected/{one}" for one in range(size)]):
            if time.monotonic() > end:
                return
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
    except RuntimeError:
        # The rank with the store has ended, so it has seen that all were connected.
        return


def _refuse_other_versions(published: list[dict[str, Any]]) -> None:
    # Before anything else is read: another version may publish other fields.
    first = published[0]
    for info in published[1:]:
        if info["version"] != first["version"]:
            raise RuntimeError(
                f"gflow: rank {info['rank']} ({info['host']}) runs gflow {info['version']}, rank 0 "
                f"({first['host']}) runs {first['version']}. Install the same version everywhere."
            )


def _refuse_different_settings(ranks: list[RankInfo], group: str) -> None:
    first = ranks[0]
    for one in ranks[1:]:
        for name, value in first.settings.items():
            if one.settings[name] != value:
                raise RuntimeError(
                    f"gflow: the ranks of group {group!r} are configured differently: {name} is "
                    f"{value!r} on rank 0 ({first.host}) and {one.settings[name]!r} on rank "
                    f"{one.rank} ({one.host}). Give {OPTION_SPECS[name].variable} (or "
                    f"Options.{name}) the same value on every rank."
                )


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
