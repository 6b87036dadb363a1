"""Why a contender does not take part. It must never be raised once measuring has begun."""

from __future__ import annotations


class LeftOut(Exception):
    """The contender cannot take part here; the text says why, in one line."""
