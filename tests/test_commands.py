"""Tests the command line: what it prints, what it returns, and that it leaves no process behind.

No test depends on how long something takes, or on which contender is faster.
"""

import importlib.util
import json
import os
import shutil
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
    "GPU libraries",
    "options",
    "network",
    "self-test",
    "GPU self-test",
]


def gflow(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    # Drops whatever the caller's shell has set for gflow.
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


@pytest.mark.parametrize(
    ("benchmark", "option"),
    [("allreduce", "--sizes"), ("ddp", "--no-bucket-view"), ("quality", "--sweep")],
)
def test_help_does_not_need_torch(benchmark: str, option: str) -> None:
    source = "import sys; sys.modules['torch'] = None; from gflow.__main__ import main; main()"
    command = [sys.executable, "-c", source, "bench", benchmark, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert option in done.stdout


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
        (["bench", "allreduce", "--hosts", "0"], "at least 1"),
        (["bench", "allreduce", "--hosts", "2", "--rate", "1gb"], "'1gb' is not a rate"),
        (["bench", "allreduce", "--hosts", "2", "--rate", "1kbit"], "'1kbit' is not a rate"),
        (["bench", "allreduce", "--hosts", "2", "--rate", "0gbit"], "from 1 Mbit/s to 100 Gbit/s"),
        (["bench", "allreduce", "--rate", "1gbit"], "one host has no link to limit"),
        (["bench", "allreduce", "--contenders", "gloo,glue"], "'glue' is not a contender"),
        (["bench", "allreduce", "--json", "/no/such/folder/x.json"], "cannot write"),
        (["bench", "allreduce", "--plot", "picture.doc"], "must end in .png or .svg"),
        (["bench", "ddp", "--model", "vgg"], "invalid choice: 'vgg'"),
        (["bench", "ddp", "--image", "32"], "'32' is not a whole number of at least 64"),
        (["bench", "ddp", "--rounds", "none"], "'none' is not a whole number of at least 1"),
        (["bench", "ddp", "--density", "7"], "'7' must be a number over 0 and at most 1"),
        (["bench", "ddp", "--fusion-bytes", "-1"], "must be a whole number of bytes, at least 0"),
        (["bench", "ddp", "--contenders", "mpich"], "'mpich' is not a contender"),
        (["bench", "ddp", "--hosts", "1", "--ranks", "1"], "at least 2"),
        (["bench", "ddp", "--hosts", "1", "--rate", "1gbit"], "one host has no link to limit"),
        (["bench", "quality", "--tasks", "cats"], "'cats' is not a task"),
        (["bench", "quality", "--methods", "int3,int2"], "'int2' must be one of"),
        (["bench", "quality", "--hosts", "2,1"], "'1' is not a whole number of at least 2"),
        (["bench", "quality", "--sweep", "1,0"], "'0' is not a number over 0"),
        (["bench", "quality", "--report", "/no/such/file"], "there is no file /no/such/file"),
        (["bench", "quality", "--out", "/no/such/folder/x"], "cannot write"),
        (["bench", "quality", "--chunk", "0"], "'0' must be a whole number, at least 1"),
        (["bench", "quality", "--seeds", "0"], "'0' is not a whole number of at least 1"),
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


@pytest.mark.parametrize("command", [["allreduce", "--hosts", "2"], ["ddp"]])
def test_several_hosts_without_root_are_refused_with_what_is_needed(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gflow.__main__ import main

    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(SystemExit) as exit:
        main(["bench", *command])
    assert exit.value.code == 2
    said = capsys.readouterr().err
    assert "needs root" in said
    assert "--hosts 1 --ranks 2" in said


def test_quality_over_links_without_root_is_refused_with_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gflow.__main__ import main

    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(SystemExit) as exit:
        main(["bench", "quality", "--rate", "1gbit"])
    assert exit.value.code == 2
    said = capsys.readouterr().err
    assert "needs root" in said
    assert "leave out --rate" in said


# --- GPUs


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.mark.parametrize("benchmark", ["allreduce", "ddp"])
def test_a_benchmark_on_gpus_that_are_not_there_says_what_is_missing(
    benchmark: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from gflow.__main__ import main

    if has_gpu():
        pytest.skip("this machine has a GPU")
    with pytest.raises(SystemExit) as exit:
        main(["bench", benchmark, "--device", "cuda", "--hosts", "1"])
    assert exit.value.code == 2
    said = capsys.readouterr().err
    assert "torch sees no GPU here" in said or "is built without CUDA" in said


def test_who_is_measured_on_gpus_is_measured_there_by_default() -> None:
    from gflow.bench import allreduce, ddp
    from gflow.cli.parser import parse

    chosen = parse(["bench", "allreduce", "--device", "cuda"])
    allreduce.options.apply_defaults(chosen)
    assert chosen.contenders == ["gflow", "nccl"]
    chosen = parse(["bench", "ddp", "--device", "cuda"])
    ddp.options.apply_defaults(chosen)
    names = ["none", "ddp-only", "nccl", "nccl-fp16", "powersgd"]
    names += ["gflow-exact", "gflow-chunks", "gflow"]
    assert (chosen.hosts, chosen.ranks, chosen.contenders) == (1, 2, names)


@pytest.mark.parametrize(("device", "name"), [("cuda", "gloo"), ("cpu", "nccl")])
def test_who_cannot_be_measured_there_is_left_out_with_the_reason(device: str, name: str) -> None:
    from gflow.bench import allreduce, ddp
    from gflow.cli.parser import parse

    named = ["--device", device, "--contenders", f"gflow,{name}"]
    chosen = parse(["bench", "allreduce", *named])
    allreduce.options.apply_defaults(chosen)
    arguments, left_out = allreduce.options.prepare(chosen, Path(), [])
    assert list(arguments["details"]) == ["gflow"]
    assert "only measured on" in left_out[name]
    chosen = parse(["bench", "ddp", *named])
    ddp.options.apply_defaults(chosen)
    arguments, left_out = ddp.options.prepare(chosen, Path(), [])
    assert arguments["names"] == ["gflow"]
    assert f"--device {device}" in left_out[name]


def test_a_report_from_gpus_names_all_that_the_numbers_depend_on() -> None:
    from gflow.bench.allreduce import report

    gpu = {"name": "Some GPU", "capability": "9.0", "memory_bytes": 80 << 30, "processors": 132}
    found = {"what": "driver", "found": "13.2, libcuda.so.1", "is_there": True}
    about = {"installed": {}, "gpus": [gpu, gpu], "cuda": "13.2", "nccl": "2.30.7"}
    about |= {"found": [found], "topology": "GPU0 GPU1\nNV18"}
    times = {"samples": 9, "low_us": 1.0, "median_us": 2.0, "high_us": 3.0, "gb_per_s": 1.0}
    row = {"bytes": 4096, "contenders": {"gflow": times, "nccl": times}}
    said = report.tables([row | {"ratios": {"nccl/gflow": 1.0}}], about)
    for words in ("GPU 1: Some GPU, compute capability 9.0, 80.0 GiB", "NCCL 2.30.7", "NV18"):
        assert words in said
    assert "driver: 13.2, libcuda.so.1" in said
    assert "NCCL ÷" in said


def test_missing_libraries_fail_the_doctor_only_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gflow.bench.machine import Finding
    from gflow.cli import checks

    found = [Finding("driver", "13.2", True), Finding("NVRTC", "no libnvrtc.so.13", False)]
    monkeypatch.setattr(checks, "gpu_findings", lambda: found)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert checks.gpu_libraries().detail.startswith("no GPU: skipped (driver: 13.2; NVRTC: no lib")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(checks.Failed) as failed:
        checks.gpu_libraries()
    assert "missing (NVRTC)" in failed.value.advice


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
    if not has_gpu():
        assert "no GPU: skipped" in lines["GPU libraries"]
        for what in ("CUDA driver", "NCCL", "NVRTC"):
            assert f"{what}: " in lines["GPU libraries"]
        assert "no GPU: skipped" in lines["GPU self-test"]
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
    from gflow.cli.checks import Check, Passed
    from gflow.cli.doctor import run_checks

    def broken() -> Passed:
        raise OSError("no such luck")

    checks = [
        Check("first", broken),
        Check("second", lambda: Passed("never seen"), needs=("first",)),
        Check("third", lambda: Passed("seen")),
    ]
    findings = list(run_checks(checks))
    assert [finding.status for finding in findings] == ["failed", "skipped", "ok"]
    assert "no such luck" in findings[0].detail


# --- bench


def test_allreduce_measures_all_contenders_and_writes_what_it_measured(tmp_path: Path) -> None:
    from gflow.bench.allreduce.contenders import BACKENDS, LABELS, default_names

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
    assert (report["ranks"], report["hosts"], report["rate"]) == (2, 1, None)
    assert [row["bytes"] for row in report["rows"]] == [4096, 65536]
    present = [name for name in default_names(1, "cpu") if name not in report["left_out"]]
    assert [name for name in BACKENDS if name not in (*present, "nccl")] == []
    # These tests do not expect an MPI that is installed but cannot run.
    for name in ("openmpi", "mpich"):
        assert (name in present) == bool(shutil.which(f"mpicc.{name}")) or shutil.which("mpicc")
    assert ("memory-limit" in present) == bool(shutil.which("cc"))
    for row in report["rows"]:
        assert list(row["contenders"]) == present
        for name, result in row["contenders"].items():
            assert all(value > 0 for value in result.values())
            assert result["low_us"] <= result["median_us"] <= result["high_us"]
            assert ("cpu_s_per_gb" in result) == (name in BACKENDS)
        assert row["ratios"]["gloo/gflow"] > 0
        assert row["ratios"]["gloo/gflow-bucket"] > 0
        assert ("mpi/gflow-bucket" in row["ratios"]) == bool({"openmpi", "mpich"} & set(present))
    assert picture.stat().st_size > 0
    for words in ("4 KiB: gflow", "64 KiB: gflow", "GB/s", "Gloo ÷", "CPU s/GB"):
        assert words in done.stdout
    title = next(
        line for line in done.stdout.splitlines() if "gflow bucket" in line and ":" not in line
    )
    for name in present:
        assert LABELS[name] in title
    assert max(map(len, done.stdout.partition("\n\n")[2].splitlines())) <= 120


def test_what_is_not_installed_is_left_out_and_said(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    options = ["--sizes", "4K", "--seconds", "0.05", "--json", str(numbers)]
    done = gflow("bench", "allreduce", *options, PATH=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left out: Open MPI: not installed" in done.stdout
    assert "left out: MPICH: not installed" in done.stdout
    assert "left out: memory limit: there is no C compiler" in done.stdout
    report = json.loads(numbers.read_text())
    assert list(report["left_out"]) == ["openmpi", "mpich", "memory-limit"]
    assert list(report["rows"][0]["contenders"]) == ["gflow", "gflow-bucket", "gloo"]


def test_an_mpi_that_does_not_start_is_left_out_and_said(tmp_path: Path) -> None:
    for name, answer in (("mpicc", "echo Open MPI"), ("mpiexec", "echo no luck today; exit 3")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / name).chmod(0o755)
    options = ["--contenders", "gloo,openmpi", "--sizes", "4K", "--seconds", "0.05"]
    done = gflow("bench", "allreduce", *options, PATH=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left out: Open MPI" in done.stdout
    assert "did not start its ranks: no luck today" in done.stdout


@pytest.mark.parametrize("name", ["openmpi", "mpich"])
def test_ranks_of_mpi_sleep_when_it_is_not_their_turn(name: str, tmp_path: Path) -> None:
    from gflow.bench.allreduce import mpi
    from gflow.bench.turns import Unavailable
    from gflow.launch.rank import Rank

    try:
        details = mpi.prepare(name, tmp_path)
    except Unavailable as reason:
        pytest.skip(str(reason))
    ranks = mpi.MpiRanks(Rank(0, 2, print), **details)
    try:
        ranks.set_size(4096)
        assert all(seconds > 0 for seconds in ranks.turn(1, 3))
        pids = running(details["program"])
        assert len(pids) == 2
        before = [processor_ticks(pid) for pid in pids]
        time.sleep(0.3)
        # One that waits actively takes all of this time; a few ticks are the clock's.
        assert sum(map(processor_ticks, pids)) - sum(before) <= 6
    finally:
        ranks.close()
    wait_until_gone(pids)


def running(program: str) -> list[int]:
    """The processes that run this program."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if program_of(pid) == program]


def program_of(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""


def processor_ticks(pid: int) -> int:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return int(user) + int(system)


def test_a_rank_that_fails_is_shown_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gflow.__main__ import main
    from gflow.launch import ranks

    def run(work: Any, *arguments: Any, **options: Any) -> list[Any]:
        return run_ranks(fail_on_rank_1, 2, deadline=60)

    run_ranks = ranks.run
    monkeypatch.setattr(ranks, "run", run)
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 0.1)
    assert main(["bench", "allreduce", "--contenders", "gloo,gflow"]) == 1
    said = capsys.readouterr().err
    assert "rank 1 raised an exception" in said
    assert "Traceback" in said
    assert "ArithmeticError: one and one is three" in said


@pytest.mark.parametrize(
    ("text", "size"), [("4K", 4096), ("1.5MiB", 3 << 19), ("1gb", 1 << 30), ("400", 400)]
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    from gflow.bench.units import read_sizes

    assert read_sizes(text) == [size]


# --- bench ddp and quality


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


@pytest.mark.thorough
def test_ddp_measures_all_contenders_and_writes_what_it_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from gflow.__main__ import main
    from gflow.bench.ddp.contenders import LABELS, default_names

    numbers, picture = tmp_path / "numbers.json", tmp_path / "picture.png"
    small = ["--model", "resnet50", "--image", "64", "--batch", "1", "--rounds", "1"]
    options = ["--hosts", "1", "--steps", "1", "--no-bucket-view", "--json", str(numbers)]
    options += ["--plot", str(picture)] if can_draw() else []
    assert main(["bench", "ddp", *small, *options]) == 0
    said = capsys.readouterr().out
    report = json.loads(numbers.read_text())
    assert (report["hosts"], report["ranks"], report["bucket_view"]) == (1, 2, False)
    assert [row["contender"] for row in report["rows"]] == default_names("cpu")
    for row in report["rows"]:
        assert 0 < row["low_ms"] <= row["median_ms"] <= row["high_ms"]
        assert row["cpu_s_per_step"] > 0
        assert row["ratio_to_none"] > 0
        assert row["speedup_over_gloo"] > 0
        has_counters = row["contender"].startswith("gflow")
        assert ("counters_per_step" in row) == has_counters
        if has_counters:
            assert row["counters_per_step"]["gradient_bytes"] == 4 * 25_557_032
            # Stages are timed where gradients are compressed; elsewhere there would be zeros.
            has_stages = row["contender"] != "gflow-exact"
            assert ("stage_accumulate_seconds" in row["counters_per_step"]) == has_stages
    labels = [LABELS[name] for name in default_names("cpu")]
    labels += ["gflow, int3", "gflow, ternary", "gflow, chunks", "by gflow.metrics()", "sum"]
    for words in (*labels, "every rank is a host of its own", "loopback", "copied"):
        assert words in said
    assert picture.exists() == can_draw()


def test_what_gflow_counts_of_hidden_and_exposed_exchange_is_reported_where_it_is_counted() -> None:
    from gflow.bench.ddp.report import tables

    about = {"model": "alexnet", "batch": 4, "image": 224, "hosts": 2, "bucket_view": True,
             "density": 0.1, "fusion_bytes": 1 << 20, "warnings": [], "device": "cpu"}  # fmt: skip
    numbers = {"median_ms": 2.0, "low_ms": 1.0, "high_ms": 3.0, "cpu_s_per_step": 1.0}
    row = {"contender": "gflow", "sent_bytes_per_step": 1e6, **numbers}
    assert "hidden" not in tables([row], about)
    row["counters_per_step"] = {"hidden_seconds": 0.125, "exposed_seconds": 0.0625}
    assert stages_in(tables([row], about)) == [["hidden", "exposed"], ["125", "62"]]
    row["counters_per_step"] |= {"stage_within_host_seconds": 0.0625, "stage_wire_seconds": 0.25}
    exact = row | {"contender": "gflow-exact"}
    exact["counters_per_step"] = {"hidden_seconds": 0.5, "exposed_seconds": 0.25}
    assert stages_in(tables([exact, row], about)) == [
        ["hidden", "exposed", "within", "host", "wire"],
        ["500", "250", "-", "-"],
        ["125", "62", "62", "250"],
    ]


def stages_in(text: str) -> list[list[str]]:
    """The cells of the table of stages, without its first column."""
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if "by gflow.metrics()" in line)
    header, _, *rest = lines[first:]
    rows = rest[: next(number for number, line in enumerate(rest) if not line.startswith(" "))]
    return [header.split()[3:], *(row.rpartition("gflow")[2].split()[-4:] for row in rows)]


def drift_apart(rank: Any) -> None:
    import torch.distributed as dist

    from gflow.bench.ddp import contenders

    dist.init_process_group("gloo")
    small = {"model": "resnet50", "image": 64, "batch": 1, "bucket_view": True, "hosts": 1}
    small["device"] = "cpu"
    replica = contenders.make("ddp-only", rank, small)
    replica.turn(2, 0)
    replica.check()
    # As if it claimed to exchange gradients.
    replica._name = "gloo"
    replica.check()


def test_a_contender_whose_replicas_drift_apart_is_not_timed() -> None:
    from gflow.launch import ranks

    with pytest.raises(ranks.RanksFailed, match="Gloo: the ranks have different weights"):
        ranks.run(drift_apart, 2, deadline=120)


def is_dense_when_timed(rank: Any) -> None:
    import torch.distributed as dist

    from gflow.bench.ddp import contenders

    dist.init_process_group("gloo")
    small = {"model": "resnet50", "image": 64, "batch": 1, "bucket_view": True, "hosts": 1}
    small |= {"device": "cpu", "density": 0.1, "fusion_bytes": None}
    for name in ("gflow-fp16", "gflow-int3"):
        contenders.make(name, rank, small).settle()
    # No step is left for its method.
    contenders._SETTLING_STEPS = 0  # type: ignore[misc]
    contenders.make("gflow-int3", rank, small).settle()


def test_a_contender_that_is_in_its_dense_steps_is_not_timed() -> None:
    from gflow.launch import ranks

    with pytest.raises(ranks.RanksFailed, match="gflow, int3: it is not past its dense steps"):
        ranks.run(is_dense_when_timed, 2, deadline=120)


# Longer than gflow's warm-up by default: what comes after it is in the second half.
QUALITY = ["bench", "quality", "--seeds", "1", "--steps", "204"]


def test_quality_trains_all_methods_on_the_same_data_and_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    from gflow.__main__ import main

    out, picture = tmp_path / "quality.jsonl", tmp_path / "picture.svg"
    options = ["--tasks", "digits", "--methods", "exact,int3", "--out", str(out)]
    assert main([*QUALITY, *options]) == 0
    said = capsys.readouterr().out
    assert "2 trainings, 0 of them already" in said
    dense, int3 = (json.loads(line) for line in out.read_text().splitlines())
    assert (dense["method"], int3["method"]) == ("exact", "int3")
    assert [point["step"] for point in dense["curve"]][:3] == [0, 20, 40]
    assert dense["curve"][-1]["step"] == 204
    for mine, its in zip(int3["curve"], dense["curve"], strict=True):
        # The first hundred steps are exact, so there is nothing but the method that differs.
        assert (mine["loss"] == its["loss"]) == (mine["step"] <= 100)
    assert (dense["ratio"], int3["ratio"]) == (pytest.approx(1, abs=0.01), pytest.approx(10, abs=2))
    assert dense["loss"] < dense["curve"][0]["loss"]

    before = out.read_text()
    # As if it had been stopped while it wrote: that training is repeated, the others are not.
    out.write_text(before[:-10])
    plot = ["--plot", str(picture)] if can_draw() else []
    assert main([*QUALITY, *options, *plot]) == 0
    said = capsys.readouterr().out
    assert "2 trainings, 1 of them already" in said
    again = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["loss"] for row in again] == [dense["loss"], int3["loss"]]
    assert picture.exists() == can_draw()
    assert main(["bench", "quality", "--report", str(out)]) == 0
    assert f"| exact (dense) | 1.0 x       | {dense['loss']:.4f}" in capsys.readouterr().out


def row_of(**fields: Any) -> dict[str, Any]:
    """A result of ``gflow bench quality``."""
    row = {"task": "gpt", "method": "exact", "seed": 0, "hosts": 2, "rate": None, "steps": 9}
    row |= {"learning_rate": 4e-3, "chunk": None, "loss": 2.0, "accuracy": 0.5, "step_ms": 9.0}
    row |= {"ratio": 1.0, "parameters": 7, "torch": "2", "warnings": [], "audits": []}
    return row | fields


def test_a_report_compares_trainings_with_the_same_seed() -> None:
    from gflow.bench.quality.report import tables

    rows = [row_of(loss=2.0), row_of(seed=1, loss=4.0)]
    # Without pairs they would be 25 % apart.
    audits = [{"noise": noise} for noise in (0.1, 0.2, 0.4)]
    rows += [row_of(method="int3", loss=4.04, seed=1), row_of(method="int3", loss=2.02)]
    rows[-1]["audits"] = audits
    rows += [row_of(method="ternary", loss=2.5, seed=7), row_of(hosts=4, method="fp16")]
    lines = tables(rows).splitlines()
    int3 = next(line for line in lines if line.startswith("| int3"))
    assert "+1.00 ± 0.00 %" in int3
    assert "0.200 (0.400)" in int3
    ternary = next(line for line in lines if line.startswith("| ternary"))
    assert "%" not in ternary
    assert [line for line in lines if line.startswith("## ")] == [
        "## gpt, 2 hosts on loopback, 9 steps",
        "## gpt, 4 hosts on loopback, 9 steps",
    ]


def test_trainings_over_a_link_are_compared_with_dense_over_any_as_it_is_the_same() -> None:
    from gflow.bench.quality.report import tables

    rows = [row_of(loss=2.0), row_of(method="auto", loss=2.04, rate=10**8)]
    rows += [row_of(hosts=4, loss=3.0), row_of(steps=10, loss=3.0)]
    auto = next(line for line in tables(rows).splitlines() if line.startswith("| auto"))
    assert "+2.00 %" in auto


def test_a_sweep_names_the_best_learning_rate_and_whether_it_is_at_an_edge() -> None:
    from gflow.bench.quality.report import tables
    from gflow.bench.quality.tasks import TASKS

    own = TASKS["gpt"].learning_rate
    rows = [row_of(learning_rate=own * factor, loss=2 + factor) for factor in (1, 2)]
    assert tables(rows).count("Best:") == 1
    assert f"Best: {own:g} (the task's own), at the edge" in tables(rows)
    rows += [row_of(learning_rate=own / 2, loss=3.5)]
    assert f"Best: {own:g} (the task's own)." in tables(rows)
    rows += [row_of(learning_rate=own / 4, loss=1.5)]
    assert f"Best: {own / 4:g} (the task's own is {own:g}), at the edge" in tables(rows)


def test_a_sweep_trains_dense_at_each_learning_rate() -> None:
    from gflow.bench.quality.command import wanted
    from gflow.bench.quality.tasks import TASKS
    from gflow.cli.parser import parse

    chosen = parse(["bench", "quality", "--tasks", "vit", "--seeds", "1", "--sweep", "0.5,1"])
    own = TASKS["vit"].learning_rate
    assert [(run.method, run.learning_rate) for run in wanted(chosen)] == [
        ("exact", own / 2),
        ("exact", own),
    ]


def test_a_task_whose_data_is_missing_is_left_out_and_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gflow.bench.quality.command import wanted
    from gflow.cli.parser import parse

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    runs = wanted(parse(["bench", "quality", "--hosts", "2,4", "--steps", "7"]))
    assert {run.task for run in runs} == {"gpt", "gpt-beta2-95", "words", "vit"}
    assert {run.steps for run in runs} == {7}
    # One number of hosts after the other, and there all methods with a seed before the next.
    assert [run.hosts for run in runs] == sorted(run.hosts for run in runs)
    some = [run.seed for run in runs if run.hosts == 2]
    assert some == sorted(some)


# --- hosts


def namespaces_of(pid: int) -> set[str]:
    """The network namespaces of a process's children, except the test's own."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid:
                found.add(os.readlink(path / "ns/net"))
        except OSError:
            continue  # gone meanwhile
    return found - {os.readlink("/proc/self/ns/net")}


@pytest.fixture
def two_hosts_can_be_made() -> None:
    from gflow.launch.namespaces import NoHosts, hosts

    try:
        with hosts(2, rate=10**9):
            pass
    except NoHosts as reason:
        pytest.skip(str(reason))


@pytest.mark.usefixtures("two_hosts_can_be_made")
def test_hosts_reach_each_other_and_are_gone_after_a_failure() -> None:
    from gflow.launch.namespaces import hosts

    source = (
        "import errno, socket, sys;"
        "reached = [socket.socket(family).connect_ex((address, 9)) for family, address in"
        " zip((socket.AF_INET, socket.AF_INET6), sys.argv[1:])];"
        # "Connection refused" is an answer, too.
        "sys.exit(reached != [errno.ECONNREFUSED] * 2)"
    )
    with pytest.raises(ArithmeticError), hosts(2, rate=10**8) as (one, other):  # noqa: PT012
        command = [sys.executable, "-c", source, other.ipv4(), other.ipv6()]
        subprocess.run(one.command(command), timeout=60, check=True)
        subprocess.run(other.command(command), timeout=60, check=True)
        assert len(namespaces_of(os.getpid())) == 3
        raise ArithmeticError
    assert namespaces_of(os.getpid()) == set()


@pytest.mark.usefixtures("two_hosts_can_be_made")
def test_allreduce_over_a_link_is_compared_with_the_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from gflow.__main__ import main

    numbers = tmp_path / "numbers.json"
    link = ["--hosts", "2", "--ranks", "1", "--rate", "1gbit"]
    options = ["--sizes", "4K,64K", "--seconds", "0.1", "--json", str(numbers)]
    assert main(["bench", "allreduce", *link, *options]) == 0
    assert namespaces_of(os.getpid()) == set()
    said = capsys.readouterr().out
    report = json.loads(numbers.read_text())
    assert (report["ranks"], report["hosts"], report["rate"]) == (1, 2, 10**9)
    assert list(report["left_out"]) == ["openmpi", "mpich", "memory-limit"]
    for row in report["rows"]:
        assert list(row["contenders"]) == ["gflow", "gflow-bucket", "gloo", "link-limit"]
        assert row["ratios"]["link-limit/gflow"] > 0
    for words in ("left out: Open MPI", "left out: MPICH", "% of link limit"):
        assert words in said


@pytest.mark.thorough
@pytest.mark.usefixtures("two_hosts_can_be_made")
def test_ddp_over_a_link_counts_what_every_contender_sends(tmp_path: Path) -> None:
    from gflow.__main__ import main

    numbers = tmp_path / "numbers.json"
    small = ["--model", "resnet50", "--image", "64", "--batch", "1", "--rounds", "1"]
    options = ["--steps", "1", "--contenders", "none,gloo,gflow-exact", "--json", str(numbers)]
    assert main(["bench", "ddp", *small, *options]) == 0
    sent = {
        row["contender"]: row["sent_bytes_per_step"] / (4 * 25_557_032)
        for row in json.loads(numbers.read_text())["rows"]
    }
    assert sent["none"] < 0.01
    # Two ranks each send one half of the sums to the other, and then the other half.
    assert sent["gloo"] == pytest.approx(1, abs=0.1)
    assert sent["gflow-exact"] == pytest.approx(1, abs=0.1)


@pytest.mark.usefixtures("two_hosts_can_be_made")
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)]
)
def test_hosts_are_gone_after_an_interruption(number: signal.Signals) -> None:
    command = ["bench", "allreduce", "--hosts", "2", "--ranks", "1", "--contenders", "gloo"]
    with subprocess.Popen(
        [sys.executable, "-m", "gflow", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # A shell starts what runs in the background with this one ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as bench:
        end = time.monotonic() + 60
        while len(namespaces_of(bench.pid)) < 3:
            assert time.monotonic() < end, "no namespaces"
            time.sleep(0.2)
        bench.send_signal(number)
        assert bench.wait(60) != 0
    assert namespaces_of(bench.pid) == set()


# --- functions that ranks run; at the top level, where a rank can find them


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
    from gflow.launch import ranks

    news: list[str] = []
    results = ranks.run(add_up, 3, {"of": [1, 2]}, deadline=60, on_message=news.append)
    assert results == [[0, 3, 3], [1, 3, 3], [2, 3, 3]]
    assert sorted(news) == ["rank 0 adds", "rank 1 adds", "rank 2 adds"]


def test_when_one_rank_fails_the_others_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    from gflow.launch import ranks

    monkeypatch.setattr(ranks, "GRACE_SECONDS", 0.1)
    pids: list[int] = []
    with pytest.raises(ranks.RanksFailed, match=r"rank 1 raised[^$]*one and one is three"):
        ranks.run(fail_on_rank_1, 2, deadline=60, on_message=pids.append)
    assert pids
    assert not any(map(is_running, pids))


def test_a_rank_that_dies_is_shown_with_its_signal_and_last_words() -> None:
    from gflow.launch import ranks

    with pytest.raises(ranks.RanksFailed, match=r"rank 0 was killed by SIGABRT[^$]*my last words"):
        ranks.run(die, 1, deadline=60)


def test_a_deadline_ends_ranks_with_what_they_started_and_shows_where_they_were() -> None:
    from gflow.launch import ranks

    pids: list[int] = []
    with pytest.raises(ranks.RanksFailed, match="rank 0 was not done after 2 s") as failed:
        ranks.run(sleep_with_child, 1, deadline=2, on_message=pids.extend)
    # On a very busy machine it may not have reached the sleep.
    if pids:
        assert "in sleep_with_child" in str(failed.value)
        wait_until_gone(pids)


def test_ranks_do_not_outlive_a_starter_that_is_killed() -> None:
    source = (
        "import sys; sys.path[:] = sys.argv[1:]; from tests.test_commands import sleep;"
        "from gflow.launch import ranks;"
        "ranks.run(sleep, 1, deadline=100, on_message=lambda pid: print(pid, flush=True))"
    )
    command = [sys.executable, "-c", source, *sys.path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        assert is_running(pid)
        starter.kill()
    wait_until_gone([pid])
