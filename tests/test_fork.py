"""Tests that a forked child, such as a DataLoader worker, has no part in its parent's groups: what
it writes stays in its own memory, and its parent's death is noticed even while the child lives.
"""

import gc
import os
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.ranks import Team, run_script

pytestmark = pytest.mark.gflow_only("shared memory")

COUNT = 1_000_000


def in_a_child(act: Callable[[], None]) -> int:
    """Runs `act` in a forked child and returns how that ended."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def bucket_after(rank: int, world: int, what: str) -> tuple[int, float, float]:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    holder = [backend.allocate_tensor(COUNT, dtype=torch.float32, device=torch.device("cpu"))]
    holder[0].fill_(1.0)
    dist.all_reduce(holder[0])

    def write() -> None:
        assert holder[0].sum().item() == COUNT * world
        holder[0].zero_()

    def free() -> None:
        holder.clear()
        gc.collect()

    code = in_a_child(write if what == "writes" else free)
    total = holder[0].sum().item()
    # And the ranks still share it.
    dist.all_reduce(holder[0])
    return code, total, holder[0].sum().item()


@pytest.mark.parametrize("what", ["writes", "frees"])
def test_what_a_child_does_to_a_bucket_stays_with_the_child(
    ranks: Callable[..., Team], what: str
) -> None:
    world = 2
    expected = (0, float(COUNT * world), float(COUNT * world * world))
    assert ranks(world).run(bucket_after, what) == [expected] * world


ORPHAN = """
    import os, signal, time
    import torch, torch.distributed as dist

    dist.init_process_group("gflow")
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 1:
        if os.fork() == 0:
            time.sleep(15)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        dist.all_reduce(torch.ones(4))
        print("went on")
    except RuntimeError as error:
        print("noticed" if "lost rank 1" in str(error) else error)
    print("at once" if time.monotonic() - start < 8 else "late")
"""


@pytest.mark.parametrize("hosts", ["alike", "different"])
def test_a_rank_whose_child_lives_on_is_noticed_when_it_is_killed(hosts: str) -> None:
    # Which host a rank is on is an option of the process, so the script takes it from its rank.
    script = ORPHAN
    if hosts == "different":
        script = script.replace(
            'dist.init_process_group("gflow")',
            'os.environ["GFLOW_HOST_ID"] = os.environ["RANK"]; dist.init_process_group("gflow")',
        )
    start = time.monotonic()
    run = run_script(script, 2, timeout_s=60)
    assert run.ranks[0].exit_code == 0, run.story()
    assert "noticed" in run.ranks[0].output, run.story()
    assert "at once" in run.ranks[0].output, run.story()
    assert time.monotonic() - start < 60
