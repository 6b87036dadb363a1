"""The trainings of ``gflow bench quality``: which there are, in what order, and the file that keeps
those that are done.

A file holds one JSON object per line, appended as soon as its training has ended: a benchmark of
hours can be stopped at any time, and goes on where it was.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

#: The method that the others are measured against.
DENSE = "exact"


@dataclass(frozen=True)
class Run:
    """One training. Two that are equal here differ in nothing that can be chosen.

    Attributes:
        task: a name of ``TASKS``.
        method: what gradients are sent as.
        seed: of the initial weights and of the data.
        hosts: how many, with one rank each.
        rate: bits per second of each host's link; None: the hosts are on loopback.
        steps: how many.
        learning_rate: its maximum.
        chunk: elements in a chunk; None for methods without chunks.
    """

    task: str
    method: str
    seed: int
    hosts: int
    rate: int | None
    steps: int
    learning_rate: float
    chunk: int | None = None

    @classmethod
    def of(cls, row: dict[str, Any]) -> Run:
        """The training that a row of results is of."""
        return cls(**{field.name: row[field.name] for field in fields(cls)})

    @property
    def label(self) -> str:
        """How it is shown in a line of progress.

        Example:
            >>> Run("gpt", "int3", 0, 2, None, 4000, 4e-3).label
            'gpt, int3, seed 0, 2 hosts, lr 0.004'
        """
        return (
            f"{self.task}, {self.method}, seed {self.seed}, {self.hosts} hosts, "
            f"lr {self.learning_rate:g}"
        )

    def as_json(self) -> dict[str, Any]:
        """Its fields, for a row and for a rank."""
        return asdict(self)


def left(runs: Iterable[Run], rows: Sequence[dict[str, Any]]) -> list[Run]:
    """The runs that are not among these results yet."""
    done = {Run.of(row) for row in rows}
    return [run for run in runs if run not in done]


def read(path: Path) -> list[dict[str, Any]]:
    """The results in a file, none if there is no file yet.

    A last line without an end is left out: that write was interrupted.
    """
    if not path.exists():
        return []
    *lines, _unfinished = path.read_text().split("\n")
    return [json.loads(line) for line in lines]


def append(path: Path, row: dict[str, Any]) -> None:
    """Add one result to a file."""
    with path.open("a+b") as file:
        # What an interrupted write has left must not spoil this line.
        size = file.seek(0, 2)
        file.seek(0)
        file.truncate(file.read(size).rfind(b"\n") + 1)
        file.write((json.dumps(row) + "\n").encode())
