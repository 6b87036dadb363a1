"""Tests how processes end: with groups alive, collectives pending, peers gone, children forked.

Every process must exit by its deadline with the exit code of its script. A signal (a crash), a hang
or anything left running is a failure.
"""

import re

import pytest

from tests.ranks import ScriptRun, run_script

pytestmark = pytest.mark.gflow_only(
    "Gloo ends one in ten processes that do not destroy their group by SIGABRT, "
    "and waits for pending collectives until their timeout"
)

# The group's timeout is far longer than any of these scripts may take to notice a lost peer.
PREAMBLE = """
import gc, os, signal, sys, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist

def start(timeout_s=60):
    dist.init_process_group(os.environ["BACKEND"], timeout=timedelta(seconds=timeout_s))
    return dist.get_rank()

def total(group=None):
    tensor = torch.ones(1000)
    dist.all_reduce(tensor, group=group)
    return int(tensor[0].item())

def error_of(call):
    began = time.monotonic()
    try:
        call()
    except RuntimeError as error:
        text = str(error).replace(chr(10), " ")
        print(f"raised after {time.monotonic() - began:.1f} s: {text}", flush=True)
        return
    print("did not raise", flush=True)
    sys.exit(5)
"""


def run(
    script: str, backend: str, world: int = 2, torchrun: bool = False, timeout_s: float = 60.0
) -> ScriptRun:
    return run_script(
        PREAMBLE + script, world, {"BACKEND": backend}, timeout_s=timeout_s, torchrun=torchrun
    )


def seconds_until_raised(run: ScriptRun, rank: int) -> float:
    found = re.search(r"raised after ([\d.]+) s", run.ranks[rank].output)
    assert found, run.story()
    return float(found[1])


@pytest.mark.parametrize("torchrun", [False, True], ids=["plain", "torchrun"])
def test_a_script_may_end_without_destroying_its_group(backend: str, torchrun: bool) -> None:
    ended = run("start()\nassert total() == 2\n", backend, torchrun=torchrun)
    ended.assert_exit_codes(*([0] if torchrun else [0, 0]))


def test_a_script_may_end_with_several_groups_alive(backend: str) -> None:
    script = """
start()
groups = [dist.new_group([0, 1]) for _ in range(3)]
for group in groups:
    assert total(group) == 2
"""
    run(script, backend).assert_exit_codes(0, 0)


def test_a_script_may_end_long_before_its_peer(backend: str) -> None:
    script = """
rank = start()
assert total() == 2
if rank == 1:
    time.sleep(1)
"""
    run(script, backend).assert_exit_codes(0, 0)


def test_a_group_may_be_kept_in_a_cycle_until_the_interpreter_ends(backend: str) -> None:
    script = """
class Holder:
    pass
start()
holder = Holder()
holder.self, holder.group = holder, dist.group.WORLD
holder.work = dist.all_reduce(torch.ones(3), async_op=True)
holder.work.wait()
"""
    run(script, backend).assert_exit_codes(0, 0)


def test_a_script_may_end_with_a_collective_pending_that_the_peer_never_joined(
    backend: str,
) -> None:
    script = """
rank = start()
assert total() == 2
if rank == 0:
    work = dist.all_reduce(torch.ones(3), async_op=True)
else:
    time.sleep(1)
"""
    run(script, backend, timeout_s=40.0).assert_exit_codes(0, 0)


def test_a_script_may_end_with_a_callback_pending(backend: str) -> None:
    script = """
rank = start()
assert total() == 2
if rank == 0:
    works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(20)]
    futures = [work.get_future().then(lambda done: print("called")) for work in works]
else:
    time.sleep(1)
"""
    run(script, backend, timeout_s=40.0).assert_exit_codes(0, 0)


def test_a_group_may_be_dropped_without_being_destroyed(backend: str) -> None:
    script = """
start()
group = dist.new_group([0, 1])
assert total(group) == 2
from torch.distributed import distributed_c10d as c10d
world = c10d._world
for known in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config,
              world.pg_to_tag):
    known.pop(group, None)
for tagged in world.tags_to_pg.values():
    if group in tagged:
        tagged.remove(group)
c10d._unregister_process_group(group.group_name)
del group, known, tagged
gc.collect()
assert total() == 2
"""
    run(script, backend).assert_exit_codes(0, 0)


