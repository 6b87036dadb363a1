"""The stand-in does what CUDA and NCCL do, and reports what they would not tell."""

import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import cases
from tests.gpu.standin.build import build

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT_S = 30


def names() -> list[str]:
    found = []
    for module in pkgutil.iter_modules(cases.__path__):
        if module.name == "__main__":
            continue
        text = (Path(cases.__path__[0]) / f"{module.name}.py").read_text()
        found += [f"{module.name}.{name}" for name in _cases_in(text)]
    return found


def _cases_in(text: str) -> list[str]:
    """Functions that take nothing and return nothing; those with a _ are not meant."""
    starts = [line for line in text.splitlines() if line.startswith("def ")]
    return [
        line.removeprefix("def ").split("(")[0]
        for line in starts
        if line.endswith("() -> None:") and not line.startswith("def _")
    ]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    build()


@pytest.mark.parametrize("case", names())
def test_standin(case: str) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "tests.gpu.cases", case],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert child.returncode == 0, child.stdout + child.stderr
