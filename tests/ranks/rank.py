"""One rank as seen by the test process: starts it, talks to it, inspects it and ends it.

Not to be used after `end`.
"""

import contextlib
import os
import pickle
import sys
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path

from gflow.launch.process import Process
from gflow.launch.rank import STACKS_SIGNAL
from tests.ranks.case import Case
from tests.ranks.outcome import Died, Outcome, Raised, Returned, Silent, exit_text
from tests.ranks.strays import TAG_VARIABLE

# Importing torch takes two seconds on an idle machine, and much longer beside a compiler.
_START_S = 180.0
_STACKS_S = 3.0
_GOODBYE_S = 10.0


class Rank:
    """A running process that runs one case at a time."""

    def __init__(self, tag: str) -> None:
        self._seen = 0
        root = Path(__file__).resolve().parents[2]
        environment = os.environ | {
            TAG_VARIABLE: tag,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]).rstrip(
                os.pathsep
            ),
        }
        command = [sys.executable, "-m", "tests.ranks.worker"]
        self._process = Process(command, environment, has_channel=True, folder=root)
        assert self._process.channel is not None
        self.conversation = Connection(self._process.channel.detach())
        # Reports the death even while a grandchild holds the other end of the conversation.
        self.death = os.pidfd_open(self._process.pid)
        self._ready = False
        self._asked = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether `end` has been called."""
        return self._process.is_killed

    def is_alive(self) -> bool:
        return not wait([self.death], timeout=0)

    def be_ready(self) -> None:
        """Waits until the process has imported torch."""
        if self._ready:
            return
        ready = wait([self.conversation, self.death], timeout=_START_S)
        try:
            if self.conversation in ready and self.conversation.recv_bytes() == b"ready":
                self._ready = True
                return
        except (EOFError, OSError):
            pass
        what = "ended" if ready else f"was not ready after {_START_S:.0f} s"
        raise RuntimeError(f"a rank {what} before its first case:\n{self.output()}")

    def send(self, case: Case) -> None:
        """Sends the process its case; call `answer` next."""
        self._seen = self._process.output_size()
        self._asked += 1
        with contextlib.suppress(OSError):  # dead; `answer` reports it
            self.conversation.send_bytes(pickle.dumps((self._asked, case)))

    def answer(self, rank: int) -> Outcome:
        """The outcome of the case; call it when the conversation or the death is readable."""
        try:
            # An answer given just before the death still counts.
            if self.conversation.poll(0):
                number, word, content = pickle.loads(self.conversation.recv_bytes())
                if number != self._asked:
                    raise RuntimeError(f"rank {rank} answers case {number}, not {self._asked}")
                return self._understood(rank, word, content)
        except (EOFError, OSError):
            pass
        return Died(rank, self.end(), self.output())

    def _understood(self, rank: int, word: str, content: bytes) -> Outcome:
        try:
            value = pickle.loads(content)
        except Exception as error:
            # A value that cannot be read here is a failure of the case, not of the harness.
            what = f"the value of rank {rank} cannot be unpickled: {error}"
            return Raised(rank, type(error).__name__, what, traceback.format_exc(), self.output())
        if word == "returned":
            return Returned(rank, value, self.output())
        return Raised(rank, *value, output=self.output())

    def silence(self, rank: int, after_s: float) -> Silent:
        """Asks a rank that has not answered for its stacks, and ends it."""
        before = self._process.output_size()
        self._process.signal(STACKS_SIGNAL)
        end = time.monotonic() + _STACKS_S
        size = before
        while time.monotonic() < end:
            time.sleep(0.1)
            if (now := self._process.output_size()) > before and now == size:
                break
            size = now
        output = self.output()
        self.end()
        return Silent(rank, after_s, output)

    def end(self) -> int:
        """Kills the process and its children if they still run; returns the exit code."""
        if not self.ended:
            self._process.kill()
            self.conversation.close()
            os.close(self.death)
        return self._process.kill()

    def dismiss(self) -> str | None:
        """Lets the process exit normally, as a script would; returns what was wrong, if
        anything."""
        self._seen = self._process.output_size()
        self.conversation.close()
        if not wait([self.death], timeout=_GOODBYE_S if self._ready else 0):
            # A rank that is still importing has nothing to report.
            return f"did not end\n{self.silence(0, _GOODBYE_S).output}" if self._ready else None
        code = self.end()
        return f"{exit_text(code)}\n{self.output()}" if code else None

    def output(self) -> str:
        """The output of the process since its case began."""
        return self._process.output(self._seen)
