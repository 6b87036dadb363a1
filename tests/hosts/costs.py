"""The program that ranks run in test_costs.py: it measures what a group costs its process. The test
judges the numbers.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.hosts.checks import BUCKET
from tests.hosts.running import eventually, say

# 200 MB in eight buckets of DDP's usual size.
BUCKETS = 8
GROUPS = 20


def resident() -> dict[str, int]:
    """Resident bytes of this process: anonymous and shared."""
    fields = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("RssAnon", "RssShmem"):
            fields[name] = 1024 * int(value.split()[0])
    return fields


def in_dev_shm() -> list[str]:
    """What this process has mapped or open in /dev/shm, unlinked files too."""
    found = [
        line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm" in line
    ]
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:
            continue  # the descriptor of this listing
        if target.startswith("/dev/shm"):
            found.append(target)
    return found


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def bucket(size: int) -> torch.Tensor:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    return backend.allocate_tensor(size, dtype=torch.float32, device=torch.device("cpu"))


def reduce_often(buckets: list[torch.Tensor]) -> None:
    for _ in range(3):
        for tensor in buckets:
            dist.all_reduce(tensor)
    works = [dist.all_reduce(tensor, async_op=True) for tensor in buckets]
    for work in works:
        work.wait()


def wait_until_given_back(before: dict[str, int]) -> None:
    """Waits until all ranks are about as small as before, or gives up."""
    for _ in range(100):
        # A group may clean up at its next use.
        dist.barrier()
        small = sum(resident().values()) < sum(before.values()) + 32 * 2**20
        done = torch.tensor(int(small))
        # All ranks stop in the same round.
        dist.all_reduce(done, dist.ReduceOp.MIN)
        if done.item():
            return
        time.sleep(0.05)


def memory() -> None:
    dist.all_reduce(torch.ones(100_000))
    before = resident()
    for turn in range(2):
        buckets = [bucket(BUCKET) for _ in range(BUCKETS)]
        for tensor in buckets:
            tensor.zero_()
        reduce_often(buckets)
        say(turn=turn, before=before, during=resident(), in_dev_shm=in_dev_shm())
        del buckets, tensor
        gc.collect()
        wait_until_given_back(before)
        say(turn=turn, before=before, after=resident(), in_dev_shm=in_dev_shm())


def ordinary_memory() -> None:
    """The same for tensors outside bucket memory."""
    dist.all_reduce(torch.ones(100_000))
    before = resident()
    tensors = [torch.zeros(BUCKET) for _ in range(BUCKETS)]
    reduce_often(tensors)
    say(before=before, during=resident(), in_dev_shm=in_dev_shm())


def groups() -> None:
    def one_group() -> None:
        group = dist.new_group()
        dist.all_reduce(torch.ones(100_000), group=group)
        dist.destroy_process_group(group)

    dist.all_reduce(torch.ones(100_000))
    one_group()
    time.sleep(0.5)
    before = {"files": open_files(), "threads": threads(), **resident()}
    for _ in range(GROUPS):
        one_group()
    eventually(lambda: abs(open_files() - before["files"]) <= 3)
    after = {"files": open_files(), "threads": threads(), **resident()}
    say(before=before, after=after)
    dist.barrier()


def outlive() -> None:
    """Bucket memory that is used, then freed, after its group is gone."""
    tensors = [bucket(size) for size in (1, 1000, BUCKET)]
    for tensor in tensors:
        tensor.fill_(1.0)
        dist.all_reduce(tensor)
    views = [tensor[-1:] for tensor in tensors]
    dist.destroy_process_group()
    gc.collect()
    world = float(os.environ["WORLD_SIZE"])
    read = all(bool((tensor == world).all()) for tensor in tensors)
    for tensor in tensors:
        tensor.mul_(2.0)
    written = all(bool((tensor == 2 * world).all()) for tensor in tensors)
    del tensors, tensor
    gc.collect()
    # A view keeps its tensor's memory alive.
    viewed = [view.item() for view in views] == [2 * world] * 3
    say(read=read, written=written, viewed=viewed)
    del views
    gc.collect()


def next_group() -> None:
    """Bucket memory of a destroyed group, reduced by another group."""
    tensor = bucket(BUCKET)
    tensor.fill_(1.0)
    dist.all_reduce(tensor)
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    start(dist.PrefixStore("again", store))
    dist.all_reduce(tensor)
    say(right=bool((tensor == float(os.environ["WORLD_SIZE"]) ** 2).all()))
    dist.barrier()


def start(store: dist.Store | None = None) -> None:
    where = {} if store is None else {"store": store, "rank": int(os.environ["RANK"])}
    if store is not None:
        where["world_size"] = int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=60)
    dist.init_process_group(os.environ["BACKEND"], timeout=timeout, **where)


PROGRAMS: dict[str, Callable[[], None]] = {
    "memory": memory,
    "ordinary_memory": ordinary_memory,
    "groups": groups,
    "outlive": outlive,
    "next_group": next_group,
}


def main() -> None:
    """Runs the program that is named in the argument."""
    torch.set_num_threads(1)
    start()
    PROGRAMS[sys.argv[1]]()
    if dist.is_initialized():
        dist.destroy_process_group()
    say(done=True)


if __name__ == "__main__":
    main()
