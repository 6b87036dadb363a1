"""How the times of contenders compare. A ratio must never be made of numbers of different sizes."""

from __future__ import annotations

from typing import Any

#: The time of the first over the time of the second, of those that took part. What a limit needs
#: over what a contender needs is the part of the limit that the contender reaches.
_PAIRS = (
    ("gloo", "gflow"),
    ("gloo", "gflow-bucket"),
    ("nccl", "gflow"),
    ("mpi", "gflow"),
    ("mpi", "gflow-bucket"),
    ("memory-limit", "gflow"),
    ("memory-limit", "gflow-bucket"),
    ("link-limit", "gloo"),
    ("link-limit", "gflow"),
    ("link-limit", "gflow-bucket"),
)
_MPI = ("openmpi", "mpich")


def ratios(results: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the ratios of one row, by names such as ``gloo/gflow``; ``mpi`` is the faster one.

    Example:
        >>> ratios({"gloo": {"median_us": 300.0}, "gflow": {"median_us": 100.0}})
        {'gloo/gflow': 3.0}
    """
    times = {name: result["median_us"] for name, result in results.items()}
    by_mpi = [times[name] for name in _MPI if name in times]
    if by_mpi:
        times["mpi"] = min(by_mpi)
    return {
        f"{one}/{other}": times[one] / times[other]
        for one, other in _PAIRS
        if one in times and other in times
    }


def with_ratios(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with its ratios."""
    return row | {"ratios": ratios(row["contenders"])}
