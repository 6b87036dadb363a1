"""The command line: ``gflow`` or ``python -m gflow``."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line and return its exit code."""
    return 0


if __name__ == "__main__":
    sys.exit(main())
