"""The report: a line for each test, the details of each failure, and the verdict.

A run in which a test that Gloo passes was skipped is not a success.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from .case import Outcome

OUTPUT_LINES = 120
# Printed by triton's bindings when the interpreter of a forked rank is finalized.
NOISE = re.compile(r"nanobind: |See https://nanobind| - (leaked|\.\.\. skipped) ")


def show(outcome: Outcome, number: int, total: int) -> None:
    width = len(str(total))
    line = f"[{number:{width}}/{total}] {outcome.result:7} {outcome.seconds:6.1f} s  {outcome.name}"
    if outcome.result in ("skipped", "limited"):
        line += f"  ({outcome.reason})"
    print(line, flush=True)
    if outcome.result == "failed":
        lines = outcome.output.splitlines()
        output = [line for line in lines if not NOISE.match(line)][-OUTPUT_LINES:]
        print(indent(outcome.reason))
        print(indent("\n".join(["--- what its processes printed last ---", *output, "---"])))


def indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def write(outcomes: list[Outcome], path: Path) -> None:
    """One line for each test, to compare runs with."""
    with path.open("w") as file:
        for outcome in outcomes:
            reason = outcome.reason.strip().splitlines()[-1:] or [""]
            fields = (outcome.name, outcome.result, f"{outcome.seconds:.2f}", reason[0])
            file.write("\t".join(fields) + "\n")


def conclude(outcomes: list[Outcome], expected: set[str] | None, backend: str) -> int:
    """Prints the last lines and returns the exit status."""
    by_result: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": [], "limited": []}
    for outcome in outcomes:
        by_result[outcome.result].append(outcome.name)
    for name in by_result["limited"]:
        print(f"limited: {name}: not counted, see limits.txt")
    for name in by_result["failed"]:
        print(f"failed: {name}")
    if expected is None:
        print("note: no expected list for this number of ranks; only failures count")
    ran = {outcome.name for outcome in outcomes if outcome.result != "skipped"}
    lost = sorted((expected or set()) - ran)
    for name in lost:
        print(f"lost: {name}: Gloo passes it, {backend} did not run it")
    counted = ("passed", "failed", "skipped")
    print("conformance: " + ", ".join(f"{len(by_result[result])} {result}" for result in counted))
    return 1 if by_result["failed"] or lost else 0


def apply_limit(outcome: Outcome, text: str | None) -> Outcome:
    """Marks a failure as a limit if every rank that failed shows the text on record."""
    if outcome.result != "failed" or text is None:
        return outcome
    failures = outcome.reason.count("exited with error code")
    if failures == 0 or outcome.reason.count(text) != failures:
        return outcome
    return replace(outcome, result="limited", reason=text)
