"""Tests what gflow logs: nothing by default, and with GFLOW_LOG or Python's own configuration the
engine's records, each with the rank and the group that it is about."""

import logging
import re

import pytest

from gflow import logs, options
from tests.ranks import run_script

SCRIPT = """
import logging, os, sys
import torch
import torch.distributed as dist

if "PYTHON_LEVEL" in os.environ:
    logging.basicConfig(
        level=os.environ["PYTHON_LEVEL"], stream=sys.stdout,
        format="%(levelname)s of rank %(rank)s in %(group)s",
    )
dist.init_process_group("gflow")
tensor = torch.ones(4)
dist.all_reduce(tensor)
if "FORK" in os.environ:
    child = os.fork()
    if child == 0:
        print("the end of the child", flush=True)
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
if "KEEP" not in os.environ:
    dist.destroy_process_group()
print("the end", flush=True)
"""


def output(env=None, world_size=1):
    run = run_script(SCRIPT, world_size=world_size, env=env)
    run.assert_exit_codes(*[0] * world_size)
    return [rank.output for rank in run.ranks]


def test_nothing_is_logged_by_default():
    (text,) = output()
    assert text.split() == ["the", "end"]


def test_records_of_the_engine_name_the_group_and_each_rank():
    for rank, text in enumerate(output({"GFLOW_LOG": "info"}, world_size=2)):
        records = [line for line in text.splitlines() if "gflow:" in line]
        prefix = re.compile(rf"^[-\d]+ [\d:,]+ INFO gflow: group \S+, rank {rank}: ")
        assert records, text
        assert all(prefix.match(line) for line in records), text
        assert any("connected in" in line for line in records), text


def test_a_program_that_configures_logging_gets_what_it_asked_for():
    (text,) = output({"PYTHON_LEVEL": "INFO"})
    assert "INFO of rank 0 in 0" in text


def test_records_written_at_the_very_end_still_come_and_the_process_ends():
    (text,) = output({"GFLOW_LOG": "debug", "KEEP": "1"})
    assert text.index("the end") < text.index("rank 0: the group is closed")


def test_a_forked_child_neither_logs_for_its_parent_nor_hangs():
    (text,) = output({"GFLOW_LOG": "debug", "FORK": "1"})
    assert text.count("connected in") == 1
    assert text.count("the end") == 2


@pytest.mark.parametrize("text", ["loud", "5"])
def test_a_level_that_is_none_is_refused_with_the_list(text):
    with pytest.raises(ValueError, match=rf"GFLOW_LOG is '{text}', but must be one of 'debug'"):
        options.log_level({"GFLOW_LOG": text})


def test_levels_are_read_in_any_case_and_off_means_off():
    assert options.log_level({}) is None
    assert options.log_level({"GFLOW_LOG": "Debug"}) == logging.DEBUG
    assert options.log_level({"GFLOW_LOG": "off"}) > logging.CRITICAL


@pytest.mark.parametrize(
    ("python", "engine"),
    [(logging.DEBUG, 4), (logging.INFO, 3), (logging.WARNING, 2), (25, 2), (1000, 0), (1, 4)],
)
def test_the_engine_writes_only_what_python_would_show(python, engine):
    assert logs._engine_level(python) == engine


def test_records_of_the_python_half_carry_rank_and_group_whatever_the_group_is_called(caplog):
    logs.warn("100% mine", 3, "50% of it")
    (record,) = caplog.records
    assert (record.group, record.rank) == ("100% mine", 3)
    assert record.getMessage() == "gflow: group 100% mine, rank 3: 50% of it"
