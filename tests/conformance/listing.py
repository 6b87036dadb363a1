"""Lists of tests, kept as text beside this file: one name to a line, `#` begins a comment.

Must never let a name that the suite does not have pass for a test that ran.
"""

from __future__ import annotations

import fnmatch
import importlib.metadata
from collections.abc import Iterable
from pathlib import Path

from .case import Outcome

FOLDER = Path(__file__).parent


def choose(available: list[str], quick: bool, pattern: str | None) -> list[str]:
    """The tests to run, in the suite's order."""
    chosen = available
    if quick:
        wanted = read(FOLDER / "quick.txt")
        unknown = sorted(set(wanted) - set(available))
        if unknown:
            raise SystemExit(f"quick.txt names tests that the suite does not have: {unknown}")
        chosen = [name for name in chosen if name in wanted]
    if pattern is not None:
        chosen = [n for n in chosen if pattern in n or fnmatch.fnmatchcase(n, pattern)]
    if not chosen:
        raise SystemExit("no test matches")
    return chosen


def expected(world_size: int, among: Iterable[str] | None) -> set[str] | None:
    """What plain Gloo passes with this many ranks; None if that was never recorded."""
    path = path_of_expected(world_size)
    if not path.exists():
        return None
    names = set(read(path))
    # A whole run answers for every name on the list, even one that the suite no longer has.
    return names if among is None else names & set(among)


def limits(backend: str) -> dict[str, str]:
    """Tests that no backend outside PyTorch can pass, each with the text of its failure."""
    if backend == "gloo":
        return {}
    pairs = (line.partition(":") for line in read(FOLDER / "limits.txt"))
    return {name.strip(): text.strip() for name, _, text in pairs}


def write_expected(world_size: int, outcomes: list[Outcome]) -> None:
    passed = [outcome.name for outcome in outcomes if outcome.result == "passed"]
    torch = importlib.metadata.version("torch")
    title = f"# What plain Gloo passes with {world_size} ranks on torch {torch}, without a GPU."
    command = f"python -m tests.conformance --backend gloo --world-size {world_size}"
    lines = [title, f"# Written by: {command} --write-expected", *passed]
    path_of_expected(world_size).write_text("\n".join(lines) + "\n")


def path_of_expected(world_size: int) -> Path:
    return FOLDER / f"expected_{world_size}_ranks.txt"


def read(path: Path) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]
