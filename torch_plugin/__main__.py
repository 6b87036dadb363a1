"""The command line: ``gflow`` or ``python -m gflow``.

torch is not imported here: ``gflow --help`` has to answer at once, and also where torch is broken.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from gflow.cli.parser import parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal without µ shows a question mark, instead of ending a measurement.
        sys.stdout.reconfigure(errors="replace")
    try:
        args = parse(arguments)
        code: int = args.command(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("gflow: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader, such as `head`, is gone. Python would complain again when it closes the
        # standard output, so redirect that to nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
