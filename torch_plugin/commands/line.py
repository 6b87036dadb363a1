"""The command line as a whole: which commands there are, and what ``--help`` says.

It must never do any of a command's work, nor import torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from gflow.commands import bench, doctor
from gflow.version import __version__


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return what was asked for; ``command`` in it is the function to call.

    What cannot be understood ends the program with exit code 2.
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
