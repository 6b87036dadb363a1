"""Tests that the engine's fast paths are taken: bucket memory lies where the ranks of a host can
reach it, and a caller that waits does the work itself.

Results don't show this, so the tests look at the process from outside: its maps and its threads.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import Team

pytestmark = pytest.mark.gflow_only("ways of its own")


def mapping_of(tensor: torch.Tensor) -> str:
    """The mapping of this process that holds the tensor."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, _, *name = line.split(maxsplit=5)
        start, end = (int(number, 16) for number in span.split("-"))
        if start <= tensor.data_ptr() < end:
            return name[0] if name else ""
    return "nothing"


def where_tensors_lie(rank: int, world: int) -> tuple[str, str]:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    bucket = backend.allocate_tensor(100_000, dtype=torch.float32, device=torch.device("cpu"))
    return mapping_of(bucket), mapping_of(torch.zeros(100_000))


def test_bucket_memory_is_shared_by_the_ranks_of_a_host(ranks: Callable[..., Team]) -> None:
    for bucket, ordinary in ranks(2).run(where_tensors_lie):
        assert "memfd:gflow" in bucket
        assert "memfd" not in ordinary


def wake_ups_of_the_worker() -> int:
    """How often the worker thread of this process's one group has slept."""
    counts = []
    for task in Path("/proc/self/task").iterdir():
        name = (task / "comm").read_text().strip()
        others = ("gflow-blocking", "gflow-accept", "gflow-handshake")
        if name.startswith("gflow-") and name not in others:
            status = (task / "status").read_text()
            counts += [line.split()[1] for line in status.splitlines() if line.startswith("volun")]
    assert len(counts) == 1, counts
    return int(counts[0])


def wake_ups(rank: int, world: int, async_op: bool) -> int:
    tensor = torch.zeros(10)
    dist.all_reduce(tensor)
    dist.barrier()
    before = wake_ups_of_the_worker()
    for _ in range(20):
        work = dist.all_reduce(tensor, async_op=async_op)
        if work is not None:
            work.wait()
    return wake_ups_of_the_worker() - before


def test_a_caller_that_waits_does_not_wake_the_worker(ranks: Callable[..., Team]) -> None:
    assert ranks(2).run(wake_ups, False) == [0, 0]
    assert all(count > 0 for count in ranks(2).run(wake_ups, True))
