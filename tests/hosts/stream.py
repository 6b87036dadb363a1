"""The program that ranks run in test_loss.py: it calls all_reduce until that fails, and reports
when, with which message, and when its group was destroyed.

It never forces the process to end: the test is about ending by itself.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.hosts.checks import BUCKET
from tests.hosts.running import say


def ordinary() -> Callable[[], None]:
    """25 MiB of ordinary memory, repeatedly."""
    tensor = torch.zeros(BUCKET)
    return lambda: dist.all_reduce(tensor)


def bucket() -> Callable[[], None]:
    """25 MiB of bucket memory, repeatedly."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    tensor = backend.allocate_tensor(BUCKET, dtype=torch.float32, device=torch.device("cpu"))
    tensor.zero_()
    return lambda: dist.all_reduce(tensor)


def small() -> Callable[[], None]:
    """Many small tensors, with some always in flight."""
    tensors = [torch.zeros(1000) for _ in range(64)]

    def turn() -> None:
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()

    return turn


KINDS = {"ordinary": ordinary, "bucket": bucket, "small": small}


def main() -> None:
    """Streams until the group fails."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("timeout_s", type=float)
    parser.add_argument("--keep", action="store_true", help="end without destroying the group")
    options = parser.parse_args()

    torch.set_num_threads(1)
    timeout = timedelta(seconds=options.timeout_s)
    # Connecting may take longer than the timeout of an all_reduce here.
    dist.init_process_group(os.environ["BACKEND"], timeout=timedelta(seconds=60))
    dist.barrier()
    dist.group.WORLD._get_backend(torch.device("cpu")).set_timeout(timeout)
    turn = KINDS[options.kind]()
    turns = 0
    try:
        while True:
            turn()
            turns += 1
            if turns == 3:
                say(streaming=True, host=socket.gethostname(), pid=os.getpid())
    except RuntimeError as error:
        say(raised=time.monotonic(), turns=turns, kind=type(error).__name__, message=str(error))
    if not options.keep:
        dist.destroy_process_group()
        say(destroyed=time.monotonic())


if __name__ == "__main__":
    main()
