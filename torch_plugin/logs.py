"""gflow's log: the records of the engine and of this package, in Python's ``logging``.

Everything goes to the logger ``gflow``. The engine's records wait in a queue of its own, and one
thread brings them here; nothing in the engine ever waits for Python.

``GFLOW_LOG`` sets the level. Where it is not set, the level of the logger holds, so a program that
configures ``logging`` gets what it asked for; by default that is warnings. The engine takes the
level over whenever a group is made.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from gflow import native, options

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from gflow._C import LogRecord

logger = logging.getLogger("gflow")

#: Levels of the engine's `log` crate, by the number that crosses the bridge, as Python's levels.
_PYTHON_LEVELS = {1: logging.ERROR, 2: logging.WARNING, 3: logging.INFO, 4: logging.DEBUG}

#: How long the end of the program waits for the last records to be written.
_END_SECONDS = 2.0


class GroupLogger(logging.LoggerAdapter[logging.Logger]):
    """Logs what happens in one group, and says which group and which of its ranks.

    Example:
        >>> GroupLogger.of("0", 1).process("connected", {})[0]
        'gflow: group 0, rank 1: connected'
    """

    @classmethod
    def of(cls, group: str, rank: int) -> GroupLogger:
        """The logger of rank ``rank`` in ``group``."""
        return cls(logger, {"group": group, "rank": rank})

    @classmethod
    def of_group(cls, group: ProcessGroup) -> GroupLogger:
        """The logger of this process in ``group``."""
        return cls.of(group.group_name, group.rank())

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[str, MutableMapping[str, Any]]:
        """Put group and rank into the text, and into the record as attributes."""
        about: Any = self.extra
        kwargs["extra"] = about
        # The text is a format, and users name groups as they like.
        group = str(about["group"]).replace("%", "%%")
        return f"gflow: group {group}, rank {about['rank']}: {msg}", kwargs


def warn(group: str, rank: int, text: str) -> None:
    """Log a warning of the native library."""
    GroupLogger.of(group, rank).warning("%s", text)


class _Reader:
    """The thread that brings the engine's records to ``logging``, in one process."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="gflow-log", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while records := native.library.next_log_records():
            for record in records:
                _write(record)

    def stop(self) -> None:
        """End the thread. It must not come back to an interpreter that is going away."""
        if os.getpid() == self.process:
            # First: how the groups end is worth a record, too.
            native.library.close_all_groups()
            native.library.stop_log()
            self._thread.join(_END_SECONDS)


_reader: _Reader | None = None


def start() -> None:
    """Pass the current log level to the engine. Called for every new group."""
    global _reader
    level = _engine_level(_level())
    native.library.start_log(level)
    # A forked child has inherited the object, but not the thread.
    is_running = _reader is not None and _reader.process == os.getpid()
    if level > 0 and not is_running:
        _reader = _Reader()
        atexit.register(_reader.stop)


def _level() -> int:
    wanted = options.log_level()
    if wanted is None:
        return logger.getEffectiveLevel()
    logger.setLevel(wanted)
    if wanted <= logging.CRITICAL and not logger.hasHandlers():
        # Without a handler Python shows warnings only, and the user has asked for more.
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
    return wanted


def _engine_level(level: int) -> int:
    """The finest level of the engine that Python would show; 0 for none."""
    shown = [number for number, python in _PYTHON_LEVELS.items() if python >= level]
    return max(shown, default=0)


def _write(record: LogRecord) -> None:
    level = _PYTHON_LEVELS.get(record.level, logging.DEBUG)
    if not logger.isEnabledFor(level):
        return
    about: dict[str, Any] = {"group": record.group, "rank": record.rank}
    text = f"gflow: {record.text}"
    if record.rank >= 0:
        text = f"gflow: group {record.group}, rank {record.rank}: {record.text}"
    made = logger.makeRecord(
        logger.name, level, record.module, 0, text, (), None, extra=about, func="engine"
    )
    made.created, made.msecs = record.created, record.created % 1 * 1000
    logger.handle(made)
