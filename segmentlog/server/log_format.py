"""What a server logs, to stderr: for people, or a JSON object a line for programs.

What a line is about stands in it for people, and once more in ``extra`` for programs: ``client_host``, ``client_id``,
``principal``, ``api``, ``group``, ``worker``, ``count``.
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
"""What ``extra`` may have."""

_ERASE: Final = "\r\x1b[2K"
"""To the beginning of the line, and everything in it away."""
_SELDOM_S: Final = 1.0


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        said = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        }
        said |= {name: value for name in FIELDS if (value := getattr(record, name, None)) not in (None, "")}
        if record.exc_info:
            said["error"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str)


class _Plain(logging.Formatter):
    """A line stays a line: what clients call themselves may have any characters."""

    def __init__(self, erase: str) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")
        self._erase = erase

    def formatMessage(self, record: logging.LogRecord) -> str:
        return self._erase + "".join(
            one if one.isprintable() else repr(one)[1:-1] for one in super().formatMessage(record)
        )


def set_up_logs(form: Form | str, level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """For a process that does nothing else: whoever embeds a server has logging of his own."""
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    # On a terminal the supervisor keeps a status line, which the lines of all workers take the place of.
    handler.setFormatter(_JsonLines() if form == "json" else _Plain(_ERASE if stream.isatty() else ""))
    root = logging.getLogger("segmentlog")
    root.handlers = [handler]
    root.setLevel(level)
    root.propagate = False


class Seldom:
    """Of what may happen a thousand times a second one line a second. For one thread."""

    def __init__(self, every_s: float = _SELDOM_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        self._last_s = float("-inf")
        self._count = 0

    def count(self) -> int:
        """It happened once more: 0 if that is not to be said now, or how often it did since it was said last."""
        self._count += 1
        now_s = self._clock()
        if now_s - self._last_s < self._every_s:
            return 0
        self._last_s = now_s
        count, self._count = self._count, 0
        return count
