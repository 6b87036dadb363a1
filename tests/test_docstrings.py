"""Runs the examples in the docstrings of the package, in a group of one rank, and proves that every
public name has one."""

import doctest
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gflow

MODULES = sorted(
    one.name
    for one in pkgutil.walk_packages(gflow.__path__, "gflow.")
    if not one.name.startswith(("gflow._", "gflow.launch.child"))
)


@pytest.fixture(scope="module")
def names() -> Iterator[dict[str, Any]]:
    """Names that examples may use without importing them: a group, and a model in DDP."""
    dist.init_process_group("gflow", store=dist.HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    yield {"gflow": gflow, "torch": torch, "dist": dist, "model": model}
    dist.destroy_process_group()


@pytest.mark.parametrize("module", ["gflow", *MODULES])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_examples_of_a_module_do_what_they_say(
    module: str, names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    outcome = doctest.testmod(importlib.import_module(module), extraglobs=names)
    assert outcome.failed == 0


@pytest.mark.parametrize("name", [name for name in gflow.__all__ if name != "__version__"])
def test_a_public_name_has_an_example_that_runs(name: str) -> None:
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(getattr(gflow, name)) or "")
    assert [one for one in examples if not one.options.get(doctest.SKIP)], name
