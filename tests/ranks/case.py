"""What one test case asks of a rank: which function, with which arguments, in which group.

It must never hold anything that cannot be pickled: it travels to another process.
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
    # A kept group is used again by the next case that asks for the same one; without it the
    # group is made for the case and destroyed after it.
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
    # The function and its arguments, pickled apart, so that what cannot be imported in the rank
    # fails this case and not the conversation with the rank.
    payload: bytes
    # None: the function makes whatever groups it needs.
    group: Group | None
    # Names the group: a rank that already has the group of this name keeps it.
    group_name: str
    # Where the case's store is.
    store_port: int
    # What the import path of the rank must be, so that it finds the same modules.
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
