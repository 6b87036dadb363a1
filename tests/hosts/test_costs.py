"""Tests what a group may cost its process: memory, descriptors, nothing in /dev/shm; and that
bucket memory lives as long as something refers to it.

Each number is read from /proc by a process that does nothing else. The bounds are what gflow
promises, with room for the allocator; none is about speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.hosts.checks import BUCKET
from tests.hosts.costs import BUCKETS
from tests.hosts.running import Ranks, line_with, lines_of
from tests.ranks import ScriptRank

pytestmark = pytest.mark.gflow_only("bucket memory is gflow's")

Note = Callable[[str], None]

MIB = 2**20
BUCKET_BYTES = 4 * BUCKET * BUCKETS
ROOM = 64 * MIB
WORLD = 2

LAYOUTS = pytest.mark.parametrize(
    "host_ids",
    [
        pytest.param(None, id="shared"),
        pytest.param(("left", "right"), id="apart", marks=pytest.mark.thorough),
    ],
)


def run(program: str, host_ids: tuple[str, ...] | None = None) -> list[ScriptRank]:
    """Runs a program of costs.py on two ranks of this machine."""
    env: dict[str, Any] = {"BACKEND": "gflow"}
    # Makes the C library return large blocks when they are freed, instead of keeping some.
    env["MALLOC_MMAP_THRESHOLD_"] = "1000000"
    if host_ids:
        env["GFLOW_HOST_ID"] = host_ids
    with Ranks("tests.hosts.costs", [None] * WORLD, env, [program]) as ranks:
        ended = ranks.ended(120.0)
    ended.assert_exit_codes(*[0] * WORLD)
    return ended.ranks


def grown(line: dict[str, Any], when: str) -> int:
    """How many bytes a process has grown by, private and shared."""
    return sum(line[when].values()) - sum(line["before"].values())


@LAYOUTS
def test_buckets_take_no_more_than_twice_their_size_and_are_given_back(
    host_ids: tuple[str, ...] | None, measured: Note
) -> None:
    for rank in run("memory", host_ids):
        lines = [line for line in lines_of(rank.output) if "turn" in line]
        assert len(lines) == 4, rank.story()
        whens = ["during" if "during" in line else "after" for line in lines]
        sizes = [
            f"{grown(*both) / MIB:.0f} MiB {both[1]}" for both in zip(lines, whens, strict=True)
        ]
        measured(f"rank {rank.rank} has grown by {', '.join(sizes)}")
        for line, when in zip(lines, whens, strict=True):
            assert line["in_dev_shm"] == [], line
            if when == "during":
                assert 0.9 * BUCKET_BYTES <= grown(line, when) <= 2 * BUCKET_BYTES + ROOM, line
            else:
                assert grown(line, when) <= ROOM, line
                assert line["after"]["RssShmem"] - line["before"]["RssShmem"] <= ROOM, line


@LAYOUTS
def test_ordinary_tensors_take_little_more_than_their_size(
    host_ids: tuple[str, ...] | None, measured: Note
) -> None:
    for rank in run("ordinary_memory", host_ids):
        line = line_with(rank, "during")
        measured(f"rank {rank.rank} has grown by {grown(line, 'during') / MIB:.0f} MiB")
        assert grown(line, "during") <= 2 * BUCKET_BYTES + ROOM, line
        assert line["in_dev_shm"] == [], line


@LAYOUTS
def test_groups_that_come_and_go_leave_no_descriptor_open_and_no_thread_running(
    host_ids: tuple[str, ...] | None, measured: Note
) -> None:
    for rank in run("groups", host_ids):
        line = line_with(rank, "after")
        before, after = line["before"], line["after"]
        measured(f"rank {rank.rank}: {before} -> {after}")
        assert abs(after["files"] - before["files"]) <= 3, line
        assert after["threads"] - before["threads"] <= 3, line
        assert after["RssShmem"] - before["RssShmem"] <= ROOM, line


@LAYOUTS
def test_bucket_memory_can_be_read_and_written_when_its_group_is_gone(
    host_ids: tuple[str, ...] | None,
) -> None:
    for rank in run("outlive", host_ids):
        line = line_with(rank, "read")
        assert line == {"read": True, "written": True, "viewed": True}


@LAYOUTS
def test_bucket_memory_of_a_group_that_is_gone_can_be_reduced_by_another(
    host_ids: tuple[str, ...] | None,
) -> None:
    for rank in run("next_group", host_ids):
        assert line_with(rank, "right")["right"], rank.story()
