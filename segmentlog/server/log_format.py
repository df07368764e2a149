"""Format the server's log on stderr: as text for people, or as a JSON object per line for programs.

A text line contains all information. For programs, ``extra`` repeats some parts of it as keys: ``client_host``,
``client_id``, ``principal``, ``api``, ``group``, ``worker``, ``count``.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Final, Literal, TextIO

Form = Literal["text", "json"]

FIELDS: Final = ("client_host", "client_id", "principal", "api", "group", "worker", "count")
"""Keys that ``extra`` may have."""

_ERASE: Final = "\r\x1b[2K"
"""Move to the beginning of the line and clear it."""
_SELDOM_S: Final = 1.0


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        }
        entry |= {name: value for name in FIELDS if (value := getattr(record, name, None)) not in (None, "")}
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class _Plain(logging.Formatter):
    """Text lines with control characters escaped: client ids may contain any characters."""

    def __init__(self, erase: str) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")
        self._erase = erase

    def formatMessage(self, record: logging.LogRecord) -> str:
        return self._erase + "".join(
            character if character.isprintable() else repr(character)[1:-1]
            for character in super().formatMessage(record)
        )


def set_up_logs(form: Form | str, level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Configure logging of a process that only runs a server. Programs that embed a server configure their own."""
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    # On a terminal the supervisor shows a status line; the log lines of all workers overwrite it.
    handler.setFormatter(_JsonLines() if form == "json" else _Plain(_ERASE if stream.isatty() else ""))
    root = logging.getLogger("segmentlog")
    root.handlers = [handler]
    root.setLevel(level)
    root.propagate = False


class LogRateLimit:
    """Limits a message that may occur thousands of times a second to one log line a second. Not thread-safe."""

    def __init__(self, every_s: float = _SELDOM_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        self._last_s = float("-inf")
        self._count = 0

    def count(self) -> int:
        """Count an event. If it must be logged now, return the number of events since the last log line, else 0."""
        self._count += 1
        now_s = self._clock()
        if now_s - self._last_s < self._every_s:
            return 0
        self._last_s = now_s
        count, self._count = self._count, 0
        return count
