"""Tests that every example runs as its first lines say, and the demo from end to end."""

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gflow
from gflow.launch.namespaces import why_not
from tests.ranks import run_script

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
TIMEOUT_S = 120.0

needs_models = pytest.mark.skipif(
    find_spec("gflow.models") is None, reason="gflow.models is not there yet"
)


def run_example(
    name: str,
    *arguments: str,
    ranks: int = 2,
    torchrun: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> str:
    """The output of an example on rank 0, or under torchrun on all ranks."""
    done = run_script(EXAMPLES / name, ranks, None, timeout_s, torchrun, arguments)
    done.assert_exit_codes(*[0] * len(done.ranks))
    return done.ranks[0].output


def test_ten_lines_sum_a_tensor_over_all_ranks() -> None:
    printed = run_example("ten_lines.py", torchrun=True)
    assert "rank 0 of 2: [3.0, 3.0, 3.0, 3.0]" in printed
    assert "rank 1 of 2: [3.0, 3.0, 3.0, 3.0]" in printed


def test_digits_are_learned() -> None:
    printed = run_example("train_digits.py", "--steps", "40")
    accuracy = float(printed.rpartition("test accuracy ")[2].strip().rstrip("%"))
    assert accuracy > 80, printed


@needs_models
def test_the_images_example_trains_a_large_network() -> None:
    printed = run_example("train_images.py", "--model", "resnet50", "--size=32", "--steps=2")
    assert "resnet50:" in printed


@needs_models
def test_the_text_example_writes_a_sample() -> None:
    printed = run_example("train_text.py", "--steps=2", "--batch=2", "--sample=10")
    assert "step 2: loss" in printed
    assert "\ndef " in printed


# Slow. `make test` checks the same of shorter trainings, in tests/compression/test_resuming.py.
@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(gflow, "state_dict"), reason="gflow.state_dict is not there yet")
def test_a_training_that_was_stopped_goes_on_to_the_same_bits() -> None:
    printed = run_example("checkpoint_and_resume.py", "--check", "--steps=24", ranks=1)
    assert "The same to the last bit" in printed


def run_demo(
    folder: Path, methods: str, *arguments: str, timeout_s: float = TIMEOUT_S
) -> tuple[str, dict[str, Any]]:
    """The demo's output and measurements for a few steps; also checks that its plot exists."""
    picture, numbers = folder / "demo.png", folder / "demo.json"
    files = [f"--out={picture}", f"--json={numbers}"]
    short = ["--steps=3", "--seeds=2", f"--methods={methods}"]
    printed = run_example("demo.py", *short, *files, *arguments, ranks=1, timeout_s=timeout_s)
    assert picture.stat().st_size > 10_000
    measured = json.loads(numbers.read_text())
    assert all(result["step_ms"] > 0 for result in measured["results"].values())
    return printed, measured


def test_the_demo_compares_methods_on_two_hosts_or_says_why_not(tmp_path: Path) -> None:
    printed, measured = run_demo(tmp_path, "gloo,gflow")
    assert list(measured["results"]) == ["gloo", "gflow"]
    if why_not() is None:
        assert "1 Gbit/s link" in printed
        # Four bytes for each of 1.1 million parameters, and headers.
        parameters = measured["runs"][0]["parameters"]
        sent = measured["results"]["gloo"]["sent_bytes"]
        assert 4 * parameters < sent < 4.4 * parameters
    else:
        assert "NOT ON TWO HOSTS" in printed
    # Gloo is what is to be reached, so it is.
    assert all(measured["results"]["gloo"]["seconds_to_target"])
    assert "gflow's settings: its defaults" in printed


