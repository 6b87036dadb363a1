"""Runs one case, given its module, its function and further arguments. Or, as `serve`, runs every
case named on stdin in a forked child, so that imports are paid for only once."""

import faulthandler
import importlib
import json
import os
import pkgutil
import sys
import tempfile
import traceback

from tests.gpu import cases

LIMIT_S = 25


def run(name: str, *more: str) -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    module, function = name.split(".")
    getattr(importlib.import_module(f"tests.gpu.cases.{module}"), function)(*more)


def leave(code: int) -> None:
    """Exits without waiting for streams, which may be frozen forever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve() -> None:
    """Reads the names of cases, one per line; answers each with its exit code and output."""
    for module in pkgutil.iter_modules(cases.__path__):
        if module.name != "__main__":
            importlib.import_module(f"tests.gpu.cases.{module.name}")
    for line in sys.stdin:
        with tempfile.TemporaryFile() as said:
            child = os.fork()
            if child == 0:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
                attempt(line.strip())
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            said.seek(0)
            print(json.dumps([code, said.read().decode(errors="replace")]), flush=True)


def attempt(name: str, *more: str) -> None:
    try:
        run(name, *more)
    except BaseException:
        traceback.print_exc()
        leave(1)
    leave(0)


if sys.argv[1] == "serve":
    serve()
else:
    attempt(*sys.argv[1:])
