"""Proves the command line: what it prints, what it returns, and that it leaves no process behind.

No test may depend on how long something takes, nor on which contender is faster.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

CHECKS = [
    "Python",
    "torch",
    "native library",
    "entry points",
    "Rust failures",
    "CUDA",
    "options",
    "network",
    "self-test",
]


def gflow(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    # What the caller's shell has set for gflow is no part of a test.
    environ = {name: text for name, text in os.environ.items() if not name.startswith("GFLOW_")}
    return subprocess.run(
        [sys.executable, "-m", "gflow", *arguments],
        env=environ | variables,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def lines_of(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """The lines of a doctor's report, by check."""
    lines = done.stdout.splitlines()
    return {name: line for name in CHECKS for line in lines if line[9:].startswith(name)}


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: list[int]) -> None:
    end = time.monotonic() + 30
    while any(map(is_running, pids)):
        assert time.monotonic() < end, f"still running: {pids}"
        time.sleep(0.02)


# --- the command line as a whole


def test_help_names_the_commands() -> None:
    done = gflow("--help")
    assert done.returncode == 0
    assert "doctor" in done.stdout
    assert "bench" in done.stdout


def test_version() -> None:
    from gflow.version import __version__

    done = gflow("--version")
    assert (done.returncode, done.stdout) == (0, f"gflow {__version__}\n")


def test_help_does_not_need_torch() -> None:
    source = "import sys; sys.modules['torch'] = None; from gflow.__main__ import main; main()"
    command = [sys.executable, "-c", source, "bench", "allreduce", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--sizes" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "COMMAND"),
        (["dcotor"], "invalid choice: 'dcotor'"),
        (["bench"], "BENCHMARK"),
        (["bench", "allredcue"], "invalid choice: 'allredcue'"),
        (["bench", "allreduce", "--sizes", "4X"], "'4X' is not a size"),
        (["bench", "allreduce", "--sizes", "4K,"], "'' is not a size"),
        (["bench", "allreduce", "--sizes", "6"], "multiple of 4"),
        (["bench", "allreduce", "--seconds", "0"], "'0' is not a number of seconds over 0"),
        (["bench", "allreduce", "--ranks", "1"], "at least 2"),
        (["bench", "allreduce", "--json", "/no/such/folder/x.json"], "cannot write"),
        (["bench", "allreduce", "--plot", "picture.doc"], "must end in .png or .svg"),
        (["doctor", "--deadline", "inf"], "'inf' is not a number of seconds over 0"),
    ],
)
def test_what_cannot_be_understood_exits_with_2(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from gflow.__main__ import main

    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gflow.__main__ import main

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as exit:
        main(["bench", "allreduce", "--plot", "picture.png"])
    assert exit.value.code == 2
    assert "pip install matplotlib" in capsys.readouterr().err


# --- doctor


def test_the_doctor_finds_this_environment_well() -> None:
    done = gflow("doctor", GFLOW_SECRET="hush", GFLOW_TYPO="1")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = lines_of(done)
    assert list(lines) == CHECKS
    assert all(line.startswith("ok ") for line in lines.values())
    assert "secret=<hidden>" in lines["options"]
    assert "GFLOW_TYPO is unknown" in lines["options"]
    assert "gradient buckets recognised" in lines["self-test"]
    assert "hush" not in done.stdout + done.stderr


def test_the_doctor_has_a_report_for_programs_and_the_self_test_a_deadline() -> None:
    # No rank gets as far as a group in this time.
    done = gflow("doctor", "--json", "--deadline", "0.01")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] is False
    checks = {check["name"]: check for check in report["checks"]}
    assert list(checks) == CHECKS
    assert checks["torch"]["status"] == "ok"
    assert checks["self-test"]["status"] == "failed"
    assert "not done after 0.01 s" in checks["self-test"]["output"]


def test_a_wrong_variable_is_named_with_what_is_allowed() -> None:
    done = gflow("doctor", "--deadline", "0.01", GFLOW_DENSITY="7")
    assert done.returncode == 1
    lines = lines_of(done)
    assert lines["options"].startswith("failed ")
    assert "GFLOW_DENSITY is '7', but must be a number over 0 and at most 1" in lines["options"]
    assert lines["self-test"].startswith("skipped ")
    assert done.stdout.splitlines()[-1].startswith("not well: ")


def test_a_check_that_breaks_has_failed_and_the_others_go_on() -> None:
    from gflow.commands.checks import Check, Fine
    from gflow.commands.doctor import examine

    def broken() -> Fine:
        raise OSError("no such luck")

    checks = [
        Check("first", broken),
        Check("second", lambda: Fine("never seen"), needs=("first",)),
        Check("third", lambda: Fine("seen")),
    ]
    findings = list(examine(checks))
    assert [finding.status for finding in findings] == ["failed", "skipped", "ok"]
    assert "no such luck" in findings[0].detail


# --- bench


