"""``gflow doctor``: says whether gflow works here, and if not, what to do.

A check that breaks counts as failed: the doctor itself never ends with a traceback.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gflow.bench.units import read_seconds
from gflow.cli.checks import Check, Failed, all_checks
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
        """One line of text, and after it the output of processes, if there is any."""
        line = f"{self.status:7}  {self.name:{width}}  {self.detail}"
        # An error of several lines would hide where the next check starts.
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


def run_checks(checks: Sequence[Check]) -> Iterator[Finding]:
    """Run the checks in order, and skip those that need one that has failed."""
    passed: set[str] = set()
    for check in checks:
        missing = [name for name in check.needs if name not in passed]
        if missing:
            yield Finding(check.name, _SKIPPED, f"needs {' and '.join(missing)}")
            continue
        finding = _run_check(check)
        if finding.status == _OK:
            passed.add(check.name)
        yield finding


def _run_check(check: Check) -> Finding:
    try:
        passed = check.run()
    except Failed as failure:
        return Finding(check.name, _FAILED, failure.detail, failure.advice, failure.output)
    except Exception as error:
        detail = f"could not be checked: {type(error).__name__}: {error}"
        return Finding(check.name, _FAILED, detail, "Please report this.")
    return Finding(check.name, _OK, passed.detail, passed.advice)


def _run(args: argparse.Namespace) -> int:
    checks = all_checks(args.deadline)
    width = max(len(check.name) for check in checks)
    findings = []
    for finding in run_checks(checks):
        findings.append(finding)
        if not args.json:
            print(finding.line(width), flush=True)
    failed = [finding.name for finding in findings if finding.status != _OK]
    if args.json:
        report = {
            "gflow": __version__,
            "ok": not failed,
            "checks": [asdict(finding) for finding in findings],
        }
        print(json.dumps(report, indent=2))
    else:
        print(f"\nnot well: {', '.join(failed)}" if failed else "\ngflow works on this machine")
    return 1 if failed else 0
