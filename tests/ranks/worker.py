"""The program of a rank: it waits for a case, runs it, answers, and waits for the next.

No Python exception in a case ends it, and every case is answered exactly once.
"""

import faulthandler
import pickle
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch

from gflow.launch.rank import STACKS_SIGNAL
from tests.ranks import membership
from tests.ranks.case import Case


def main() -> None:
    """Runs cases until the harness closes the conversation."""
    faulthandler.enable(all_threads=True)
    faulthandler.register(STACKS_SIGNAL, all_threads=True, chain=False)
    torch.set_num_threads(1)
    conversation = Connection(int(sys.argv[1]))
    conversation.send_bytes(b"ready")
    while True:
        try:
            message = conversation.recv_bytes()
        except EOFError:
            break
        answer = _answer(message)
        # Flushed before the answer, because the harness reads the output when the answer arrives.
        sys.stdout.flush()
        sys.stderr.flush()
        conversation.send_bytes(answer)
    membership.leave()


def _answer(message: bytes) -> bytes:
    # The content is pickled separately: if it cannot be unpickled, only this case fails.
    case: Case
    number, case = pickle.loads(message)
    try:
        return pickle.dumps((number, "returned", pickle.dumps(_run(case))))
    except BaseException as error:  # SystemExit too: a rank outlives its cases
        report = (type(error).__name__, str(error), traceback.format_exc())
        return pickle.dumps((number, "raised", pickle.dumps(report)))


def _run(case: Case) -> Any:
    sys.path[:] = case.path
    with membership.environment(case):
        try:
            membership.enter(case)
            function, arguments = pickle.loads(case.payload)
            value = function(case.rank, case.world, *arguments)
        except BaseException:
            _leave_quietly()
            raise
        if case.group is None or not case.group.kept:
            membership.leave()
        return value


def _leave_quietly() -> None:
    # The case's own error is the one to report.
    try:
        membership.leave()
    except Exception:
        traceback.print_exc()


if __name__ == "__main__":
    main()
