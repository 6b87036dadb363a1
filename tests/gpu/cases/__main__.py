"""Runs one case: its module, its function, and what else it is given."""

import faulthandler
import importlib
import os
import sys


def main() -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(25, exit=True)
    module, function = sys.argv[1].split(".")
    case = getattr(importlib.import_module(f"tests.gpu.cases.{module}"), function)
    case(*sys.argv[2:])
    # Streams may be frozen for ever: nobody waits for them.
    sys.stdout.flush()
    os._exit(0)


main()