def test_a_group_may_be_destroyed_with_a_collective_pending(backend: str) -> None:
    script = """
rank = start()
assert total() == 2
if rank == 0:
    work = dist.all_reduce(torch.ones(3), async_op=True)
else:
    time.sleep(1)
dist.destroy_process_group()
if rank == 0:
    error_of(work.wait)
"""
    ended = run(script, backend, timeout_s=40.0)
    ended.assert_exit_codes(0, 0)
    assert seconds_until_raised(ended, 0) < 20


def test_an_exception_ends_the_script_with_its_traceback(backend: str) -> None:
    script = """
start()
assert total() == 2
work = dist.all_reduce(torch.ones(3), async_op=True)
raise ValueError("the script's own words")
"""
    ended = run(script, backend)
    ended.assert_exit_codes(1, 1)
    assert all("ValueError: the script's own words" in rank.output for rank in ended.ranks)


def test_a_rank_that_fails_takes_its_waiting_peer_along(backend: str) -> None:
    script = """
rank = start()
assert total() == 2
if rank == 1:
    raise ValueError("the script's own words")
total()
"""
    ended = run(script, backend, timeout_s=40.0)
    ended.assert_exit_codes(1, 1)
    assert "ValueError" in ended.ranks[1].output
    assert "RuntimeError" in ended.ranks[0].output or "DistBackendError" in ended.ranks[0].output


def test_a_peer_that_leaves_at_once_is_an_error_for_the_others_whatever_they_wait_in(
    backend: str,
) -> None:
    script = """
rank = start()
assert total() == 3
pairs = {(a, b): dist.new_group([a, b]) for a, b in [(0, 1), (1, 2)]}
if rank == 1:
    os._exit(3)
if rank == 0:
    error_of(lambda: dist.recv(torch.zeros(3), 1))
else:
    error_of(lambda: dist.broadcast(torch.zeros(3), 1, group=pairs[1, 2]))
"""
    ended = run(script, backend, world=3, timeout_s=50.0)
    ended.assert_exit_codes(0, 3, 0)
    for rank in (0, 2):
        assert seconds_until_raised(ended, rank) < 20


def test_the_survivors_of_a_killed_rank_get_an_error(backend: str) -> None:
    script = """
rank = start()
assert total() == 3
if rank == 1:
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
error_of(total)
error_of(total)
"""
    ended = run(script, backend, world=3, timeout_s=50.0)
    ended.assert_exit_codes(0, -9, 0)
    for rank in (0, 2):
        assert seconds_until_raised(ended, rank) < 20
        said = [line for line in ended.ranks[rank].output.splitlines() if "raised after" in line]
        # Every later operation fails with the same error.
        assert len(said) == 2, ended.story()
        for line in said:
            assert "rank 1" in line, ended.story()
            assert "all_reduce" in line, ended.story()


def test_a_rank_killed_in_the_midst_of_the_data_is_an_error_for_the_others(backend: str) -> None:
    script = """
rank = start()
assert total() == 2
if rank == 1:
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()

def forever():
    tensor = torch.zeros(1_000_000)
    while True:
        dist.all_reduce(tensor)

error_of(forever)
"""
    ended = run(script, backend, timeout_s=50.0)
    ended.assert_exit_codes(0, -9)
    assert seconds_until_raised(ended, 0) < 30


def test_a_callback_that_raises_does_not_end_the_process(backend: str) -> None:
    script = """
start()

def fail(done):
    raise ValueError("the callback's own words")

futures = []
for _ in range(5):
    work = dist.all_reduce(torch.ones(3), async_op=True)
    futures.append(work.get_future().then(fail))
    work.get_future().add_done_callback(fail)
assert total() == 2
try:
    futures[0].wait()
except Exception as error:
    assert "own words" in str(error)
else:
    sys.exit(5)
dist.destroy_process_group()
"""
    run(script, backend).assert_exit_codes(0, 0)


