"""How a case ended on one rank, and the exception that reports it to the test.

Tracebacks, stacks and output of a rank are shown in full.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gflow.launch.process import signal_name


@dataclass(frozen=True)
class Returned:
    """The function returned a value."""

    rank: int
    value: Any
    output: str = ""

    def story(self) -> str:
        return f"rank {self.rank} returned"


@dataclass(frozen=True)
class Raised:
    """The function raised, or its group could not be made or destroyed."""

    rank: int
    kind: str
    message: str
    traceback: str
    output: str = ""

    def story(self) -> str:
        return f"rank {self.rank} raised {self.kind}: {self.message}\n{self.traceback}"


@dataclass(frozen=True)
class Died:
    """The process ended before it answered."""

    rank: int
    exit_code: int
    output: str = ""

    @property
    def signal_name(self) -> str | None:
        return signal_name(self.exit_code)

    def story(self) -> str:
        return f"rank {self.rank} died: {exit_text(self.exit_code)}"


@dataclass(frozen=True)
class Silent:
    """The process had not answered at the deadline; its stacks are in its output."""

    rank: int
    after_s: float
    output: str = ""

    def story(self) -> str:
        return f"rank {self.rank} had not answered after {self.after_s:.1f} s (stacks below)"


Outcome = Returned | Raised | Died | Silent


def exit_text(exit_code: int) -> str:
    """An exit code in words."""
    name = signal_name(exit_code)
    return f"killed by {name}" if name else f"exit code {exit_code}"


class RanksFailed(AssertionError):
    """At least one rank did not return a value."""

    def __init__(self, function: Callable[..., Any], outcomes: Sequence[Outcome]) -> None:
        self.outcomes = list(outcomes)
        super().__init__(_report(function, outcomes))


def _report(function: Callable[..., Any], outcomes: Sequence[Outcome]) -> str:
    bad = [outcome for outcome in outcomes if not isinstance(outcome, Returned)]
    silent = [str(outcome.rank) for outcome in bad if isinstance(outcome, Silent)]
    lines = [f"{function.__qualname__}: {len(bad)} of {len(outcomes)} ranks failed"]
    if silent:
        lines.append(f"ranks that had not answered at the deadline: {', '.join(silent)}")
    lines += [outcome.story() for outcome in outcomes]
    for outcome in outcomes:
        if outcome.output.strip():
            lines.append(f"---- output of rank {outcome.rank} ----\n{outcome.output.rstrip()}")
    return "\n".join(lines)
