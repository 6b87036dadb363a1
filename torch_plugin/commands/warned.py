"""What gflow warns of when a group is made, for people to see: a rank's own output is not shown.

It must never keep a warning from the report: what has no effect must not look as if it had.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def gflow_warnings() -> Iterator[list[str]]:
    """Collect in a list what gflow warns of; it is complete at the end.

    Example:
        >>> with gflow_warnings() as said:
        ...     warnings.warn("gflow: density has no effect yet", stacklevel=1)
        >>> said
        ['gflow: density has no effect yet']
    """
    said: list[str] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        yield said
    texts = [str(one.message) for one in warned]
    said += [text for text in texts if text.startswith("gflow:")]