def test_a_callback_that_raises_at_the_very_end_does_not_crash(backend: str) -> None:
    script = """
start()
for _ in range(20):
    work = dist.all_reduce(torch.ones(100_000), async_op=True)
    future = work.get_future().then(lambda done: 1 / 0)
"""
    run(script, backend).assert_exit_codes(0, 0)


# Both callbacks release the GIL in the middle, when the main thread has already finished.
def test_a_callback_may_still_run_while_the_interpreter_ends(backend: str) -> None:
    # Rank 1 is late, so that rank 0's callback does not run at once in the main thread.
    script = """
rank = start()
assert total() == 2
if rank == 1:
    time.sleep(0.5)
work = dist.all_reduce(torch.ones(3), async_op=True)
if rank == 0:
    future = work.get_future().then(lambda done: time.sleep(0.5))
work.wait()
"""
    run(script, backend).assert_exit_codes(0, 0)


def test_a_callback_may_begin_to_run_while_the_interpreter_ends(backend: str) -> None:
    script = """
start()
works = [dist.all_reduce(torch.ones(100_000), async_op=True) for _ in range(5)]
futures = [work.get_future().then(lambda done: time.sleep(0.2)) for work in works]
"""
    run(script, backend).assert_exit_codes(0, 0)


@pytest.mark.parametrize("leave", ["os._exit(0)", "sys.exit(0)"], ids=["_exit", "exit"])
def test_a_forked_child_may_end_and_the_group_goes_on(backend: str, leave: str) -> None:
    script = f"""
start()
assert total() == 2
child = os.fork()
if child == 0:
    {leave}
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert total() == 2
dist.destroy_process_group()
"""
    run(script, backend).assert_exit_codes(0, 0)


def test_a_forked_child_that_calls_a_collective_gets_an_error(backend: str) -> None:
    script = """
start()
assert total() == 2
child = os.fork()
if child == 0:
    error_of(total)
    os._exit(0)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert total() == 2
dist.destroy_process_group()
"""
    run(script, backend, timeout_s=40.0).assert_exit_codes(0, 0)


def test_workers_of_a_data_loader_may_be_forked(backend: str) -> None:
    script = """
start()
assert total() == 2
data = torch.utils.data.TensorDataset(torch.arange(16.0))
for _ in range(2):
    for (batch,) in torch.utils.data.DataLoader(data, batch_size=4, num_workers=2):
        dist.all_reduce(batch)
dist.destroy_process_group()
"""
    run(script, backend).assert_exit_codes(0, 0)


def test_children_may_be_spawned(backend: str) -> None:
    script = """
import multiprocessing

def work(queue):
    queue.put(sum(range(10)))

if __name__ == "__main__":
    start()
    assert total() == 2
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=work, args=(queue,))
    child.start()
    assert queue.get(timeout=40) == 45
    child.join()
    assert child.exitcode == 0
    assert total() == 2
"""
    run(script, backend).assert_exit_codes(0, 0)


def test_an_interrupt_ends_a_waiting_rank(backend: str) -> None:
    script = """
rank = start(timeout_s=5)
assert total() == 2
if rank == 0:
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        total()
    except KeyboardInterrupt:
        sys.exit(0)
    except RuntimeError:
        # Python sees the interrupt only when the native wait returns.
        sys.exit(0)
    sys.exit(5)
time.sleep(2)
"""
    run(script, backend).assert_exit_codes(0, 0)


def test_a_script_may_end_while_messages_without_a_peer_fail(backend: str) -> None:
    # Both ranks end at once, so that their receives fail while the interpreter exits. By then only
    # the threads that wait for them still hold their tensors.
    script = """
rank = start()
assert total() == 2
for tag in range(100):
    dist.irecv(torch.zeros(1000), 1 - rank, tag=tag)
dist.barrier()
dist.destroy_process_group()
"""
    for _ in range(3):
        run(script, backend).assert_exit_codes(0, 0)
