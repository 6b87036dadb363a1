"""One rank, from the inside: what a process does that ``ranks`` has started.

It must never outlive the process that started it, and never end without saying how it went.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: A rank that gets this signal writes where its threads are to its output.
STACKS_SIGNAL = signal.SIGUSR1

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Rank:
    """What a function that runs on a rank knows about itself.

    Attributes:
        number: this rank, from 0.
        world: how many ranks there are.
        tell: sends something that JSON can hold to the process that started the ranks.
    """

    number: int
    world: int
    tell: Callable[[Any], None]


def main() -> None:
    """Do what the order on the standard input says, and report it."""
    order = json.load(sys.stdin)
    _die_with(order["starter"])
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    # Whatever this rank starts must not keep the way back open when the rank is gone.
    os.set_inheritable(order["way_back"], False)
    with os.fdopen(order["way_back"], "w") as way_back:

        def send(kind: str, content: Any) -> None:
            way_back.write(json.dumps([kind, content]) + "\n")
            way_back.flush()

        rank = Rank(order["rank"], order["world"], lambda news: send("news", news))
        try:
            module, _, name = order["work"].partition(":")
            work = getattr(importlib.import_module(module), name)
            send("result", work(rank, **order["arguments"]))
        except Exception:
            send("raised", traceback.format_exc())
            sys.exit(1)


def _die_with(starter: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != starter:  # it ended before the line above took hold
        sys.exit(1)
