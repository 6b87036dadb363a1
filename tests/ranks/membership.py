"""The process group that a rank is currently in, as seen by the rank.

A group never survives a case that failed.
"""

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.ranks.case import Case

_current: Case | None = None
_group_name: str | None = None


def rendezvous(name: str = "own") -> dist.Store:
    """A store that the ranks of the running case share, for a function that makes its own group.
    Another name gives an empty store."""
    if _current is None:
        raise RuntimeError("no case is running in this process")
    return _store(_current, f"case {_current.group_name} {name}")


def enter(case: Case) -> None:
    """Puts the rank into the group that the case asks for."""
    global _current, _group_name
    _current = case
    if _group_name is not None and _group_name == case.group_name and dist.is_initialized():
        return
    leave()
    if case.group is None:
        return
    _group_name = case.group_name
    dist.init_process_group(
        case.group.backend,
        store=_store(case, f"group {case.group_name}"),
        rank=case.rank,
        world_size=case.world,
        timeout=timedelta(seconds=case.group.timeout_s),
        pg_options=case.group.options() if case.group.options else None,
        **dict(case.group.extra),
    )


def leave() -> None:
    """Takes the rank out of whatever group it is in."""
    global _group_name
    _group_name = None
    if dist.is_initialized():
        dist.destroy_process_group()
    # torch puts the number of groups made so far into the store's keys. An init that failed on this
    # rank alone was counted, so the next group would wait for its peers under a different key.
    distributed_c10d._world.group_count = 0


@contextlib.contextmanager
def environment(case: Case) -> Iterator[None]:
    """The case's environment variables, for as long as it runs."""
    given = case.group.env if case.group else ()
    wanted = {name: value.replace("{rank}", str(case.rank)) for name, value in given}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _store(case: Case, prefix: str) -> dist.Store:
    # A new client for every case: one that an earlier case left blocked cannot hold this one up.
    client = dist.TCPStore("127.0.0.1", case.store_port, is_master=False)
    return dist.PrefixStore(prefix, client)
