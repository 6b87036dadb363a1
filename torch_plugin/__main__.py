"""The command line: ``gflow`` or ``python -m gflow``.

It must never import torch by itself: ``gflow --help`` has to answer at once, and also where torch
is broken.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from gflow.commands.line import parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Better a question mark where the terminal has no µ than the end of a measurement.
        sys.stdout.reconfigure(errors="replace")
    try:
        chosen = parse(arguments)
        code: int = chosen.command(chosen)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("gflow: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader, such as `head`, has gone. Python would complain once more when it closes
        # the standard output, so that leads nowhere from here on.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