def test_allreduce_measures_all_contenders_and_writes_what_it_measured(tmp_path: Path) -> None:
    numbers, picture = tmp_path / "numbers.json", tmp_path / "picture.png"
    options = ["--sizes", "4K,64K", "--seconds", "0.1", "--json", str(numbers)]
    try:
        import matplotlib  # noqa: F401

        options += ["--plot", str(picture)]
    except ImportError:
        picture = numbers
    done = gflow("bench", "allreduce", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(numbers.read_text())
    assert report["ranks"] == 2
    assert [row["bytes"] for row in report["rows"]] == [4096, 65536]
    for row in report["rows"]:
        assert list(row["contenders"]) == ["gloo", "gflow"]
        for result in row["contenders"].values():
            assert all(value > 0 for value in result.values())
            assert result["low_us"] <= result["median_us"] <= result["high_us"]
        assert row["ratios"]["gloo/gflow"] > 0
    assert picture.stat().st_size > 0
    for words in ("4 KiB: Gloo", "64 KiB: Gloo", "gflow GB/s", "Gloo/gflow"):
        assert words in done.stdout


def test_a_rank_that_fails_is_shown_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gflow.__main__ import main
    from gflow.commands import ranks

    def run(work: Any, *arguments: Any, **options: Any) -> list[Any]:
        return run_ranks(fail_on_rank_1, 2, deadline=60)

    run_ranks = ranks.run
    monkeypatch.setattr(ranks, "run", run)
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 0.1)
    assert main(["bench", "allreduce"]) == 1
    said = capsys.readouterr().err
    assert "rank 1 raised an exception" in said
    assert "Traceback" in said
    assert "ArithmeticError: one and one is three" in said


@pytest.mark.parametrize(
    ("text", "size"), [("4K", 4096), ("1.5MiB", 3 << 19), ("1gb", 1 << 30), ("400", 400)]
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    from gflow.commands.sizes import read_sizes

    assert read_sizes(text) == [size]


# --- ranks; what they run is at the top level, where a rank can find it


def add_up(rank: Any, of: list[int]) -> list[int]:
    rank.tell(f"rank {rank.number} adds")
    return [rank.number, rank.world, sum(of)]


def fail_on_rank_1(rank: Any) -> None:
    rank.tell(os.getpid())
    if rank.number == 1:
        raise ArithmeticError("one and one is three")
    time.sleep(300)


def die(rank: Any) -> None:
    print("these are my last words", flush=True)
    os.kill(os.getpid(), signal.SIGABRT)


def sleep(rank: Any) -> None:
    rank.tell(os.getpid())
    time.sleep(300)


def sleep_with_child(rank: Any) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    rank.tell([os.getpid(), child.pid])
    time.sleep(300)


def test_ranks_bring_back_results_in_order_and_news_meanwhile() -> None:
    from gflow.commands import ranks

    news: list[str] = []
    results = ranks.run(add_up, 3, {"of": [1, 2]}, deadline=60, on_news=news.append)
    assert results == [[0, 3, 3], [1, 3, 3], [2, 3, 3]]
    assert sorted(news) == ["rank 0 adds", "rank 1 adds", "rank 2 adds"]


def test_when_one_rank_fails_the_others_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    from gflow.commands import ranks

    monkeypatch.setattr(ranks, "GRACE_SECONDS", 0.1)
    pids: list[int] = []
    with pytest.raises(ranks.RanksFailed, match=r"rank 1 raised[^$]*one and one is three"):
        ranks.run(fail_on_rank_1, 2, deadline=60, on_news=pids.append)
    assert pids
    assert not any(map(is_running, pids))


def test_a_rank_that_dies_is_shown_with_its_signal_and_last_words() -> None:
    from gflow.commands import ranks

    with pytest.raises(ranks.RanksFailed, match=r"rank 0 was killed by SIGABRT[^$]*my last words"):
        ranks.run(die, 1, deadline=60)


def test_a_deadline_ends_ranks_with_what_they_started_and_shows_where_they_were() -> None:
    from gflow.commands import ranks

    pids: list[int] = []
    with pytest.raises(ranks.RanksFailed, match="rank 0 was not done after 2 s") as failed:
        ranks.run(sleep_with_child, 1, deadline=2, on_news=pids.extend)
    # On a very busy machine it may not have come so far as to sleep.
    if pids:
        assert "in sleep_with_child" in str(failed.value)
        wait_until_gone(pids)


def test_ranks_do_not_outlive_a_starter_that_is_killed() -> None:
    source = (
        "import sys; sys.path[:] = sys.argv[1:]; from tests.test_commands import sleep;"
        "from gflow.commands import ranks;"
        "ranks.run(sleep, 1, deadline=100, on_news=lambda pid: print(pid, flush=True))"
    )
    command = [sys.executable, "-c", source, *sys.path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        assert is_running(pid)
        starter.kill()
    wait_until_gone([pid])
