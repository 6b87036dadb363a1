"""The progress that the user sees: on a terminal one line that is rewritten, elsewhere a few lines
per training, and one a minute."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Any

#: Elsewhere than on a terminal nobody waits for longer than this, and an evaluation, for a line.
_SILENT_SECONDS = 60.0


class Progress:
    """The progress of one training after the other."""

    def __init__(self, headings: list[str], steps: int) -> None:
        self._headings = headings
        self._steps = steps
        self._live = sys.stdout.isatty()
        self._shown = 0.0
        self._show("starting")

    def update(self, point: dict[str, Any]) -> None:
        """Show an evaluation."""
        step = point["step"]
        third = step * 3 // self._steps > (step - 1) * 3 // self._steps or step == 0
        if self._live or third or time.monotonic() - self._shown > _SILENT_SECONDS:
            self._show(
                f"step {step}/{self._steps}, {point['seconds']:.1f} s, held-out loss "
                f"{point['loss']:.4f}"
            )

    def done(self, text: str) -> None:
        """Replace the line by the result of the training; the next one begins."""
        self._show(text)
        self.leave_line()
        self._headings.pop(0)

    def leave_line(self) -> None:
        """Let the next output start on a new line."""
        if self._live:
            print(flush=True)

    def _show(self, text: str) -> None:
        self._shown = time.monotonic()
        line = f"{self._headings[0]}  {text}"
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{line[:width]}", end="", flush=True)
        else:
            print(line, flush=True)
