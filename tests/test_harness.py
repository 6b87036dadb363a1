"""Tests the harness: what it reports when ranks fail, hang or die, and that it cleans up.

Only Gloo is used here, so that a bug in gflow never looks like a bug in the harness.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import Died, Group, Pool, Raised, RanksFailed, Returned, Silent, run_script
from tests.ranks.membership import rendezvous
from tests.ranks.strays import new_tag, strays

GLOO = Group("gloo", timeout_s=20.0)
KEPT = Group("gloo", timeout_s=20.0, kept=True)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


def add_ones(rank: int, world: int) -> float:
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return tensor.item()


def own_pid(rank: int, world: int) -> int:
    return os.getpid()


def group_identity(rank: int, world: int) -> int:
    return id(dist.group.WORLD)


def echo(rank: int, world: int, first: object, second: object) -> tuple[object, ...]:
    return rank, world, first, second


def fail_on_rank_one(rank: int, world: int) -> None:
    print(f"rank {rank} speaks before it fails")
    if rank == 1:
        raise ValueError("no good")


def hang_on_rank_one(rank: int, world: int) -> None:
    if rank == 1:
        time.sleep(3600)


def die_on_rank_one(rank: int, world: int, number: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), number)
    return "alive"


def leave_with_code_seven(rank: int, world: int) -> None:
    os._exit(7)


def exit_politely(rank: int, world: int) -> None:
    sys.exit(3)


def read_variable(rank: int, world: int) -> str | None:
    return os.environ.get("TEST_RANKS_EXAMPLE")


def own_group(rank: int, world: int) -> float:
    dist.init_process_group("gloo", store=rendezvous(), rank=rank, world_size=world)
    return add_ones(rank, world)


def start_a_sleeping_child(rank: int, world: int) -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]).pid


def number_of_threads(rank: int, world: int) -> int:
    return torch.get_num_threads()


def not_picklable(rank: int, world: int) -> object:
    return lambda: None


class OnlyHere:
    """Can be pickled by a rank, and unpickled only by that rank."""

    def __init__(self, pid: int) -> None:
        if pid != os.getpid():
            raise ValueError("not in this process")
        self.pid = pid

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return OnlyHere, (self.pid,)


def only_readable_by_rank_one(rank: int, world: int) -> object:
    return OnlyHere(os.getpid()) if rank == 1 else "fine"


def fail_to_meet_on_rank_one(rank: int, world: int) -> str:
    if rank == 1:
        try:
            dist.init_process_group(
                "gloo",
                store=rendezvous(),
                rank=0,
                world_size=2,
                timeout=timedelta(seconds=0.2),
            )
        except RuntimeError as error:
            return type(error).__name__
    return "idle"


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_every_rank_runs_the_function_in_a_group(pool: Pool) -> None:
    assert pool.team(3, GLOO).run(add_ones) == [3.0, 3.0, 3.0]


def test_arguments_arrive_and_values_come_back_in_rank_order(pool: Pool) -> None:
    assert pool.team(2, None).run(echo, "a", {"b": 1}) == [
        (0, 2, "a", {"b": 1}),
        (1, 2, "a", {"b": 1}),
    ]


def test_ranks_stay_alive_between_cases(pool: Pool) -> None:
    first = pool.team(2, None).run(own_pid)
    assert pool.team(2, GLOO).run(own_pid) == first
    assert pool.team(1, None).run(own_pid) == first[:1]


def test_a_kept_group_is_used_again_and_a_fresh_one_is_not(pool: Pool) -> None:
    assert pool.team(2, KEPT).run(group_identity) == pool.team(2, KEPT).run(group_identity)
    before = pool._kept_name
    assert pool.team(2, GLOO).run(add_ones) == [2.0, 2.0]
    assert pool._kept_name != before
    assert pool.team(2, KEPT).run(add_ones) == [2.0, 2.0]


def test_a_rank_computes_with_one_thread(pool: Pool) -> None:
    assert pool.team(1, None).run(number_of_threads) == [1]


def test_environment_variables_last_as_long_as_the_case(pool: Pool) -> None:
    group = Group("gloo", env=(("TEST_RANKS_EXAMPLE", "here {rank}"),))
    assert pool.team(2, group).run(read_variable) == ["here 0", "here 1"]
    assert pool.team(2, None).run(read_variable) == [None, None]


def test_a_function_can_make_its_own_group(pool: Pool) -> None:
    assert pool.team(2, None).run(own_group) == [2.0, 2.0]
    assert pool.team(2, None).run(own_group) == [2.0, 2.0]


def test_a_failing_rank_shows_its_traceback_its_rank_and_the_output(pool: Pool) -> None:
    with pytest.raises(RanksFailed) as failure:
        pool.team(2, None).run(fail_on_rank_one)
    text = str(failure.value)
    assert "rank 1 raised ValueError: no good" in text
    assert 'raise ValueError("no good")' in text
    assert "rank 0 returned" in text
    assert "rank 0 speaks before it fails" in text
    assert "rank 1 speaks before it fails" in text


def test_output_of_an_earlier_case_is_not_shown(pool: Pool) -> None:
    pool.team(2, None).outcomes(fail_on_rank_one)
    with pytest.raises(RanksFailed) as failure:
        pool.team(2, None).run(exit_politely)
    assert "speaks" not in str(failure.value)


def test_a_rank_that_failed_is_used_again(pool: Pool) -> None:
    before = pool.team(2, GLOO).run(own_pid)
    outcomes = pool.team(2, GLOO).outcomes(fail_on_rank_one)
    assert isinstance(outcomes[0], Returned)
    assert isinstance(outcomes[1], Raised)
    assert pool.team(2, GLOO).run(own_pid) == before
    assert pool.team(2, GLOO).run(add_ones) == [2.0, 2.0]


def test_a_hanging_rank_meets_its_deadline_shows_its_stack_and_is_replaced(pool: Pool) -> None:
    before = pool.team(2, None).run(own_pid)
    start = time.monotonic()
    with pytest.raises(RanksFailed) as failure:
        pool.team(2, None).run(hang_on_rank_one, deadline_s=1.0)
    assert time.monotonic() - start < 20
    text = str(failure.value)
    assert "ranks that had not answered at the deadline: 1" in text
    assert "in hang_on_rank_one" in text
    assert isinstance(failure.value.outcomes[1], Silent)
    after = pool.team(2, None).run(own_pid)
    assert after[0] == before[0]
    assert after[1] != before[1]
    assert not is_running(before[1])


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT"])
def test_a_rank_that_dies_is_named_with_its_signal_and_is_replaced(pool: Pool, name: str) -> None:
    before = pool.team(2, None).run(own_pid)
    with pytest.raises(RanksFailed) as failure:
        pool.team(2, None).run(die_on_rank_one, int(signal.Signals[name]))
    assert f"rank 1 died: killed by {name}" in str(failure.value)
    after = pool.team(2, None).run(own_pid)
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_the_survivors_of_a_death_still_tell_their_value(pool: Pool) -> None:
    outcomes = pool.team(2, None).outcomes(die_on_rank_one, int(signal.SIGKILL))
    assert outcomes[0] == Returned(0, "alive")
    assert isinstance(outcomes[1], Died)
    assert outcomes[1].signal_name == "SIGKILL"


def test_a_rank_that_leaves_by_itself_is_named_with_its_exit_code(pool: Pool) -> None:
    with pytest.raises(RanksFailed, match="rank 0 died: exit code 7"):
        pool.team(1, None).run(leave_with_code_seven)


def test_sys_exit_in_a_case_does_not_end_the_rank(pool: Pool) -> None:
    before = pool.team(1, None).run(own_pid)
    with pytest.raises(RanksFailed, match="rank 0 raised SystemExit: 3"):
        pool.team(1, None).run(exit_politely)
    assert pool.team(1, None).run(own_pid) == before


def test_a_function_that_cannot_be_imported_is_refused_at_once(pool: Pool) -> None:
    with pytest.raises(TypeError, match="top-level function"):
        pool.team(1, None).run(lambda rank, world: None)


def test_a_value_that_cannot_be_pickled_is_an_error_of_that_rank(pool: Pool) -> None:
    with pytest.raises(RanksFailed, match=r"rank 0 raised .*[Pp]ickl"):
        pool.team(1, None).run(not_picklable)


def test_a_value_that_cannot_be_unpickled_does_not_shift_the_answers_of_later_cases(
    pool: Pool,
) -> None:
    with pytest.raises(RanksFailed, match=r"rank 1 raised ValueError: .*cannot be unpickled"):
        pool.team(2, None).run(only_readable_by_rank_one)
    assert pool.team(2, None).run(echo, 1, 2) == [(0, 2, 1, 2), (1, 2, 1, 2)]


def test_a_rank_that_could_not_make_a_group_can_make_the_next(pool: Pool) -> None:
    assert pool.team(2, None).run(fail_to_meet_on_rank_one)[1] != "idle"
    assert pool.team(2, GLOO).run(add_ones) == [2.0, 2.0]


def test_nothing_runs_after_the_pool_is_closed() -> None:
    pool = Pool()
    pids = pool.team(2, None).run(own_pid)
    children = pool.team(2, None).run(start_a_sleeping_child)
    assert all(is_running(pid) for pid in pids + children)
    pool.close()
    assert not any(is_running(pid) for pid in pids + children)
    assert strays(pool.tag) == []


def test_ranks_die_with_the_process_that_started_them() -> None:
    tag = new_tag()
    program = (
        "import time\n"
        "from tests.ranks.rank import Rank\n"
        f"rank = Rank({tag!r})\n"
        "rank.be_ready()\n"
        "print('ready', flush=True)\n"
        "time.sleep(3600)\n"
    )
    root = Path(__file__).resolve().parents[1]
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=root
    ) as starter:
        try:
            assert starter.stdout is not None
            assert starter.stdout.readline() == "ready\n"
            assert len(strays(tag)) == 1
        finally:
            starter.kill()
    end = time.monotonic() + 10
    while strays(tag) and time.monotonic() < end:
        time.sleep(0.05)
    assert strays(tag) == []


def test_a_script_runs_once_per_rank_and_gives_exit_codes_and_output() -> None:
    run = run_script(
        """
        import os, sys
        print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.environ["EXAMPLE"])
        sys.exit(int(os.environ["RANK"]))
        """,
        world_size=2,
        env={"EXAMPLE": "here"},
    )
    assert run.exit_codes() == [0, 1]
    assert [rank.output for rank in run.ranks] == ["rank 0 of 2 here\n", "rank 1 of 2 here\n"]
    with pytest.raises(AssertionError, match="rank 1: exit code 1"):
        run.assert_exit_codes(0, 0)


def test_a_script_can_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "example.py"
    path.write_text("print('from a file')")
    run_script(path).assert_exit_codes(0)


def test_a_script_that_hangs_is_ended_at_the_deadline_and_shows_its_stack() -> None:
    run = run_script("def wait():\n    import time; time.sleep(3600)\nwait()\n", timeout_s=1.0)
    assert run.ranks[0].timed_out
    assert "in wait" in run.ranks[0].output
    with pytest.raises(AssertionError, match="still running at the deadline"):
        run.assert_exit_codes(0)


def test_a_script_that_crashes_is_named_with_its_signal() -> None:
    run = run_script("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert run.ranks[0].signal_name == "SIGSEGV"
    assert run.exit_codes() == [-signal.SIGSEGV]


def test_what_a_script_leaves_running_is_reported_and_killed() -> None:
    run = run_script(
        """
        import subprocess, sys
        command = [sys.executable, "-c", "import time; time.sleep(3600)"]
        print(subprocess.Popen(command, start_new_session=True).pid)
        """
    )
    child = int(run.ranks[0].output)
    assert run.left_running == [child]
    assert not is_running(child)
    with pytest.raises(AssertionError, match="left running"):
        run.assert_exit_codes(0)


def test_a_script_runs_under_torchrun() -> None:
    run = run_script(
        "import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n",
        world_size=2,
        torchrun=True,
    )
    run.assert_exit_codes(0)
    assert "rank 0 of 2" in run.ranks[0].output
    assert "rank 1 of 2" in run.ranks[0].output
