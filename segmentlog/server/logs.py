"""What a server logs, to stderr: for people, or a JSON object a line for programs."""

from __future__ import annotations

import json
import logging
import time
from typing import Literal


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        said = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            said["error"] = self.formatException(record.exc_info)
        return json.dumps(said)


def set_up_logs(form: Literal["text", "json"] | str, level: int = logging.INFO) -> None:
    """For a process that does nothing else: whoever embeds a server has logging of his own."""
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonLines() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger("segmentlog")
    root.handlers = [handler]
    root.setLevel(level)
    root.propagate = False
