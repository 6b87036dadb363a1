"""Compiles the small C programs of this benchmark when it runs.

The package may not be writable, so programs go into the folder that the caller gives.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

_SOURCES = Path(__file__).parent
_SECONDS = 60.0
_MAX_MESSAGE = 300


class CannotCompile(RuntimeError):
    """The compiler failed; the text says why, in one line."""


def compile_c(command: list[str], source: str, output: Path) -> Path:
    """Compile a source file of this folder with the compiler and options in ``command``."""
    full = [*command, "-O3", "-o", str(output), str(_SOURCES / source)]
    try:
        done = subprocess.run(full, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompile(f"{command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())[:_MAX_MESSAGE]
        raise CannotCompile(f"{command[0]} cannot compile {source}: {said}")
    return output
