"""The process groups of gflow that benchmarks make: when they compress, and what they warn of."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator


def compress_between(hosts: int) -> str:
    """The ``compress`` with which gflow compresses something on this number of hosts.

    One host alone would be exact: then every rank counts as a host of its own.

    Example:
        >>> compress_between(2), compress_between(1)
        ('auto', 'on')
    """
    return "auto" if hosts > 1 else "on"


@contextlib.contextmanager
def gflow_warnings() -> Iterator[list[str]]:
    """Collect gflow's warnings, which would be lost in a rank's output; complete at the end.

    Example:
        >>> with gflow_warnings() as texts:
        ...     warnings.warn("gflow: density has no effect yet", stacklevel=1)
        >>> texts
        ['gflow: density has no effect yet']
    """
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    all_texts = [str(one.message) for one in caught]
    texts += [text for text in all_texts if text.startswith("gflow:")]
