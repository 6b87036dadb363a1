"""Runs one stage of `make test`: `stage.py NAME COMMAND...` names it, times it, and shows its end.

The exit code is the command's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time


def main(name: str, *command: str) -> int:
    """Run the command between a line that names it and a line with the seconds it took."""
    print(f"gflow: {name}", flush=True)
    start = time.monotonic()
    try:
        code = subprocess.run(command, check=False).returncode
    except KeyboardInterrupt:
        return 130
    taken, used = time.monotonic() - start, os.times()
    cpu = used.children_user + used.children_system
    verdict = "done" if code == 0 else f"FAILED ({code})"
    print(f"gflow: {name}: {verdict}, {taken:.0f} s ({cpu:.0f} s of CPU)", flush=True)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: stage.py NAME COMMAND...")
    sys.exit(main(*sys.argv[1:]))
