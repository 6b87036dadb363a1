"""Compiles the small C programs of the benchmarks, where they are run.

It must never write into the package: what it makes goes into the folder that it is given.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

_SOURCES = Path(__file__).parent
_SECONDS = 60.0
_SAID_AT_MOST = 300


class CannotCompile(RuntimeError):
    """There is no program; the text says why, in one line."""


def compile_c(command: list[str], source: str, output: Path) -> Path:
    """Compile a source file of this package with the compiler and options in ``command``."""
    full = [*command, "-O3", "-o", str(output), str(_SOURCES / source)]
    try:
        done = subprocess.run(full, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompile(f"{command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())[:_SAID_AT_MOST]
        raise CannotCompile(f"{command[0]} cannot compile {source}: {said}")
    return output
