"""The parser of the command line: which commands there are, and what ``--help`` says."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from gflow.cli import bench, doctor
from gflow.version import __version__


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments; their ``command`` is the function to call.

    Arguments that cannot be understood end the program with exit code 2.
    """
    return _parser().parse_args(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gflow",
        description="gflow, a torch.distributed backend: is it well, and how fast is it here?",
        epilog="A training job needs none of this: it says init_process_group(backend='gflow').",
    )
    parser.add_argument("--version", action="version", version=f"gflow {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    doctor.add_to(commands)
    bench.add_to(commands)
    return parser
