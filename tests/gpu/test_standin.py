"""Tests that the stand-in does what CUDA and NCCL do, and reports what they would not.

The cases are in cases/; each runs in its own process.
"""

import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gpu import cases
from tests.gpu.standin.build import build

REPOSITORY = Path(__file__).resolve().parents[2]


def names() -> list[str]:
    """The cases of a module, found by parsing it: importing it would load libraries."""
    found = []
    for module in pkgutil.iter_modules(cases.__path__):
        if module.name != "__main__":
            text = (Path(cases.__path__[0]) / f"{module.name}.py").read_text()
            starts = [line for line in text.splitlines() if line.startswith("def ")]
            plain = [line for line in starts if line.endswith("() -> None:")]
            called = [line.removeprefix("def ").split("(")[0] for line in plain]
            found += [f"{module.name}.{name}" for name in called if not name.startswith("_")]
    return found


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[str], None]]:
    try:
        build()
    except FileNotFoundError as missing:
        pytest.skip(f"this torch comes without CUDA: {missing}")
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.cases", "serve"],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OPENBLAS_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def run_case(name: str) -> None:
        server.stdin.write(name + "\n")
        server.stdin.flush()
        code, said = json.loads(server.stdout.readline())
        assert code == 0, said

    yield run_case
    server.stdin.close()
    server.wait(10)


@pytest.mark.parametrize("case", names())
def test_standin(run: Callable[[str], None], case: str) -> None:
    run(case)


def test_a_case_that_fails_is_seen(run: Callable[[str], None]) -> None:
    for name in ("streams.there_is_no_such_case", "collectives._process"):
        with pytest.raises(AssertionError, match="Traceback"):
            run(name)
