"""Prints the packages of the optional dependencies named on the command line, one per line."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def requirements(extra: str, pyproject: str) -> list[str]:
    """The packages of one extra. Found by its brackets: Python 3.10 has no tomllib."""
    found = re.search(rf"^{re.escape(extra)} = \[(.*?)\]$", pyproject, re.MULTILINE | re.DOTALL)
    if found is None:
        sys.exit(f"no optional dependencies named {extra!r} in pyproject.toml")
    return re.findall(r'"([^"]+)"', found.group(1))


if __name__ == "__main__":
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    for name in sys.argv[1:]:
        print("\n".join(requirements(name, text)))
