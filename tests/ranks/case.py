"""A test case as a rank gets it: a function, its arguments, and the group to run it in.

Everything in it can be pickled, because it is sent to another process.
"""

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

DEADLINE_S = 60.0


@dataclass(frozen=True)
class Group:
    """The process group that a case runs in."""

    backend: str
    # The group's own timeout, as given to init_process_group.
    timeout_s: float = 30.0
    # A kept group is reused by the next case that asks for the same one; otherwise the group is
    # made for this case and destroyed after it.
    kept: bool = False
    # Set in the rank while the case runs; "{rank}" in a value becomes the rank.
    env: tuple[tuple[str, str], ...] = ()
    # Called in the rank; gives pg_options.
    options: Callable[[], Any] | None = None
    # Further arguments of init_process_group.
    extra: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Case:
    """One function to be run by one rank."""

    rank: int
    world: int
    # The function and its arguments, pickled separately: if the rank cannot import something, this
    # case fails and the connection to the rank survives.
    payload: bytes
    # None: the function makes whatever groups it needs.
    group: Group | None
    # Names the group: a rank that already has the group of this name keeps it.
    group_name: str
    # The port of the case's store.
    store_port: int
    # The import path for the rank, so that it finds the same modules.
    path: tuple[str, ...] = field(repr=False, default=())


def pack(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """The payload of a case. Only a function that can be imported by its name can be packed."""
    try:
        return pickle.dumps((function, arguments))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"a rank runs a top-level function of a module with picklable arguments, "
            f"and {function!r} with {arguments!r} cannot be pickled: {error}"
        ) from error