def test_the_demo_takes_the_target_of_each_seed_from_the_first_method(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from comparison.runs import Result, targets_of

    curves = {0: [3.0, 2.0, 1.0], 1: [3.0, 2.9, 2.0]}
    gloo, gflow = (
        [run_of(seed, [loss * more for loss in losses]) for seed, losses in curves.items()]
        for more in (1.0, 1.02)
    )
    targets = targets_of(gloo)
    assert targets == {0: pytest.approx(1.03), 1: pytest.approx(2.06)}
    # A little worse is within the tolerance; the third evaluation is the first to reach it.
    assert Result.of(gflow, targets).seconds_to_target == [2.0, 2.0]
    gflow[1] = run_of(1, [3.0, 2.9, 2.07])
    result = Result.of(gflow, targets)
    assert (result.seconds_to_target, result.time_to_target) == ([2.0, None], None)


def run_of(seed: int, losses: list[float]) -> Any:
    """A training of the demo that has found these losses, one per second."""
    from comparison.runs import Run

    curve = [
        {"step": number, "seconds": float(number), "loss": loss, "accuracy": 0.5}
        for number, loss in enumerate(losses)
    ]
    return Run("gloo", seed, curve, [1.0], [1.0], 7, {})


@pytest.mark.thorough
def test_the_demo_runs_without_hosts_too(tmp_path: Path) -> None:
    printed, measured = run_demo(tmp_path, "gloo-fp16,gflow", "--loopback")
    assert "NOT ON TWO HOSTS: --loopback was given" in printed
    assert measured["environment"]["GFLOW_COMPRESS"] == "on"
    # Not through shared memory, where bytes are not counted.
    assert measured["results"]["gflow"]["sent_bytes"] > 1e5


@pytest.mark.thorough
@pytest.mark.parametrize("task", ["gpt", "alexnet"])
def test_the_demo_trains_large_networks_too(tmp_path: Path, task: str) -> None:
    large = [f"--task={task}", "--loopback", "--seeds=1", "--learning-rate=5e-4"]
    printed, measured = run_demo(tmp_path, "gloo,gflow", *large, timeout_s=600)
    assert "3 steps with warm-up and a cosine" in printed
    assert "0.0005" in printed
    assert (measured["task"], measured["learning_rate"]) == (task, 5e-4)
    # Nothing but how numbers are exchanged differs, and in the first steps that is exact.
    gloo, gflow = (run["curve"][-1]["loss"] for run in measured["runs"])
    assert gflow == pytest.approx(gloo, rel=1e-3)
    assert [run["sent_as"] for run in measured["runs"]] == [None, "exact"]


@pytest.mark.parametrize("task", ["gpt", "alexnet"])
def test_a_large_task_of_the_demo_is_what_its_summary_says(
    monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from comparison.tasks import TASKS

    data = TASKS[task].load()
    with torch.device("meta"):
        parameters = sum(one.numel() for one in data.network().parameters())
    assert f"({parameters / 1e6:.0f} M parameters)" in TASKS[task].summary
    # Equal seeds and ranks have equal samples, others do not; none is among what is held out.
    inputs, again, other_rank, other_seed = (
        next(data.batches(seed, rank, 2))[0] for seed, rank in ((0, 0), (0, 0), (0, 1), (1, 0))
    )
    assert torch.equal(inputs, again)
    assert not torch.equal(inputs, other_rank)
    assert not torch.equal(inputs, other_seed)
    held_out = data.held_out[0]
    assert inputs.shape[1:] == held_out.shape[1:]
    assert not any(torch.equal(one, kept) for one in inputs for kept in held_out)


def test_the_demo_takes_what_is_usual_for_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from comparison.tasks import TASKS
    from demo import parse_args

    for name, out in (("digits", "demo.png"), ("gpt", "demo-gpt.png")):
        args = parse_args([f"--task={name}"])
        assert (args.steps, args.out) == (TASKS[name].steps, Path(out))
        assert args.learning_rate == TASKS[name].learning_rate
    assert vars(parse_args([])) == vars(parse_args(["--task=digits"]))
    args = parse_args(["--task=gpt", "--steps=7", "--learning-rate=0.5", "--out=x.png"])
    assert (args.steps, args.learning_rate, args.out) == (7, 0.5, Path("x.png"))


@pytest.mark.parametrize(
    ("argument", "complaint"),
    [
        ("--methods=gloo,mpi", "'mpi': choose from gloo, gloo-fp16, gflow"),
        ("--task=cats", "invalid choice: 'cats'"),
        ("--learning-rate=0", "0: must be over 0"),
        ("--steps=0", "0: must be at least 1"),
    ],
)
def test_the_demo_refuses_what_it_does_not_know(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argument: str,
    complaint: str,
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from demo import parse_args

    with pytest.raises(SystemExit) as exit:
        parse_args([argument])
    assert exit.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_long_training_shows_that_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from comparison import progress

    now = [1000.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    shown = progress.Progress(["gloo"], 900)
    for step in range(0, 110, 10):
        shown.update({"step": step, "seconds": 1.0, "loss": 2.0})
        now[0] += 13
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "gloo  starting",
        "gloo  step 0/900",
        "gloo  step 50/900",
        "gloo  step 100/900",
    ]
