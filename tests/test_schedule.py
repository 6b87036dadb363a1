"""Tests how the tests are ordered and dealt out to workers."""

from pathlib import Path

import pytest

from tests import schedule

ROOT = Path(__file__).resolve().parent.parent
HOSTS = "tests/hosts/test_hosts.py::test_every_rank"


@pytest.mark.parametrize("name", [*schedule.ORDER, *schedule.ONE_BY_ONE, *schedule.SHARED_RUNS])
def test_what_the_schedule_names_exists(name: str) -> None:
    assert (ROOT / name).exists()


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [
        ("tests/ddp/test_buckets.py::test_a[1]", "tests/ddp/test_buckets.py::test_b[2]", True),
        ("tests/ddp/test_buckets.py::test_a", "tests/ddp/test_losses.py::test_a", False),
        ("tests/test_shutdown.py::test_a", "tests/test_shutdown.py::test_b", False),
        (f"{HOSTS}[gflow-2+1-barrier]", f"{HOSTS}_ends_well[gflow-2+1]", True),
        (f"{HOSTS}[gflow-2+1-barrier]", f"{HOSTS}[gflow-2+1_in_turns-barrier]", False),
        (f"{HOSTS}[gflow-one_host-all_gather]", f"{HOSTS}[gflow-one_host-barrier]", True),
        (f"{HOSTS}[gflow-one_host-barrier]", f"{HOSTS}[gflow-one_machine_as_2+1-barrier]", False),
        ("tests/gpu/test_ddp.py::test_a", "tests/gpu/test_state.py::test_a", True),
    ],
)
def test_tests_that_share_ranks_run_on_one_worker(one: str, other: str, together: bool) -> None:
    assert (schedule.unit(one) == schedule.unit(other)) == together


def test_unit_tests_come_first_and_examples_last() -> None:
    names = ["test_examples.py", "hosts/test_loss.py", "ddp/test_buckets.py", "test_options.py"]
    ordered = sorted(names, key=lambda name: schedule.position(f"tests/{name}"))
    assert ordered == names[::-1]


def test_there_is_at_least_one_worker() -> None:
    assert 1 <= schedule.number_of_workers() <= schedule.MOST_WORKERS
