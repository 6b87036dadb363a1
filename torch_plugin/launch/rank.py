"""One rank, from the inside: what a process does that ``ranks.run`` has started.

It always says how it went before it ends: with a result, or with the exception that was raised.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: A rank that gets this signal writes the stacks of all its threads to its output.
STACKS_SIGNAL = signal.SIGUSR1


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


def main(descriptor: int) -> None:
    """Run the task that arrives on this socket, and send back what came of it."""
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    with socket.socket(fileno=descriptor) as channel:
        # Programs that this rank starts must not keep the channel open once the rank is gone.
        channel.set_inheritable(False)
        with channel.makefile("r") as lines:
            task = json.loads(lines.readline())

        def send(kind: str, content: Any) -> None:
            channel.sendall((json.dumps([kind, content]) + "\n").encode())

        rank = Rank(task["rank"], task["world"], lambda message: send("message", message))
        try:
            module, _, name = task["function"].partition(":")
            function = getattr(importlib.import_module(module), name)
            send("result", function(rank, **task["arguments"]))
        except Exception:
            send("raised", traceback.format_exc())
            sys.exit(1)
