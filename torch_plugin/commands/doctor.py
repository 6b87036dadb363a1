"""``gflow doctor``: says whether gflow works here, and if not, what to do.

It must never end with a traceback of its own: a check that breaks is a check that failed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gflow.commands.check import Check, Wrong
from gflow.commands.checks import all_checks
from gflow.commands.seconds import read_seconds
from gflow.version import __version__

_OK, _FAILED, _SKIPPED = "ok", "failed", "skipped"


@dataclass(frozen=True)
class Finding:
    """How one check went."""

    name: str
    status: str
    detail: str
    advice: str = ""
    output: str = ""

    def line(self, width: int) -> str:
        """The line for people; the output of processes follows it, if there is any."""
        line = f"{self.status:7}  {self.name:{width}}  {self.detail}"
        # An error of several lines would hide where the next check begins.
        line = " ".join(line.splitlines())
        if self.advice:
            line += f" -> {self.advice}"
        return f"{line}\n{self.output}" if self.output else line


def add_to(commands: Any) -> None:
    """Add this command to the command line."""
    parser = commands.add_parser(
        "doctor",
        help="check that gflow works on this machine",
        description="Check that gflow works on this machine: one line per check, and what to do "
        "about those that failed. The exit code is 0 if none failed, else 1.",
    )
    parser.add_argument("--json", action="store_true", help="print a report for programs instead")
    parser.add_argument(
        "--deadline",
        type=read_seconds,
        default=60.0,
        metavar="SECONDS",
        help="end what the checks have started after this long (default: %(default)g)",
    )
    parser.set_defaults(command=_run)


def examine(checks: Sequence[Check]) -> Iterator[Finding]:
    """Run the checks in order. What needs something that has failed is skipped."""
    passed: set[str] = set()
    for check in checks:
        missing = [name for name in check.needs if name not in passed]
        if missing:
            yield Finding(check.name, _SKIPPED, f"needs {' and '.join(missing)}")
            continue
        finding = _examine_one(check)
        if finding.status == _OK:
            passed.add(check.name)
        yield finding


def _examine_one(check: Check) -> Finding:
    try:
        fine = check.look()
    except Wrong as wrong:
        return Finding(check.name, _FAILED, wrong.detail, wrong.advice, wrong.output)
    except Exception as error:
        detail = f"could not be checked: {type(error).__name__}: {error}"
        return Finding(check.name, _FAILED, detail, "Please report this.")
    return Finding(check.name, _OK, fine.detail, fine.advice)


def _run(chosen: argparse.Namespace) -> int:
    checks = all_checks(chosen.deadline)
    width = max(len(check.name) for check in checks)
    findings = []
    for finding in examine(checks):
        findings.append(finding)
        if not chosen.json:
            print(finding.line(width), flush=True)
    failed = [finding.name for finding in findings if finding.status != _OK]
    if chosen.json:
        report = {
            "gflow": __version__,
            "ok": not failed,
            "checks": [asdict(finding) for finding in findings],
        }
        print(json.dumps(report, indent=2))
    else:
        print(f"\nnot well: {', '.join(failed)}" if failed else "\ngflow works on this machine")
    return 1 if failed else 0
