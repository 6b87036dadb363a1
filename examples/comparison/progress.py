"""The progress that the user sees: on a terminal one line that is rewritten, elsewhere a few lines
per training."""

from __future__ import annotations

import shutil
import sys
from typing import Any


class Progress:
    """The progress of one training."""

    def __init__(self, heading: str, steps: int) -> None:
        self._heading = heading
        self._steps = steps
        self._live = sys.stdout.isatty()
        self._show("starting")

    def update(self, message: dict[str, Any]) -> None:
        """Show what rank 0 tells after each step."""
        step = message["step"]
        if self._live or step == 1 or step % max(1, self._steps // 3) == 0:
            self._show(
                f"step {step}/{self._steps}, loss {message['loss']:.4f}, "
                f"{message['seconds'] * 1e3:.0f} ms"
            )

    def done(self, text: str) -> None:
        """Replace the line by the result of the training."""
        self._show(text)
        self.leave_line()

    def leave_line(self) -> None:
        """Let the next output start on a new line."""
        if self._live:
            print(flush=True)

    def _show(self, text: str) -> None:
        line = f"{self._heading}  {text}"
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{line[:width]}", end="", flush=True)
        else:
            print(line, flush=True)
